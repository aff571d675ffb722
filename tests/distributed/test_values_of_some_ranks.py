"""Save and restore a model's values under names that only some ranks have."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from tests.distributed.normalized import NormalizedJob
from tests.distributed.partial_lives import end_as_killed
from tests.distributed.small_job import Workers
from torchrec_checknrun import Checkpointer, Images, PartialRecovery, PerRank
from torchrec_checknrun.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from torchrec_checknrun.errors import IncompatibleCheckpoint, UnsupportedState

SHAPES = {"first": (3,), "second": (2, 4), "both": (5,), "count": ()}


def job_with(names: list[str], seed: int = 0) -> NormalizedJob:
    """Make a job whose model has buffers of these names, and a parameter of the first one."""
    job = NormalizedJob(seed)
    own = nn.Module()
    for name in names:
        random = torch.Generator().manual_seed(100 * seed + len(name))
        value = torch.rand(SHAPES[name], generator=random)
        own.register_buffer(name, value)
        if name == "first":
            own.weight = nn.Parameter(value.clone())
    job.model.module.own = own
    return job


def values(job: NormalizedJob) -> dict[str, Any]:
    found: dict[str, Any] = job.model.state_dict()
    return {name: value.tolist() for name, value in found.items() if "own." in name}


def save(root: str, names: list[list[str]]) -> dict[str, Any]:
    job = job_with(names[dist.get_rank()])
    with job.checkpointer(root) as saver:
        for factor in (1.0, 1.5):
            job.train()
            with torch.no_grad():
                for value in job.model.module.own.state_dict().values():
                    value.mul_(factor)
            saver.step()
            saver.save()
    return values(job)


def restore(root: str, names: list[list[str]], **options: Any) -> dict[str, Any]:
    job = job_with(names[dist.get_rank()], seed=5)
    with job.checkpointer(root) as saver:
        saver.restore(**options)
    return values(job)


ONE, OTHER = ["first", "both", "count"], ["second", "both", "count"]


@pytest.mark.parametrize("names", [[ONE, OTHER], [OTHER, ONE], [[], [*ONE, "second"]]])
def test_each_comes_back(workers: Workers, tmp_path: Path, names: list[list[str]]) -> None:
    """Give each rank what it has, under whatever rank that was saved."""
    root = str(tmp_path / "root")
    zero, one = workers(2).run(save, root=root, names=[ONE, OTHER])
    assert set(zero) - set(one) == {"own.first", "own.weight"}
    saved = zero | one
    for own in workers(2).run(restore, root=root, names=names):
        assert own == {name: saved[name] for name in own}
    (whole,) = workers(1).run(restore, root=root, names=[[*ONE, "second"]])
    assert whole == saved


def normalized_apart(root: str, resume: bool) -> dict[str, Any]:
    """Name buffers of each rank by patterns, of which one rank has more than the other."""
    job = job_with([], seed=5 * resume)
    if dist.get_rank():
        job.model.module.own.norm = nn.BatchNorm1d(3)
    with job.checkpointer(root, per_rank_buffers="*.running_*") as saver:
        if resume:
            saver.restore()
        else:
            job.train()
            if dist.get_rank():
                job.model.module.own.norm(torch.rand(5, 3))
            saver.save()
    return values(job) | job.statistics()


def test_buffers_of_each_rank(workers: Workers, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    zero, one = workers(2).run(normalized_apart, root=root, resume=False)
    assert zero["running_mean"] != one["running_mean"]
    assert "own.norm.running_mean" in one.keys() - zero.keys()
    assert workers(2).run(normalized_apart, root=root, resume=True) == [zero, one]


def missing(root: str) -> None:
    job = job_with([*ONE, "second"] if dist.get_rank() else [], seed=5)
    with job.checkpointer(root) as saver, pytest.raises(IncompatibleCheckpoint, match="second"):
        saver.restore()


def test_a_value_that_no_rank_has_saved(workers: Workers, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    workers(2).run(save, root=root, names=[ONE, ["both", "count"]])
    workers(2).run(missing, root=root)


def late(root: str) -> list[Any]:
    """Register a buffer on one rank, after the names were agreed on."""
    job, told = job_with([]), ""
    with job.checkpointer(root) as saver:
        saver.save()
        if dist.get_rank():
            job.model.module.own.register_buffer("late", torch.ones(2))
        job.train()
        saver.step()
        try:
            saver.save()
        except UnsupportedState as error:
            told = str(error)
    with job.checkpointer(root) as saver:
        report = saver.save()
    assert report is not None
    return [told, report.modified_rows > 0]


def test_a_value_that_comes_late(workers: Workers, tmp_path: Path) -> None:
    for told, kept in workers(2).run(late, root=str(tmp_path / "root")):
        assert "on rank 1 has values under other names than on rank 0" in told
        assert "Make a new Checkpointer" in told
        assert kept


def direct(root: str, key: str) -> list[str]:
    """Save by DCP, which asks nobody for names: with all values in one state, and apart."""
    job, told = job_with([ONE, OTHER][dist.get_rank()]), ""
    content: dict[str, Any] = dict(job.model.state_dict())
    try:
        dcp.save({key: content}, planner=SavePlanner(), storage_writer=StorageWriter(root))
    except CheckpointException as error:
        told = str(error)
    own = {name: content.pop(name) for name in list(content) if "own." in name}
    planner = SavePlanner(per_rank=["own"])
    writer = StorageWriter(f"{root}-apart")
    dcp.save({"model": content, "own": own}, planner=planner, storage_writer=writer)
    live = {"model": content, "own": {name: torch.zeros_like(own[name]) for name in own}}
    reader = StorageReader(f"{root}-apart")
    dcp.load(live, planner=LoadPlanner(), storage_reader=reader)
    return [told, str({n: v.tolist() for n, v in live["own"].items()} == values(job))]


@pytest.mark.parametrize("key", ["model", "net"])
def test_dcp_alone_refuses_them(workers: Workers, tmp_path: Path, key: str) -> None:
    for told, same in workers(2).run(direct, root=str(tmp_path / "root"), key=key):
        assert "has values under other names than on rank 0" in told
        assert "SavePlanner(per_rank=" in told
        assert same == "True"


def survive(root: str, memory: str, lost: bool) -> list[Any]:
    """Die after steps that no checkpoint has; rank 1's image may be gone."""

    def make(seed: int) -> tuple[NormalizedJob, Checkpointer]:
        job = job_with([ONE, OTHER][dist.get_rank()], seed)
        partial = PartialRecovery(max_pls=1.0, total_steps=100)
        images = Images(folder=memory)
        return job, job.checkpointer(root, survive=images, partial=partial, retention=None)

    def train(job: NormalizedJob, saver: Checkpointer) -> dict[str, Any]:
        for _ in range(2):
            job.train()
            with torch.no_grad():
                for value in job.model.module.own.state_dict().values():
                    value.mul_(1.1)
            saver.step()
        return values(job)

    job, saver = make(0)
    saver.restore()
    saved = train(job, saver)
    saver.save()
    done = train(job, saver)
    end_as_killed(saver, memory, 1 if lost else None)
    job, saver = make(5)
    with saver:
        report = saver.restore()
    assert report is not None
    restored = values(job)
    return [restored == done, restored == saved, report.source, " ".join(report.without_images)]


def test_images_hold_what_each_rank_has(workers: Workers, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="checknrun-test-", dir="/dev/shm") as memory:
        where: dict[str, Any] = {"root": str(tmp_path / "root"), "memory": memory}
        found = workers(2).run(survive, lost=False, **where)
    assert found == [[True, False, "images", ""]] * 2


def test_a_lost_value_means_a_full_recovery(workers: Workers, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="checknrun-test-", dir="/dev/shm") as memory:
        where: dict[str, Any] = {"root": str(tmp_path / "root"), "memory": memory}
        found = workers(2).run(survive, lost=True, **where)
    for done, saved, source, why in found:
        assert (done, saved, source) == (False, True, "checkpoint")
        assert "values that only some ranks have: ['own.first', 'own.second', 'own.weight']" in why


def with_optimizer(root: str, declared: bool) -> Any:
    """Train a parameter of rank 0 alone; go on in another job as in the first."""

    def make(seed: int) -> tuple[NormalizedJob, Checkpointer]:
        job = job_with(["first"] if dist.get_rank() == 0 else [], seed)
        parameters = [p for n, p in job.model.named_parameters() if "bags" not in n]
        job.optimizer = torch.optim.Adam(parameters, lr=0.1)
        optimizer = PerRank(job.optimizer) if declared else job.optimizer
        state: dict[str, Any] = {"optimizer": optimizer}
        return job, Checkpointer(root, model=job.model, state=state)

    def train(job: NormalizedJob, saver: Checkpointer, steps: int) -> None:
        for _ in range(steps):
            job.train()
            if (weight := getattr(job.model.module.own, "weight", None)) is not None:
                job.optimizer.zero_grad()
                weight.square().sum().backward()
                job.optimizer.step()  # of this parameter alone
            saver.step()

    job, saver = make(0)
    with saver:
        train(job, saver, 2)
        try:
            saver.save()
        except UnsupportedState as error:
            return str(error)
        train(job, saver, 2)
    again, saver = make(5)
    with saver:
        train(again, saver, 1)
        saver.restore()
        again.steps = 2
        train(again, saver, 2)
    return [
        {name: p.tolist() for name, p in each.model.named_parameters() if "bags" not in name}
        for each in (job, again)
    ]


def test_an_optimizer_of_one_ranks_parameter(workers: Workers, tmp_path: Path) -> None:
    for told in workers(2).run(with_optimizer, root=str(tmp_path / "refused"), declared=False):
        assert "'optimizer' was not declared and differs between rank 0 and rank 1" in told
    for rank, (first, second) in enumerate(
        workers(2).run(with_optimizer, root=str(tmp_path / "root"), declared=True)
    ):
        assert first == second
        assert len(first) == 5 - rank
