"""Warn of lookups before the end of the step before them, and of no others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.unit.tracked_model import batch, make_model
from torchrec_checknrun import Checkpointer, Images

Step = Callable[[Any], object]
"""Does one step of a model; what it returns is held until the step's end."""

pytestmark = pytest.mark.usefixtures("group")


def look_up(model: Any) -> torch.Tensor:
    out: torch.Tensor = model(batch(a=[[1, 2]], shared=[[3]], b=[[4]]))
    return out.square().sum()


def plain(model: Any) -> None:
    look_up(model).backward()


def evaluated(model: Any) -> None:
    look_up(model)
    plain(model)


def recomputed(model: Any) -> None:
    checkpoint(look_up, model, use_reentrant=False).backward()


def recomputed_in_a_pass_of_its_own(model: Any) -> None:
    def out(scale: torch.Tensor) -> torch.Tensor:
        return look_up(model) * scale

    checkpoint(out, torch.ones((), requires_grad=True), use_reentrant=True).backward()


def ahead(model: Any) -> torch.Tensor:
    plain(model)
    return look_up(model)


def ahead_after_two_passes(model: Any) -> torch.Tensor:
    loss = look_up(model)
    loss.backward(retain_graph=True)
    loss.backward()
    return ahead(model)


def warnings(step: Step, folder: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what the log tells of lookups ahead in three steps."""
    model = make_model()
    with (
        caplog.at_level(logging.WARNING),
        Checkpointer(folder / "root", model=model, survive=Images(folder=str(folder))) as saver,
    ):
        saver.restore()
        for _ in range(3):
            held = step(model)
            saver.step()
            del held
    return [line for line in caplog.messages if "looked up before the end" in line]


@pytest.mark.parametrize(
    "step",
    [plain, evaluated, recomputed, recomputed_in_a_pass_of_its_own],
    ids=lambda s: s.__name__,
)
def test_lookups_of_the_step_itself_are_not_told(
    step: Step, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert warnings(step, tmp_path, caplog) == []


@pytest.mark.parametrize("step", [ahead, ahead_after_two_passes], ids=lambda step: step.__name__)
def test_lookups_of_later_steps_are_told_once(
    step: Step, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(warnings(step, tmp_path, caplog)) == 1
