"""Options of parameter groups, written into live groups."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.optim.keyed import KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper

from torchrec_checknrun import Checkpointer, Images
from torchrec_checknrun.dense.param_groups import set_option


@pytest.mark.parametrize("saved", [0.1, torch.tensor(0.1, dtype=torch.float64)])
def test_a_rate_in_double_precision_keeps_all_digits(saved: Any) -> None:
    rate = torch.tensor(0.5, dtype=torch.float64)
    group = {"lr": rate}
    set_option(group, "lr", saved)
    assert group["lr"] is rate
    assert rate.item() == 0.1


@pytest.mark.parametrize("saved", [None, "cosine"])
def test_other_values_replace_a_tensor(saved: Any) -> None:
    group = {"schedule": torch.tensor(0.5)}
    set_option(group, "schedule", saved)
    assert group == {"schedule": saved}


def test_a_rate_that_has_become_another_tensor_leaves_the_first_one() -> None:
    rate = torch.tensor(0.5)
    group = {"lr": rate}
    set_option(group, "lr", torch.tensor(0.5), {id(rate)})
    assert group["lr"] is rate
    set_option(group, "lr", torch.tensor(0.25), {id(rate)})
    assert (rate.item(), group["lr"].item()) == (0.5, 0.25)


class Ramp(OptimizerWrapper):
    """A user's warm-up that keeps the first rates, which are the groups' own tensors at first."""

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        super().__init__(optimizer)
        self.first = [group["lr"] for group in optimizer.param_groups]
        self.count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group, rate in zip(self.param_groups, self.first, strict=True):
            group["lr"] = rate * min(1.0, self.count / 8)
        super().step(closure)


def ramp(layers: nn.Module) -> Ramp:
    keyed = KeyedOptimizerWrapper(
        dict(layers.named_parameters()),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
    )
    return Ramp(keyed)


def test_first_rates_that_are_tensors_stay_apart(tmp_path: Path) -> None:
    layers = nn.Linear(3, 2)
    optimizer = ramp(layers)
    layers(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with Checkpointer(tmp_path, model=layers, state={"optimizer": optimizer}) as saver:
        saver.save()
    again = nn.Linear(3, 2)
    restored = ramp(again)
    with Checkpointer(tmp_path, model=again, state={"optimizer": restored}) as saver:
        assert saver.restore() is not None
    assert restored.first == [torch.tensor(0.1)]
    assert restored.param_groups[0]["lr"] == torch.tensor(0.1) / 8


class Norm(Enum):
    SPECTRAL = 1
    SIGN = 2


class Scaled(torch.optim.SGD):
    """A user's optimizer with an option, and state, that are members of an enumeration."""

    def __init__(self, layers: nn.Module, norm: Norm) -> None:
        super().__init__(layers.parameters(), lr=0.1, momentum=0.9)
        for group in self.param_groups:
            group["norm"] = norm

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's is overloaded
        super().step(closure)
        for parameter, state in self.state.items():
            state["last"] = Norm.SIGN if parameter.dim() == 1 else Norm.SPECTRAL


@pytest.mark.parametrize("survive", [None, Images()], ids=["checkpoint", "images"])
def test_members_of_enumerations_come_back(tmp_path: Path, survive: Images | None) -> None:
    layers = nn.Linear(3, 2)
    optimizer = Scaled(layers, Norm.SIGN)
    saver = Checkpointer(tmp_path, model=layers, state={"own": optimizer}, survive=survive)
    saver.restore()
    layers(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    saver.step()
    if survive is None:
        saver.save()
        saver.close()
    else:
        saver.__exit__(RuntimeError, RuntimeError("killed"), None)
    again = nn.Linear(3, 2)
    restored = Scaled(again, Norm.SPECTRAL)
    with Checkpointer(tmp_path, model=again, state={"own": restored}, survive=survive) as saver:
        report = saver.restore()
        assert report is not None
        assert report.step == 1
    assert [group["norm"] for group in restored.param_groups] == [Norm.SIGN]
    assert [state["last"] for state in restored.state.values()] == [Norm.SPECTRAL, Norm.SIGN]
