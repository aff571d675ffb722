"""Inject storage faults while a job saves, restores, prunes and compacts.

Allowed: a documented error, after which everything durable is still there and the next save holds
all rows; or success, and an exact restore. A trial ends with a save and a restore on sound storage.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist

from tests.campaign import forks
from tests.campaign.fault_store import (
    IN_MEMORY_ONLY,
    PROTOCOL,
    Fault,
    Injector,
    Kind,
    UnsoundStore,
)
from tests.campaign.kill_plan import LINKS, POLICIES, SPEC
from tests.campaign.kill_rank import join
from tests.campaign.outcome import Outcome
from tests.crash.faulty_store import faulty_disk
from tests.distributed import lc_bound
from tests.distributed.models import Job, uniform_plan
from tests.distributed.states import State, gather, local_parts, scramble
from torchrec_checknrun import Checkpointer, Consecutive, Retention
from torchrec_checknrun.compaction.compact import compact
from torchrec_checknrun.errors import CheckNRunError
from torchrec_checknrun.format import reader as read_chunks
from torchrec_checknrun.root.checkpoints import committed
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.store import retry
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.verify import verify

T = TypeVar("T")

SAVES = 3
_OPERATIONS = {"save": 150, "restore": 40, "prune": 50, "compact": 60}
"""Approximate number of a stage's operations; fewer of them can have a given kind of fault."""


def run(
    seed: int, first: int, count: int, folder: Path, ranks: int = 1, links: str = ""
) -> Outcome:
    """Run trials in this process, or on two ranks in processes of their own.

    Args:
        links: the method that stores rows as differences; empty: rows are whole.
    """
    if ranks == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return _run_here(seed, first, count, folder, links)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        logs = [folder / f"log-{rank}" for rank in range(ranks)]

        def act(rank: int) -> None:
            join(rank, ranks, listener)
            outcome = _run_here(seed, first, count, folder, links)
            (folder / f"outcome-{rank}").write_text(json.dumps(outcome.to_json()))

        pids = [forks.child(partial(act, rank), logs[rank]) for rank in range(ranks)]
    for pid in pids:
        os.waitpid(pid, 0)
    found = folder / "outcome-0"
    if not found.exists():
        outcome = Outcome()
        outcome.fail(first, "error", "\n".join(map(forks.tail, logs)))
        return outcome
    return Outcome.from_json(json.loads(found.read_text()))


def _run_here(seed: int, first: int, count: int, folder: Path, links: str) -> Outcome:
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    bench = _Bench(folder, links)
    outcome = Outcome()
    for number in range(first, first + count):
        outcome.add(bench.run(seed, number))
    return outcome


class _Bench:
    """The job and the reader of all trials."""

    def __init__(self, folder: Path, links: str) -> None:
        self._folder = folder
        self.links = links
        ranks = dist.get_world_size()
        self.rank = dist.get_rank()
        self.alone = ranks == 1
        plan = uniform_plan(SPEC, "row_wise", ranks)
        self.job, self.reader = Job.build(SPEC, plan), Job.build(SPEC, plan, seed=5)
        self._first = [part.tensor.clone() for part in local_parts(self.job)]
        self.disk = Injector()

    @contextmanager
    def storage(self, number: int, on_disk: bool) -> Iterator[tuple[str, Injector]]:
        """Make a root in memory or on disk."""
        if not on_disk:
            UnsoundStore.clear()
            yield f"{PROTOCOL}://run/{number}", UnsoundStore.injector
            return
        self.disk.clear()
        root = self._folder / str(number)
        with faulty_disk(self.disk):
            yield str(root), self.disk
        if not self.alone:
            dist.barrier()
        shutil.rmtree(root, ignore_errors=True)

    def run(self, seed: int, number: int) -> Outcome:
        """Run a trial."""
        rng = random.Random(f"{seed}/{number}")
        with torch.no_grad():
            for part, first in zip(local_parts(self.job), self._first, strict=True):
                part.tensor.copy_(first)
        self.job.steps = 0
        trial = _Trial(self, number, rng)
        on_disk = not self.alone or rng.random() < 0.3
        with (
            mock.patch.dict(os.environ, {"CHECKNRUN_RETRY_SECONDS": "0.3"}),
            mock.patch.object(retry, "_FIRST_PAUSE", 0.001),
            mock.patch.object(read_chunks, "VISIBLE_SECONDS", 0.02),
            mock.patch.object(read_chunks, "_LOOK_SECONDS", 0.005),
            self.storage(number, on_disk) as (root, injector),
        ):
            trial.run(root, injector, on_disk)
        return trial.outcome


class _Trial:
    """A run of all stages, one of them with faults."""

    def __init__(self, bench: _Bench, number: int, rng: random.Random) -> None:
        self._bench = bench
        self._number = number
        self._rng = rng
        self.outcome = Outcome()
        self._record: dict[int, State] = {}
        self._exact: set[int] = set()
        self._durable = 0
        self._failed: list[int] = []
        self._on_disk = False
        self._what = ""
        self._kinds: tuple[Kind, ...] = ()

    def run(self, root: str, injector: Injector, on_disk: bool) -> None:
        rng = self._rng
        stage = rng.choices(list(_OPERATIONS), weights=[6, 2, 1, 1])[0]
        faults = [self._draw(stage, on_disk) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
        self._on_disk = on_disk
        self._kinds = tuple(fault.kind for fault in faults)
        here = self._bench.alone or rng.randrange(dist.get_world_size()) == self._bench.rank
        self._what = f"{stage} on {'disk' if on_disk else 'memory'}, {faults}"
        self._options: dict[str, Any] = {
            "policy": POLICIES[rng.choice(list(POLICIES))](),
            "retention": rng.choice([None, Retention(1), Retention(2)]),
            "staging": rng.choice(["auto", "copy", "encode"]),
            "chunk_bytes": rng.choice([1000, 10_000]),
        }
        if self._bench.links:
            self._options |= {"policy": Consecutive()}
            self._options["quantization"] = LINKS[self._bench.links]()
        chosen = [Fault(f.kind, f.at, f.length) for f in faults] if here else []

        @contextmanager
        def unsound(now: str) -> Iterator[None]:
            injector.set(chosen if now == stage else [])
            try:
                yield
            finally:
                injector.set([])

        def prune_root() -> None:
            prune(Folder(root), Retention(1))

        def compact_root() -> None:
            compact(root)

        try:
            with ExitStack() as stack:
                saver = self._checkpointer(root, self._bench.job)
                stack.callback(injector.set, [])
                try:
                    with unsound("save"):
                        for _ in range(SAVES):
                            self._save(saver)
                        self._wait_for_pruner(saver)
                finally:
                    saver.close()
            if stage == "restore":
                with unsound("restore"):
                    self._restore(root)
            if stage in ("prune", "compact"):
                work = {"prune": prune_root, "compact": compact_root}
                with unsound(stage):
                    self._told(lambda: self._on_rank_0(work[stage]))
            self._restored(root, f"after {stage}")
            self._end(root)
        except Exception as error:
            self._fail("error", f"{type(error).__name__}: {error}\n{_where(error)}")
        self._count(injector.happened)

    def _count(self, happened: list[tuple[Kind, str]]) -> None:
        """Count the faults of all ranks."""
        if not self._bench.alone:
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, happened)
            happened = [one for of_rank in everyone for one in of_rank]
        counts = self.outcome.counts
        counts["trials"] += 1
        counts["faults"] += len(happened)
        counts["trials with a fault"] += bool(happened)
        for kind, name in happened:
            counts[f"fault: {kind.value}"] += 1
            counts[f"faults at: {name}"] += 1

    def _draw(self, stage: str, on_disk: bool) -> Fault:
        kinds = [kind for kind in Kind if not (on_disk and kind in IN_MEMORY_ONLY)]
        kind = self._rng.choice(kinds)
        most = _OPERATIONS[stage]
        if kind in (Kind.LOST, Kind.HALF, Kind.SHORT, Kind.SHORT_SILENT, Kind.TWICE) or kind.lags:
            most //= 4
        length = self._rng.choice([1, 1, 1, 2, 5, 1000])
        if kind in (Kind.HANG, Kind.TIMED_OUT, Kind.RESET, Kind.HANG_ERROR, Kind.RESET_AFTER):
            length = min(length, 5)
        return Fault(kind, self._rng.randint(1, most), length)

    def _checkpointer(self, root: str, job: Job) -> Checkpointer:
        state = {"optimizer": job.optimizer, "job": job}
        return Checkpointer(
            root,
            model=job.model,
            state=state,
            timeout_seconds=20.0,
            **self._options,
        )

    def _save(self, saver: Checkpointer) -> None:
        job = self._bench.job
        job.train()
        saver.steps = job.steps
        self._record[job.steps] = gather(job)
        done, report = self._told(saver.save)
        if not done:
            self.outcome.counts["saves that failed and said so"] += 1
            self._failed.append(job.steps)
        elif report is None:
            self._fail("silent", f"save() of step {job.steps} returned None")
        else:
            self._note_durable(saver)
            self.outcome.counts["saves reported durable"] += 1

    def _restore(self, root: str) -> None:
        """Restore from unsound storage."""
        scramble(self._bench.reader)
        with self._closing(self._checkpointer(root, self._bench.reader)) as reader:
            done, report = self._told(reader.restore)
            if not done:
                self.outcome.counts["restores that failed and said so"] += 1
                return
            told = report is not None and bool(report.passed_over)
            self._compare(None if report is None else report.step, "with the fault", told)

    def _restored(self, root: str, when: str) -> None:
        """Restore from sound storage, and verify it."""
        scramble(self._bench.reader)
        with self._closing(self._checkpointer(root, self._bench.reader)) as reader:
            report = reader.restore()
        for problem in () if report is None else report.passed_over:
            if not self._is_torn(problem):
                self._fail("lost", f"{when}: skipped {problem}")
        self._compare(None if report is None else report.step, when, False)
        problems = self._on_rank_0(lambda: [p for v in verify(root) for p in v.problems])
        for problem in problems:
            if not self._is_torn(problem):
                self._fail("lost", f"{when}: verify: {problem}")

    def _is_torn(self, problem: str) -> bool:
        """Return whether a problem is half a manifest that a reported failed save has left.

        Only a store without atomic puts can leave one; local disks and S3 have them.
        """
        torn = Kind.HALF in self._kinds and not self._on_disk and "is not a manifest" in problem
        return torn and any(f"step-{step:08d}_" in problem for step in self._failed)

    def _compare(self, step: int | None, when: str, told: bool) -> None:
        self.outcome.counts["restores compared"] += 1
        found = gather(self._bench.reader)
        lags = any(kind.lags for kind in self._kinds) and when == "with the fault"
        if (step or 0) < self._durable and not told:
            if lags:
                self.outcome.counts["restores behind a listing that lags"] += 1
            else:
                what = f"{when}: restored step {step}, and {self._durable} was reported durable"
                self._fail("lost", what)
        if step is None:
            return
        links, exact = self._bench.links, step in self._exact
        for difference in lc_bound.compared(found, self._record[step], links, exact):
            self._fail("silent", f"{when}: step {step}: {difference}")

    def _note_durable(self, saver: Checkpointer) -> None:
        """Note that the last step's checkpoint is durable, and what LC's links restore to."""
        step = self._durable = self._bench.job.steps
        if self._bench.links == "lc":
            self._record[step] = self._record[step] | lc_bound.restored_rows(saver)
            self._exact.add(step)

    def _end(self, root: str) -> None:
        """Continue from the restored state: save once more, and restore that save."""
        job = self._bench.job
        with self._closing(self._checkpointer(root, job)) as saver:
            report = saver.restore()
            if report is not None:
                job.steps = report.step
            job.train()
            saver.steps = job.steps
            self._record[job.steps] = gather(job)
            if saver.save() is None:
                self._fail("silent", "the last save() returned None")
            self._note_durable(saver)
            self._wait_for_pruner(saver)
        self._restored(root, "in the end")
        retention = self._options["retention"]
        if retention is not None and self._on_rank_0(lambda: len(committed(Folder(root)))) > 9:
            self._fail("error", "too many checkpoints are left")

    def _told(self, act: Callable[[], T]) -> tuple[bool, T | None]:
        """Call a function that may raise a documented error, the same one on all ranks."""
        result, error = None, ""
        try:
            result = act()
        except (CheckNRunError, OSError) as failure:
            error = type(failure).__name__
            self.outcome.counts[f"told: {error}"] += 1
        if not self._bench.alone:
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, error)
            if len(set(everyone)) > 1:
                self._fail("error", f"the ranks report different errors: {everyone}")
        return not error, result

    def _on_rank_0(self, act: Callable[[], Any]) -> Any:
        if self._bench.alone:
            return act()
        told: list[Any] = [None]
        if self._bench.rank == 0:
            try:
                told = [(act(), None)]
            except (CheckNRunError, OSError) as error:
                told = [(None, error)]
        dist.broadcast_object_list(told, src=0)
        result, failure = told[0]
        if failure is not None:
            raise failure
        return result

    def _wait_for_pruner(self, saver: Checkpointer) -> None:
        if saver._saver.writer._pruner is not None:
            saver._saver.writer._pruner.wait(60)
        if not self._bench.alone:
            dist.barrier()

    @contextmanager
    def _closing(self, checkpointer: Checkpointer) -> Iterator[Checkpointer]:
        try:
            yield checkpointer
        finally:
            checkpointer.close()

    def _fail(self, kind: str, what: str) -> None:
        self.outcome.fail(self._number, kind, f"{what} [{self._what}]")


def _where(error: BaseException) -> str:
    """Return the last lines of an error's traceback."""
    import traceback

    return "".join(traceback.format_tb(error.__traceback__)[-4:])
