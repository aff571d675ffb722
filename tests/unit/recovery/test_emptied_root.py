"""Go on from no image in a root that was emptied, or made anew, since its run was killed."""

from __future__ import annotations

import shutil

import pytest

from tests.unit.run.jobs import train
from tests.unit.run.lives import Lives, by_images

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("saves", [False, True])
def test_a_root_that_was_deleted_is_a_fresh_start(
    lives: Lives, caplog: pytest.LogCaptureFixture, saves: bool
) -> None:
    """Begin again, whether or not the killed run had saved anything."""
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 3)
    if saves:
        saver.save()
    lives.die()
    shutil.rmtree(lives.root)
    job, saver = lives.begin()
    assert saver.restore() is None
    assert saver.steps == 0
    assert f"no run has claimed {lives.root}" in caplog.text


def test_a_claim_is_enough(lives: Lives) -> None:
    """Lose no step of a run that was killed before its first checkpoint."""
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 1)
    lives.die()
    assert [path.name for path in lives.root.iterdir()] == ["writers"]
    _, saver = lives.begin()
    assert by_images(saver.restore())
    assert saver.steps == 1
