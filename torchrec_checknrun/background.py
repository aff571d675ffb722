"""From a snapshot to a committed checkpoint while training goes on.

One checkpoint at a time: staged by the training thread, then planned with the other ranks, encoded,
written and committed by a thread of its own, over a group of its own. That thread never touches
marks or the model; it only leaves what became of it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal, NoReturn

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from torchrec_checknrun.errors import CheckNRunError, SaveFailed
from torchrec_checknrun.filesystem import Folder
from torchrec_checknrun.lineage import Proposal
from torchrec_checknrun.manifest import Manifest
from torchrec_checknrun.quantization import Quantization
from torchrec_checknrun.rank_file import write_rank_file
from torchrec_checknrun.ranks import Ranks, own_error
from torchrec_checknrun.report import Progress
from torchrec_checknrun.save_items import Items
from torchrec_checknrun.save_plan import CheckpointPlanner, Prepared, summarize
from torchrec_checknrun.shards import LocalShard
from torchrec_checknrun.snapshot import Snapshot
from torchrec_checknrun.staged import rows_size
from torchrec_checknrun.staging import Staging, StagingMode, encoded_while_staged, staged_size
from torchrec_checknrun.staging_memory import Ring, StagingMemory, default_budget
from torchrec_checknrun.storage import StorageWriter
from torchrec_checknrun.tracking import Cut
from torchrec_checknrun.write_process import WriteProcess, require_shared

logger = logging.getLogger("torchrec_checknrun.checkpointer")

BackgroundKind = Literal["thread", "process"]
_SPARE_BYTES = 1 << 20
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
    """

    def __init__(self, proposal: Proposal, cut: Cut | None, begun: float) -> None:
        self.proposal = proposal
        self.cut = cut
        self.begun = begun
        self.progress = Progress()
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
        """What became of it."""
        self._manifest, self._error = manifest, error
        self.progress.committed = time.monotonic() - self.begun
        self._done.set()


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
        self._pinned = any(shard.weight.is_cuda for shard in expected)
        whole = sum(_staged_bytes(shard, quantization, self._encode) for shard in expected)
        self._make_memory(min(self._most, whole + dense_bytes + _SPARE_BYTES))
        self._process: WriteProcess | None = None
        self._thread: threading.Thread | None = None
        self._start_process()

    def _make_memory(self, size: int) -> None:
        self._memory = StagingMemory(size, shared=self._kind == "process", pinned=self._pinned)
        self._ring = Ring(size)

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
    ) -> Save:
        """Stages a snapshot; when it returns, training may go on. Called on all ranks.

        Args:
            snapshot: or why there is none on this rank: then the checkpoint fails on all ranks.
            cut: kept in the result.
            begun: when training began to wait, by the monotonic clock.
            before_commit: called on rank 0; raises an error if it must not be committed.
        """
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()  # it has said what became of its checkpoint, and is about to end
        self._thread = None  # what it refers to may go
        save = Save(proposal, cut, begun)
        failure = snapshot if isinstance(snapshot, Exception) else None
        staging: Staging | None = None
        prepared: Prepared | None = None
        if not isinstance(snapshot, Exception):
            try:
                items = Items.of(snapshot, quantization, self.chunk_bytes)
                sizes = {name: staged_size(item) for name, item in items.by_name.items()}
                self._prepare_memory(sizes)
                staging = Staging(self._memory, self._ring, items, sizes, self._encode)
                summary = summarize(proposal.header, snapshot, items, quantization)
                prepared = Prepared(summary, staging.items, staging.choose)
            except Exception as error:
                failure = error

        def prepare(path: str) -> Prepared:
            if failure is not None:
                raise failure
            assert prepared is not None
            return prepared

        save.thread = thread = self._thread = threading.Thread(
            target=self._finish,
            args=(save, CheckpointPlanner(prepare), before_commit),
            name="checknrun-save",
            daemon=True,  # it may wait for a rank that never comes
        )
        if staging is None:
            thread.start()
            return save
        try:
            if not staging.fits:
                thread.start()
            with contextlib.suppress(Exception):  # the thread hears it from staging
                staging.run()
            save.progress.staged = time.monotonic() - save.begun
            save.progress.in_parts = self._ring.waited
            if staging.fits:
                thread.start()
        except BaseException as error:  # interrupted: the thread must not wait for what never comes
            staging.fail(error)
            raise
        return save

    def close(self) -> None:
        """Ends the process and gives the memory back; nothing may be on its way."""
        self._end_process()
        self._memory.close()

    def _prepare_memory(self, sizes: Mapping[str, int]) -> None:
        """Makes the memory larger where the budget allows it, or the largest item demands it.

        Args:
            sizes: of the items, by name.
        """
        largest, most = max(sizes.items(), key=lambda item: item[1], default=("nothing", 0))
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
            self._make_memory(wanted)
        if self._process is None or not self._process.alive:
            self._end_process()
            self._start_process()
        self._ring.begin()

    def _finish(
        self, save: Save, planner: CheckpointPlanner, before_commit: Callable[[], object]
    ) -> None:
        process = self._process
        writer = StorageWriter(
            (self._root / save.proposal.id).url,
            write_rank_file if process is None else process.write,
            before_commit,
        )
        try:
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
            save.finish(metadata.planner_data)
        finally:
            self._ring.abort()  # a training thread that still stages waits in vain


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


def _staged_bytes(shard: LocalShard, quantization: Quantization, encode: frozenset[str]) -> int:
    """About what all rows of a shard take in staging memory."""
    encoding = quantization.for_table(shard.table, shard.shape.rows)
    rows = shard.rectangle.rows
    size = rows_size(shard, rows)
    if shard.table in encode:
        size -= shard.weight.nbytes * (32 - encoding.codec.value_bits) // 32
    return size


def _raise_as_failed(error: BaseException, step: int) -> NoReturn:
    if isinstance(error, CheckpointException):
        cause = own_error(error)
        if isinstance(cause, CheckNRunError):
            raise cause from error
    elif isinstance(error, Exception):
        cause = error
    else:
        raise error
    raise SaveFailed(
        f"the checkpoint at step {step} was not committed: {cause!r}. Its rows are kept for the "
        "next one; mend the storage and save again"
    ) from error
