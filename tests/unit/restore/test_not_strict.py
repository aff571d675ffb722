"""Restore with ``strict=False``: the report lists all that stays, and the next save writes it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.optim.keyed import KeyedOptimizerWrapper

from torchrec_checknrun import Checkpointer, RestoreReport

pytestmark = pytest.mark.usefixtures("one_rank")


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 1)


Make = Callable[[Any], torch.optim.Optimizer]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def keyed(model: nn.Module) -> torch.optim.Optimizer:
    return KeyedOptimizerWrapper(dict(model.named_parameters()), lambda p: torch.optim.Adam(p))


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


@pytest.mark.parametrize("make", [adam, keyed])
@pytest.mark.parametrize("trained", [False, True])
def test_a_layer_of_another_shape(tmp_path: Path, make: Make, trained: bool) -> None:
    """Keep its moments as well: those of another shape would end training's next step."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        model.zero_grad()

    def job(columns: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, columns))
        return model, make(model)

    old, its_optimizer = job(1)
    train(old, its_optimizer)
    with Checkpointer(tmp_path, model=old, state={"o": its_optimizer}) as saver:
        saver.step()
        saver.save()
    new, optimizer = job(3)
    if trained:
        train(new, optimizer)
    kept = copy.deepcopy(new[1].state_dict())
    with Checkpointer(tmp_path, model=new, state={"o": optimizer}) as saver:
        report = saver.restore(strict=False)
        assert report is not None
        assert report.skipped == (
            "state model.1.bias: of another shape or type than the model's",
            "state model.1.weight: of another shape or type than the model's",
            "state o.state.1.bias: only in the checkpoint",
            "state o.state.1.weight: only in the checkpoint",
        )
        assert torch.equal(new.state_dict()["0.weight"], old.state_dict()["0.weight"])
        assert all(torch.equal(value, kept[name]) for name, value in new[1].state_dict().items())
        train(new, optimizer)
        saver.step()
        saver.save()
    again, optimizer = job(3)
    with Checkpointer(tmp_path, model=again, state={"o": optimizer}) as saver:
        saver.restore()
        assert torch.equal(again.state_dict()["1.weight"], new.state_dict()["1.weight"])
        train(again, optimizer)
