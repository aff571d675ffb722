"""Interrupt the way back by images, as Ctrl-C in a notebook does, and go on in the same process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.run.jobs import train
from tests.unit.run.lives import Lives, differences, undisturbed
from torchrec_checknrun.errors import ModelPartlyRestored
from torchrec_checknrun.memory.image import RankImage
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.recovery.held_restore import HeldRestore

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(not has_extension(), reason="the extension was not built"),
]


def interrupted(patch: pytest.MonkeyPatch, owner: type, method: str) -> None:
    """Have a method interrupted once it has done its work."""
    run = getattr(owner, method)

    def act(*given: Any) -> None:
        run(*given)
        raise KeyboardInterrupt

    patch.setattr(owner, method, act)


@pytest.mark.parametrize(
    ("owner", "method"),
    [(RankImage, "go_back"), (HeldRestore, "load"), (HeldRestore, "set_generators")],
)
def test_a_model_that_is_half_way_is_not_saved(
    lives: Lives, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    job, saver = lives.begin(every_steps=2, when_busy="wait")
    saver.restore()
    train(job, saver, 3)
    lives.die()
    job, saver = lives.begin()
    with monkeypatch.context() as patch:
        interrupted(patch, owner, method)
        with pytest.raises(KeyboardInterrupt):
            saver.restore()
    job.train()
    for act in (saver.step, saver.save):
        with pytest.raises(ModelPartlyRestored, match="interrupted"):
            act()
    report = saver.restore()
    assert report is not None
    assert (report.source, report.step) == ("checkpoint", 2)
    assert differences(job, undisturbed(2)) == []
    train(job, saver)
    assert saver.save().step == 3


def test_an_interrupt_before_anything_is_changed_is_none_of_the_model(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 3)
    lives.die()
    job, saver = lives.begin()
    with monkeypatch.context() as patch:
        interrupted(patch, HeldRestore, "plan")
        with pytest.raises(KeyboardInterrupt):
            saver.restore()
    train(job, saver)
    assert saver.save().step == 1
