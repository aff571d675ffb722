"""Restore a killed run by images in a process that doesn't go on with it: an evaluation, say."""

from __future__ import annotations

import pytest

from tests.distributed.states import gather
from tests.unit.run.jobs import train
from tests.unit.run.lives import Lives, by_images, differences
from torchrec_checknrun.native import has_extension

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(not has_extension(), reason="the extension was not built"),
]


@pytest.mark.parametrize("saved", [True, False])
def test_steps_that_no_checkpoint_holds_stay_for_the_restart(
    lives: Lives, saved: bool, caplog: pytest.LogCaptureFixture
) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver)
    if saved:
        saver.save()
    train(job, saver, 2)
    wanted = gather(job)
    lives.die()
    for _ in range(2):
        job, saver = lives.begin()
        assert by_images(saver.restore())
        caplog.clear()
        saver.close()
        assert "its images stay, since no checkpoint holds their steps up to 3" in caplog.text
    job, saver = lives.begin()
    assert by_images(saver.restore())
    assert differences(job, wanted) == []
    train(job, saver)
    saver.close()
    assert lives.files() == []


def test_images_of_a_run_that_has_saved_its_last_step_are_removed(lives: Lives) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    saver.save()
    lives.die()
    job, saver = lives.begin()
    assert by_images(saver.restore())
    saver.close()
    assert lives.files() == []


def test_images_of_a_process_that_has_gone_back_are_removed(lives: Lives) -> None:
    """Keep no image of a step that the process itself has left behind."""
    job, saver = lives.begin()
    saver.restore()
    train(job, saver)
    report = saver.save()
    train(job, saver)
    lives.die()
    job, saver = lives.begin()
    assert by_images(saver.restore())
    assert report is not None
    saver.restore(report.id)
    saver.close()
    assert lives.files() == []
