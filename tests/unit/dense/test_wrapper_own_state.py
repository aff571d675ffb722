"""Restore values of any kind in an optimizer's wrapper, or report them, on one rank."""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torchrec.optim.keyed import KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper

from torchrec_checknrun import Checkpointer
from torchrec_checknrun.errors import IncompatibleCheckpoint, SaveFailed
from torchrec_checknrun.model.dense_states import DenseStates
from torchrec_checknrun.model.tracked import track
from torchrec_checknrun.values.state import encode_state

Made = tuple[nn.Module, Any]
Make = Callable[[], Made]
CONFIG = {"a": 1}


class Mode(enum.Enum):
    COLD = 1
    HOT = 2


class Clock:
    """A callable that counts its calls."""

    def __init__(self) -> None:
        self.ticks = 0

    def __call__(self) -> None:
        self.ticks += 1


class Resumable(Clock):
    def state_dict(self) -> dict[str, Any]:
        return {"ticks": self.ticks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ticks = state["ticks"]


class Slotted(OptimizerWrapper):
    """A wrapper with slots beside its attributes."""

    __slots__ = ("__private", "slotted")

    def __init__(self, inner: KeyedOptimizer) -> None:
        super().__init__(inner)
        self.slotted = 0
        self.__private = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.slotted += 1
        self.__private += 1

    def values(self) -> list[Any]:
        return [self.slotted, self.__private]


class Everything(Slotted):
    """A wrapper with values of many kinds."""

    def __init__(self, inner: KeyedOptimizer) -> None:
        super().__init__(inner)
        self.clock = Resumable()
        self.average = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.zeros(()))
        self.empty = torch.zeros(0)
        self.beside = [
            {"of": p, "average": torch.zeros(p.shape)}
            for group in self.param_groups
            for p in group["params"]
        ]
        self.mixed: dict[str, Any] = {"function": max, "count": 0}
        self.sentinel: object = object()
        self.mode = Mode.COLD
        self.rank_weights = torch.zeros(2)
        self.marked = {"$live": 0}

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.clock()
        self.mixed["count"] += 1
        self.sentinel = 0.5
        self.mode = Mode.HOT
        self.empty = torch.ones(3)
        self.marked["$live"] += 1
        with torch.no_grad():
            self.scale.add_(1)
            self.average.weight.fill_(7)
            self.rank_weights.add_(2)
            for item in self.beside:
                item["average"].add_(1)

    def values(self) -> list[Any]:
        return [
            *super().values(),
            self.clock.ticks,
            self.average.state_dict(),
            self.scale,
            self.empty,
            [item["average"] for item in self.beside],
            self.mixed,
            self.sentinel,
            self.mode,
            self.rank_weights,
            self.marked,
        ]


class Holding(OptimizerWrapper):
    """A wrapper of one given value and any that are set."""

    def __init__(self, inner: KeyedOptimizer, value: Any = None) -> None:
        super().__init__(inner)
        self.value = value


class Renamed(Holding):
    pass


class OwnForm(OptimizerWrapper):
    count = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict(), "count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]
        super().load_state_dict(state["inner"])


class Failing(OptimizerWrapper):
    def state_dict(self) -> dict[str, Any]:
        return {"n": vars(self)["missing"]}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 2)
        self.b = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.a(x) + self.b(x))


def adam(model: nn.Module, rate: float = 0.1) -> KeyedOptimizer:
    named = dict(model.named_parameters())
    return KeyedOptimizerWrapper(named, lambda params: optim.Adam(params, lr=rate))


def making(wrap: Callable[[KeyedOptimizer], Any]) -> Make:
    def make() -> Made:
        model = nn.Linear(4, 2)
        return model, wrap(adam(model))

    return make


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def checkpointer(root: Path, model: nn.Module, optimizer: Any) -> Checkpointer:
    return Checkpointer(str(root), model=model, state={"o": optimizer}, retention=None)


def save(root: Path, make: Make, steps: int = 2, change: Callable[[Any], object] = id) -> Any:
    model, optimizer = make()
    train(model, optimizer, steps)
    change(optimizer)
    with checkpointer(root, model, optimizer) as saver:
        assert saver.save() is not None
    return optimizer


def restore(root: Path, made: Made, **options: Any) -> Any:
    with checkpointer(root, *made) as saver:
        assert saver.restore(**options) is not None
    return made[1]


def test_all_kinds_of_values_come_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        saved = save(tmp_path, making(Everything))
        made = making(Everything)()
        kept = [made[1].average, made[1].scale, made[1].clock, made[1].beside[0]["average"]]
        parameters = [item["of"] for item in made[1].beside]
        live = restore(tmp_path, made)
    assert repr(live.values()) == repr(saved.values())
    now = [live.average, live.scale, live.clock, live.beside[0]["average"]]
    assert list(map(id, now)) == list(map(id, kept))
    assert [id(item["of"]) for item in live.beside] == list(map(id, parameters))
    assert "Everything" not in caplog.text.replace("Everything.sentinel", "")


def test_a_rollback_to_before_the_first_step_is_whole(tmp_path: Path) -> None:
    model, optimizer = making(Everything)()
    before = repr(optimizer.values()[:8])
    with checkpointer(tmp_path, model, optimizer) as saver:
        assert saver.save() is not None
        train(model, optimizer, 2)
        assert saver.restore() is not None
    assert repr(optimizer.values()[:8]) == before


@pytest.mark.parametrize("value", [np.ones(3), [torch.ones(3)], float("nan"), {"x": np.ones(2)}])
def test_any_value_of_a_constructor(
    tmp_path: Path, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, making(lambda inner: Holding(inner, value)))
    with caplog.at_level(logging.WARNING):
        live = restore(tmp_path, making(lambda inner: Holding(inner, value))())
    assert repr(live.value) == repr(value)
    assert "continues with" not in caplog.text


def test_the_state_of_an_argument_is_no_setting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Hold an object that moves at each step, as a gradient scaler does, as an argument."""
    make = making(lambda inner: Holding(inner, Resumable()))
    save(tmp_path, make, change=lambda optimizer: optimizer.value())
    with caplog.at_level(logging.WARNING):
        live = restore(tmp_path, make())
    assert live.value.ticks == 1
    assert "continues with" not in caplog.text


@pytest.mark.parametrize("name", ["value", "other"])
def test_the_callers_objects_are_not_rewritten(tmp_path: Path, name: str) -> None:
    def make() -> Made:
        model, wrapper = making(lambda inner: Holding(inner, CONFIG))()
        setattr(wrapper, name, CONFIG)
        return model, wrapper

    save(tmp_path, make, change=lambda optimizer: setattr(optimizer, name, {"a": 5}))
    assert getattr(restore(tmp_path, make()), name) == {"a": 5}
    assert CONFIG == {"a": 1}


def test_what_is_not_saved_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def hold(optimizer: Any) -> None:
        optimizer.clock = Clock()
        optimizer.among = {"n": 1, "clock": Clock()}
        optimizer.place_rank = 17
        optimizer.quiet = [torch.device("cpu"), logging.getLogger("x"), threading.Lock(), Mode.HOT]
        optimizer.log, optimizer.device = logging.getLogger("x"), torch.device("cpu")

    with caplog.at_level(logging.WARNING):
        for number in range(2):
            save(tmp_path / str(number), making(Holding), change=hold)
    lines = [r.getMessage() for r in caplog.records if "Holding." in r.getMessage()]
    assert sorted(line.split(", ")[0] for line in lines) == [
        "Holding.among['clock']",
        "Holding.clock",
        "Holding.place_rank = 17 is taken for the process's rank or world size",
    ]


@pytest.mark.parametrize(
    ("saved", "live"),
    [(nn.Linear(2, 2), nn.Linear(2, 3)), (Mode.HOT, 1), ([max, 2], []), (Resumable(), 3)],
)
def test_what_can_not_be_put_back_is_told(
    tmp_path: Path, saved: Any, live: Any, caplog: pytest.LogCaptureFixture
) -> None:
    before = repr(live)
    kind: Any = type("Holding", (Holding,), {})  # a class that has logged no warning yet
    save(tmp_path, making(lambda inner: kind(inner, saved)))
    with caplog.at_level(logging.WARNING):
        wrapper = restore(tmp_path, making(lambda inner: kind(inner, live))())
    assert repr(wrapper.value) == before
    assert "Holding.value keeps its present value" in caplog.text


def test_attributes_of_wrappers_that_are_gone_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, making(lambda inner: Holding(inner, 3)))
    with caplog.at_level(logging.WARNING):
        restore(tmp_path, making(Renamed)())
    assert "['value'] of Holding are not restored" in caplog.text
    assert "Renamed.value keeps" in caplog.text


def test_values_that_follow_from_the_number_of_ranks_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Report all changed values on another number of ranks; else only constructor arguments."""
    lines = []
    for resized in (False, True):
        (_, saved), (model, live) = making(Holding)(), making(Holding)()
        saved.accumulate, live.accumulate = 32, 16
        content = DenseStates(model, {"o": saved}, track(model)).stored()["o"]
        tree, _ = encode_state(content, "o")
        states = DenseStates(model, {"o": live}, track(model))
        states.fit({"o": tree}, {}, skipped=None, resized=resized)
        states.load("o", content)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            states.finish()
        lines.append(caplog.text)
        assert live.accumulate == 32
    assert "accumulate" not in lines[0]
    assert "accumulate = 32 (not 16), as saved on another number of ranks" in lines[1]


def test_marks_of_schedulers_are_no_settings(caplog: pytest.LogCaptureFixture) -> None:
    """Tell nobody of what a torch's scheduler notes of its optimizer, on any number of ranks."""
    model = Two()
    saved, live = (optim.Adam(model.a.parameters()) for _ in range(2))
    optim.lr_scheduler.StepLR(saved, 2)
    saved.step()
    content = DenseStates(model, {"o": saved}, track(model)).stored()["o"]
    tree, _ = encode_state(content, "o")
    states = DenseStates(model, {"o": live}, track(model))
    states.fit({"o": tree}, {}, skipped=None, resized=True)
    states.load("o", content)
    with caplog.at_level(logging.WARNING):
        states.finish()
    assert vars(live)["_opt_called"]
    assert not caplog.text


@pytest.mark.parametrize("added", ["saved", "live"])
@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam])
def test_groups_of_one_side_only(tmp_path: Path, added: str, kind: Any) -> None:
    def make(full: bool) -> Made:
        model = Two()
        optimizer = kind(model.a.parameters(), lr=0.1)
        if full:
            optimizer.add_param_group({"params": list(model.b.parameters()), "lr": 0.01})
        return model, optimizer

    save(tmp_path, lambda: make(added == "saved"), steps=0)
    where = "checkpoint" if added == "saved" else "optimizer"
    made = make(added == "live")
    with pytest.raises(IncompatibleCheckpoint, match=f"only the {where} .*b.bias.*add_param_group"):
        restore(tmp_path, made)
    restore(tmp_path, made, strict=False)
    restore(tmp_path, make(added == "saved"))


@pytest.mark.parametrize("steps", [0, 2])
def test_a_state_dict_of_a_form_of_its_own(tmp_path: Path, steps: int) -> None:
    saved = save(
        tmp_path, making(OwnForm), steps, lambda optimizer: optimizer.param_groups[0].update(lr=0.7)
    )
    made = making(OwnForm)()
    train(*made, 3 - steps if steps == 0 else 0)
    live = restore(tmp_path, made)
    assert live.count == saved.count == steps
    assert live.param_groups[0]["lr"] == 0.7
    assert repr(list(live.state.values())) == repr(list(saved.state.values()))


def test_a_state_dict_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(SaveFailed, match=r"'o'.*Failing.*KeyError: 'missing'.*state_dict"):
        save(tmp_path, making(Failing))


def test_own_parameters_and_their_state_stay_where_they_are(tmp_path: Path) -> None:
    def make() -> Made:
        model, wrapper = making(Holding)()
        wrapper.params["__own"] = own = nn.Parameter(torch.zeros(2))
        wrapper.state[own] = {"n": torch.zeros(1, dtype=torch.int64)}
        return model, wrapper

    def change(wrapper: Any) -> None:
        with torch.no_grad():
            wrapper.params["__own"].fill_(3)
        wrapper.state[wrapper.params["__own"]]["n"].fill_(5)

    save(tmp_path, make, steps=0, change=change)
    made = make()
    own = made[1].params["__own"]
    kept = made[1].state[own]["n"]
    live = restore(tmp_path, made)
    assert own.tolist() == [3, 3]
    assert live.state[own]["n"] is kept
    assert kept.tolist() == [5]
