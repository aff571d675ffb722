"""Train while the rows of a cut are copied chunk by chunk, as slowly as a test asks.

``Instants`` saves a job again and again, and compares what each checkpoint restores with the copy
of the whole state that was taken at its cut.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Event
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.distributed import references
from tests.distributed.states import gather
from torchrec_checknrun import Checkpointer, CheckpointReport, Consecutive, Full, OneShot
from torchrec_checknrun.marks.row_copies import ShardCopies
from torchrec_checknrun.snapshot import late_copies, staging
from torchrec_checknrun.snapshot.late_copies import LateCopies

BUDGET = 8 << 20
"""Bytes, enough for copies on write."""
POLICIES: dict[str, Any] = {"consecutive": Consecutive, "one_shot": OneShot, "full": Full}


class Chunks:
    """The chunks that the background copies, which wait until they may go on.

    Attributes:
        go: while clear, no chunk is copied.
        seconds: each chunk takes so much longer.
        copied: number of chunks copied since the start.
    """

    def __init__(self, seconds: float) -> None:
        self.go = Event()
        self.go.set()
        self.seconds = seconds
        self.copied = 0
        self.stop_after: int | None = None

    def stage(self, stage: Callable[..., None], *arguments: Any) -> None:
        """Copy a chunk once it may be copied."""
        if self.stop_after is not None and self.copied >= self.stop_after:
            self.go.clear()
            self.stop_after = None
        assert self.go.wait(60), "nobody let the chunks go on"
        time.sleep(self.seconds)
        stage(*arguments)
        self.copied += 1


@contextmanager
def slowed(seconds: float = 0.002, dense: bool = True) -> Iterator[Chunks]:
    """Slow the copies of rows behind training at every chunk; hold those of the dense part, too.

    Args:
        dense: hold copies of the dense part, however small its tensors; else small ones are made at
            the cut.
    """
    chunks, stage, make = Chunks(seconds), ShardCopies.stage, LateCopies.make

    def slow(copies: ShardCopies, *arguments: Any) -> None:
        chunks.stage(lambda *rest: stage(copies, *rest), *arguments)

    def make_later(copies: LateCopies) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert chunks.go.wait(60), "nobody let the copies go on"
        make(copies)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(ShardCopies, "stage", slow))
        patches.enter_context(mock.patch.object(LateCopies, "make", make_later))
        for module in (late_copies, staging) if dense else ():
            patches.enter_context(mock.patch.object(module, "LEAST_BYTES", 1))
        try:
            yield chunks
        finally:
            chunks.stop_after = None
            chunks.go.set()


def on_all_ranks(own: Any) -> list[Any]:
    """Gather a value of each rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def checkpointer(root: str, job: Any, policy: str = "consecutive", **options: Any) -> Checkpointer:
    """Make a Checkpointer of small chunks that copies on write."""
    options.setdefault("memory_budget", BUDGET)
    options.setdefault("chunk_bytes", 700)
    options.setdefault("state", {"optimizer": job.optimizer})
    return Checkpointer(
        root, model=job.model, policy=POLICIES[policy](), retention=None, max_failures=0, **options
    )


class Instants:
    """A job whose checkpoints are compared with copies of the state at their cuts.

    Args:
        job: has a model and an optimizer.
        again: another one like it, into which checkpoints are restored.
        at_cut: tables (the last part of their names) that must be copied at the cut; all others
            must not.
        take: copies a job's state; by default the whole state of all ranks.

    Attributes:
        protected: number of rows that training has saved before it overwrote them, on all ranks,
            by checkpoint.
    """

    def __init__(
        self,
        root: str,
        job: Any,
        again: Any,
        chunks: Chunks,
        at_cut: tuple[str, ...] = (),
        take: Callable[[Any], dict[str, Any]] = gather,
        **options: Any,
    ) -> None:
        self.job = job
        self.again = again
        self.chunks = chunks
        self.at_cut = at_cut
        self.take = take
        self.saver = checkpointer(root, job, **options)
        state = {"optimizer": again.optimizer}
        self.reader = Checkpointer(root, model=again.model, state=state, memory_budget=BUDGET)
        self.protected: list[int] = []
        self.reports: list[CheckpointReport] = []

    def save(self, first: Callable[[], object], rest: Callable[[], object]) -> None:
        """Save while training; compare the checkpoint with the state at its cut.

        Args:
            first: trains before any row is copied behind training.
            rest: trains while rows are copied.
        """
        self.chunks.go.clear()
        wanted = self.take(self.job)
        self.saver.steps += 1
        assert self.saver.save(wait=False) is None
        assert self.saver._saver.running is not None
        first()
        self.chunks.go.set()
        rest()
        assert references.differences(self.take(self.job), wanted, None), "nothing was trained"
        report = self.saver.wait()
        assert report is not None
        self.compare(report, wanted)

    def compare(self, report: CheckpointReport, wanted: dict[str, Any]) -> None:
        """Compare a checkpoint with the copy of the state at its cut."""
        for found in on_all_ranks(report.copied_at_cut):
            assert {table.rpartition(".")[2] for table in found} <= set(self.at_cut), found
        everywhere = {table for found in on_all_ranks(report.copied_at_cut) for table in found}
        assert {table.rpartition(".")[2] for table in everywhere} == set(self.at_cut)
        self.protected.append(sum(on_all_ranks(report.protected_rows)))
        self.reports.append(report)
        dist.barrier()
        assert self.reader.restore(report.id) is not None
        problems = references.differences(self.take(self.again), wanted, None)
        assert not problems, (report.id, problems)

    def close(self) -> list[int]:
        """Close; return the number of rows protected, by checkpoint."""
        self.saver.close()
        self.reader.close()
        return self.protected


def overflow_pages(saver: Checkpointer) -> tuple[int, int]:
    """Return how many pages of overflow memory are free, and how many there are."""
    memory = saver._saver._background.memory.on_write
    assert memory is not None
    return memory.overflow.native.free(), memory.overflow.native.total()
