"""Take snapshots to committed checkpoints while training goes on, one at a time.

The training thread stages what it may change at any time; rows that are copied on write follow
behind it. A background thread then plans with the other ranks over a
group of its own, encodes, writes and commits. That thread sets the outcome of a ``Save``. It never
touches the model or live marks, only those that cuts have frozen.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from torchrec_checknrun.codecs import Surveys
from torchrec_checknrun.codecs.quantization import Quantization
from torchrec_checknrun.format.rank_file import write_rank_file
from torchrec_checknrun.marks.cuts import Cut
from torchrec_checknrun.model.tracked_shard import TrackedShard
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.root.lineage import Proposal
from torchrec_checknrun.root.report import Progress
from torchrec_checknrun.save.commit import CheckpointWriter, save_checkpoint
from torchrec_checknrun.save.cut_rows import CopyOnWriteMemory, CutRows, why_copied_at_cut
from torchrec_checknrun.save.items import Item, Items, RowsItem, fingerprint
from torchrec_checknrun.save.late_copies import LateCopies
from torchrec_checknrun.save.memory import Ring, StagingMemory, default_budget
from torchrec_checknrun.save.plan import PlanSummary, Prepared, summarize, survey
from torchrec_checknrun.save.process import WriteProcess, require_shared
from torchrec_checknrun.save.rank_differences import RankDifferences
from torchrec_checknrun.save.save import Save
from torchrec_checknrun.save.snapshot import ShardSnapshot, Snapshot
from torchrec_checknrun.save.staged import rows_size, tensors_size
from torchrec_checknrun.save.staging import (
    COPIER,
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
_OVERFLOW_PART = 5
"""Part of the rows that are copied on write for which there is overflow memory; one of so many."""
_BEHIND_PART = 5
"""Part of these rows for which there is staging memory; one of so many."""
_LEAST_ON_WRITE = 1 << 20
"""Bytes of staging memory below which all rows are copied at the cut."""
_LEAST_BUDGET = 2048
"""Bytes, as few as tests need. A smaller budget is likely meant in another unit."""
_SLOW_BUDGET = 8 << 20


class _Plan:
    """This rank's part of a checkpoint, or the error that prevents it."""

    def __init__(self, save: Save, differences: RankDifferences) -> None:
        self.staging: Staging | None = None
        self.summary: PlanSummary | None = None
        self.find_rows: Callable[[], dict[str, RowsItem]] = dict
        """Finds the items of the rows that are copied on write."""
        self.survey_rows: Callable[[Surveys], object] = lambda found: None
        """Adds surveys of these rows."""
        self.kept: object = None
        """Freed behind training: to free tensors lets the background have the interpreter."""
        self.ready_copier: ReadyThread | None = None
        self._copier: threading.Thread | None = None
        self._save = save
        self._differences = differences
        self._failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Set the error that stops this rank's part."""
        self._failure = error
        if self.staging is not None:
            self.staging.fail(error)
        self._save.end_protection()

    def end(self) -> None:
        """End protection of rows and the thread that copies them, which gets no more memory; free
        what would else be freed by training.
        """
        self._save.end_protection()
        if self._copier is not None:
            self._copier.join()
        if self.staging is not None and self.staging.late is not None:
            self.staging.late.end()
            self._save.progress.protection.seconds += self.staging.late.seconds
        rows, self._save.rows, self.kept = self._save.rows, None, None
        if rows is not None:
            rows.release()

    def make_late_copies(self) -> None:
        """Copy what an optimizer's step would else have to copy; the background's first work."""
        if self._failure is not None:
            return
        assert self.staging is not None
        try:
            if self.staging.late is not None:
                self.staging.late.make()
        except Exception as error:
            self.fail(error)

    def unite(self, ranks: Ranks) -> None:
        """Unite the ranks' marks of data-parallel tables; a collective, even if a rank failed."""
        replicas = []
        if self._failure is None:
            assert self.staging is not None
            replicas = [s for s in self.staging.later if s.copies is None]
        known = [(s, own) for s in replicas if (own := s.own_rows()) is not None]
        if not all(ranks.gather(self._failure is None)) or not known:
            return
        united = torch.cat([own for _, own in known])
        dist.all_reduce(united, op=dist.ReduceOp.BOR, group=ranks.group)
        for (snapshot, _), rows in zip(
            known, united.split([len(own) for _, own in known]), strict=True
        ):
            snapshot.unite(rows)

    def prepare(self) -> Prepared:
        """Return this rank's part, for ``save_checkpoint``.

        Raises:
            BaseException: the error passed to ``fail``.
        """
        if self._failure is not None:
            raise self._failure
        assert self.staging is not None
        assert self.summary is not None
        items: dict[str, Item] = dict(self.staging.at_cut)
        if self.staging.later:
            found = self.find_rows()
            # Before other rows take overflow memory: a sample may take memory beyond it.
            self.survey_rows(self.summary.surveys)
            items |= found
            ready, self.ready_copier = self.ready_copier, None
            self._copier = self.staging.start_behind(found, self._save.rows, ready)
        digests = self.staging.digests()
        self._save.fingerprint = fingerprint(digests, self.summary.progress)
        summary = self.summary.with_digests(digests, self.staging.shared_digests())
        return Prepared(summary, items, self._differences, self.staging.jobs)


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
        expected: list[TrackedShard],
        dense_bytes: int,
    ) -> None:
        self._root = root
        self._ranks = ranks
        self._kind = kind
        if memory_budget is None:
            budget = default_budget()
        else:
            budget = _checked(memory_budget, warn=ranks.rank == 0)
        self.chunk_bytes = min(chunk_bytes, budget // (2 * _CHUNKS))
        self._budget = budget
        self._most = budget - _CHUNKS * self.chunk_bytes
        self._warned = False
        self._told: set[str] = set()
        self._pinned = any(shard.local.weight.is_cuda for shard in expected)
        on_write = [s for s in expected if mode == "copy_on_write" and not why_copied_at_cut(s)]
        self._on_write: CopyOnWriteMemory | None = None
        if on_write and self._most >= _LEAST_ON_WRITE:
            self._on_write = self._overflow(on_write)
            self._most -= self._on_write.size
        else:
            on_write = []
        at_cut = [shard.local for shard in expected if shard not in on_write]
        self._mode = mode
        self._late: LateCopies | None = None
        self._behind: tuple[list[TrackedShard | None], int] = [], 0
        """The shards copied on write at the last cut, and the staging memory for them."""
        self._encode = encoded_while_staged(at_cut, quantization, mode)
        whole = sum(self._expected_bytes(shard, quantization) for shard in at_cut)
        whole += self._behind_bytes(ShardSnapshot(shard.local, None) for shard in on_write)
        self._make_memory(min(self._most, whole + dense_bytes + _SPARE_BYTES))
        self._process: WriteProcess | None = None
        self._thread: threading.Thread | None = None
        self._ready: ReadyThread | None = None
        self._ready_copier: ReadyThread | None = None
        """Both for the next checkpoint; an interpreter that ends may give no more threads."""
        self._start_process()
        self._make_ready()

    def _overflow(self, shards: list[TrackedShard]) -> CopyOnWriteMemory:
        """Make the memory for rows of these shards that training is about to overwrite."""
        whole = sum(rows_size(shard.local, shard.rectangle.rows) for shard in shards)
        wanted = max(whole // _OVERFLOW_PART, len(shards) * _LEAST_ON_WRITE // 4)
        return CopyOnWriteMemory(
            min(self._most // 4, wanted), shards, self._root.patience.timeout_seconds
        )

    def _behind_bytes(self, snapshots: Iterable[ShardSnapshot]) -> int:
        """Return the bytes of staging memory for rows that are copied on write: enough that the
        copies are not slowed by each write to storage, and fewer than for all rows.
        """
        whole = chunk = 0
        for each in snapshots:
            whole += rows_size(each.shard, each.shard.rectangle.rows)
            rows = min(each.span_rows(self.chunk_bytes), each.shard.rectangle.rows)
            chunk = max(chunk, tensors_size(each.tensors, rows))
        return max(whole // _BEHIND_PART, min(whole, _CHUNKS * chunk))

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
        unite: bool = False,
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
            unite: unite the marks of data-parallel tables behind training; the same on all ranks.
        """
        assert not self.hangs, "the ranks have agreed that all can begin"
        self._thread = None  # its references keep memory
        save = Save(proposal, cut, begun, self._root.patience.apart())
        differences = RankDifferences(told=self._told)
        plan = _Plan(save, differences)
        plan.kept = snapshot
        plan.ready_copier, self._ready_copier = self._ready_copier, None
        finish = partial(self._finish, save, plan, (before_commit, after_commit), unite)

        def start() -> None:
            if save.thread is not None:
                return
            save.thread = self._thread = self._start(finish)

        try:
            if isinstance(snapshot, Exception):
                raise snapshot
            save.progress.lap("states found and marks cut", begun)
            late = self._late_copies(snapshot)
            save.rows = self._copy_later(snapshot, late, save.progress)
            items = Items.of(snapshot, quantization, self.chunk_bytes)
            plan.find_rows = partial(items.find_rows, quantization, self.chunk_bytes)
            plan.survey_rows = partial(survey, items.copied_later, quantization)
            self._prepare_memory(items)
            plan.staging = Staging(self._memory, self._ring, items, self._encode, late)
            differences.trees = items.trees
            differences.models, differences.buffers = snapshot.models, snapshot.buffers
            plan.summary = summarize(proposal.header, snapshot, items, quantization)
            save.progress.lap("chunks laid out", begun)
            try:
                plan.staging.run(start)
            finally:
                _keep_until_read(snapshot, plan.staging.read)
            if save.rows is not None:
                save.rows.protect()
            save.progress.lap("states and tables copied", begun)
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
            if self._on_write is not None:
                self._ready_copier = ReadyThread(COPIER)

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
        for ready in (self._ready, self._ready_copier):
            if ready is not None:
                ready.end()
        self._ready = self._ready_copier = None
        self._end_process()
        self._memory.close()

    @property
    def copies_later(self) -> bool:
        """Whether rows are copied behind training where their table allows it."""
        return self._mode == "copy_on_write"

    def _copy_later(
        self, snapshot: Snapshot, late: LateCopies | None, progress: Progress
    ) -> CutRows | None:
        """Choose the shards whose rows are copied later, and prepare their copies."""
        if not self.copies_later:
            return None
        chosen = []
        for shard in snapshot.shards:
            assert shard.tracked is not None
            if shard.tracked.local.replicated and shard.shard.weight.is_cpu:
                shard.copy_whole(late)
                continue
            reason = why_copied_at_cut(shard.tracked)
            if reason is None and self._on_write is None:
                reason = "memory_budget is too small"
            if reason is None:
                chosen.append(shard)
            else:
                progress.copied_at_cut[shard.shard.table] = reason
        if self._on_write is None or not chosen:
            return None
        return CutRows(self._on_write, chosen)

    def _late_copies(self, snapshot: Snapshot) -> LateCopies | None:
        """Return the late copies of a snapshot's states, unless that has once failed."""
        if self._mode != "copy_on_write" or (self._late is not None and self._late.spoiled):
            return None
        self._late = LateCopies(snapshot.stepped)
        return self._late

    def _prepare_memory(self, items: Items) -> None:
        """Enlarge the memory as far as the budget allows, or as the largest item requires."""
        sizes = {name: copied_size(item) for name, item in items.by_name.items()}
        largest, most = max(sizes.items(), key=lambda item: item[1], default=("nothing", 0))
        for name, item in items.by_name.items():
            if isinstance(item, RowsItem) and item.shard.shard.table in self._encode:
                sizes[name] = encoded_size(item.shard.shard, item.count, item.encoding)
        tracked = [shard.tracked for shard in items.copied_later]
        if tracked != self._behind[0]:
            self._behind = tracked, self._behind_bytes(items.copied_later)
        behind = self._behind[1]
        wanted = max(min(self._most, sum(sizes.values()) + behind), most)
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
        plan: _Plan,
        checks: tuple[Callable[[], object], Callable[[], object]],
        unite: bool,
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
            plan.make_late_copies()
            if unite:
                plan.unite(self._ranks)
            manifest = save_checkpoint(self._ranks, writer, plan.prepare)
        except BaseException as error:
            ring.abort()
            plan.end()
            _consolidate(save)
            save.finish(None, error)
        else:
            plan.end()
            _consolidate(save)
            if writer.written is not None:
                save.progress.encoded = writer.written.encoded_at - save.begun
                save.progress.written = writer.written.written_at - save.begun
            _ = manifest.size  # cached here, lest the training thread's report compute it
            save.finish(manifest)
        finally:
            ring.abort()  # wakes a training thread that still stages


def _keep_until_read(snapshot: Snapshot, read: torch.cuda.Event | None) -> None:
    """Have training's stream wait for copies from a GPU: at the first update, where that is all
    that changes a table's memory, or now.
    """
    if read is None:
        return
    for shard in snapshot.shards:
        assert shard.tracked is not None
        watch = shard.tracked.writes
        if shard.shard.weight.is_cuda and watch.kernel.changes_in_backward_only:
            watch.read = read
        elif shard.shard.weight.is_cuda:
            torch.cuda.current_stream(shard.shard.weight.device).wait_event(read)


def _consolidate(save: Save) -> None:
    """Consolidate the marks that the save has cut, before the next save can begin."""
    if save.cut is None:
        return
    try:
        save.cut.consolidate()
    except Exception:  # marks stay as they are, only larger: no reason for a save to fail
        logger.exception("the marks of modified rows could not be made smaller")


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
