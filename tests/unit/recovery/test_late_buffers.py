"""Restore what a model has grown since it was built: refused before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.models import Job
from tests.distributed.states import gather
from tests.unit.run.jobs import train
from tests.unit.run.lives import Lives, differences, undisturbed
from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.native import has_extension

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(not has_extension(), reason="the extension was not built"),
]


def grow(job: Job) -> None:
    job.model.module.register_buffer("late", torch.ones(3))


def test_a_checkpoint_with_a_buffer_that_was_made_later(lives: Lives) -> None:
    job, saver = lives.begin(survive=None)
    train(job, saver)
    grow(job)
    id = saver.save().id
    lives.die()
    job, saver = lives.begin(survive=None)
    before = gather(job)
    with pytest.raises(IncompatibleCheckpoint, match=r"model\.late is in the checkpoint only"):
        saver.restore()
    assert differences(job, before) == []
    report = saver.restore(strict=False)
    assert report is not None
    assert (report.id, [line for line in report.skipped if "late" in line]) == (
        id,
        ["state model.late: only in the checkpoint"],
    )
    assert differences(job, undisturbed(1)) == []


def test_a_model_may_make_it_when_it_is_loaded(lives: Lives) -> None:
    job, saver = lives.begin(survive=None)
    grow(job)
    job.model.module.late.fill_(2.0)
    saver.save()
    lives.die()
    job, saver = lives.begin(survive=None)

    def make(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        module.register_buffer("late", torch.zeros_like(state[f"{prefix}late"]))

    job.model.module.register_load_state_dict_pre_hook(make)
    saver.restore()
    assert job.model.module.late.tolist() == [2.0, 2.0, 2.0]


def test_an_image_with_it_changes_nothing(lives: Lives) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    saver.save()
    grow(job)
    train(job, saver)
    lives.die()
    job, saver = lives.begin()
    report = saver.restore()
    assert report is not None
    assert report.step == 2
    assert "model.late is in the checkpoint only" in report.without_images[0]
    assert differences(job, undisturbed(2)) == []


def test_what_only_the_model_has_is_told_and_saved(lives: Lives) -> None:
    """The report lists what a restore in part has left as it is, and the next save writes that."""
    job, saver = lives.begin(survive=None)
    train(job, saver)
    saver.save()
    lives.die()
    job, saver = lives.begin(survive=None)
    grow(job)
    with pytest.raises(IncompatibleCheckpoint, match=r"model\.late is not in.*strict=False"):
        saver.restore()
    report = saver.restore(strict=False)
    assert report is not None
    assert report.skipped == ("state model.late: not in the checkpoint",)
    assert not saver.save().unchanged
    lives.die()
    job, saver = lives.begin(survive=None)
    grow(job)
    job.model.module.late.zero_()
    saver.restore()
    assert job.model.module.late.tolist() == [1.0, 1.0, 1.0]
