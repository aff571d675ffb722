"""Fail one operation of a save, each in turn; judge what the storage holds, and the next save."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.crash.faulty_store import (
    PROTOCOL,
    Faults,
    FaultyStore,
    Mode,
    Operation,
    faulty_disk,
    patience,
)
from tests.distributed import references
from tests.distributed.models import CollectionSpec, Job, ModelSpec, TableSpec, uniform_plan
from tests.distributed.states import State, gather, scramble
from torchrec_checknrun import Checkpointer, Consecutive, Full, Retention
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.root.checkpoints import committed
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.verify import verify
from torchrec_checknrun.writers.lease import FOLDER

SPEC = ModelSpec((CollectionSpec("c", (TableSpec("t0", 40, 8, ("f0",)),)),))
_roots = itertools.count()


class Phase(Enum):
    """The work during which the operation fails."""

    FIRST = "the root is claimed, and a full checkpoint saved"
    NEXT = "a differential checkpoint is saved"
    RETENTION = "a checkpoint is saved and the one before deleted"


@dataclass
class Tally:
    """The outcome of a sweep.

    Attributes:
        operations: the operations of the work.
        injected: faults that took place.
        surfaced: cases in which the caller got an error.
        healed: cases in which nobody noticed anything: another try helped, or what failed was only
            tidying up.
        new: cases after which a restore gave the new state; in the others it gave the old one.
        lost: what was not as it should be.
    """

    operations: int = 0
    injected: int = 0
    surfaced: int = 0
    healed: int = 0
    new: int = 0
    lost: list[str] = field(default_factory=list)

    def __add__(self, other: Tally) -> Tally:
        return Tally(**{name: value + vars(other)[name] for name, value in vars(self).items()})


@contextmanager
def alone() -> Iterator[None]:
    """Make a process group of one rank, and use one thread: the models are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if ours:
            dist.destroy_process_group()
        torch.set_num_threads(threads)


@contextmanager
def faulty_roots(disk: Path | None) -> Iterator[tuple[Faults, Callable[[], str]]]:
    """Yield faults and a function that makes new roots, which meet them, and forgets the old one.

    Args:
        disk: a folder for the roots; None: they are in memory.
    """
    faults = Faults() if disk is not None else FaultyStore.faults

    def new_root() -> str:
        number = next(_roots)
        if disk is None:
            FaultyStore.clear()
            return f"{PROTOCOL}://run/{number}"
        shutil.rmtree(disk / str(number - 1), ignore_errors=True)
        return str(disk / str(number))

    with faulty_disk(faults) if disk is not None else nullcontext():
        try:
            yield faults, new_root
        finally:
            faults.disarm()


class Sweep:
    """A job that saves to faulty storage, and another one that restores from it."""

    def __init__(self, faults: Faults, new_root: Callable[[], str], phase: Phase) -> None:
        self._faults = faults
        self._new_root = new_root
        self._phase = phase
        plan = uniform_plan(SPEC, "table_wise", 1)
        self._job = Job.build(SPEC, plan)
        self._reader = Job.build(SPEC, plan, seed=5)

    @cached_property
    def operations(self) -> list[Operation]:
        """Return the operations that the work consists of."""
        return self._case(0, Mode.ONCE, Tally())

    def run(self, mode: Mode, start: int = 1, stride: int = 1) -> Tally:
        """Fail every ``stride``-th operation that can fail that way, one in each case."""
        tally = Tally(sum(operation.can_fail(mode) for operation in self.operations))
        with patience(mode):
            for number in range(start, tally.operations + 1, stride):
                try:
                    self._case(number, mode, tally)
                except Exception as error:
                    tally.lost.append(f"{self._describe(number, mode)}: {error!r}")
        return tally

    def _describe(self, number: int, mode: Mode) -> str:
        names = [operation.name for operation in self._faults.failed]
        return f"{self._phase.value}: {names[:1]}, operation {number}, fails {mode.value}"

    def _case(self, number: int, mode: Mode, tally: Tally) -> list[Operation]:
        root, old = self._new_root(), None
        full = self._phase is Phase.RETENTION
        saver = _checkpointer(
            root,
            self._job,
            policy=Full() if full else Consecutive(),
            retention=Retention(keep=1) if full else None,
        )
        self._job.steps = 0  # the same rows, and so the same operations, in each case
        try:
            self._job.train()
            if self._phase is not Phase.FIRST:
                saver.save()
                _wait_for_pruner(saver)  # its operations are none of the next save's
                old = gather(self._job)
                self._job.train()
            new = gather(self._job)
            self._faults.arm(number, mode if number else None)
            told = _save(saver)
            _wait_for_pruner(saver)
            self._faults.disarm()
            asked_for, failed = self._faults.asked_for, self._faults.failed
            problems = self._look(root, told, old, new, tally)
            self._job.train()
            saver.save()
            _wait_for_pruner(saver)
            problems += [f"then {p}" for p in self._restored(root, gather(self._job))[1]]
            if full and len(committed(Folder(root))) != 1:
                problems.append(f"{committed(Folder(root))} were left")
        finally:
            self._faults.disarm()
            saver.close()
        if number and failed:
            tally.injected += len(failed)
            tally.healed += not told
            if mode.transient and told and not failed[0].streams:
                problems.append(f"it was not healed: {told}")
        elif number:
            problems.append("nothing failed")
        tally.lost += [f"{self._describe(number, mode)}: {problem}" for problem in problems]
        return asked_for

    def _look(self, root: str, told: str, old: State | None, new: State, tally: Tally) -> list[str]:
        """Judge what a process that starts now would find."""
        at, problems = self._restored(root, new)
        is_new = at is not None and not problems
        if not is_new and not told:
            return ["no error was told", *problems]
        if not is_new and (at is None) != (old is None):
            return [f"restored {at}"]
        if not is_new and old is not None:
            problems = references.differences(gather(self._reader), old, None)
        elif not is_new:
            problems = []
        tally.surfaced += bool(told)
        tally.new += is_new
        if told and "no space left" not in told and "says the test" not in told:
            problems.append(f"the error does not say what happened: {told}")
        problems += [problem for found in verify(root) for problem in found.problems]
        return problems

    def _restored(self, root: str, wanted: State) -> tuple[str | None, list[str]]:
        """Restore as another process; return the checkpoint, and how it differs."""
        scramble(self._reader)
        with _checkpointer(root, self._reader) as reader:
            report = reader.restore()
        if report is None:
            return None, ["nothing was restored"]
        return report.id, references.differences(gather(self._reader), wanted, None)


def _checkpointer(root: str, job: Job, **options: Any) -> Checkpointer:
    state = {"optimizer": job.optimizer, "job": job}
    return Checkpointer(root, model=job.model, state=state, chunk_bytes=1000, **options)


def _save(saver: Checkpointer) -> str:
    """Save; return the error's text, or an empty one."""
    try:
        saver.save()
    except SaveFailed as error:
        return str(error)
    return ""


def _wait_for_pruner(saver: Checkpointer) -> None:
    if saver._saver.writer._pruner is not None:
        saver._saver.writer._pruner.wait(60)


def leftovers(root: Folder) -> list[str]:
    """Return all names beside committed checkpoints and the claims."""
    return [n for n in root.names() if n != FOLDER and (root / n).size("manifest.json") is None]
