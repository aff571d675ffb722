"""Gradient scalers, averages and generators that nobody saves are told of, once."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.swa_utils import AveragedModel

from tests.crash.save_sweep import alone
from torchrec_checknrun import Checkpointer, RngState


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    with alone():
        yield


class Training:
    """A loop with a scaler and an average.

    Args:
        enabled: whether the scaler is.
        inside: whether the average is part of the model.
    """

    def __init__(self, enabled: bool = True, inside: bool = False) -> None:
        self.layer = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        self.scaler = GradScaler("cpu", enabled=enabled)
        self.average = AveragedModel(self.layer)
        parts = {"layer": self.layer} | ({"average": self.average} if inside else {})
        self.model = nn.ModuleDict(parts)

    def step(self) -> None:
        self.scaler.scale(self.layer(torch.ones(1, 2)).sum()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.average.update_parameters(self.layer)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [{"scaler": self.scaler.state_dict()}, self.average.state_dict()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError  # nothing is restored here


class Holder:
    """A state object that shows nothing of what it holds."""

    def __init__(self, parts: list[object]) -> None:
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError  # nothing is restored here


def told(path: Path, log: pytest.LogCaptureFixture, training: Training, **state: Any) -> list[str]:
    """Return which of the two warnings tell of."""
    state["optimizer"] = training.optimizer
    with (
        log.at_level(logging.WARNING),
        Checkpointer(path / "root", model=training.model, state=state) as saver,
    ):
        for _ in range(4):
            training.step()
            saver.step()
            saver.save()
    lines = [line for line in log.messages if "is, holds or shows it" in line]
    return ["scaler" if "GradScaler" in line else "average" for line in lines]


def test_what_nobody_saves_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert told(tmp_path, caplog, Training()) == ["scaler", "average"]


@pytest.mark.parametrize("way", ["given", "held", "shown", "inside", "by another"])
def test_what_is_saved_is_not_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    training = Training(inside=way == "inside")
    given: dict[str, Any] = {"scaler": training.scaler, "average": training.average}
    if way == "given":
        assert told(tmp_path, caplog, training, **given) == []
    elif way == "held":
        assert told(tmp_path, caplog, training, holder=Holder([given])) == []
    elif way == "shown":
        functions = training.state_dict, training.load_state_dict
        shown = SimpleNamespace(
            state_dict=lambda: functions[0](), load_state_dict=lambda state: functions[1](state)
        )
        assert told(tmp_path, caplog, training, shown=shown) == []
    elif way == "inside":
        assert told(tmp_path, caplog, training, scaler=training.scaler) == []
    else:
        with Checkpointer(
            tmp_path / "other", model=nn.ModuleDict({"a": nn.Linear(1, 1)}), state=given
        ):
            assert told(tmp_path, caplog, training) == []


def test_what_is_not_used_is_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training, unused = Training(enabled=False), (GradScaler("cpu"), AveragedModel(nn.Linear(1, 1)))
    assert told(tmp_path, caplog, training, average=training.average) == []
    assert len(unused) == 2


DRAWS: dict[str, Callable[[], object]] = {
    "PyTorch's": lambda: torch.rand(1),
    "NumPy's": lambda: np.random.rand(),  # the global one
    "Python's": random.random,
}


class Own:
    """A state object of a team's own that saves the global generators."""

    def state_dict(self) -> dict[str, Any]:
        states = [torch.get_rng_state(), {"numpy": np.random.get_state()}]
        return {"generators": [*states, random.getstate()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError  # nothing is restored here


class Others:
    """A state object that saves generators of the program's own, none of the global ones."""

    def state_dict(self) -> dict[str, Any]:
        own = np.random.RandomState(1).get_state()
        return {"all": [torch.Generator().get_state(), own, random.Random(1).getstate()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError  # nothing is restored here


@pytest.mark.parametrize("saved", [None, Others(), RngState(), Own()])
@pytest.mark.parametrize("name", [*DRAWS, None])
def test_generators_that_training_draws_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str | None, saved: Any
) -> None:
    model = nn.ModuleDict({"layer": nn.Linear(2, 2)})
    state = {} if saved is None else {"rng": saved}
    lost = saved is None or isinstance(saved, Others)
    with (
        caplog.at_level(logging.WARNING),
        Checkpointer(tmp_path / "root", model=model, state=state) as saver,
    ):
        for _ in range(4):
            if name is not None:
                DRAWS[name]()
            saver.step()
            saver.save()
    lines = [line for line in caplog.messages if "draws other numbers" in line]
    assert [f"({name})" in line for line in lines] == [True] * (name is not None and lost)


class Average:
    """A program's own average of parameters.

    Args:
        key: what it keeps each under.
    """

    def __init__(self, layer: nn.Module, key: Callable[[str, nn.Parameter], Any]) -> None:
        self.kept = {key(name, p): p.detach().clone() for name, p in layer.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"all": [{"kept": self.kept, 7: [*range(2000)]}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["all"][0]["kept"]


def test_what_is_kept_by_ids_of_parameters_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layer = nn.Linear(2, 2)
    states = {
        "by_id": Average(layer, lambda name, p: id(p)),
        "by_name": Average(layer, lambda name, p: name),
        "by_other": Average(layer, lambda name, p: id(p) + 8),
    }
    with (
        caplog.at_level(logging.WARNING),
        Checkpointer(tmp_path, model=layer, state=states) as saver,
    ):
        for _ in range(4):
            saver.step()
            saver.save()
    (line,) = [line for line in caplog.messages if "id(parameter)" in line]
    assert "state 'by_id' keeps something" in line
