"""Restore rates of fused optimizers that are tensors into the program's own tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.tracked_model import TALL, make_model, table, train
from torchrec_checknrun import Checkpointer

pytestmark = pytest.mark.usefixtures("group")


def groups_of(model: Any) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = model.fused_optimizer.param_groups
    assert len(groups) > 1
    return groups


def saved(root: Path, rates: list[torch.Tensor]) -> None:
    model = make_model()
    for group, rate in zip(groups_of(model), rates, strict=True):
        group["lr"] = rate
    with Checkpointer(root, model=model) as saver:
        saver.steps += 1
        saver.save()


def restored(root: Path, model: nn.Module) -> None:
    with Checkpointer(root, model=model) as saver:
        saver.restore(required=True)


def test_a_programs_tensors_keep_their_place(tmp_path: Path) -> None:
    count = len(groups_of(make_model()))
    saved(tmp_path / "root", [torch.tensor(0.25) / (at + 1) for at in range(count)])
    model: Any = make_model()
    own = [torch.tensor(0.5) for _ in range(count)]
    for group, rate in zip(groups_of(model), own, strict=True):
        group["lr"] = rate
    restored(tmp_path / "root", model)
    assert [float(rate) for rate in own] == pytest.approx([0.25 / (n + 1) for n in range(count)])
    for rate in own:
        rate.fill_(0.0)  # as a schedule of the program's does
    model.fused_optimizer.step()
    before = table(model, TALL)
    train(model, b=[[3]])
    assert torch.equal(table(model, TALL), before)


def test_a_tensor_of_several_kernels_that_had_other_rates(tmp_path: Path) -> None:
    count = len(groups_of(make_model()))
    saved(tmp_path / "root", [torch.tensor(0.25 * (at + 1)) for at in range(count)])
    model = make_model()
    rate = torch.tensor(0.5)
    for group in groups_of(model):
        group["lr"] = rate
    restored(tmp_path / "root", model)
    assert [float(group["lr"]) for group in groups_of(model)] == [
        0.25 * (at + 1) for at in range(count)
    ]
