"""Parameters that a given optimizer trains, and that nothing given holds, are told of, once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from tests.crash.save_sweep import alone
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.values import shown

LOST = "neither the model nor a state object shows"


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    with alone():
        yield


class Weights:
    """A state object that gives weights of losses in a form of its own."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def state_dict(self) -> dict[str, Any]:
        return {"of": [self.of()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError  # nothing is restored here


class Trainer(Weights):
    """An object of a team's that holds its optimizer, with a state dict of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(lambda: 1)
        self.optimizer = optimizer


@pytest.fixture
def net() -> nn.Module:
    return nn.ModuleDict({"over": nn.Linear(2, 2)})


@pytest.fixture
def beside() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


def told(root: Path, caplog: Any, net: Any, beside: nn.Parameter, step: Any, **states: Any) -> Any:
    """Train, save four times, and return the warnings."""
    with (
        caplog.at_level(logging.WARNING),
        Checkpointer(root / "root", model=net, state=states) as saver,
    ):
        for _ in range(4):
            (net["over"](torch.ones(3, 2)).sum() * beside.sum()).backward()
            step()
            saver.step()
            saver.save()
    return [line for line in caplog.messages if LOST in line]


def test_weights_of_losses_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, net: nn.Module, beside: nn.Parameter
) -> None:
    adam = torch.optim.Adam([*net.parameters(), beside])
    (line,) = told(tmp_path, caplog, net, beside, adam.step, dense=adam)
    assert "parameter 2 of group 0, of shape [2], of state 'dense' (Adam)" in line


def test_names_of_keyed_optimizers_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, net: nn.Module, beside: nn.Parameter
) -> None:
    named = {**dict(net.named_parameters()), "log_vars": beside}
    keyed = KeyedOptimizerWrapper(named, lambda p: torch.optim.SGD(p, lr=0.1))
    both = CombinedOptimizer([("dense", keyed)])
    (line,) = told(tmp_path, caplog, net, beside, both.step, dense=both)
    assert "log_vars of state 'dense' (SGD)" in line
    assert "over" not in line


def test_optimizers_inside_state_objects_are_looked_into(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, net: nn.Module, beside: nn.Parameter
) -> None:
    adam = torch.optim.Adam([*net.parameters(), beside])
    assert len(told(tmp_path, caplog, net, beside, adam.step, trainer=Trainer(adam))) == 1


@pytest.mark.parametrize("form", ["module", "tensor", "copy", "list", "frozen"])
def test_what_is_given_is_not_told(
    form: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    net: nn.Module,
    beside: nn.Parameter,
) -> None:
    adam = torch.optim.Adam([*net.parameters(), beside])
    forms = {
        "tensor": lambda: beside,
        "copy": lambda: beside.detach().clone(),
        "list": beside.tolist,
        "frozen": lambda: 1,
    }
    given: Any = nn.ParameterList([beside]) if form == "module" else Weights(forms[form])
    beside.requires_grad_(form != "frozen")
    assert not told(tmp_path, caplog, net, beside, adam.step, dense=adam, given=given)


@pytest.mark.parametrize("form", ["tensor", "copy", "other"])
def test_of_large_parameters_a_sample_is_compared(
    form: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    net: nn.Module,
) -> None:
    """Training waits for the comparison: all values of a dense part would take seconds."""
    beside = nn.Parameter(torch.randn(1 << 18))
    adam = torch.optim.Adam([*net.parameters(), beside])
    forms = {
        "tensor": lambda: beside,
        "copy": lambda: beside.detach().clone(),
        "other": lambda: torch.randn(1 << 18),
    }
    bytes_read: list[int] = []
    real = shown.xxhash.xxh3_128_digest

    def digest(data: memoryview) -> bytes:
        bytes_read.append(data.nbytes)
        return real(data)

    monkeypatch.setattr(shown, "xxhash", SimpleNamespace(xxh3_128_digest=digest))
    lines = told(tmp_path, caplog, net, beside, adam.step, dense=adam, given=Weights(forms[form]))
    assert len(lines) == (form == "other")
    assert max(bytes_read) < 2 * 8 * shown.MOST_VALUES
