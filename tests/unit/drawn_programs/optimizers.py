"""Make a drawn program's optimizers: PyTorch's, users' own, and wrappers around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import (
    CombinedOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
)
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from tests.distributed.optimizer_nests import Averaging, Delegating
from tests.programs.optimizer_variations import Easing
from tests.unit.dense.test_flat_buffers import Flat
from tests.unit.inner_nests import Lookahead

RATE = 0.03
Named = dict[str, torch.Tensor]
Parameters = list[torch.Tensor]


class Dicts(Optimizer):
    """A user's momentum that keeps a history by step, text and numbers in dicts."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": RATE})
        self.count = 0
        self.norms: dict[str, float] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded
        """Step by the mean of the last gradients."""
        self.count += 1
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                history = state.setdefault("history", {})
                history[self.count] = parameter.grad.clone()
                if len(history) > 3:
                    del history[min(history)]
                self.norms[str(number)] = float(parameter.grad.norm())
                mean = torch.stack(list(history.values())).mean(0)
                parameter.sub_(mean, alpha=group["lr"] / (1 + self.norms[str(number)]))


class Lists(Optimizer):
    """A user's optimizer that keeps a list of tensors and one of numbers for each parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": RATE, "schedule": (1.0, 0.5)})
        self.log: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded
        """Step by two moments of different decay, and a factor that goes to and fro."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["moments"] = [torch.zeros_like(parameter) for _ in range(2)]
                    state["steps"] = [0, 0.0]
                for moment, decay in zip(state["moments"], (0.9, 0.5), strict=True):
                    moment.lerp_(parameter.grad, 1 - decay)
                state["steps"] = [state["steps"][0] + 1, state["steps"][1] + 0.1]
                factor = group["schedule"][state["steps"][0] % 2] * (1 + state["steps"][1])
                parameter.sub_(sum(state["moments"]) * factor, alpha=group["lr"])
        self.log = [*self.log, len(self.log) / 3][-4:]


def groups(parameters: Parameters) -> Optimizer:
    """Give each parameter a group with options of its own."""
    each = [
        {"params": [p], "weight_decay": 0.01 * number, "lr": RATE / (1 + number % 3)}
        for number, p in enumerate(parameters)
    ]
    return torch.optim.AdamW(each, lr=RATE)


DENSE: dict[str, Callable[[Parameters], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=RATE, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=RATE, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=RATE, amsgrad=True),
    "tensor_rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(RATE), foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=RATE),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=RATE / 3, centered=True, momentum=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=RATE, momentum_decay=0.01),
    "groups": groups,
    "dicts": Dicts,
    "lists": Lists,
    "flat": Flat,
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2, history_size=3),
    "lookahead": lambda p: Lookahead(torch.optim.Adam(p, lr=RATE)),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=RATE),
    "radam": lambda p: torch.optim.RAdam(p, lr=RATE),
    "asgd": lambda p: torch.optim.ASGD(p, lr=RATE, t0=3),
    "rprop": lambda p: torch.optim.Rprop(p, lr=RATE / 3),
}


def stages() -> list[WarmupStage]:
    return [
        WarmupStage(WarmupPolicy.LINEAR, 3, 0.1),
        WarmupStage(WarmupPolicy.CONSTANT, 5, 0.5),
        WarmupStage(WarmupPolicy.POLY, 30, 1.0),
    ]


def warm(optimizer: KeyedOptimizer, name: str = "__warmup") -> KeyedOptimizer:
    return WarmupOptimizer(optimizer, stages(), lr=RATE, param_name=name)


def clip(optimizer: KeyedOptimizer, kind: Any = GradientClipping.NORM) -> KeyedOptimizer:
    return GradientClippingOptimizer(optimizer, kind, 0.05)


def both(fused: KeyedOptimizer, dense: KeyedOptimizer) -> KeyedOptimizer:
    return CombinedOptimizer([("tables", fused), ("dense", dense)])


def with_groups_saved(fused: KeyedOptimizer, dense: KeyedOptimizer) -> KeyedOptimizer:
    made = both(fused, dense)
    made.save_param_groups(True)
    return made


WRAPPERS: dict[str, Callable[[KeyedOptimizer, KeyedOptimizer], KeyedOptimizer]] = {
    "keyed": both,
    "warm_around": lambda f, d: warm(both(f, d)),
    "warm_inside": lambda f, d: both(warm(f), warm(d)),
    "clip_inside": lambda f, d: both(f, clip(d)),
    "clip_around_warm": lambda f, d: both(f, clip(warm(d), GradientClipping.VALUE)),
    "clip_around_all": lambda f, d: clip(both(f, d)),
    "own": lambda f, d: both(f, Easing(d)),
    "averaging": lambda f, d: both(f, Averaging(d)),
    "delegating": lambda f, d: both(f, Delegating(d)),
    "warm_warm": lambda f, d: warm(both(f, warm(clip(d), "__inner")), "__outer"),
    "groups_saved": with_groups_saved,
}


class Optimizers:
    """A program's optimizers as its loop sees them.

    Attributes:
        fused: the tables'.
        inner: PyTorch's or a user's, of everything else; the first one where there are two.
        outer: what the loop steps.
        state: what is given to the Checkpointer.
    """

    def __init__(self, dense: str, wrapper: str, fused: KeyedOptimizer, named: Named) -> None:
        self.fused = fused
        if wrapper == "bare":
            parts = [list(named.values())]
            if dense == "two":
                parts = [parts[0][::2], parts[0][1::2]]
            makes = [DENSE["adam"], DENSE["sgd"]] if dense == "two" else [DENSE[dense]]
            found = [make(part) for make, part in zip(makes, parts, strict=True)]
            self.inner = found[0]
            self.outer: list[Any] = [fused, *found]
            self.state = {"fused": fused, **{f"dense{i}": o for i, o in enumerate(found)}}
        else:
            keyed = KeyedOptimizerWrapper(named, DENSE[dense])
            self.inner = keyed._optimizer
            self.outer = [WRAPPERS[wrapper](fused, keyed)]
            self.state = {"optimizer": self.outer[0]}

    def zero_grad(self) -> None:
        for optimizer in self.outer:
            optimizer.zero_grad()

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for optimizer in self.outer:
            if closure is not None and optimizer is self.inner:
                optimizer.step(closure)
            else:
                optimizer.step()
