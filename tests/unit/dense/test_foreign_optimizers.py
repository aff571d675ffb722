"""Restore optimizers written as those of other libraries are; each class names one that is so.

Some keep counts outside their state, make state late or in forms of its own, refuse a step outside
of training, have no rate, show what belongs to the optimizer inside. All step a data-parallel
table as well, whose rows of state are stored apart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR
from torchrec.optim.keyed import KeyedOptimizerWrapper

from tests.crash.save_sweep import alone
from tests.distributed.live_optimizers import differences, live
from tests.unit.inner_nests import Shell
from tests.unit.mixed_job import Job
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.errors import IncompatibleCheckpoint

RATE = 0.03


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    with alone():
        yield


class Foreign(Optimizer):
    """An optimizer of its own: moments in the parameters' state, as ``moments`` makes them."""

    def __init__(self, params: Any, lr: float | None = RATE) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9})

    def moments(self, parameter: torch.Tensor) -> dict[str, Any]:
        return {"mean": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.update({} if state else self.moments(p))
                    self.update(p, state, group)

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["mean"].lerp_(p.grad, 1 - group["momentum"])
        p.sub_(state["mean"], alpha=group["lr"] or RATE)


class Counting(Foreign):
    """StableSPAM: a count and a tensor of the optimizer itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.total, self.norm = 0, torch.zeros(())

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded
        self.total += 1
        self.norm += 0.5
        super().step()

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(p, state, {**group, "lr": RATE / self.total * float(self.norm)})


class Moded(Foreign):
    """schedulefree: refuses a step outside of training, of which it is told after a restore."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.param_groups[0]["train_mode"] = False

    def train(self) -> None:
        self.param_groups[0]["train_mode"] = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("not in train mode")
        super().step()


class Beginning(Foreign):
    """Prodigy: remembers where a parameter began, in a form that depends on its values."""

    def moments(self, parameter: torch.Tensor) -> dict[str, Any]:
        began = parameter.flatten().clone() if parameter.any() else torch.zeros(())
        return {**super().moments(parameter), "began": began, "norm": 0.0}

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(p, state, group)
        state["norm"] = state["began"].norm()  # a number until now


class Empty(Foreign):
    """PID: an empty state of most parameters."""

    def moments(self, parameter: torch.Tensor) -> dict[str, Any]:
        return {}

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert p.grad is not None
        p.sub_(p.grad, alpha=group["lr"])


class Coded(Foreign):
    """FlashAdamW: moments in codes of 8 bits; SaRA: a mask of the values that are trained."""

    def moments(self, parameter: torch.Tensor) -> dict[str, Any]:
        trained = torch.arange(parameter.numel()).view_as(parameter) % 3 > 0
        codes = torch.zeros_like(parameter, dtype=torch.int8)
        return {"codes": codes, "scales": torch.ones(len(parameter)), "trained": trained}

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert p.grad is not None
        scales = state["scales"].view(-1, *[1] * (p.ndim - 1))
        mean = (state["codes"] * scales / 127).lerp(p.grad, 0.1)
        scales.copy_(mean.abs().amax(tuple(range(1, p.ndim)), keepdim=True) + 1e-3)
        state["codes"].copy_((mean * 127 / scales).round())
        p.sub_(mean * state["trained"], alpha=group["lr"])


class Rateless(Foreign):
    """Adafactor: finds its rate itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=None)


class Slow(Optimizer):
    """timm's Lookahead: slow weights, made every other step, in the state of the one inside."""

    def __init__(self, base: Optimizer) -> None:
        self._base = base
        self.param_groups, self.defaults = base.param_groups, base.defaults
        self.state: Any = {}
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        for group in self.param_groups:
            group.setdefault("slow_step", 0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded
        self._base.step()
        for group in self.param_groups:
            group["slow_step"] += 1
            for p in group["params"] if group["slow_step"] % 2 == 0 else ():
                if p.grad is not None:
                    state = self._base.state[p]
                    slow = state.setdefault("slow", p.clone())
                    p.copy_(slow.lerp_(p, 0.5))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._base.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self._base.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self._base.load_state_dict(state_dict)
        self.param_groups = self._base.param_groups


class Around(Foreign):
    """pytorch_optimizer's Lookahead: groups that are the inner one's, and can't be set; state of
    both for each parameter. torch's state dict of it fails: it is given inside TorchRec's.
    """

    def __init__(self, base: Optimizer) -> None:
        self.optimizer = base
        self.state: Any = {p: {} for group in base.param_groups for p in group["params"]}
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.defaults = base.defaults

    param_groups = property(lambda self: self.optimizer.param_groups)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded
        self.optimizer.step()
        super().step()

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.copy_(state["mean"].lerp_(p, 0.3))


class Beside:
    """schedulefree's wrapper: not of torch's class, with a mode that changes what a step does."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.training = base, False

    param_groups = property(lambda self: self.base.param_groups)
    state = property(lambda self: self.base.state)

    def train(self) -> None:
        if not self.training:
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.mul_(1.5)
        self.training = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.base.step()

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.base.load_state_dict(state_dict)


Factory = Callable[[Any], Any]
FACTORIES: dict[str, Factory] = {
    **{
        kind.__name__: kind
        for kind in (Foreign, Counting, Moded, Beginning, Empty, Coded, Rateless)
    },
    "Slow": lambda p: Slow(optim.Adam(p, lr=RATE)),
    "slow momentum": lambda p: Slow(optim.SGD(p, lr=RATE, momentum=0.9)),
    "Beside": lambda p: Beside(optim.Adam(p, lr=RATE)),
    "Around": lambda p: Around(optim.Adam(p, lr=RATE)),
}
HOLDERS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "in TorchRec's": lambda job: {"optimizer": job.optimizer},
    "alone": lambda job: {"dense": job.dense._optimizer, "fused": job.model.fused_optimizer},
}


class Trained:
    """A job with its optimizers in a Checkpointer of its own; ``train`` as its program does."""

    def __init__(self, root: Path, factory: Factory, states: Any) -> None:
        self.job = Job(root.with_name("unused"), factory)
        self.job.saver.close()
        self.states = states(self.job)
        self.saver = Checkpointer(root, model=self.job.model, state=self.states)
        self.report = self.saver.restore()

    def train(self, steps: int) -> None:
        inner: Any = self.job.dense._optimizer
        for _ in range(steps):
            if isinstance(inner, (Moded, Beside)):
                inner.train()
            self.job.optimizer.zero_grad()
            self.job.backward()
            self.turn()
            self.saver.step()

    def turn(self) -> None:
        self.job.optimizer.step()

    def live(self) -> dict[str, str]:
        found = live(self.job.model, held=self.job.dense, **self.states)
        torchs = ("differentiable", ".defaults", "_zero_grad_profile_name")  # made by a load
        return {k: v for k, v in found.items() if not k.endswith(torchs)}


ONLY_INSIDE = [("Around", "alone"), ("Beside", "alone")]  # else their state dicts decide
CASES = [(name, holder) for name in FACTORIES for holder in HOLDERS]


@pytest.mark.parametrize(("name", "holder"), [case for case in CASES if case not in ONLY_INSIDE])
def test_each_comes_back(tmp_path: Path, name: str, holder: str) -> None:
    goes_on(tmp_path, lambda root: Trained(root, FACTORIES[name], HOLDERS[holder]))


def goes_on(folder: Path, make: Callable[[Path], Trained]) -> None:
    """Assert that a run that was saved and restored ends as one that was not interrupted."""
    whole, first = make(folder / "whole"), make(folder / "run")
    whole.train(5)
    first.train(3)
    first.saver.save()
    first.saver.close()
    again = make(folder / "run")
    assert again.report is not None
    again.train(2)
    assert differences(again.live(), whole.live()) == []
    whole.saver.close()
    again.saver.close()


# Wrappers that give another optimizer's state dict as their own, as accelerate's and Fabric's do.


class Wrapped(Trained):
    """A job whose state object is a shell around its optimizer, which steps, with a schedule."""

    def __init__(self, root: Path, inner: Callable[[Job], Optimizer]) -> None:
        def states(job: Job) -> dict[str, Any]:
            self.shell = Shell(Shell(inner(job)))
            self.schedule = StepLR(inner(job), 1, 0.5)
            return {
                "optimizer": self.shell,
                "schedule": self.schedule,
                "fused": job.model.fused_optimizer,
            }

        super().__init__(root, lambda p: optim.Adam(p, lr=RATE), states)

    def turn(self) -> None:
        self.shell.step()
        self.schedule.step()


@pytest.mark.parametrize("inner", ["dense", "torch's"])
def test_an_optimizer_in_a_shell_comes_back_with_its_rates(tmp_path: Path, inner: str) -> None:
    def of(job: Job) -> Optimizer:
        return job.dense if inner == "dense" else job.dense._optimizer

    goes_on(tmp_path, lambda root: Wrapped(root, of))


class Telling(Shell):
    """A shell whose state dict has more than the inner one's."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict(), "more": 1}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict["inner"])


def test_rates_in_a_shell_of_its_own_form_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layer = nn.Linear(2, 2)
    named = dict(layer.named_parameters())
    inner = KeyedOptimizerWrapper(named, lambda p: optim.SGD(p, lr=RATE))
    with caplog.at_level(logging.WARNING):
        Checkpointer(tmp_path, model=layer, state={"mine": Telling(inner)}).close()
        Checkpointer(tmp_path, model=layer, state={"mine": Shell(inner)}).close()
    told = [line for line in caplog.messages if "leaves out learning rates" in line]
    assert len(told) == 1
    assert "'mine' holds a KeyedOptimizerWrapper in optimizer" in told[0]


def test_another_optimizer_is_refused_all_the_same(tmp_path: Path) -> None:
    def make(kind: Any) -> Trained:
        return Trained(tmp_path / "run", kind, HOLDERS["alone"])

    first = make(Counting)
    first.train(2)
    first.saver.save()
    first.saver.close()
    with pytest.raises(IncompatibleCheckpoint):
        make(lambda p: optim.Adam(p, lr=RATE))
