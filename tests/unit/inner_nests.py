"""Define users' optimizers that hold other optimizers, and functions to nest and train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage


class Lookahead(Optimizer):
    """An optimizer with slow weights beside those of a base optimizer, and a count."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__([{"params": g["params"]} for g in base.param_groups], {"alpha": 0.5})
        self.base = base
        self.count = 0
        self.log: list[int] = []
        self.sums = torch.zeros(2)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded
        self.base.step()
        self.count += 1
        self.log.append(self.count)
        self.sums.add_(1)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    slow = self.state[p].setdefault("slow", p.detach().clone())
                    slow.lerp_(p, group["alpha"])
                    if self.count % 2 == 0:
                        p.copy_(slow)


class Sam(Optimizer):
    """SAM as in the reference implementation: shares groups, and relinks them on a load."""

    def __init__(self, params: Any, base: Any, **options: Any) -> None:
        super().__init__(params, {"rho": 0.05, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.clone()
                p.add_(p.grad, alpha=group["rho"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old_p"])
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded
        assert closure is not None
        with torch.enable_grad():
            closure()
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


class Ramp(KeyedOptimizer):
    """A user's TorchRec wrapper that shows the inner state as its own."""

    def __init__(self, inner: KeyedOptimizer) -> None:
        super().__init__(inner.params, inner.state, inner.param_groups)
        self.inner = inner
        self.count = 0

    def zero_grad(self, set_to_none: bool = False) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.inner.step(closure)


class Shell(Optimizer):
    """A wrapper like accelerate's ``AcceleratedOptimizer``, without ``Optimizer.__init__``."""

    def __init__(self, inner: Optimizer) -> None:
        self.optimizer = inner

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded
        self.optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)


class PlainShell(Optimizer):
    """A wrapper that shares state and groups with the inner optimizer, in torch's state dict."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([{"params": [nn.Parameter(torch.zeros(1))]}], {})
        self.inner = inner
        self.state, self.param_groups = inner.state, inner.param_groups
        self.count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded
        self.count += 1
        self.inner.step(closure)


class Split(Optimizer):
    """An optimizer of matrices that leaves the rest to optimizers in a dict of lists."""

    def __init__(self, layers: nn.Module) -> None:
        params = list(layers.parameters())
        super().__init__([p for p in params if p.dim() > 1], {"lr": 0.1})
        rest = [p for p in params if p.dim() < 2]
        self.others = {"vectors": [torch.optim.Adam([p], lr=0.1) for p in rest]}

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for other in self.others["vectors"]:
            other.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded
        for other in self.others["vectors"]:
            other.step()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_(mean.lerp_(p.grad, 0.3), alpha=0.1)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def adam(layers: nn.Module) -> Optimizer:
    return torch.optim.Adam(layers.parameters(), lr=0.1)


def keyed(layers: nn.Module, make: Callable[[Any], Optimizer]) -> KeyedOptimizer:
    return KeyedOptimizerWrapper(dict(layers.named_parameters()), make)


def keyed_adam(layers: nn.Module) -> KeyedOptimizer:
    return keyed(layers, lambda ps: torch.optim.Adam(ps, lr=0.1))


def looking(ps: Any) -> Optimizer:
    return Lookahead(torch.optim.Adam(ps, lr=0.1))


def sam(layers: nn.Module) -> Sam:
    return Sam(layers.parameters(), torch.optim.AdamW, lr=0.1)


def warm(inner: KeyedOptimizer) -> KeyedOptimizer:
    return WarmupOptimizer(inner, [WarmupStage(WarmupPolicy.LINEAR, max_iters=9, value=0.1)], 0.1)


NESTS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "lookahead": lambda m: Lookahead(adam(m)),
    "lookahead twice": lambda m: Lookahead(Lookahead(adam(m))),
    "lookahead in torchrec": lambda m: warm(CombinedOptimizer([("a", keyed(m, looking))])),
    "lookahead around torchrec": lambda m: Lookahead(warm(keyed_adam(m))),
    "sam": sam,
    "sam in torchrec": lambda m: keyed(m, lambda ps: Sam(ps, torch.optim.AdamW, lr=0.1)),
    "lookahead of a shell": lambda m: Lookahead(Shell(adam(m))),
    "ramp": lambda m: Ramp(keyed_adam(m)),
    "ramp around warm-up": lambda m: Ramp(warm(Ramp(keyed_adam(m)))),
    "ramp of a combined one": lambda m: Ramp(CombinedOptimizer([("a", keyed_adam(m))])),
    "shell": lambda m: Shell(adam(m)),
    "shell in torchrec": lambda m: keyed(m, lambda ps: Shell(torch.optim.Adam(ps, lr=0.1))),
    "plain shell": lambda m: PlainShell(adam(m)),
    "split": Split,
}


def train(layers: nn.Module, nest: Any, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        batch = torch.randn(5, 4, generator=generator)

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            nest.zero_grad()
            loss: torch.Tensor = layers(batch).square().sum()
            loss.backward()
            return loss

        closure()
        nest.step(closure if "Sam" in repr(type(getattr(nest, "_optimizer", nest))) else None)
    nest.zero_grad()
