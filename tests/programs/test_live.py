"""Test the comparison itself: find whatever a resumed run may lack, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from tests.programs.live import differences, generators, live


@dataclass
class Own:
    """A user's state object."""

    number: float = 0.5
    _hidden: list[Any] = field(default_factory=lambda: [1, {"a": (2, None)}])
    seen: set[int] = field(default_factory=lambda: {3, 1})
    array: Any = field(default_factory=lambda: np.arange(3.0))
    draw: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))
    dice: random.Random = field(default_factory=lambda: random.Random(2))
    bits: Any = field(default_factory=lambda: np.random.default_rng(3))
    hook: Callable[[], None] = lambda: None


class Run:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.1))
        self.model.register_buffer("scratch", torch.ones(2), persistent=False)
        dense = KeyedOptimizerWrapper(
            dict(self.model.named_parameters()), lambda p: torch.optim.Adam(p, lr=0.1)
        )
        self.inner: Any = dense._optimizer
        stages = [WarmupStage(WarmupPolicy.LINEAR, 5, 0.1)]
        self.warm: Any = WarmupOptimizer(CombinedOptimizer([("d", dense)]), stages, lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.inner, 2)
        self.own = Own()
        for _ in range(2):
            self.model(torch.ones(4, 2)).sum().backward()
            self.warm.step()

    def live(self) -> dict[str, str]:
        return live(vars(self))


def test_equal_runs_are_equal() -> None:
    found = Run().live()
    assert differences(found, Run().live()) == []
    assert len(found) > 100


def _set(path: str, value: Any) -> Callable[[Run], None]:
    def change(run: Run) -> None:
        *owners, name = path.split(".")
        owner: Any = run
        for step in owners:
            owner = owner[int(step)] if step.isdigit() else getattr(owner, step)
        setattr(owner, name, value)

    return change


def _add(run: Run, tensor: Callable[[Run], torch.Tensor]) -> None:
    with torch.no_grad():
        tensor(run).add_(1)


CHANGES: dict[str, tuple[Callable[[Run], Any], str]] = {
    "parameter": (lambda r: _add(r, lambda r: r.model[0].weight), "model.0.weight"),
    "gradient": (lambda r: _add(r, lambda r: r.model[0].bias.grad), "model.0.bias.grad"),
    "buffer": (lambda r: _add(r, lambda r: r.model[1].running_mean), "model.1.running_mean"),
    "not persistent": (lambda r: _add(r, lambda r: r.model.scratch), "model.scratch"),
    "mode": (lambda r: r.model[2].eval(), "model.2.training"),
    "attribute": (_set("model.2.p", 0.2), "model.2.p"),
    "rate": (lambda r: r.inner.param_groups[0].update(lr=0.3), "param_groups.000.lr"),
    "momentum": (lambda r: r.inner.param_groups[0].update(betas=(0.9, 0.9)), "betas.001"),
    "Adam's step": (lambda r: _add(r, lambda r: _state(r)["step"]), "[model.0.weight].step"),
    "Adam's moment": (lambda r: _add(r, lambda r: _state(r)["exp_avg"]), "exp_avg"),
    "state that was not there": (lambda r: _state(r).update(more=1), "more"),
    "state that is gone": (lambda r: r.inner.state.clear(), "exp_avg_sq: (missing)"),
    "warm-up's step": (lambda r: r.warm.state[r.warm._warmup_param]["warmup"].zero_(), "warmup"),
    "a wrapper's attribute": (_set("warm._lr", 0.2), "warm._lr"),
    "another list of groups": (
        lambda r: setattr(r.warm._optimizer.optimizers[0][1], "param_groups", []),
        "param_groups: empty instead of is ",
    ),
    "schedule": (_set("schedule.last_epoch", 7), "schedule.last_epoch"),
    "number": (_set("own.number", 0.25), "own.number"),
    "nested": (lambda r: r.own._hidden[1].update(a=(2, 0)), "own._hidden.001.a.001"),
    "set": (lambda r: r.own.seen.add(4), "own.seen"),
    "array": (lambda r: r.own.array.__setitem__(0, 9), "own.array"),
    "torch's generator": (lambda r: torch.rand(1, generator=r.own.draw), "own.draw"),
    "Python's generator": (lambda r: r.own.dice.random(), "own.dice"),
    "NumPy's generator": (lambda r: r.own.bits.random(), "own.bits"),
}


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_each_change_is_seen(change: str) -> None:
    run, wanted = Run(), Run().live()
    make, where = CHANGES[change]
    make(run)
    lines = differences(run.live(), wanted)
    assert lines
    assert any(where in line for line in lines), lines


def _state(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = run.inner.state[run.model[0].weight]
    return found


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), np.random.rand, random.random])
def test_the_process_own_generators(draw: Callable[[], Any]) -> None:
    before = live({"random": generators()})
    assert differences(live({"random": generators()}), before) == []
    draw()
    assert len(differences(live({"random": generators()}), before)) == 1


def test_nothing_is_passed_over_in_silence() -> None:
    with pytest.raises(TypeError, match=r"own.number is of"):
        live({"own": Own(number=iter([1]))})  # type: ignore[arg-type]  # on purpose


def test_keys_of_one_name() -> None:
    with pytest.raises(AssertionError, match="several keys"):
        live({"own": {torch.ones(2): 1, torch.ones(2): 2}})
