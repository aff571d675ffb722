"""Which rows of a shard have come already, while a chain is read from its newest checkpoint on.

One bit for each row: as bytes they would outweigh a chunk of a large table. Bits are unpacked where
a chunk's rows are, a block at a time.
"""

from __future__ import annotations

import numpy as np
import torch

from torchrec_checknrun.codecs.kernel import has_extension
from torchrec_checknrun.row_set import RowSet

_BLOCK = 1 << 18
"""Rows looked at together; a multiple of 8, so that blocks begin at a byte."""


class DoneRows(RowSet):
    """A growing set of row positions in ``[0, rows)``."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._bits = torch.zeros((rows + 7) // 8, dtype=torch.uint8, device="cpu")
        self._packed = self._bits.numpy()

    def hold(self, start: int, stop: int) -> bool:
        """Whether all rows of a range have come."""
        for begin in range(start, stop, _BLOCK):
            end = min(begin + _BLOCK, stop)
            if not self._unpacked(begin, end)[begin % 8 : begin % 8 + end - begin].all():
                return False
        return True

    def add(self, rows: np.ndarray) -> np.ndarray | None:
        """Adds rows, sorted and distinct int64 positions.

        Returns:
            Which of ``rows`` had not come before, as sorted positions in it; None: all.
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
            stop = at + int(np.searchsorted(rows[at:], begin + _BLOCK))
            end = int(rows[stop - 1]) + 1
            unpacked = self._unpacked(begin, end)
            inside: np.ndarray | slice = rows[at:stop] - begin
            if end - int(rows[at]) == stop - at:
                inside = slice(int(rows[at]) - begin, end - begin)
            new = np.flatnonzero(unpacked[inside] == 0)
            unpacked[inside] = 1
            self._packed[begin // 8 : (end + 7) // 8] = np.packbits(unpacked, bitorder="little")
            found.append(new + at)
            at = stop
        new = np.concatenate(found) if len(found) > 1 else found[0] if found else rows[:0]
        return None if len(new) == len(rows) else new

    def _unpacked(self, start: int, stop: int) -> np.ndarray:
        """A byte for each row, from the beginning of the byte that has ``start``'s bit."""
        return np.unpackbits(self._packed[start // 8 : (stop + 7) // 8], bitorder="little")
