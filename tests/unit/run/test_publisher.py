"""Publications of a run with images: rows that come back from memory carry no mark."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.run.lives import Lives, by_images
from torchrec_checknrun import Publish

pytestmark = pytest.mark.usefixtures("one_rank")


def test_after_images_the_next_one_is_a_base(tmp_path: Path, lives: Lives) -> None:
    rule = Publish(tmp_path / "serve", every_seconds=1e6)
    job, saver = lives.begin(publish=rule)
    saver.restore()
    for seed in range(2):
        job.train(1)
        saver.step()
        report = saver.publish()
        assert report is not None
        assert report.kind == ("differential" if seed else "full")
    lives.die()
    job, saver = lives.begin(publish=rule)
    assert by_images(saver.restore())
    report = saver.publish()
    assert report is not None
    assert (report.kind, report.step) == ("full", 2)
