"""Take snapshots to committed checkpoints while training goes on, one at a time.

The training thread stages a snapshot. A background thread then plans with the other ranks over a
group of its own, encodes, writes and commits. That thread never touches marks or the model; it only
sets the outcome of a ``Save``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Literal

from torchrec_checknrun.codecs.quantization import Quantization
from torchrec_checknrun.format.rank_file import write_rank_file
from torchrec_checknrun.model.marks import Cut
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.root.lineage import Proposal
from torchrec_checknrun.save.commit import CheckpointWriter, save_checkpoint
from torchrec_checknrun.save.items import Items, RowsItem, fingerprint
from torchrec_checknrun.save.memory import Ring, StagingMemory, default_budget
from torchrec_checknrun.save.plan import PlanSummary, Prepared, summarize
from torchrec_checknrun.save.process import WriteProcess, require_shared
from torchrec_checknrun.save.rank_differences import RankDifferences
from torchrec_checknrun.save.save import Save
from torchrec_checknrun.save.snapshot import Snapshot
from torchrec_checknrun.save.staged import rows_size
from torchrec_checknrun.save.staging import (
    Staging,
    StagingMode,
    copied_size,
    encoded_size,
    encoded_while_staged,
)
from torchrec_checknrun.shards import LocalShard
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.threads import ReadyThread

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

BackgroundKind = Literal["thread", "process"]
_NAME = "checknrun-save"
_SPARE_BYTES = 1 << 20
_END_SECONDS = 5.0
_CHUNKS = 4
"""Chunks for which the budget leaves memory beside staging: one is encoded while the previous one
is written, and each thread's part of the allocator keeps about as much again.
"""
_LEAST_BUDGET = 2048
"""Bytes, as few as tests need. A smaller budget is likely meant in another unit."""
_SLOW_BUDGET = 8 << 20


class _Plan:
    """This rank's part of a checkpoint, or the error that prevents it."""

    def __init__(self, save: Save, differences: RankDifferences) -> None:
        self.staging: Staging | None = None
        self.summary: PlanSummary | None = None
        self._save = save
        self._differences = differences
        self._failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Set the error that stops this rank's part."""
        self._failure = error
        if self.staging is not None:
            self.staging.fail(error)

    def prepare(self) -> Prepared:
        """Return this rank's part, for ``save_checkpoint``.

        Raises:
            BaseException: the error passed to ``fail``.
        """
        if self._failure is not None:
            raise self._failure
        assert self.staging is not None
        assert self.summary is not None
        digests = self.staging.digests()
        self._save.fingerprint = fingerprint(digests, self.summary.progress)
        summary = self.summary.with_digests(digests, self.staging.shared_digests())
        return Prepared(summary, self.staging.items, self.staging.choose, self._differences)


class Background:
    """The background of one Checkpointer, which takes snapshots to storage, one at a time.

    Create this on all ranks at once, in the training thread.

    Args:
        root: the root of the checkpoints.
        ranks: ranks with a group of their own, used by no other thread.
        kind: whether a thread or a process encodes and writes.
        mode: whether rows are copied or encoded while they are staged.
        memory_budget: bytes for staging and encoding; None: a fraction of the free memory. A state
            object is staged in one piece: a larger one takes more, with a warning.
        chunk_bytes: memory for a chunk's copies, in bytes; a small budget lowers it.
        expected: the shards, from which the size of staging memory is estimated.
        dense_bytes: expected bytes of everything outside the tables.

    Raises:
        TypeError, ValueError: the budget is not an int, or too small.
    """

    def __init__(
        self,
        root: Folder,
        ranks: Ranks,
        *,
        kind: BackgroundKind,
        mode: StagingMode,
        memory_budget: int | None,
        chunk_bytes: int,
        quantization: Quantization,
        expected: list[LocalShard],
        dense_bytes: int,
    ) -> None:
        self._root = root
        self._ranks = ranks
        self._kind = kind
        self._encode = encoded_while_staged(expected, quantization, mode)
        if memory_budget is None:
            budget = default_budget()
        else:
            budget = _checked(memory_budget, warn=ranks.rank == 0)
        self.chunk_bytes = min(chunk_bytes, budget // (2 * _CHUNKS))
        self._budget = budget
        self._most = budget - _CHUNKS * self.chunk_bytes
        self._warned = False
        self._told: set[str] = set()
        self._pinned = any(shard.weight.is_cuda for shard in expected)
        whole = sum(self._expected_bytes(shard, quantization) for shard in expected)
        self._make_memory(min(self._most, whole + dense_bytes + _SPARE_BYTES))
        self._process: WriteProcess | None = None
        self._thread: threading.Thread | None = None
        self._ready: ReadyThread | None = None
        """For the next checkpoint."""
        self._start_process()
        self._make_ready()

    def _make_memory(self, size: int) -> None:
        self._memory = StagingMemory(size, shared=self._kind == "process", pinned=self._pinned)
        self._ring = Ring(size)

    def _expected_bytes(self, shard: LocalShard, quantization: Quantization) -> int:
        """Estimate the bytes of staging memory for all rows of a shard."""
        if shard.table not in self._encode:
            return rows_size(shard, shard.rectangle.rows)
        encoding = quantization.for_table(shard.table, shard.shape.rows)
        return encoded_size(shard, shard.rectangle.rows, encoding)

    def _start_process(self) -> None:
        if self._kind == "process":
            require_shared(self._root)
            self._process = WriteProcess(self._memory)

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def begin(
        self,
        proposal: Proposal,
        snapshot: Snapshot | Exception,
        cut: Cut | None,
        quantization: Quantization,
        begun: float,
        before_commit: Callable[[], object],
        after_commit: Callable[[], object],
    ) -> Save:
        """Stage a snapshot and start its background; training may go on afterwards. Call this on
        all ranks.

        Args:
            proposal: rank 0's decision on the checkpoint.
            snapshot: the snapshot, or the error that prevents one on this rank; then the checkpoint
                fails on all ranks.
            cut: the snapshot's cut, kept in the result.
            begun: when training began to wait, by the monotonic clock.
            before_commit: called on rank 0; raises an error if the commit must not happen.
            after_commit: called on rank 0; raises an error if the commit doesn't count.
        """
        assert not self.hangs, "the ranks have agreed that all can begin"
        self._thread = None  # its references keep memory
        save = Save(proposal, cut, begun, self._root.patience.apart())
        differences = RankDifferences(told=self._told)
        plan = _Plan(save, differences)
        finish = partial(self._finish, save, plan.prepare, (before_commit, after_commit))

        def start() -> None:
            if save.thread is not None:
                return
            save.thread = self._thread = self._start(finish)

        try:
            if isinstance(snapshot, Exception):
                raise snapshot
            items = Items.of(snapshot, quantization, self.chunk_bytes)
            self._prepare_memory(items)
            plan.staging = Staging(self._memory, self._ring, items, self._encode)
            differences.trees = items.trees
            differences.models, differences.buffers = snapshot.models, snapshot.buffers
            plan.summary = summarize(proposal.header, snapshot, items, quantization)
            plan.staging.run(start)
            save.progress.staged = time.monotonic() - save.begun
            save.progress.in_parts = self._ring.waited
            start()
        except BaseException as error:
            # The other ranks must hear of the error, and no thread may wait for further items.
            plan.fail(error)
            try:
                start()
            except RuntimeError:  # no thread to be had, but the other ranks wait for this one
                finish()
            if not isinstance(error, Exception):
                raise
        return save

    def _make_ready(self) -> None:
        """Start the thread of the next checkpoint while nobody waits for that."""
        with suppress(RuntimeError):  # no thread to be had, or the interpreter ends
            self._ready = ReadyThread(_NAME)

    def _start(self, finish: Callable[[], None]) -> threading.Thread:
        """Run ``finish`` in a thread; a daemon, as it may wait for a rank that never comes.

        Raises:
            RuntimeError: the system gives no more threads.
        """
        ready, self._ready = self._ready, None
        thread = None if ready is None else ready.give(finish)
        if thread is None:
            thread = threading.Thread(target=finish, name=_NAME, daemon=True)
            thread.start()
        return thread

    @property
    def hangs(self) -> bool:
        """True while the thread of a given-up checkpoint still runs, in the middle of a collective
        or a storage operation. Waits for a thread that is about to end.
        """
        if self._thread is not None:
            self._thread.join(_END_SECONDS)
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """End the process and release the memory; no checkpoint may be on its way."""
        ready, self._ready = self._ready, None
        if ready is not None:
            ready.end()
        self._end_process()
        self._memory.close()

    def _prepare_memory(self, items: Items) -> None:
        """Enlarge the memory as far as the budget allows, or as the largest item requires."""
        sizes = {name: copied_size(item) for name, item in items.by_name.items()}
        largest, most = max(sizes.items(), key=lambda item: item[1], default=("nothing", 0))
        for name, item in items.by_name.items():
            if isinstance(item, RowsItem) and item.shard.shard.table in self._encode:
                sizes[name] = encoded_size(item.shard.shard, item.count, item.encoding)
        wanted = max(min(self._most, sum(sizes.values())), most)
        if most > self._most and not self._warned:
            self._warned = True
            logger.warning(
                "%s is staged in one piece of %d bytes, more than memory_budget=%d leaves for "
                "staging: that memory is taken nevertheless. Give a budget of %d bytes or more, or "
                "split a state object into several",
                largest,
                most,
                self._budget,
                2 * most,
            )
        if wanted > self._memory.size:
            self._end_process()
            self._memory.discard()  # first, lest old and new memory be there at once
            # A reserve, since each new allocation touches all memory: a growing state would else
            # cause one at every save.
            self._make_memory(max(most, min(self._most, wanted * 5 // 4)))
        if self._process is None or not self._process.alive:
            self._end_process()
            self._start_process()
        # A new ring: a thread that hangs in the storage may still release pieces of the old one.
        self._ring = Ring(self._memory.size)

    def _finish(
        self,
        save: Save,
        prepare: Callable[[], Prepared],
        checks: tuple[Callable[[], object], Callable[[], object]],
    ) -> None:
        process, ring = self._process, self._ring
        self._make_ready()
        before_commit, after_commit = checks
        folder = self._root / save.proposal.id
        folder.patience = save.patience
        try:
            writer = CheckpointWriter(
                folder,
                write_rank_file if process is None else process.write,
                (before_commit, save.begin_commit),
                after_commit,
                self._root,
            )
            manifest = save_checkpoint(self._ranks, writer, prepare)
        except BaseException as error:
            save.finish(None, error)
        else:
            if writer.written is not None:
                save.progress.encoded = writer.written.encoded_at - save.begun
                save.progress.written = writer.written.written_at - save.begun
            _ = manifest.size  # cached here, lest the training thread's report compute it
            save.finish(manifest)
        finally:
            ring.abort()  # wakes a training thread that still stages


def _checked(budget: int, warn: bool) -> int:
    """Validate a user-supplied memory budget."""
    remedy = "give a whole number of bytes (8 << 30 for 8 GiB), or None for the default"
    if not isinstance(budget, int):
        raise TypeError(f"memory_budget must be an int, not {budget!r}: {remedy}")
    if budget < _LEAST_BUDGET:
        raise ValueError(
            f"memory_budget={budget} is {budget} bytes, expected at least {_LEAST_BUDGET}: {remedy}"
        )
    if warn and budget < _SLOW_BUDGET:
        logger.warning(
            "memory_budget=%d is less than 8 MiB: chunks will be small and saves slow. It is in "
            "bytes; give more (8 << 30 for 8 GiB) if memory allows it",
            budget,
        )
    return budget
