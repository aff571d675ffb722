"""Values of modules that training changes and that are in no state dict are told of, once."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torchmetrics import MeanMetric

from tests.crash.save_sweep import alone
from torchrec_checknrun import Checkpointer


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    with alone():
        yield


class Counting(nn.Module):
    """A module with all kinds of values that no state dict shows."""

    held: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.calls, self.mean, self.losses = 0, 0.0, deque([0.0], maxlen=2)
        self.total = torch.zeros(())
        self.register_buffer("held", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean += 0.5
        self.losses.append(self.mean)
        self.total += 3
        self.held += 1
        out: torch.Tensor = self.layer(x)
        return out


class Fixed(nn.Module):
    """A module with values that don't matter: what stays, and what another one takes the place
    of, as a cache.
    """

    cos: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.width, self.seen = 2, False
        self.batch: int | None = None
        self.last = torch.zeros(())
        self.register_buffer("cos", torch.zeros(2), persistent=False)
        self.register_buffer("mask", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen, self.batch = True, len(x)
        self.last = x.sum()
        self.cos = torch.ones(4)
        self.mask.copy_(self.mask.clone())  # as DistributedDataParallel broadcasts it
        out: torch.Tensor = self.layer(x)
        return out


class OfItsOwn(Counting):
    """A module that puts its counter, its mean and its tensors into its state dict."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        own = {"calls": torch.tensor(self.calls), "mean": self.mean, "held": self.held}
        destination.update({f"{prefix}{name}": value for name, value in own.items()})


class Extra(Counting):
    """A module with a tensor as its extra state, which the model's state dict shows."""

    def get_extra_state(self) -> torch.Tensor:
        return self.total

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.total = state


class Counts:
    """A state object that gives a module's values under their names."""

    def __init__(self, module: Counting) -> None:
        self.of = module

    def state_dict(self) -> dict[str, Any]:
        of = self.of
        found = {"calls": of.calls, "losses": list(of.losses), "held": of.held, "total": of.total}
        return {"over": {**found, "mean": of.mean}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError  # nothing is restored here


Told = Callable[..., list[str]]


@pytest.fixture
def told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Told:
    """Return the warnings about values in no state dict by saves with a module beside the model or
    in it.
    """

    def of(over: Any, train: Callable[[], object], **states: Any) -> list[str]:
        caplog.clear()
        model = nn.ModuleDict({"over": over, "out": nn.Linear(2, 2)})
        with (
            caplog.at_level(logging.WARNING),
            Checkpointer(tmp_path / "root", model=model, state=states) as saver,
        ):
            for _ in range(4):
                train()
                saver.step()
                saver.save()
        return [line for line in caplog.messages if "in no state dict" in line]

    return of


def call(module: nn.Module) -> Callable[[], object]:
    return lambda: module(torch.ones(3, 2))


class Replacing(nn.Module):
    """A module whose cache takes the place in Python's memory of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.last = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = id(self.last)
        others: list[torch.Tensor] = []
        del self.last
        made = x.sum().add_(1)
        while id(made) != place and len(others) < 1000:
            others.append(made)
            made = x.sum().add_(1)
        self.last = made
        places.append(id(made) == place)
        out: torch.Tensor = self.layer(x)
        return out


places: list[bool] = []
"""By call of a ``Replacing``, whether the cache took the place of the one before."""


def test_a_cache_in_the_place_of_the_one_before_is_not_told(told: Told) -> None:
    places.clear()
    module = Replacing()
    assert told(module, call(module)) == []
    assert any(places)


def test_values_that_move_are_told_once(told: Told) -> None:
    module = Counting()
    (line,) = told(module, call(module))
    names = ("calls", "mean", "losses", "total", "held")
    assert all(f"model.over.{name}" in line for name in names)
    assert "layer" not in line


def test_a_value_that_moves_later_is_told(told: Told) -> None:
    module = Counting()
    calls = iter([lambda: None, call(module), lambda: None, lambda: None])
    assert len(told(module, lambda: next(calls)())) == 1


class Negatives(nn.Module):
    """A module with queues of negatives in plain attributes.

    Args:
        rows: of each queue.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.written, self.joined = torch.zeros(2, rows).T, torch.zeros(rows, 2)
        self.kept = torch.zeros(rows, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.written[: len(x)] = x
        self.joined = torch.cat([self.joined, x])[len(x) :]
        self.kept = self.kept.clone()
        out: torch.Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("rows", [64, 50_000])
def test_queues_of_tensors_are_told(told: Told, rows: int) -> None:
    module = Negatives(rows)
    (line,) = told(module, lambda: module(torch.rand(16, 2)))
    assert "in no state dict: model.over.written, model.over.joined. " in line


def test_rates_of_torchs_layers_that_move_are_told_once(told: Told) -> None:
    normalise, drop = nn.BatchNorm1d(2), nn.Dropout(0.1)
    layers = nn.Sequential(nn.Linear(2, 2), normalise, drop)

    def train() -> None:
        normalise.momentum = 0.9 * (normalise.momentum or 1)
        drop.p += 0.01
        layers(torch.ones(3, 2))

    (line,) = told(layers, train)
    assert "in no state dict: model.over.1.momentum, model.over.2.p. " in line


def test_parameters_that_are_frozen_or_thawed_are_told_once(told: Told) -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    layers[0].weight.requires_grad_(False)
    rounds = iter([1, 1, 0, 1])

    def train() -> None:
        thawed = bool(next(rounds))
        layers[0].weight.requires_grad_(thawed)
        layers[1].bias.requires_grad_(not thawed)

    (line,) = told(layers, train)
    assert "requires_grad of over.0.weight, over.1.bias, which is in no state dict" in line


def test_modules_of_state_objects_are_looked_into(told: Told) -> None:
    module, holder = Counting(), Counts(Counting())
    assert "module.calls" in told(nn.Linear(2, 2), call(module), module=module)[0]
    holder.state_dict = dict  # type: ignore[method-assign]  # one that gives nothing
    (line,) = told(nn.Linear(2, 2), call(holder.of), holder=holder)
    assert "holder.of.calls" in line


@pytest.mark.parametrize(
    "module",
    [
        Fixed(),
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.1)),
        AveragedModel(Fixed()),
        torch.nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)),
    ],
    ids=["caches", "torch's", "averaged", "spectral norm"],
)
def test_what_does_not_matter_is_not_told(module: nn.Module, told: Told) -> None:
    assert told(module, call(module)) == []


def test_what_a_state_object_gives_is_not_told(told: Told) -> None:
    module = Counting()
    assert told(module, call(module), counts=Counts(module)) == []


def test_what_a_module_gives_in_a_form_of_its_own_is_not_told(told: Told) -> None:
    module = OfItsOwn()
    (line,) = told(nn.Linear(2, 2), call(module), own=module)
    assert "own.losses, own.total." in line


class Nameless:
    """A key that has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("begins", [True, False], ids=["at the start", "later"])
def test_an_object_that_raises_ends_the_look_alone(
    told: Told, caplog: pytest.LogCaptureFixture, begins: bool
) -> None:
    module = Counting()
    windows: dict[object, object] = {Nameless(): module} if begins else {"losses": module}
    vars(module)["windows"] = windows

    def train() -> None:
        module(torch.ones(3, 2))
        windows[Nameless()] = module

    assert told(module, train) == []
    lines = [line for line in caplog.messages if "not looked at" in line]
    assert len(lines) == 1


def test_the_count_of_a_metric_is_told(told: Told) -> None:
    metric = MeanMetric()
    metric.persistent(True)
    (line,) = told(nn.Linear(2, 2), lambda: metric.update(1.0), metric=metric)
    assert "metric._update_count" in line
    assert "mean_value" not in line


class Unshown:
    """A key that no text can be made of, as a sharded tensor."""

    def __format__(self, form: str) -> str:
        raise RuntimeError("no text")


class Metrics:
    """A state object that keeps a program's metrics in lists."""

    def __init__(self) -> None:
        self.by_key = {Unshown(): 1}
        self.of = {"train": [MeanMetric()], "eval": [MeanMetric()]}

    def state_dict(self) -> dict[str, Any]:
        return {mode: [metric.state_dict() for metric in of] for mode, of in self.of.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError  # nothing is restored here


def test_metrics_in_lists_of_a_state_object_are_looked_into(told: Told) -> None:
    metrics = Metrics()
    metric = metrics.of["train"][0]
    (line,) = told(nn.Linear(2, 2), lambda: metric.update(1.0), metrics=metrics)
    assert "metrics.of.train.0.mean_value" in line
    assert "metric.persistent(True)" in line
    metrics = Metrics()
    metric = metrics.of["train"][0]
    metric.persistent(True)
    (line,) = told(nn.Linear(2, 2), lambda: metric.update(1.0), metrics=metrics)
    assert "train.0.mean_value" not in line
    assert "persistent(True)" not in line


def test_what_a_modules_extra_state_has_is_not_told(told: Told) -> None:
    module = Extra()
    (line,) = told(module, call(module))
    assert "over.calls, model.over.mean, model.over.losses, model.over.held." in line


class Window:
    """A window of a module's values, of a class of the user's."""

    def __init__(self) -> None:
        self.calls = 0
        self.sums = torch.zeros(2)


def test_windows_under_names_with_dots_are_looked_at(
    told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    module: Any = Fixed()
    module.windows = {"loss": Window(), "loss.aux": Window(), "loss.aux.b": 1}

    def train() -> None:
        module(torch.ones(3, 2))
        module.windows["loss.aux"].calls += 1
        module.windows["loss"].sums += 1

    (line,) = told(module, train)
    assert "model.over.windows.loss.aux.calls" in line
    assert "model.over.windows.loss.sums" in line
    assert "are not looked at" not in caplog.text


class Windowed:
    """A state object whose ``state_dict`` shows some of what moves: of torcheval's windows the
    place of the next value is missing, of schedulefree's wrapper the mode.
    """

    def __init__(self) -> None:
        self.window, self.next_inserted, self.batches, self.train_mode = [0.0] * 3, 0, 0, False
        self.size, self.seconds, self._fetched = 3, 0.0, 0

    def update(self) -> None:
        self.window[self.next_inserted] += 1.0
        self.next_inserted = (self.next_inserted + 2) % self.size
        self.batches, self.train_mode = self.batches + 1, True
        self.seconds, self._fetched = self.seconds + 0.5, self._fetched + 2

    def state_dict(self) -> dict[str, Any]:
        return {"window": self.window, "position": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.window, self.batches = state["window"], state["position"]


def test_numbers_and_modes_of_a_state_object_are_told_once(told: Told) -> None:
    """Not private ones, which may be a reader's own business, nor times, nor what is shown under
    another name.
    """
    metric = Windowed()
    lines = told(nn.Linear(2, 2), metric.update, metric=metric)
    assert len(lines) == 1
    assert "metric.next_inserted, metric.train_mode. A restored run" in lines[0]
