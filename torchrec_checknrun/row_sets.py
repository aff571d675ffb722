"""Sets of a shard's rows, one bit per row: rows of a snapshot, rows that a restore has read.

As int64 ids, or as a byte per row, a set could outweigh the chunks of a narrow table. So bits are
unpacked a block of rows at a time. ``RowSet`` is packed from marks, sometimes while training waits:
the extension needs one pass over the marks, NumPy several. ``DoneRows`` grows while a chain is read
from its newest checkpoint to its oldest: a row that was read once is not read again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from torchrec_checknrun.native import has_extension

_BLOCK = 1 << 20
"""Rows handled at a time; a multiple of 8, so that blocks begin at a byte."""
_DONE_BLOCK = 1 << 18
"""Rows unpacked at a time to be changed; small enough for the processor's cache."""


class RowSet:
    """A set of row positions in ``[0, rows)``, in CPU memory.

    Args:
        marks: ``(rows,)`` bool or uint8, on any device.
        bits: a row is in the set if its mark has any of these bits.

    Attributes:
        rows: number of rows that may be in the set.
    """

    def __init__(self, marks: torch.Tensor, bits: int = 255) -> None:
        self.rows = len(marks)
        marks = marks.view(torch.uint8)
        self._bits = torch.empty((self.rows + 7) // 8, dtype=torch.uint8, device="cpu")
        if marks.is_cpu and marks.is_contiguous() and has_extension():
            torch.ops.checknrun.pack_marks(marks, bits, self._bits)
            return
        for start, stop in self._blocks(0, self.rows):
            block = marks[start:stop].bitwise_and(bits).cpu().numpy()
            packed = np.packbits(block, bitorder="little")
            self._bits[start // 8 : (stop + 7) // 8] = torch.from_numpy(packed)

    @classmethod
    def of_bits(cls, packed: np.ndarray, rows: int) -> RowSet:
        """Make a set of packed bits, ``((rows + 7) // 8,)`` uint8, each byte's lowest bit first."""
        found = cls.__new__(cls)
        found.rows, found._bits = rows, torch.from_numpy(packed.copy())
        return found

    @classmethod
    def union(cls, sets: Sequence[RowSet], rows: int) -> RowSet:
        """Unite sets of positions in ``[0, rows)``; a single one is returned as it is."""
        if len(sets) == 1:
            return sets[0]
        united = cls.of_bits(np.zeros((rows + 7) // 8, dtype=np.uint8), rows)
        for each in sets:
            united._bits.bitwise_or_(each._bits)
        return united

    @property
    def packed(self) -> torch.Tensor:
        """Return the set's bits, ``((rows + 7) // 8,)`` uint8, each byte's lowest bit first."""
        return self._bits

    def same_as(self, other: RowSet) -> bool:
        """Tell whether another set of positions in the same range holds the same rows."""
        return self._bits is other._bits or torch.equal(self._bits, other._bits)

    def contains(self, rows: np.ndarray) -> np.ndarray:
        """Return which of some rows, ``(n,)`` int64, are in the set, ``(n,)`` bool."""
        held: np.ndarray = (self._bits.numpy()[rows >> 3] >> (rows & 7).astype(np.uint8)) & 1
        return held.astype(bool)

    def is_within(self, other: RowSet) -> bool:
        """Tell whether another set of positions in the same range holds all rows of this one."""
        return not bool(self._bits.bitwise_and(~other._bits).any())

    def any(self) -> bool:
        """Tell whether the set holds any row."""
        return bool(self._bits.any())

    def __len__(self) -> int:
        return sum(int(mask.sum()) for _, mask in self.masks())

    def part(self, start: int, stop: int) -> RowSet:
        """Return the rows of a range as a set of positions in the range."""
        return RowSet(torch.from_numpy(np.ascontiguousarray(self._mask(start, stop))))

    def masks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield blocks of rows: the first row, and a bool mask of which are in the set."""
        for start, stop in self._blocks(0, self.rows):
            yield start, self._mask(start, stop)

    def positions(self, start: int, stop: int) -> np.ndarray:
        """Return the rows of the set in ``[start, stop)``, sorted, int64."""
        if has_extension():
            found: np.ndarray = torch.ops.checknrun.marked_positions(
                self._bits, start, stop
            ).numpy()
            return found
        blocks = [
            first + np.flatnonzero(self._mask(first, end))
            for first, end in self._blocks(start, stop)
        ]
        return np.concatenate(blocks) if blocks else np.empty(0, dtype=np.int64)

    def spans(self, size: int) -> list[tuple[int, int, int]]:
        """Return ranges of rows with ``size`` rows of the set each, as ``(start, stop, count)``.

        The last range may have fewer rows of the set, but at least one.
        """
        if has_extension():
            flat = torch.ops.checknrun.marked_spans(self._bits, self.rows, size)
            return list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))
        spans = []
        start = held = 0
        for first, mask in self.masks():
            positions = first + np.flatnonzero(mask)
            begins = range(size - held, len(positions), size)
            for begin in begins:
                spans.append((start, int(positions[begin]), size))
                start = int(positions[begin])
            held = len(positions) - begins[-1] if begins else held + len(positions)
        if held:
            spans.append((start, self.rows, held))
        return spans

    def _mask(self, start: int, stop: int) -> np.ndarray:
        packed = self._bits[start // 8 : (stop + 7) // 8].numpy()
        skip = start % 8
        unpacked = np.unpackbits(packed, bitorder="little", count=skip + stop - start)
        return unpacked[skip:].view(np.bool_)

    @staticmethod
    def _blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
        while start < stop:
            end = min(stop, (start // _BLOCK + 1) * _BLOCK)
            yield start, end
            start = end


class DoneRows(RowSet):
    """A growing set of row positions in ``[0, rows)``."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._bits = torch.zeros((rows + 7) // 8, dtype=torch.uint8, device="cpu")
        self._packed = self._bits.numpy()

    def contains_range(self, start: int, stop: int) -> bool:
        """Tell whether all rows in ``[start, stop)`` are in the set."""
        return all(self._mask(*block).all() for block in self._blocks(start, stop))

    def add(self, rows: np.ndarray) -> np.ndarray | None:
        """Add rows.

        Args:
            rows: ``(n,)`` int64, sorted and distinct.

        Returns:
            Sorted positions in ``rows`` of the rows that are new to the set; None: all are.
        """
        if has_extension():
            added: np.ndarray = torch.ops.checknrun.add_rows(
                torch.from_numpy(rows), self._bits
            ).numpy()
            return None if len(added) == len(rows) else added
        found = []
        at = 0
        while at < len(rows):
            begin = int(rows[at]) & ~7
            stop = at + int(np.searchsorted(rows[at:], begin + _DONE_BLOCK))
            end = int(rows[stop - 1]) + 1
            held = self._packed[begin // 8 : (end + 7) // 8]
            unpacked = np.unpackbits(held, bitorder="little")
            inside: np.ndarray | slice = rows[at:stop] - begin
            if end - int(rows[at]) == stop - at:
                inside = slice(int(rows[at]) - begin, end - begin)
            new = np.flatnonzero(unpacked[inside] == 0)
            unpacked[inside] = 1
            held[:] = np.packbits(unpacked, bitorder="little")
            found.append(new + at)
            at = stop
        new = np.concatenate((rows[:0], *found))
        return None if len(new) == len(rows) else new
