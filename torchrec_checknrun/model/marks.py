"""Mark the rows that training changes: one byte per row, one bit per consumer.

A row is marked when the backward pass reaches its kernel, where the fused optimizer updates the
row, and when its id is evicted, which resets the row. A mark set in the forward pass, as in the
paper (Check-N-Run, section 4.1), would be lost with pipelines that look up the next batch before
the current one is applied, and evaluation would mark rows that nothing changes. Marking stores a
constant at the looked-up ids: no atomics, no growth.

A checkpoint takes its consumer's marks away (a ``Cut``); ``Cuts`` gives them back if the checkpoint
fails.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag

import torch

from torchrec_checknrun.row_sets import RowSet

_FEW_IDS = 4096
"""Number of pending ids that are kept as a list even for a table with fewer rows."""


class Consumer(IntFlag):
    """A user of marks; each has a bit of its own and clears only that."""

    LAST = 1
    """Rows modified since the last checkpoint."""
    BASELINE = 2
    """Rows modified since the last full checkpoint."""
    USER = 4
    """Free for users of ``track`` without a Checkpointer."""

    EVERY = 255


class Marks:
    """The mark bytes of one local shard, on the device of its weight.

    Args:
        rows: number of rows of the shard.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows = rows
        # The extra byte takes the marks of pruned lookups (id -1 on a GPU); no consumer reads it.
        self._bytes = torch.zeros(rows + 1, dtype=torch.uint8, device=device)

    def mark(self, ids: torch.Tensor) -> None:
        """Mark rows for every consumer.

        Args:
            ids: shard-local, ``(n,)`` of any integer dtype, in any order, repeated or not.
        """
        if ids.numel() == 0 or self.rows == 0:
            return
        if ids.is_cuda or ids.dtype != torch.int64:
            # FBGEMM corrects out-of-range ids to row 0, but in its own int64 copy.
            ids = ids.to(torch.int64)
            ids = torch.where(
                ids == -1, self.rows, torch.where((ids < 0) | (ids >= self.rows), 0, ids)
            )
        self._bytes.index_fill_(0, ids, int(Consumer.EVERY))

    def mark_all(self) -> None:
        """Mark every row for every consumer."""
        self._bytes.fill_(int(Consumer.EVERY))

    def add(self, ids: torch.Tensor, consumer: Consumer) -> None:
        """Mark sorted distinct shard-local ``ids`` for one consumer only."""
        ids = ids.to(self._bytes.device)
        self._bytes[ids] = self._bytes[ids] | int(consumer)

    def modified(self, consumer: Consumer) -> torch.Tensor:
        """Return a copy of the consumer's marks, ``(rows,)`` bool."""
        return torch.bitwise_and(self._bytes[: self.rows], int(consumer)) != 0

    def clear(self, consumer: Consumer) -> None:
        """Clear the consumer's marks."""
        self._bytes.bitwise_and_(int(Consumer.EVERY & ~consumer))

    @property
    def raw(self) -> torch.Tensor:
        """The mark bytes themselves, ``(rows,)`` uint8."""
        return self._bytes[: self.rows]

    def take(self, consumer: Consumer) -> RowSet:
        """Clear the consumer's marks and return the rows that had them."""
        return RowSet(self.raw, int(consumer), take=True)

    def merge(self, taken: RowSet, consumer: Consumer) -> None:
        """Mark taken rows again, in addition to those marked since."""
        for start, mask in taken.masks():
            again = torch.from_numpy(mask).to(self._bytes.device, torch.uint8) * int(consumer)
            self._bytes[start : start + len(mask)].bitwise_or_(again)


class PendingRows:
    """Rows of one local shard that the next optimizer step will change.

    Kept as ids while there are fewer of them than rows, and as marks beyond that.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._ids: list[torch.Tensor] = []
        self._count = 0
        self._many: Marks | None = None

    def __bool__(self) -> bool:
        return bool(self._ids) or self._many is not None

    def add(self, ids: torch.Tensor) -> None:
        """Add shard-local ids, as for ``Marks.mark``; their memory must not change afterwards."""
        self._ids.append(ids)
        self._count += max(1, ids.numel())  # even an empty tensor takes memory
        if self._count > max(self._marks.rows, _FEW_IDS):
            if self._many is None:
                self._many = Marks(self._marks.rows, self._marks.raw.device)
            self._mark_into(self._many)

    def mark(self) -> None:
        """Mark the pending rows for every consumer, and forget them."""
        if self._many is not None:
            self._marks.raw.bitwise_or_(self._many.raw)
            self._many = None
        self._mark_into(self._marks)

    def _mark_into(self, marks: Marks) -> None:
        for ids in self._ids:
            marks.mark(ids)
        self._ids, self._count = [], 0


@dataclass(eq=False)
class Cut:
    """Marks taken away at one instant, kept until their rows are known to be durable.

    Attributes:
        number: position among the tracked model's cuts, the same on all ranks.
        taken: by consumer and by each shard's marks, the rows.
    """

    number: int
    taken: dict[Consumer, dict[Marks, RowSet]]

    def bytes(self, marks: Marks) -> torch.Tensor:
        """Return one shard's marks as they were taken, ``(rows,)`` uint8."""
        again = Marks(marks.rows, marks.raw.device)
        for consumer, taken in self.taken.items():
            if marks in taken:
                again.merge(taken[marks], consumer)
        return again.raw

    def move(self, gone: Iterable[Marks], new: Mapping[Marks, torch.Tensor]) -> None:
        """Replace the rows of old shards by those of new ones.

        Args:
            gone: marks of the old shards.
            new: by the new shards' marks, bytes as ``bytes`` returns them.
        """
        for consumer, taken in self.taken.items():
            for marks in gone:
                taken.pop(marks, None)
            taken |= {marks: RowSet(rows, int(consumer)) for marks, rows in new.items()}


class Cuts:
    """The cuts of a tracked model whose rows are not durable yet.

    Held weakly: marks of a cut that its owner has dropped are never merged, and need not follow
    their shards.
    """

    def __init__(self) -> None:
        self._open: weakref.WeakSet[Cut] = weakref.WeakSet()
        self._made = 0

    def __iter__(self) -> Iterator[Cut]:
        return iter(self._open)

    def take(self, shards: Sequence[Marks], consumers: Consumer) -> Cut:
        """Take the consumers' marks of all shards away; leave them in place on failure."""
        self._made += 1
        cut = Cut(self._made, {})
        self._open.add(cut)
        taking: Marks | None = None
        try:
            for consumer in (Consumer.LAST, Consumer.BASELINE):
                if consumer & consumers:
                    taken = cut.taken[consumer] = {}
                    for marks in shards:
                        taking = marks
                        taken[marks] = marks.take(consumer)
        except BaseException:
            self.merge(cut)
            if taking is not None:
                taking.mark_all()  # an interrupt may come between taking the marks and storing them
            raise
        return cut

    def merge(self, cut: Cut) -> None:
        """Mark a cut's rows again, in addition to those marked since."""
        self._open.discard(cut)
        for consumer, taken in cut.taken.items():
            for marks, rows in taken.items():
                marks.merge(rows, consumer)

    def forget(self, cut: Cut) -> None:
        """Drop a cut whose rows are durable."""
        self._open.discard(cut)
