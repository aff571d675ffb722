"""Save and restore optimizers of which each rank has a part of the state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from tests.distributed.normalized import NormalizedJob
from tests.distributed.small_job import Workers
from tests.distributed.watch import warnings_said
from torchrec_checknrun import Checkpointer, Images, PerRank
from torchrec_checknrun.errors import IncompatibleCheckpoint, UnsupportedState

SAVED, STEPS = 3, 5


def partitioned(parameters: Any, **options: Any) -> Any:
    return ZeroRedundancyOptimizer(
        list(parameters), optimizer_class=torch.optim.Adam, lr=0.05, **options
    )


def two_groups(job: NormalizedJob) -> Optimizer:
    first, *others = dense(job).values()
    optimizer = partitioned([first])
    optimizer.add_param_group({"params": others, "lr": 0.01})
    return optimizer


def loaded(job: NormalizedJob) -> Optimizer:
    """Load what was gathered, which leaves other ranks' parameters in its own state, as None."""
    optimizer = partitioned(dense(job).values())
    job.optimizer = optimizer
    job.train()
    job.steps = 0
    for rank in range(dist.get_world_size()):
        optimizer.consolidate_state_dict(rank)
        if rank == dist.get_rank():
            gathered = optimizer.state_dict()
    optimizer.load_state_dict(gathered)
    return optimizer


def wrapped(job: NormalizedJob) -> Any:
    return KeyedOptimizerWrapper(dense(job), partitioned)


OPTIMIZERS: dict[str, Callable[[NormalizedJob], Any]] = {
    "plain": lambda job: partitioned(dense(job).values()),
    "views": lambda job: partitioned(dense(job).values(), parameters_as_bucket_view=True),
    "two_groups": two_groups,
    "loaded": loaded,
    "wrapped": wrapped,
    "combined": lambda job: CombinedOptimizer([job.model.fused_optimizer, ("d", wrapped(job))]),
}


def dense(job: NormalizedJob) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in job.model.named_parameters() if "bags" not in name}


class Run:
    """A job whose dense part is stepped by an optimizer of each rank, under a schedule."""

    def __init__(self, root: str, name: str, seed: int, **options: Any) -> None:
        self.job = NormalizedJob(seed)
        self.job.optimizer = OPTIMIZERS[name](self.job)
        self.schedule = StepLR(self.job.optimizer, 2, gamma=0.5)
        optimizer: Any = PerRank(self.job.optimizer)
        state = {"optimizer": optimizer, "schedule": PerRank(self.schedule)}
        self.saver = self.job.checkpointer(root, state=state, **options)

    def train(self, until: int) -> None:
        while self.saver.steps < until:
            self.job.steps = self.saver.steps
            self.job.train()
            self.schedule.step()
            self.saver.step()

    def found(self) -> dict[str, Any]:
        names = {p: name for name, p in dense(self.job).items()}
        inner: Any = self.job.optimizer
        while not isinstance(inner, ZeroRedundancyOptimizer):
            inner = inner.optimizers[1][1] if hasattr(inner, "optimizers") else inner._optimizer
        state = {names[parameter]: values for parameter, values in inner.optim.state.items()}
        own = {n: {k: v.tolist() for k, v in values.items()} for n, values in state.items()}
        rates = [group["lr"] for group in inner.param_groups]
        return {**{n: p.tolist() for p, n in names.items()}, "own": own, "rates": rates}


def whole(root: str, name: str, survive: bool) -> dict[str, Any]:
    run = Run(root, name, 0, survive=Images() if survive else None)
    with run.saver:
        run.train(1)
        run.saver.save()
        run.train(SAVED)
        run.saver.save()
        run.train(STEPS)
    return run.found()


def resumed(root: str, name: str) -> dict[str, Any]:
    run = Run(root, name, 7)
    with run.saver:
        run.saver.restore()
        assert run.saver.steps == SAVED
        run.train(STEPS)
    return run.found()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_rank_goes_on_with_its_part(workers: Workers, tmp_path: Path, name: str) -> None:
    root = str(tmp_path / "root")
    first = workers(2).run(whole, root=root, name=name, survive=name == "plain")
    assert workers(2).run(resumed, root=root, name=name) == first
    assert first[0]["own"].keys().isdisjoint(first[1]["own"])
    assert len(first[0]["own"]) + len(first[1]["own"]) == len(first[0]) - 2


def alone(root: str, resume: bool) -> Any:
    """Train on one rank, which has all state, undeclared."""
    job = NormalizedJob(7 * resume)
    job.optimizer = partitioned(dense(job).values())
    with job.checkpointer(root) as saver:
        if resume:
            saver.restore()
        for job.steps in range(saver.steps, STEPS):
            job.train()
            saver.step()
            if saver.steps == SAVED and not resume:
                saver.save()
    return [p.tolist() for p in dense(job).values()]


def test_one_rank_has_all(workers: Workers, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    first = workers(1).run(alone, root=root, resume=False)
    assert workers(1).run(alone, root=root, resume=True) == first


def on_another_number(root: str) -> None:
    run = Run(root, "plain", 7)
    with run.saver, pytest.raises(IncompatibleCheckpoint, match="on 2 ranks, and there are 1 now"):
        run.saver.restore()


def test_another_number_of_ranks_is_refused(workers: Workers, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    workers(2).run(whole, root=root, name="plain", survive=False)
    workers(1).run(on_another_number, root=root)


def undeclared(root: str) -> None:
    for name in ("plain", "wrapped", "combined"):
        job = NormalizedJob()
        job.optimizer = OPTIMIZERS[name](job)
        with pytest.raises(UnsupportedState, match=r"'optimizer': PerRank\(optimizer\)"):
            job.checkpointer(root)


def test_undeclared_ones_are_refused_at_the_start(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(undeclared, root=str(tmp_path / "root"))


class Trainer:
    """A user's trainer, which leaves its optimizer to the Checkpointer, or doesn't."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def held(root: str) -> list[list[str]]:
    found = []
    for given in (False, True):
        job = NormalizedJob()
        optimizer = partitioned(dense(job).values())
        state: dict[str, Any] = {"trainer": Trainer(optimizer)}
        state |= {"optimizer": PerRank(optimizer)} if given else {}
        with warnings_said() as told:
            Checkpointer(root, model=job.model, state=state).close()
        found.append(list(told))
    return found


def test_one_inside_an_object_is_named(workers: Workers, tmp_path: Path) -> None:
    for without, given in workers(2).run(held, root=str(tmp_path / "root")):
        assert any("'trainer' holds a ZeroRedundancyOptimizer" in each for each in without)
        assert not any("ZeroRedundancyOptimizer" in each for each in given)
