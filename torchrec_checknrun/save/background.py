"""Take snapshots to committed checkpoints while training goes on, one at a time.

The training thread stages what it may change at any time; rows that are copied on write follow
behind it. A background thread then plans with the other ranks over a
group of its own, encodes, writes and commits. That thread sets the outcome of a ``Save``, and never
touches the model or live marks, only those that cuts have frozen.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from torchrec_checknrun.codecs.quantization import Quantization
from torchrec_checknrun.delta.transaction import Transaction
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.rank_file import write_rank_file
from torchrec_checknrun.marks.cuts import Cut
from torchrec_checknrun.marks.gpu_streams import GpuReads
from torchrec_checknrun.model.hand_written import Overwritten
from torchrec_checknrun.model.tracked_shard import TrackedShard
from torchrec_checknrun.native import park_terminated_threads
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.root.lineage import Proposal
from torchrec_checknrun.save.commit import CheckpointWriter, save_checkpoint
from torchrec_checknrun.save.local_part import LocalPart
from torchrec_checknrun.save.parent_content import DenseForm, ParentContent
from torchrec_checknrun.save.plan import summarized_later, survey
from torchrec_checknrun.save.process import WriteProcess, require_shared
from torchrec_checknrun.save.rank_differences import RankDifferences
from torchrec_checknrun.save.save import Save
from torchrec_checknrun.save.save_memory import SaveMemory
from torchrec_checknrun.snapshot.encoded_at_cut import StagingMode
from torchrec_checknrun.snapshot.items import Items
from torchrec_checknrun.snapshot.snapshot import Snapshot
from torchrec_checknrun.snapshot.staging import COPIER, Staging
from torchrec_checknrun.store.file_copy import CopyTo
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.threads import ReadyThread, end_at_exit, pause_gc
from torchrec_checknrun.values.tensor_bytes import RawViews

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

BackgroundKind = Literal["thread", "process"]


class Copies(Protocol):
    """Copies of the rank files that the background writes."""

    def begin(self, id: str, chain: Sequence[str]) -> None:
        """Note the checkpoint that is about to be written, and those that it builds on."""

    @property
    def copy_to(self) -> CopyTo:
        """Return the second destination of this rank's next file."""

    def committed(self, manifest: Manifest) -> None:
        """Do what is to be done with the copy of a committed checkpoint; a collective of the
        background's ranks. Must not fail.
        """


@dataclass
class Destination:
    """The destination of saves of one kind.

    Attributes:
        root: of the checkpoints.
        parent_content: what the next one there builds on beside rows.
        copies: told of each rank file; None: nobody makes copies.
    """

    root: Folder
    parent_content: ParentContent
    copies: Copies | None = None


_NAME = "checknrun-save"
_END_SECONDS = 5.0


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
        dense: whether that is written as differences to the parent where smaller, or whole.

    Attributes:
        destination: where checkpoints go.
        ranks: as given.

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
        dense: DenseForm = "difference",
    ) -> None:
        self.destination = Destination(root, ParentContent(dense))
        self.ranks = ranks
        self._kind = kind
        self.memory = SaveMemory(
            shared=kind == "process",
            mode=mode,
            memory_budget=memory_budget,
            chunk_bytes=chunk_bytes,
            quantization=quantization,
            expected=expected,
            dense_bytes=dense_bytes,
            wait_seconds=root.patience.timeout_seconds,
            warn=ranks.rank == 0,
        )
        self._views = RawViews()
        self._told: set[str] = set()
        self._process: WriteProcess | None = None
        self._thread: threading.Thread | None = None
        self._ready: ReadyThread | None = None
        self._ready_copier: ReadyThread | None = None
        """Both for the next checkpoint; an interpreter that ends may give no more threads."""
        self._start_process()
        self._make_ready()

    def _start_process(self) -> None:
        if self._kind == "process":
            require_shared(self.destination.root)
            self._process = WriteProcess(self.memory.staging)

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
        agreed: float,
        before_commit: Callable[[], object],
        after_commit: Callable[[], object],
        unite: bool = False,
        links: Transaction | None = None,
        to: Destination | None = None,
    ) -> Save:
        """Stage a snapshot and start its background; training may go on afterwards. Call this on
        all ranks.

        Args:
            proposal: rank 0's decision on the checkpoint.
            snapshot: the snapshot, or the error that prevents one on this rank; then the checkpoint
                fails on all ranks.
            cut: the snapshot's cut, kept in the result.
            begun: when training began to wait, by the monotonic clock.
            agreed: when the ranks had agreed on the checkpoint, by the same clock.
            before_commit: called on rank 0; raises an error if the commit must not happen.
            after_commit: called on rank 0; raises an error if the commit doesn't count.
            unite: unite the marks of data-parallel tables behind training; the same on all ranks.
            links: encodes tables stored as differences; kept in the result.
            to: where the save goes; None: where checkpoints go.
        """
        assert not self.hangs, "the ranks have agreed that all can begin"
        to, self._thread = to or self.destination, None  # its references keep memory
        save = Save(proposal, cut, begun, to.root.patience.apart(), links)
        differences = RankDifferences(told=self._told)
        plan = LocalPart(save, differences)
        plan.kept = snapshot
        plan.parent_content = to.parent_content
        plan.ready_copier, self._ready_copier = self._ready_copier, None
        finish = partial(self._finish, save, plan, to, (before_commit, after_commit), unite)

        def start() -> None:
            if save.thread is not None:
                return
            resume = pause_gc()  # collection waits for the thread, lest training wait for it

            def run() -> None:
                resume()
                finish()

            try:
                save.thread = self._thread = self._start(run)
                end_at_exit(save.thread, left=park_terminated_threads)
            except BaseException:
                resume()
                raise

        try:
            if isinstance(snapshot, Exception):
                raise snapshot
            save.progress.cut_parts["ranks agree"] = agreed - begun
            save.progress.lap("states found and marks cut", begun)
            staging = self._lay_out(save, plan, differences, snapshot, quantization)
            save.progress.lap("chunks laid out", begun)
            self._stage(save, staging, snapshot, start)
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

    def _lay_out(
        self,
        save: Save,
        plan: LocalPart,
        differences: RankDifferences,
        snapshot: Snapshot,
        quantization: Quantization,
    ) -> Staging:
        """Lay a snapshot out in chunks, with memory for them; return how they get there."""
        memory = self.memory
        plan.late = late = memory.late_copies(snapshot)
        save.rows = memory.copy_later(snapshot, late, save.progress)
        if save.rows is not None:
            save.progress.protection = save.rows.copies.protection
        items = Items.of(snapshot, quantization, memory.chunk_bytes, self._views)
        plan.find_rows = partial(items.find_rows, quantization, memory.chunk_bytes)
        plan.survey_rows = partial(survey, items.copied_later, quantization)
        self._prepare_memory(items)
        plan.staging = Staging(memory.staging, memory.ring, items, memory.encode, late)
        differences.trees = items.trees
        differences.models, differences.buffers = snapshot.models, snapshot.buffers
        differences.broadcast = snapshot.broadcast
        header = save.proposal.header
        plan.summarize = summarized_later(header, snapshot, items, quantization)
        return plan.staging

    def _stage(
        self, save: Save, staging: Staging, snapshot: Snapshot, start: Callable[[], None]
    ) -> None:
        """Stage what training waits for; have ``start`` called earlier if memory is too small."""
        try:
            staging.run(start)
        finally:
            if staging.reads is not None:
                _keep_until_read(snapshot, staging.reads)
        if save.rows is not None:
            save.rows.protect()
        save.progress.lap("states and tables copied", save.begun)
        save.progress.staged = time.monotonic() - save.begun
        save.progress.in_parts = self.memory.ring.waited

    def _make_ready(self) -> None:
        """Start the thread of the next checkpoint while nobody waits for that."""
        with suppress(RuntimeError):  # no thread to be had, or the interpreter ends
            self._ready = ReadyThread(_NAME)
            if self.copies_later:
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
        """Return True while the thread of a given-up checkpoint still runs, in the middle of a
        collective or a storage operation. Waits for a thread that is about to end.
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
        self.memory.close()

    @property
    def copies_later(self) -> bool:
        """Return whether rows are copied behind training where their table allows it."""
        return self.memory.mode == "copy_on_write"

    def _prepare_memory(self, items: Items) -> None:
        """Prepare memory for a save's items, and a process that maps it."""
        self.memory.prepare(items, self._end_process)
        if self._process is None or not self._process.alive:
            self._end_process()
            self._start_process()

    def _finish(
        self,
        save: Save,
        plan: LocalPart,
        to: Destination,
        checks: tuple[Callable[[], object], Callable[[], object]],
        unite: bool,
    ) -> None:
        process, ring, copies = self._process, self.memory.ring, to.copies
        write = write_rank_file if process is None else process.write
        self._make_ready()
        before_commit, after_commit = checks
        folder = to.root / save.proposal.id
        folder.patience = save.patience
        try:
            writer = CheckpointWriter(
                folder,
                write if copies is None else partial(write, copy=copies.copy_to),
                (before_commit, save.begin_commit),
                after_commit,
                to.root,
            )
            plan.make_late_copies()
            if unite:
                plan.unite(self.ranks)
            manifest = save_checkpoint(self.ranks, writer, plan.prepare)
            if copies is not None:
                copies.committed(manifest)
        except BaseException as error:
            ring.abort()
            if type(error) is Overwritten:  # on all ranks, lest each of them fail once
                self.memory.copy_at_cut()
            to.parent_content.failed()
            plan.end()
            _consolidate(save)
            save.finish(None, error)
        else:
            to.parent_content.committed(manifest)
            plan.end()
            _consolidate(save)
            if writer.written is not None:
                save.progress.encoded = writer.written.encoded_at - save.begun
                save.progress.written = writer.written.written_at - save.begun
            _ = manifest.size  # cached here, lest the training thread's report compute it
            save.finish(manifest)
        finally:
            ring.abort()  # wakes a training thread that still stages
            save.common_step.agree(self.ranks)


def _keep_until_read(snapshot: Snapshot, reads: GpuReads) -> None:
    """Have training wait for copies from a GPU before the memory changes."""
    for shard in snapshot.shards:
        assert shard.tracked is not None
        if shard.shard.weight.is_cuda:
            shard.tracked.writes.follow(reads)


def _consolidate(save: Save) -> None:
    """Consolidate the marks that the save has cut, before the next save can begin."""
    if save.cut is None:
        return
    try:
        save.cut.consolidate()
    except Exception:  # marks stay as they are, only larger: no reason for a save to fail
        logger.exception("the marks of modified rows could not be made smaller")
