"""Restore with ``strict=False``: the report lists all that stays, and the next save writes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchrec_checknrun import Checkpointer, RestoreReport

pytestmark = pytest.mark.usefixtures("one_rank")


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 1)


Make = Callable[[Two], torch.optim.Optimizer]


def apart(model: Two) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": model.a.parameters()},
        {"params": model.b.parameters(), "lr": 0.01},
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def joined(model: Two) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def one(model: Two) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.a.parameters(), lr=0.1, momentum=0.9)


def saver_of(root: Path, make: Make) -> tuple[Checkpointer, torch.optim.Optimizer]:
    model = Two()
    optimizer = make(model)
    model.b(model.a(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.zero_grad()
    return Checkpointer(root, model=model, state={"o": optimizer}), optimizer


def restored_in_part(root: Path, saved: Make, live: Make) -> tuple[RestoreReport, Any]:
    """Return the report of a restore into another optimizer, and that optimizer."""
    with saver_of(root, saved)[0] as saver:
        saver.step()
        saver.save()
    saver, optimizer = saver_of(root, live)
    with saver:
        report = saver.restore(strict=False)
        assert report is not None
        assert not saver.save().unchanged
    with saver_of(root, live)[0] as again:
        again.restore()
        assert again.save().unchanged
    return report, optimizer


def test_options_of_groups_that_were_joined(tmp_path: Path) -> None:
    report, optimizer = restored_in_part(tmp_path, apart, joined)
    (line,) = report.skipped
    assert line.startswith("state o.param_groups: ['a.bias', 'a.weight', 'b.bias', 'b.weight'] ")
    assert [group["lr"] for group in optimizer.param_groups] == [0.5]


@pytest.mark.parametrize(("saved", "live"), [(apart, one), (one, apart)])
def test_a_group_of_one_side(tmp_path: Path, saved: Make, live: Make) -> None:
    report, _ = restored_in_part(tmp_path, saved, live)
    where = "checkpoint" if saved is apart else "optimizer"
    lines = [line for line in report.skipped if "param_groups" in line]
    assert lines == [
        f"state o.param_groups: only the {where} has a parameter group with ['b.bias', 'b.weight']"
    ]
