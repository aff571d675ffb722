"""Which rows training has changed: one byte per row, one bit per consumer.

A row is marked when the backward pass reaches its kernel, where the fused optimizer updates it (and
when its id is evicted, which resets it). A mark set in the forward pass, as in the paper (Check-N-
Run, section 4.1), would be lost with pipelines that look the next batch up before the current one
is applied, and evaluation would mark rows that nothing changes. Marking stores a constant at the
looked-up ids: no atomics, no growth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntFlag

import torch

from torchrec_checknrun.row_sets import RowSet

_FEW_IDS = 4096
"""So many rows of a small table may wait for their optimizer as ids, however few rows it has."""


class Consumer(IntFlag):
    """Who asks which rows were modified; each has its own bit and clears only that."""

    LAST = 1
    """Since the last checkpoint."""
    BASELINE = 2
    """Since the last full checkpoint."""
    USER = 4
    """Free for whoever uses ``track`` without a Checkpointer."""

    EVERY = 255


class Marks:
    """The mark bytes of one local shard, on the device of its weight."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows = rows
        # One byte more than rows: pruned lookups (id -1 on a GPU) are marked there, for nobody.
        self._bytes = torch.zeros(rows + 1, dtype=torch.uint8, device=device)

    def mark(self, ids: torch.Tensor) -> None:
        """Marks shard-local ``ids`` (any integer dtype, in any order, repeated or not)."""
        if ids.numel() == 0 or self.rows == 0:
            return
        if ids.is_cuda or ids.dtype != torch.int64:
            # FBGEMM corrects ids it finds out of range to row 0, but in its own int64 copy.
            ids = ids.to(torch.int64)
            ids = torch.where(
                ids == -1, self.rows, torch.where((ids < 0) | (ids >= self.rows), 0, ids)
            )
        self._bytes.index_fill_(0, ids, int(Consumer.EVERY))

    def mark_all(self) -> None:
        self._bytes.fill_(int(Consumer.EVERY))

    def add(self, ids: torch.Tensor, consumer: Consumer) -> None:
        """Marks sorted distinct local ``ids`` for one consumer only."""
        ids = ids.to(self._bytes.device)
        self._bytes[ids] = self._bytes[ids] | int(consumer)

    def modified(self, consumer: Consumer) -> torch.Tensor:
        """A copy of the consumer's marks, ``(rows,)`` bool."""
        return torch.bitwise_and(self._bytes[: self.rows], int(consumer)) != 0

    def clear(self, consumer: Consumer) -> None:
        self._bytes.bitwise_and_(int(Consumer.EVERY & ~consumer))

    @property
    def raw(self) -> torch.Tensor:
        """The mark bytes themselves, ``(rows,)`` uint8."""
        return self._bytes[: self.rows]

    def take(self, consumer: Consumer) -> RowSet:
        """The consumer's marks, taken away."""
        return RowSet(self.raw, int(consumer), take=True)

    def merge(self, taken: RowSet, consumer: Consumer) -> None:
        """Marks again what was taken, beside what is marked now."""
        for start, mask in taken.masks():
            again = torch.from_numpy(mask).to(self._bytes.device, torch.uint8) * int(consumer)
            self._bytes[start : start + len(mask)].bitwise_or_(again)


class PendingRows:
    """Rows of one local shard that the next optimizer step will change: as ids, while these are
    fewer than the shard's rows.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._ids: list[torch.Tensor] = []
        self._count = 0
        self._many: Marks | None = None

    def __bool__(self) -> bool:
        return bool(self._ids) or self._many is not None

    def add(self, ids: torch.Tensor) -> None:
        """Add shard-local ids, as ``Marks.mark`` takes them; their memory may not change."""
        self._ids.append(ids)
        self._count += max(1, ids.numel())  # a list of nothing takes memory, too
        if self._count > max(self._marks.rows, _FEW_IDS):
            if self._many is None:
                self._many = Marks(self._marks.rows, self._marks.raw.device)
            self._mark_into(self._many)

    def mark(self) -> None:
        """Mark them for every consumer, and forget them."""
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
    """Marks taken away at one instant, until it is known that what they name is durable.

    Attributes:
        number: which of the tracked model's cuts it is.
        taken: by consumer, the rows of each shard, by its marks.
    """

    number: int
    taken: dict[Consumer, dict[Marks, RowSet]]

    def bytes(self, marks: Marks) -> torch.Tensor:
        """A shard's rows as its marks were, ``(rows,)`` uint8."""
        again = Marks(marks.rows, marks.raw.device)
        for consumer, taken in self.taken.items():
            if marks in taken:
                again.merge(taken[marks], consumer)
        return again.raw

    def move(self, gone: Iterable[Marks], new: Mapping[Marks, torch.Tensor]) -> None:
        """Puts such bytes of new shards in the place of old ones."""
        for consumer, taken in self.taken.items():
            for marks in gone:
                taken.pop(marks, None)
            taken |= {marks: RowSet(rows, int(consumer)) for marks, rows in new.items()}
