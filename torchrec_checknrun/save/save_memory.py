"""The memory of one Checkpointer's saves, within its budget: staging, and rows on write.

Allocated once, since the first touch of memory is slow, and enlarged where a state object needs it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from torchrec_checknrun.codecs.quantization import Quantization
from torchrec_checknrun.model.tracked_shard import TrackedShard
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.root.report import Progress
from torchrec_checknrun.save.copy_ways import CopyWays
from torchrec_checknrun.shards import LocalShard, row_memory
from torchrec_checknrun.snapshot.cut_rows import CopyOnWriteMemory, CutRows, why_copied_at_cut
from torchrec_checknrun.snapshot.encoded_at_cut import (
    StagingMode,
    copied_size,
    encoded_size,
    encoded_while_staged,
)
from torchrec_checknrun.snapshot.items import Items, RowsItem
from torchrec_checknrun.snapshot.late_copies import LateCopies
from torchrec_checknrun.snapshot.memory import Ring, StagingMemory, default_budget
from torchrec_checknrun.snapshot.snapshot import ShardSnapshot, Snapshot
from torchrec_checknrun.snapshot.staged import rows_size, tensors_size

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

_SPARE_BYTES = 1 << 20
_CHUNKS = 4
"""Chunks for which the budget leaves memory beside staging: one is encoded while the previous one
is written, and each thread's part of the allocator keeps about as much again.
"""
_MOST_CHUNKS = 1 << 16
"""Chunks of rows of a rank's file, about, where the budget allows it: readers refuse a file's index
that lists twice as many.
"""
_OVERFLOW_PART = 5
"""Part of the rows that are copied on write for which there is overflow memory; one of so many."""
_BEHIND_PART = 5
"""Part of these rows for which there is staging memory; one of so many."""
_LEAST_ON_WRITE = 1 << 20
"""Bytes of staging memory below which all rows are copied at the cut."""
_ROW_BYTES = 2
"""Bytes for each row of these tables: the state of its copy, and a zeroed mark for the next cut."""
_LEAST_BUDGET = 2048
"""Bytes, as few as tests need. A smaller budget is likely meant in another unit."""
_SLOW_BUDGET = 8 << 20


class SaveMemory:
    """The memory of saves, one at a time.

    Args:
        shared: whether another process maps the staging memory.
        mode: whether rows are copied on write, at the cut, or encoded there.
        memory_budget: bytes for staging and encoding; None: a fraction of the free memory. A state
            object is staged in one piece: a larger one takes more, with a warning.
        chunk_bytes: memory for a chunk's copies, in bytes; a small budget lowers it, and shards of
            which a rank's file could not list so many chunks raise it.
        expected: the shards, from which the size of staging memory is estimated.
        dense_bytes: expected bytes of everything outside the tables.
        wait_seconds: longest time that training waits for overflow memory.
        warn: whether to warn of a small budget.

    Attributes:
        mode, chunk_bytes: see above.
        staging: the staging memory.
        ring: allocator of the present save's pieces of it.
        on_write: what copy on write keeps; None if no table is copied on write.
        encode: tables whose rows are encoded at the cut.

    Raises:
        TypeError, ValueError: the budget is not an int, or too small.
    """

    def __init__(
        self,
        *,
        shared: bool,
        mode: StagingMode,
        memory_budget: int | None,
        chunk_bytes: int,
        quantization: Quantization,
        expected: list[TrackedShard],
        dense_bytes: int,
        wait_seconds: float,
        warn: bool,
    ) -> None:
        budget = default_budget() if memory_budget is None else _checked(memory_budget, warn)
        self.mode = mode
        rows = sum(s.local.rectangle.rows * row_memory(s.local.tensors) for s in expected)
        self.chunk_bytes = min(max(chunk_bytes, rows // _MOST_CHUNKS), budget // (2 * _CHUNKS))
        self._budget = budget
        self._most = budget - _CHUNKS * self.chunk_bytes
        self._warned = False
        self._wait_seconds = wait_seconds
        self._shared = shared
        self._pinned = any(shard.local.weight.is_cuda for shard in expected)
        could = [s for s in expected if why_copied_at_cut(s) is None and not s.local.replicated]
        by_row = _ROW_BYTES * sum(shard.local.rectangle.rows for shard in could)
        self._on_write = mode == "copy_on_write" and self._most - by_row >= _LEAST_ON_WRITE
        self.on_write: CopyOnWriteMemory | None = None
        if self._on_write and has_extension():
            self._most -= by_row
            self.on_write = self._overflow(could)
            self._most -= self.on_write.size
        self._late: LateCopies | None = None
        self._copies_late = mode == "copy_on_write"
        self._behind: tuple[list[tuple[TrackedShard | None, int]], int] = [], 0
        """The shards copied later at the last cut, each with its number of tensors, and the staging
        memory for them.
        """
        self._ways = CopyWays(mode == "copy_on_write", self._on_write)
        ways = list(zip(expected, self._ways.of(expected), strict=True))
        later = [shard for shard, way in ways if way.at_cut is None]
        at_cut = [shard.local for shard, way in ways if way.at_cut is not None]
        self.encode = encoded_while_staged(at_cut, quantization, mode)
        whole = sum(self._expected_bytes(shard, quantization) for shard in at_cut)
        whole += self._behind_bytes(ShardSnapshot(shard.local, None) for shard in later)
        self._make(min(self._most, whole + dense_bytes + _SPARE_BYTES))

    def prepare(self, items: Items, before_growing: Callable[[], None]) -> None:
        """Enlarge the memory as far as the budget allows, or as the largest item requires.

        Args:
            before_growing: called before the present memory is given back.
        """
        self.staging.wait_until_filled()
        sizes = {name: copied_size(item) for name, item in items.by_name.items()}
        largest, most = max(sizes.items(), key=lambda item: item[1], default=("nothing", 0))
        for name, item in items.by_name.items():
            if isinstance(item, RowsItem) and item.shard.shard.table in self.encode:
                sizes[name] = encoded_size(item.shard.shard, item.count, item.encoding)
        tracked = [(shard.tracked, len(shard.tensors)) for shard in items.copied_later]
        if tracked != self._behind[0]:
            self._behind = tracked, self._behind_bytes(items.copied_later)
        wanted = max(min(self._most, sum(sizes.values()) + self._behind[1]), most)
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
        if wanted > self.staging.size:
            before_growing()
            self.staging.discard()  # first, lest old and new memory be there at once
            # A reserve, since each new allocation touches all memory: a growing state would else
            # cause one at every save.
            self._make(max(most, min(self._most, wanted * 5 // 4)))
        # A new ring: a thread that hangs in the storage may still release pieces of the old one.
        self.ring = Ring(self.staging.size)

    def late_copies(self, snapshot: Snapshot) -> LateCopies | None:
        """Return the late copies of a snapshot's states; None if they must be made at the cut."""
        if self._late is not None and self._late.spoiled:
            self.copy_at_cut()
        if not self._copies_late:
            return None
        self._late = LateCopies(snapshot.stepped, snapshot.by_hand)
        return self._late

    def copy_at_cut(self) -> None:
        """Make the copies of all states at the cut from now on."""
        self._copies_late = False

    def copy_later(
        self, snapshot: Snapshot, late: LateCopies | None, progress: Progress
    ) -> CutRows | None:
        """Choose the shards whose rows are copied later, and prepare their copies.

        Args:
            progress: is told which tables are not, and why.

        Returns:
            The rows that are copied on write; None without any.
        """
        if self.mode != "copy_on_write":
            return None
        tracked = [shard.tracked for shard in snapshot.shards if shard.tracked is not None]
        chosen = []
        for shard, way in zip(snapshot.shards, self._ways.of(tracked), strict=True):
            if way.whole:
                shard.copy_whole(late)
            elif way.at_cut is not None:
                progress.copied_at_cut[shard.shard.table] = way.at_cut
            else:
                chosen.append(shard)
        if self.on_write is None or not chosen:
            return None
        return CutRows(self.on_write, chosen, self._wait_seconds)

    def close(self) -> None:
        """Release the memory."""
        self.staging.close()
        if self.on_write is not None:
            self.on_write.close()

    def _overflow(self, shards: list[TrackedShard]) -> CopyOnWriteMemory:
        """Make the memory for rows of these shards that training is about to overwrite."""
        whole = sum(rows_size(shard.local, shard.rectangle.rows) for shard in shards)
        wanted = max(whole // _OVERFLOW_PART, len(shards) * _LEAST_ON_WRITE // 4)
        return CopyOnWriteMemory(min(self._most // 4, wanted), shards)

    def _behind_bytes(self, snapshots: Iterable[ShardSnapshot]) -> int:
        """Return the bytes of staging memory for rows that are copied later: enough that the copies
        are not slowed by each write to storage, and fewer than for all rows.
        """
        whole = chunk = 0
        for each in snapshots:
            whole += rows_size(each.shard, each.shard.rectangle.rows)
            rows = min(each.span_rows(self.chunk_bytes), each.shard.rectangle.rows)
            chunk = max(chunk, tensors_size(each.tensors, rows))
        return max(whole // _BEHIND_PART, min(whole, _CHUNKS * chunk))

    def _make(self, size: int) -> None:
        self.staging = StagingMemory(size, shared=self._shared, pinned=self._pinned)
        self.ring = Ring(size)

    def _expected_bytes(self, shard: LocalShard, quantization: Quantization) -> int:
        """Estimate the bytes of staging memory for all rows of a shard."""
        if shard.table not in self.encode:
            return rows_size(shard, shard.rectangle.rows)
        encoding = quantization.for_table(shard.table, shard.shape.rows)
        return encoded_size(shard, shard.rectangle.rows, encoding)


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
