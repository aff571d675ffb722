"""From a snapshot to a committed checkpoint while training goes on.

One checkpoint at a time: staged by the training thread, then planned with the other ranks, encoded,
written and committed by a thread of its own, over a group of its own. That thread never touches
marks or the model; it only leaves what became of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Literal, NoReturn

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from torchrec_checknrun.codecs.quantization import Quantization
from torchrec_checknrun.errors import (
    CheckNRunError,
    CheckpointExists,
    CorruptCheckpoint,
    SaveFailed,
)
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.rank_file import write_rank_file
from torchrec_checknrun.model.marks import Cut
from torchrec_checknrun.ranks import Ranks, own_error
from torchrec_checknrun.root.lineage import Proposal
from torchrec_checknrun.root.report import Progress
from torchrec_checknrun.save.commit import StorageWriter
from torchrec_checknrun.save.items import Fingerprint, Items, RowsItem, fingerprint
from torchrec_checknrun.save.memory import Ring, StagingMemory, default_budget
from torchrec_checknrun.save.plan import CheckpointPlanner, PlanSummary, Prepared, summarize
from torchrec_checknrun.save.process import WriteProcess, require_shared
from torchrec_checknrun.save.rank_differences import RankDifferences
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
from torchrec_checknrun.store.deadlines import Patience
from torchrec_checknrun.store.folder import Folder

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

BackgroundKind = Literal["thread", "process"]
_OF_STORAGE = (CorruptCheckpoint, CheckpointExists)
"""What lies where a new checkpoint is to be written; by itself it would read as an old one's."""
_SPARE_BYTES = 1 << 20
_END_SECONDS = 5.0
_LEAVE_SECONDS = 10.0
_CHUNKS = 4
"""Whose memory the background takes beside what is staged: one is encoded while the one before is
being written, and each thread's part of the allocator keeps about as much again."""
_LEAST_BUDGET = 2048
"""Bytes; tests come down to it. Who gives less means another unit."""
_SLOW_BUDGET = 8 << 20


class Save:
    """One checkpoint on its way.

    Attributes:
        cut: the marks it took, to be merged back unless it is committed; None if that failed.
        fingerprint: of what it holds beside table rows, on this rank; None until that is known.
        patience: with the storage, as far as it is asked for this checkpoint.
    """

    def __init__(
        self, proposal: Proposal, cut: Cut | None, begun: float, patience: Patience
    ) -> None:
        self.proposal = proposal
        self.cut = cut
        self.begun = begun
        self.patience = patience
        self._lock = threading.Lock()
        self._committing = self._given_up = False
        self.progress = Progress()
        self.fingerprint: Fingerprint | None = None
        self._manifest: Manifest | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        self.thread: threading.Thread | None = None
        """Which does it, once it is begun."""

    @property
    def done(self) -> bool:
        """Whether it is known on this rank what became of it."""
        return self._done.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until it is ``done``, at most so long; whether it is."""
        return self._done.wait(seconds)

    def leave(self) -> None:
        """When it is ``done``: returns when its thread has ended, too. An interpreter that ends
        while a thread gives tensors back aborts.
        """
        if self.thread is not None:
            self.thread.join(_LEAVE_SECONDS)

    def result(self) -> Manifest:
        """The committed checkpoint, if it is ``done``.

        Raises:
            SaveFailed, UnsupportedState, InvalidPlan …: it was not committed.
        """
        if self._error is not None:
            _raise_as_failed(self._error, self.proposal.header.step)
        assert self._manifest is not None
        return self._manifest

    def finish(self, manifest: Manifest | None, error: BaseException | None = None) -> None:
        """Note what became of it, unless that was noted before."""
        with self._lock:
            if self._done.is_set():
                return
            self._manifest, self._error = manifest, error
            self.progress.committed = time.monotonic() - self.begun
            self._done.set()

    def begin_commit(self) -> None:
        """Let nobody give it up from now on: whether it is committed is up to the storage.

        Raises:
            SaveFailed: somebody has.
        """
        with self._lock:
            if self._given_up:
                raise SaveFailed(f"{self.proposal.id} was given up before it was committed")
            self._committing = True

    def give_up(self, error: Exception, force: bool = False) -> bool:
        """Fail with ``error``, and never commit; return False if it is being committed just now.

        Args:
            force: fail even then: whether it is committed is not known.
        """
        with self._lock:
            if self._committing and not force:
                return False
            self._given_up = True
        self.finish(None, error)
        return True


class _Plan:
    """What this rank has for the planner, or why it has nothing."""

    def __init__(self, save: Save, differences: RankDifferences) -> None:
        self.staging: Staging | None = None
        self.summary: PlanSummary | None = None
        self._save = save
        self._differences = differences
        self._failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """There will be no more than is there now."""
        self._failure = error
        if self.staging is not None:
            self.staging.fail(error)

    def prepare(self, path: str) -> Prepared:
        """For ``CheckpointPlanner``.

        Raises:
            BaseException: what it failed with.
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
    """Takes snapshots to storage, one at a time.

    Made on all ranks at once, in the thread that trains.

    Args:
        root: of the checkpoints.
        ranks: with a group that nobody else uses.
        memory_budget: bytes for staging and encoding; None: a fraction of what is free. A state
            object is one piece: one that is larger takes more, with a warning.
        expected: the shards, from which staging memory's size is estimated.
        dense_bytes: the same for all that is no table.

    Raises:
        TypeError, ValueError: the budget is no number of bytes, or too small for anything.
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
        self._start_process()

    def _make_memory(self, size: int) -> None:
        self._memory = StagingMemory(size, shared=self._kind == "process", pinned=self._pinned)
        self._ring = Ring(size)

    def _expected_bytes(self, shard: LocalShard, quantization: Quantization) -> int:
        """About what all rows of a shard take in staging memory."""
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
        after_commit: Callable[[], object] = lambda: None,
    ) -> Save:
        """Stages a snapshot; when it returns, training may go on. Called on all ranks.

        Args:
            snapshot: or why there is none on this rank: then the checkpoint fails on all ranks.
            cut: kept in the result.
            begun: when training began to wait, by the monotonic clock.
            before_commit: called on rank 0; raises an error if it must not be committed.
            after_commit: the same, if it was not committed after all.
        """
        assert not self.hangs, "the ranks have agreed that all can begin"
        self._thread = None  # what it refers to may go
        save = Save(proposal, cut, begun, self._root.patience.apart())
        differences = RankDifferences(told=self._told)
        plan = _Plan(save, differences)
        checks = before_commit, after_commit
        finish = partial(self._finish, save, CheckpointPlanner(plan.prepare), checks)

        def start() -> None:
            if save.thread is not None:
                return
            # A daemon: it may wait for a rank that never comes.
            thread = threading.Thread(target=finish, name="checknrun-save", daemon=True)
            thread.start()
            save.thread = self._thread = thread

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
            # The other ranks are to hear of it, and no thread may wait for what never comes.
            plan.fail(error)
            try:
                start()
            except RuntimeError:  # the system gives no thread, but the others wait for this rank
                finish()
            if not isinstance(error, Exception):
                raise
        return save

    @property
    def hangs(self) -> bool:
        """Whether the thread of a checkpoint that was given up is still at it, and so in the middle
        of what it has begun with the other ranks. One that has said what became of it, and is about
        to end, is waited for.
        """
        if self._thread is not None:
            self._thread.join(_END_SECONDS)
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Ends the process and gives the memory back; nothing may be on its way."""
        self._end_process()
        self._memory.close()

    def _prepare_memory(self, items: Items) -> None:
        """Makes the memory larger where the budget allows it, or the largest item demands it."""
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
                "staging: it takes that memory nevertheless. Give a budget of %d bytes or more, or "
                "split a state object into several",
                largest,
                most,
                self._budget,
                2 * most,
            )
        if wanted > self._memory.size:
            self._end_process()
            self._memory.discard()  # before there is new memory: else the two are there at once
            # And some more: a state that grows would have all of it touched anew at every save.
            self._make_memory(max(most, min(self._most, wanted * 5 // 4)))
        if self._process is None or not self._process.alive:
            self._end_process()
            self._start_process()
        # A new one: a thread that hangs in the storage may give memory back to the old one yet.
        self._ring = Ring(self._memory.size)

    def _finish(
        self,
        save: Save,
        planner: CheckpointPlanner,
        checks: tuple[Callable[[], object], Callable[[], object]],
    ) -> None:
        process, ring = self._process, self._ring
        before_commit, after_commit = checks
        folder = self._root / save.proposal.id
        folder.patience = save.patience

        def last_look() -> None:
            before_commit()
            save.begin_commit()

        try:
            writer = StorageWriter(
                folder,
                write_rank_file if process is None else process.write,
                last_look,
                after_commit,
            )
            metadata = dcp.save(
                {},
                storage_writer=writer,
                planner=planner,
                process_group=self._ranks.group,
                no_dist=self._ranks.group is None,
            )
        except BaseException as error:
            save.finish(None, error)
        else:
            if writer.written is not None:
                save.progress.encoded = writer.written.encoded_at - save.begun
                save.progress.written = writer.written.written_at - save.begun
            manifest: Manifest = metadata.planner_data
            _ = manifest.size  # found here, since the training thread's report asks for it
            save.finish(manifest)
        finally:
            ring.abort()  # a training thread that still stages waits in vain


def _checked(budget: int, warn: bool) -> int:
    """A budget that somebody has chosen, if it can be meant."""
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


def _raise_as_failed(error: BaseException, step: int) -> NoReturn:
    if isinstance(error, CheckpointException):
        cause = own_error(error)
        if isinstance(cause, CheckNRunError) and not isinstance(cause, _OF_STORAGE):
            raise cause from error
    elif isinstance(error, SaveFailed):
        raise error
    elif isinstance(error, Exception):
        cause = error
    else:
        raise error
    of_storage = isinstance(cause, (OSError, *_OF_STORAGE))
    remedy = "fix the storage and save again" if of_storage else "save again"
    raise SaveFailed(
        f"the checkpoint at step {step} was not committed: {cause!r}. Its rows are kept for the "
        f"next one; {remedy}"
    ) from error
