"""Buffers and state objects that differ between ranks are reported at a save."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from tests.distributed.normalized import NormalizedJob
from tests.distributed.small_job import Note, Workers, build, checkpointer, where
from tests.distributed.watch import warnings_said
from tests.examples import some_of
from torchrec_checknrun import Checkpointer, PerRank, Replicated
from torchrec_checknrun.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from torchrec_checknrun.errors import IncompatibleCheckpoint, UnsupportedState

STATISTICS = "norm.running_*"


def mean(saved: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(saved).mean(dim=0)


def save_statistics(root: str, declared: bool) -> dict[str, list[float]]:
    job = NormalizedJob()
    own = {STATISTICS: mean} if declared else {}
    with job.checkpointer(root, per_rank_buffers=own) as saver:
        for _ in range(3):
            job.train()
        saver.save()
    return job.statistics()


def restore_statistics(root: str, declared: Any, **options: Any) -> dict[str, list[float]]:
    job = NormalizedJob(seed=5)
    own = {STATISTICS: mean} if declared is True else declared or {}
    with job.checkpointer(root, per_rank_buffers=own) as saver:
        saver.restore(**options)
    return job.statistics()


def test_buffers_are_the_lowest_ranks(workers: Workers, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    zero, one = workers(2).run(save_statistics, root=root, declared=False)
    assert zero["running_mean"] != one["running_mean"]
    assert workers(2).run(restore_statistics, root=root, declared=False) == [zero, zero]
    assert workers(1).run(restore_statistics, root=root, declared=False) == [zero]
    # Declared only now: what the checkpoint has is for all.
    assert workers(2).run(restore_statistics, root=root, declared=True) == [zero, zero]


def refuse_statistics(root: str) -> None:
    job = NormalizedJob(seed=5)
    with job.checkpointer(root, per_rank_buffers=STATISTICS) as saver:
        before = job.statistics()
        with pytest.raises(IncompatibleCheckpoint, match=r"'norm\.running_.*per_rank_buffers=\{"):
            saver.restore()
        assert job.statistics() == before


def test_buffers_of_each_rank(workers: Workers, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    zero, one = workers(2).run(save_statistics, root=root, declared=True)
    for verify in ("read", "all"):
        found = workers(2).run(restore_statistics, root=root, declared=True, verify=verify)
        assert found == [zero, one]
    # The checkpoint says which they were: on as many ranks none is lost though undeclared.
    assert workers(2).run(restore_statistics, root=root, declared=False) == [zero, one]
    (merged,) = workers(1).run(restore_statistics, root=root, declared=True)
    pairs = zip(zero["running_mean"], one["running_mean"], strict=True)
    assert merged["running_mean"] == pytest.approx([(a + b) / 2 for a, b in pairs])
    assert merged["num_batches_tracked"] == [3]
    workers(1).run(refuse_statistics, root=root)


def unknown_pattern(root: str) -> None:
    job = NormalizedJob()
    with pytest.raises(ValueError, match=r"'\*\.moving'.*norm\.running_mean"):
        job.checkpointer(root, per_rank_buffers=["*.moving"])


def test_a_pattern_without_a_buffer(workers: Workers, tmp_path: Path) -> None:
    workers(1).run(unknown_pattern, root=str(tmp_path / "root"))


def own_parameters(root: str) -> list[Any]:
    """Warn once of parameters that are no longer alike; store rank 0's."""
    job = NormalizedJob()
    with warnings_said() as told, job.checkpointer(root) as saver:
        for _ in range(2):
            job.train()
            content = job.model.state_dict()
            with torch.no_grad():
                content["out.bias"].fill_(7 + dist.get_rank())
            saver.step()
            saver.save()
        with torch.no_grad():
            content["out.bias"].fill_(0)
        saver.restore()
    return [content["out.bias"].tolist(), [text for text in told if "differ" in text]]


def test_parameters_that_differ(workers: Workers, tmp_path: Path) -> None:
    (zero, told), (one, nothing) = workers(2).run(own_parameters, root=str(tmp_path / "root"))
    assert zero == one == [7.0]
    assert nothing == []
    text, of_buffers = told
    assert re.search(r"rank 0 and rank 1: out\.bias\. Rank 0's", text)
    assert "running" not in text
    assert "buffers differ between rank 0 and rank 1: norm.running_mean" in of_buffers


def warnings_of_buffers(root: str, declared: bool) -> list[str]:
    """Save twice with buffers that differ between ranks."""
    job = NormalizedJob()
    own = STATISTICS if declared else ()
    with warnings_said() as told, job.checkpointer(root, per_rank_buffers=own) as saver:
        for _ in range(2):
            job.train()
            saver.step()
            saver.save()
    return [text for text in told if "differ" in text]


def warnings_of_broadcast_buffers(root: str) -> list[str]:
    """Save with buffers that differ until DistributedDataParallel broadcasts rank 0's."""
    job = NormalizedJob()
    beside = nn.parallel.DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)))
    both = nn.ModuleDict({"first": job.model, "beside": beside})
    with warnings_said() as told, Checkpointer(root, model=both) as saver:
        beside(torch.rand(4, 2, generator=torch.Generator().manual_seed(dist.get_rank())))
        saver.step()
        saver.save()
    return [text for text in told if "buffers differ" in text]


def test_buffers_that_are_broadcast_are_not_told(workers: Workers, tmp_path: Path) -> None:
    found = workers(2).run(warnings_of_broadcast_buffers, root=str(tmp_path / "root"))
    assert found == [[], []]


def test_buffers_that_differ_are_told_once(workers: Workers, tmp_path: Path) -> None:
    run = workers(2).run
    (text,), nothing = run(warnings_of_buffers, root=str(tmp_path / "root"), declared=False)
    assert nothing == []
    assert "buffers differ between rank 0 and rank 1: norm.running_mean, norm.running_var" in text
    assert 'per_rank_buffers=["…"]' in text
    assert run(warnings_of_buffers, root=str(tmp_path / "own"), declared=True) == [[], []]


class Count(nn.Module):
    """A metric that keeps its count in no buffer, as torchmetrics' do."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}total"] = self.total

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.total = state_dict.pop(f"{prefix}total")
        super()._load_from_state_dict(state_dict, prefix, *args)


def metric_of_a_model(root: str) -> list[Any]:
    job, count = NormalizedJob(), Count()
    job.model.module.count = count
    state = {"count": PerRank(count)}
    with warnings_said() as told, job.checkpointer(root, state=state) as saver:
        job.train()
        count.total = torch.tensor(7.0 + dist.get_rank())
        saver.save()
        count.total = torch.zeros(())
        saver.restore()
    return [float(count.total), [text for text in told if "differ" in text]]


def test_metrics_in_a_model(workers: Workers, tmp_path: Path) -> None:
    (zero, told), (one, nothing) = workers(2).run(metric_of_a_model, root=str(tmp_path / "root"))
    assert (zero, one, nothing) == (7.0, 8.0, [])
    text, _ = told
    assert "rank 0 and rank 1: count.total. Rank 0's" in text
    assert "Metrics, which count on each rank, are given as state objects as well" in text


class Odd:
    """A state object with any content."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def state_dict(self) -> Any:
        return self.content

    def load_state_dict(self, content: Any) -> None:
        self.content = content


def content_of(case: str) -> Any:
    rank = dist.get_rank()
    if case == "order":
        items = [("a", torch.arange(3)), ("b", {"x": 1.5, "y": b"bytes"}), (3, [1, 2])]
        return dict(items if rank == 0 else reversed(items))
    cases: dict[str, Any] = {
        "number": {"epoch": 3, "at": {"batch": 10 + rank}},
        "tensor": {"epoch": 3, "rng": torch.arange(4) + rank},
        "shape": {"values": torch.zeros(4).view((4, 1) if rank else (1, 4))},
        "dtype": {"values": torch.zeros(2, dtype=torch.int32 if rank else torch.float32)},
        "keys": {"epoch": 3, **({"more": 1} if rank else {})},
        "type": {"values": (1,) if rank else [1]},
        "key": {1 if rank else "1": 0},
        "long": {"queue": [i + rank * (i == 9000) for i in range(10_000)]},
        "bytes": {"raw": b"a" if rank else b"b"},
        "bare": torch.full((2,), rank),
    }
    return cases[case]


NAMED = {
    "number": "at.batch",
    "tensor": "rng",
    "shape": "values",
    "dtype": "values",
    "type": "values",
    "long": "queue[8192]",
    "bytes": "raw",
}


def save_odd(root: str, spec: dict[str, Any], plan: Any, case: str) -> list[Any]:
    """Refuse differing content by name, save it once declared, and lose no row."""
    job = build(spec, plan)
    told = ""
    odd = Odd(content_of(case))
    with checkpointer(root, job, state={"odd": odd}) as saver:
        job.train()
        saver.step()
        try:
            saver.save()
        except UnsupportedState as error:
            told = str(error)
    with checkpointer(root, job, state={"odd": Replicated(odd), "own": PerRank(odd)}) as saver:
        saver.save()
    fresh, own = Odd(None), Odd(None)
    with checkpointer(root, job, state={"odd": Replicated(fresh), "own": PerRank(own)}) as saver:
        saver.restore()
    return [told, repr(odd.content), repr(fresh.content), repr(own.content)]


@pytest.mark.parametrize("case", some_of([*NAMED, "keys", "key", "bare", "order"], 0, 5, 10))
def test_a_state_object_that_differs(workers: Workers, tmp_path: Path, case: str) -> None:
    zero, one = workers(2).run(save_odd, **where(tmp_path), case=case)
    for told, before, lowest, own in (zero, one):
        assert (lowest, own) == (zero[1], before)
        if case == "order":
            assert told == ""
            continue
        assert "'odd' was not declared and differs between rank 0 and rank 1" in told
        assert "PerRank(object" in told
        assert "Replicated(object)" in told
        assert f"(in {NAMED[case]})" in told if case in NAMED else True


def lost_rows(root: str, spec: dict[str, Any], plan: Any) -> list[Any]:
    """Put rows of a refused save into the next one; report it though failures are allowed."""
    job, note = build(spec, plan), Note(dist.get_rank())
    with checkpointer(root, job, state={"note": note}, max_failures=9) as saver:
        job.train()
        saver.step()
        with pytest.raises(UnsupportedState, match="'note'"):
            saver.save()
        note.value = 5
        rows = saver.save().modified_rows
        job.train()
        saver.step()
        note.value = dist.get_rank()
        saver.save(wait=False)
        assert saver.wait() is None  # allowed, and logged
        note.value = 6
        return [rows, saver.save().modified_rows > 0]


def test_rows_of_a_refused_save(workers: Workers, tmp_path: Path) -> None:
    zero, one = workers(2).run(lost_rows, **where(tmp_path))
    assert zero == one
    assert zero[0] > 0
    assert zero[1]


def snapshot_instant(root: str, spec: dict[str, Any], plan: Any, budget: int | None) -> list[Any]:
    """Compare the content of the snapshot, though training goes on before the comparison."""
    job, note = build(spec, plan), Note(torch.arange(20_000))
    options: dict[str, Any] = {"memory_budget": budget, "state": {"note": note}}
    with checkpointer(root, job, **options) as saver:
        job.train()
        saver.step()
        saver.save(wait=False)
        note.value.add_(dist.get_rank())
        report = saver.wait()
        assert report is not None
        with pytest.raises(UnsupportedState, match=r"in value"):
            saver.save()
        note.value.fill_(3)
        second = saver.save()
    return [report.in_parts, second.in_parts, second.unchanged]


@pytest.mark.parametrize("budget", [None, 1 << 15])
def test_the_instant_of_a_comparison(workers: Workers, tmp_path: Path, budget: int | None) -> None:
    found = workers(2).run(snapshot_instant, **where(tmp_path), budget=budget)
    in_parts = budget is not None
    assert found == [[in_parts, in_parts, False]] * 2


def direct(root: str, spec: dict[str, Any], plan: Any) -> list[str]:
    """Compare in ``dcp.save`` as well."""
    job, told = build(spec, plan), ""
    own = {"rank": dist.get_rank()}
    content = {"model": job.model.state_dict(), "own": own}

    def save(name: str, **options: Any) -> None:
        writer = StorageWriter(f"{root}/{name}")
        dcp.save(content, storage_writer=writer, planner=SavePlanner(**options))

    try:
        save("refused")
    except CheckpointException as error:
        told = str(error)
    save("replicated", replicated=["own"])
    save("per rank", per_rank=["own"])
    found = []
    for name in ("replicated", "per rank"):
        live = {"own": {"rank": -1}}
        reader = StorageReader(f"{root}/{name}")
        tables = {"model": job.model.state_dict()}
        dcp.load({**tables, **live}, storage_reader=reader, planner=LoadPlanner())
        found.append(live["own"]["rank"])
    return [told, *map(str, found)]


def test_direct_saves(workers: Workers, tmp_path: Path) -> None:
    for rank, (told, lowest, own) in enumerate(workers(2).run(direct, **where(tmp_path))):
        assert "state 'own' was not declared" in told
        assert "SavePlanner(per_rank=" in told
        assert (lowest, own) == ("0", str(rank))
