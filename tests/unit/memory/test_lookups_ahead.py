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

Step = Callable[[Any, Any], object]
"""Does one step of a model, given what the step before returned; that is held in between."""

pytestmark = pytest.mark.usefixtures("group")


def look_up(model: Any) -> torch.Tensor:
    out: torch.Tensor = model(batch(a=[[1, 2]], shared=[[3]], b=[[4]]))
    return out.square().sum()


def plain(model: Any, _: Any) -> None:
    look_up(model).backward()


def evaluated(model: Any, _: Any) -> torch.Tensor:
    out = look_up(model)
    plain(model, None)
    return out  # and with it the graph, as evaluation pipelines of TorchRec's keep it


def recomputed(model: Any, _: Any) -> None:
    checkpoint(look_up, model, use_reentrant=False).backward()


def recomputed_in_a_pass_of_its_own(model: Any, _: Any) -> None:
    def out(scale: torch.Tensor) -> torch.Tensor:
        return look_up(model) * scale

    checkpoint(out, torch.ones((), requires_grad=True), use_reentrant=True).backward()


def after_the_update(model: Any, held: Any) -> torch.Tensor:
    (look_up(model) if held is None else held).backward()
    return look_up(model)  # the same values as in a new process


def ahead(model: Any, held: Any) -> torch.Tensor:
    following = look_up(model)
    (look_up(model) if held is None else held).backward()
    return following


def ahead_after_two_passes(model: Any, held: Any) -> torch.Tensor:
    loss = look_up(model)
    loss.backward(retain_graph=True)
    loss.backward()
    return ahead(model, held)


def warnings(step: Step, folder: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what the log tells of lookups ahead in three steps."""
    model = make_model()
    with (
        caplog.at_level(logging.WARNING),
        Checkpointer(folder / "root", model=model, survive=Images(folder=str(folder))) as saver,
    ):
        saver.restore()
        held = None
        for _ in range(3):
            held = step(model, held)
            saver.step()
    return [line for line in caplog.messages if "looked up before the end" in line]


@pytest.mark.parametrize(
    "step",
    [plain, evaluated, recomputed, recomputed_in_a_pass_of_its_own, after_the_update],
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
