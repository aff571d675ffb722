"""Jobs whose optimizers are wrapped in any way, with a scheduler beside them."""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch.optim import lr_scheduler
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import (
    CombinedOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
)
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from tests.distributed.layouts import Layout, LayoutJob, build
from tests.distributed.live_optimizers import Live, differences, live
from tests.distributed.models import CollectionSpec, ModelSpec, TableSpec
from torchrec_checknrun import Checkpointer, Consecutive

TABLES = (TableSpec("t0", 29, 8, ("f0",)), TableSpec("t1", 24, 8, ("f1",)))
SPEC = ModelSpec((CollectionSpec("a", TABLES),))


class Averaging(OptimizerWrapper):
    """A user's wrapper: an average of weights, counters, references; and this process's rank."""

    def __init__(self, optimizer: KeyedOptimizer, decay: float = 0.5) -> None:
        super().__init__(optimizer)
        self.decay = decay
        self.count = 0
        self.history: deque[float] = deque(maxlen=3)
        self.counts: Counter[str] = Counter()
        self.first = [p for p in self.params.values() if type(p) is torch.nn.Parameter]
        self.average: dict[str, torch.Tensor] = {}
        self._rank = torch.distributed.get_rank()

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.count += 1
        self.history.append(self.count / 3)
        self.counts["odd" if self.count % 2 else "even"] += 1
        for name, p in self.params.items():
            if type(p) is torch.nn.Parameter and p.numel():
                old = self.average.get(name, torch.zeros_like(p.data))
                self.average[name] = old.lerp(p.detach(), self.decay)


class Delegating(KeyedOptimizer):
    """A user's warm-up with TorchRec's interface alone: all but the rate is the inner optimizer's,
    whose attribute has a name of its own.
    """

    def __init__(self, inner: KeyedOptimizer, steps: int = 4) -> None:
        self._inner = inner
        self.steps, self.done = steps, 0
        self.rates = [group["lr"] for group in inner.param_groups]

    @property
    def params(self) -> Any:
        return self._inner.params

    @property
    def state(self) -> Any:
        return self._inner.state

    @property
    def param_groups(self) -> Any:
        return self._inner.param_groups

    @property
    def defaults(self) -> Any:
        return self._inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.done += 1
        for group, rate in zip(self.param_groups, self.rates, strict=True):
            group["lr"] = rate * min(1.0, self.done / self.steps)
        self._inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self._inner.load_state_dict(state_dict)

    def post_load_state_dict(self) -> None:
        self._inner.post_load_state_dict()

    def save_param_groups(self, save: bool) -> None:
        self._inner.save_param_groups(save)


def stages() -> list[WarmupStage]:
    return [
        WarmupStage(WarmupPolicy.LINEAR, 2, 0.1),
        WarmupStage(WarmupPolicy.CONSTANT, 4, 0.7),
        WarmupStage(WarmupPolicy.POLY, 30, 1.0),
    ]


def warm(optimizer: KeyedOptimizer, name: str = "__warmup") -> KeyedOptimizer:
    return WarmupOptimizer(optimizer, stages(), lr=0.05, param_name=name)


def clip(optimizer: KeyedOptimizer) -> KeyedOptimizer:
    return GradientClippingOptimizer(optimizer, GradientClipping.NORM, 0.3)


def both(fused: KeyedOptimizer, dense: KeyedOptimizer) -> KeyedOptimizer:
    return CombinedOptimizer([fused, ("dense", dense)])


NESTS: dict[str, Callable[[KeyedOptimizer, KeyedOptimizer], KeyedOptimizer]] = {
    "combined": both,
    "warm combined": lambda f, d: warm(both(f, d)),
    "warm fused": lambda f, d: both(warm(f), d),
    "warm each": lambda f, d: both(warm(f), clip(warm(d))),
    "clip warm combined": lambda f, d: clip(warm(both(f, d))),
    "warm warm combined": lambda f, d: warm(warm(both(f, d)), "__second"),
    "warm in warm": lambda f, d: warm(both(f, warm(clip(d), "__inner")), "__outer"),
    "averaging": lambda f, d: Averaging(both(f, Averaging(warm(d)))),
    "delegating combined": lambda f, d: Delegating(both(f, d)),
    "delegating each": lambda f, d: both(Delegating(f), Delegating(warm(d))),
    "warm delegating": lambda f, d: warm(Delegating(clip(both(f, d)))),
    "combined twice": lambda f, d: CombinedOptimizer([("x", warm(both(f, d)))]),
}
ALONE: dict[str, Callable[[KeyedOptimizer], KeyedOptimizer]] = {
    "warm": warm,
    "clip warm": lambda o: clip(warm(o)),
    "combined warm": lambda o: CombinedOptimizer([("f", warm(o))]),
}
FACTORIES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.03),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.03), weight_decay=0.2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9),
}
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "none": lambda o: None,
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 12),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(
        o, 0.1, 20, cycle_momentum="betas" in o.defaults or "momentum" in o.defaults
    ),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)],
        [3],
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
}


def layout(*shardings: str, ranks: int = 2) -> dict[str, Any]:
    return asdict(Layout(dict(zip(("a.t0", "a.t1"), shardings, strict=True)), ranks))


class Run:
    """A job with its optimizers, wrapper and scheduler.

    Args:
        nest: a name of ``NESTS``, or of ``ALONE``: then of the fused optimizer, with SGD beside.
        scheduled: the scheduler's optimizer: the ``outer`` optimizer, the ``wrapper`` of the
            dense one, or torch's own (``inner``).
    """

    def __init__(
        self,
        layout: dict[str, Any],
        nest: str,
        factory: str = "adam",
        schedule: str = "none",
        scheduled: str = "outer",
        over_all: bool = False,
        seed: int = 0,
    ) -> None:
        self.job: LayoutJob = build(SPEC.to_json(), layout, seed)
        model = self.job.model
        named = model.named_parameters()
        dense = KeyedOptimizerWrapper(
            dict(named if over_all else in_backward_optimizer_filter(named)), FACTORIES[factory]
        )
        self.beside: list[KeyedOptimizer] = []
        if nest in ALONE:
            self.optimizer = ALONE[nest](model.fused_optimizer)
            self.beside = [dense]
        else:
            self.optimizer = NESTS[nest](model.fused_optimizer, dense)
        of = {"outer": self.optimizer, "wrapper": dense, "inner": dense._optimizer}[scheduled]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.scheduler = SCHEDULES[schedule](of)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for optimizer in (self.optimizer, *self.beside):
                optimizer.zero_grad()
            loss = self.job.loss(*self.job.batch(self.job.steps))
            loss.backward()
            for optimizer in (self.optimizer, *self.beside):
                optimizer.step()
            if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(float(self.job.steps % 3))
            elif self.scheduler is not None:
                self.scheduler.step()
            self.job.steps += 1

    def checkpointer(
        self, root: str, scheduler_first: bool = False, **options: Any
    ) -> Checkpointer:
        state: dict[str, Any] = {"optimizer": self.optimizer, "job": self.job}
        state |= {f"beside{i}": o for i, o in enumerate(self.beside)}
        if self.scheduler is not None:
            scheduler = {"scheduler": self.scheduler}
            state = {**scheduler, **state} if scheduler_first else {**state, **scheduler}
        return Checkpointer(
            root,
            model=self.job.model,
            **{"state": state, **options},
            policy=Consecutive(),
            retention=None,
            chunk_bytes=700,
        )

    def live(self) -> Live:
        return live(
            self.job.model,
            optimizer=self.optimizer,
            beside=self.beside,
            scheduler=self.scheduler,
            steps=self.job.steps,
        )


def goes_on(root: str, cases: list[dict[str, Any]]) -> list[str]:
    """Save in the middle, restore into new objects (and into the old ones), and train on."""
    problems = []
    for number, case in enumerate(cases):
        path = f"{root}/{number}"
        first = case.pop("scheduler_first", False)
        run = Run(**case)
        with run.checkpointer(path, first) as saver:
            start = saver.save()
            at_start = run.live()
            run.train(5)  # through two stages of a warm-up
            middle = saver.save()
            assert start is not None
            assert middle is not None
            at_middle = run.live()
            run.train(4)
            at_end = run.live()
            again = Run(**{**case, "seed": 7})
            with again.checkpointer(path, first) as other:
                assert other.restore() is not None
                found = [("restored", again.live(), at_middle)]
            again.train(4)
            found.append(("trained on", again.live(), at_end))
            assert saver.restore(middle.id) is not None
            found.append(("gone back", run.live(), at_middle))
            run.train(4)
            found.append(("trained again", run.live(), at_end))
            assert saver.restore(start.id) is not None
            found.append(("gone back to the start", run.live(), at_start))
        problems += [
            f"{case} {when}: {line}"
            for when, one, wanted in found
            for line in differences(one, wanted)
        ]
    return problems
