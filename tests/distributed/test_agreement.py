"""Ranks with different arguments, models or storage are told so at once."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.models import Plan
from tests.distributed.small_job import Note, build, checkpointer, where
from tests.distributed.worker_pool import WorkerPool
from torchrec_checknrun import (
    AtEnd,
    Checkpointer,
    Consecutive,
    EverySteps,
    Full,
    OneShot,
    PerRank,
    Quantization,
    Retention,
)
from torchrec_checknrun.errors import RootNotShared
from torchrec_checknrun.root import shared_root

Workers = Callable[[int], WorkerPool]


@contextmanager
def within(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    yield
    os.chdir(before)


class Own:
    """A user's policy whose content may differ between ranks."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def decide(self, history: object) -> Any:
        return Full().decide(())


ON_EACH: dict[str, Callable[[int], dict[str, Any]]] = {
    "every_steps": lambda rank: {"every_steps": 10 + rank},
    "policy": lambda rank: {"policy": (Full(), OneShot())[rank]},
    "policy by name": lambda rank: {"policy": ("full", "one_shot")[rank]},
    "quantization": lambda rank: {"quantization": (None, 8)[rank]},
    "a table's": lambda rank: {"quantization": {"bits": 4, "tables": {"*t0": 4 * (1 + rank)}}},
    "triggers": lambda rank: {"triggers": [AtEnd()][rank:]},
    "retention": lambda rank: {"retention": (None, Retention(3))[rank]},
    "resume": lambda rank: {"resume": ("auto", "must")[rank]},
    "when_busy": lambda rank: {"when_busy": ("skip", "wait")[rank]},
    "background": lambda rank: {"background": ("thread", "process")[rank]},
    "chunk_bytes": lambda rank: {"chunk_bytes": 600 + rank},
    "timeout_seconds": lambda rank: {"timeout_seconds": 30.0 + rank},
    "more state": lambda rank: {"state": {"extra": Note(1)} if rank else {}},
    "less state": lambda rank: {"state": {} if rank else {"extra": Note(1)}},
    "other state": lambda rank: {"state": {f"note{rank}": Note(1)}},
    "per rank on one": lambda rank: {"state": {"note": (Note(1), PerRank(Note(1)))[rank]}},
    "another merge": lambda rank: {"state": {"note": PerRank(Note(1), max if rank else None)}},
    "a mistake on one": lambda rank: {"every_steps": (5, "5")[rank]},
    "a name on one": lambda rank: {"bits": 8} if rank else {},
    "no module on one": lambda rank: {"model": None} if rank else {},
}
TOLD = {
    "every_steps": "every_steps differs between the ranks: 10 on rank 0; 11 on rank 1",
    "more state": "state['extra'] differs between the ranks: absent on rank 0; given on rank 1",
    "other state": "state['note0'] differs between the ranks: given on rank 0; absent on rank 1",
    "quantization": "quantization differs between the ranks",
    "per rank on one": "given on rank 0; PerRank() on rank 1",
    "a mistake on one": "not '5'",
    "a name on one": "give quantization=Quantization(bits=8)",
    "no module on one": "model must be a module",
}


def make(root: str, job: Any, options: dict[str, Any]) -> Checkpointer:
    given = {
        "model": job.model,
        "state": {"optimizer": job.optimizer, "job": job, **options.pop("state", {})},
        "chunk_bytes": 600,
        "retention": None,
        **options,
    }
    return Checkpointer(root, **given)


def all_are_refused(root: str, spec: dict[str, Any], plan: Plan) -> dict[str, str]:
    """Return the error of each mistake; assert that a Checkpointer without one works afterwards."""
    job = build(spec, plan)
    rank = dist.get_rank()
    told = {}
    for name, of_rank in ON_EACH.items():
        started = time.monotonic()
        with pytest.raises((ValueError, TypeError)) as caught:
            make(root, job, of_rank(rank))
        assert time.monotonic() - started < 60
        told[name] = str(caught.value)
        assert not os.path.exists(root)
    for given in (
        {"policy": Own(rank)},
        {"callbacks": [print] if rank else []},
        {"memory_budget": (64 + rank) << 20},
        {"quantization": (8, Quantization(bits=8))[rank]},
        {"policy": ("consecutive", Consecutive())[rank]},
        {"every_steps": (5, 5.0)[rank]},
        {"triggers": [EverySteps(5)] if rank else (EverySteps(5),)},
        {"root": (Path(root), root)[rank]},
    ):
        options: dict[str, Any] = dict(given)
        make(str(options.pop("root", root)), job, options).close()
    return told


def test_arguments_that_differ(workers: Workers, tmp_path: Path) -> None:
    first, second = workers(2).run(all_are_refused, **where(tmp_path))
    assert first == second
    for name, told in TOLD.items():
        assert told in first[name]
    agreed = {"a mistake on one", "a name on one", "no module on one"}
    for name in first.keys() - agreed:
        assert "differs between the ranks" in first[name]
        assert "rank 0" in first[name]
        assert "rank 1" in first[name]


def other_tables_are_refused(root: str, spec: dict[str, Any], plan: Plan) -> str:
    """Build a table with more rows on rank 1, and return the error."""
    job = build(spec, plan)
    if dist.get_rank():
        for module in job.model.modules():
            for config in getattr(module, "_table_name_to_config", {}).values():
                config.num_embeddings += 1
    with pytest.raises(ValueError, match="table") as caught:
        checkpointer(root, job)
    return str(caught.value)


def test_models_that_differ(workers: Workers, tmp_path: Path) -> None:
    told = workers(2).run(other_tables_are_refused, **where(tmp_path))
    assert told[0] == told[1]
    assert "differs between the ranks: 40 × 8 on rank 0; 41 × 8 on rank 1" in told[0]


def disks_of_their_own(
    root: str, spec: dict[str, Any], plan: Plan, of_others: str
) -> dict[str, str]:
    """Give each process another folder under the same path, as machines with own disks have."""
    shared_root.PATIENCE_SECONDS = 0.5
    own = Path(root).parent / f"disk{dist.get_rank()}"
    own.mkdir(parents=True, exist_ok=True)
    path = "/proc/self/cwd/run"
    told = {}
    with within(own):
        job = build(spec, plan)
        with checkpointer(path, job) as saver:
            saver.restore()
            job.train(1)
            for name, act in (("step", saver.step), ("save", saver.save)):
                with pytest.raises(RootNotShared) as caught:
                    act()
                told[name] = str(caught.value)
        # Checkpoints are on one of the disks only.
        if dist.get_rank() == int(of_others):
            shutil.rmtree("run", ignore_errors=True)
            os.rename(Path(root).parent / "made", "run")
        dist.barrier()
        with checkpointer(path, job) as saver:
            with pytest.raises(RootNotShared) as caught:
                saver.restore()
            told["restore"] = str(caught.value)
    return told


def one_checkpoint(root: str, spec: dict[str, Any], plan: Plan) -> None:
    job = build(spec, plan)
    with checkpointer(str(Path(root).parent / "made"), job) as saver:
        job.train(1)
        saver.step()
        saver.save()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_root_that_is_not_shared(workers: Workers, tmp_path: Path, rank: str) -> None:
    case = where(tmp_path)
    workers(2).run(one_checkpoint, **case)
    first, second = workers(2).run(disks_of_their_own, **case, of_others=rank)
    assert first == second
    for told in first.values():
        assert "/proc/self/cwd/run is not shared storage" in told
        assert "Give a folder on a file system that all machines mount" in told
    assert "writers/epoch-00000001.json, rank 1" in first["step"]
    assert f"rank {rank} on" in first["restore"]
