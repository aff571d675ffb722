"""Publications of a run that is started again, from images and from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.run.jobs import checkpointer, make_job, train
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


def test_of_earlier_publications_nothing_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Keep old publications by their own rule alone: no run goes on from them."""
    for _ in range(3):
        job = make_job()
        rule = Publish(tmp_path / "serve", every_seconds=1e6, keep=1)
        with checkpointer(tmp_path / "run", job, publish=rule) as saver:
            saver.restore()
            train(job, saver)
            saver.save()
            saver.publish()
    assert "nothing was restored" not in caplog.text
    assert len([*(tmp_path / "serve").glob("*/manifest.json")]) == 1


def test_another_run_s_root_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Publish nothing where a run's checkpoints are, which ``keep`` would delete; train on."""
    job = make_job()
    with checkpointer(tmp_path / "other", job) as saver:
        saver.restore()
        for _ in range(3):
            train(job, saver)
            saver.save()
    before = sorted(tmp_path.glob("other/**/*"))
    job = make_job()
    rule = Publish(tmp_path / "other", every_seconds=1e6, keep=1)
    with checkpointer(tmp_path / "run", job, publish=rule) as saver:
        saver.restore()
        train(job, saver)
        assert saver.publish() is None
        saver.save()
    assert "a checkpoint with optimizer or training state" in caplog.text
    assert sorted(tmp_path.glob("other/**/*")) == before
