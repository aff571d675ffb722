"""Keep in memory what a shard's rows restore to as fp32 values: as much memory as the table takes.

LC-Checkpoint adds a number to each value, and the sum is rounded; so nothing smaller than the sums
stands for them. As rows of ``Grid`` the values are stored bit for bit, and digests count them so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import numpy as np
import torch

from torchrec_checknrun.bitwidth import lc_reference_bytes
from torchrec_checknrun.delta.digest import row_digests, total
from torchrec_checknrun.delta.grid import Grid, Kind
from torchrec_checknrun.delta.references import BLOCK_ROWS, References, Undo
from torchrec_checknrun.native import Chosen, copy_rows
from torchrec_checknrun.shards import Rectangle


class ValueReferences(References):
    """The fp32 values that the rows of one shard restore to; see ``References``."""

    keeps_bits: ClassVar[bool] = True

    def __init__(self, table: str, rectangle: Rectangle, states: Iterable[str] = ()) -> None:
        super().__init__(table, rectangle, states)
        self._known = np.zeros(rectangle.rows, bool)
        self._bits = np.zeros((rectangle.rows, rectangle.cols), np.int32)

    @staticmethod
    def expected_bytes(rectangle: Rectangle, states: int = 0) -> int:
        return rectangle.rows * lc_reference_bytes(rectangle.cols, states)

    @property
    def bytes(self) -> int:
        return super().bytes + self._known.nbytes + self._bits.nbytes

    def clear(self) -> None:
        super().clear()
        self._known[:] = False

    def gather(self, positions: np.ndarray) -> Grid:
        known = self._known[positions]
        codes = np.empty((len(positions), self.rectangle.cols), np.int32)
        _copy(self._bits, positions, codes, slice(0, len(positions)))
        if not known.all():
            codes[~known] = 0
        kind = np.where(known, np.uint8(Kind.VERBATIM), np.uint8(Kind.NONE))
        return Grid(kind, np.zeros(len(positions), np.int16), codes)

    def scatter(self, positions: np.ndarray, rows: Grid, before: Grid | None = None) -> None:
        if (rows.kind == Kind.GRID).any():
            raise ValueError("rows on grids, where values are due")
        gone = 0
        if self._known[positions].any():  # of a base no row has a predecessor
            gone = self._total(positions, self.gather(positions) if before is None else before)
        new = self._total(positions, rows)
        self._known[positions] = rows.kind == Kind.VERBATIM
        _copy(rows.codes, slice(0, len(positions)), self._bits, positions)
        with self._lock:
            self._count(gone, new)

    def undo(self, positions: np.ndarray) -> Undo:
        known = self._known[positions]
        bits = self._bits[positions] if known.any() else None

        def put_back() -> None:
            self._known[positions] = known
            if bits is not None:
                self._bits[positions] = bits

        return put_back

    def part(self, rectangle: Rectangle) -> ValueReferences:
        if rectangle == self.rectangle:
            return self
        start = rectangle.row_start - self.rectangle.row_start
        found = ValueReferences(self.table, rectangle, self.states)
        found._known[:] = self._known[start : start + rectangle.rows]
        found._bits[:] = self._bits[start : start + rectangle.rows]
        for at in range(0, rectangle.rows, BLOCK_ROWS):
            here = np.arange(at, min(at + BLOCK_ROWS, rectangle.rows))
            found._count(0, found._total(here, found.gather(here)))
        found._take_states(self)
        return found

    def _total(self, positions: np.ndarray, rows: Grid) -> int:
        """Return the sum of the digests of rows at these positions."""
        return total(row_digests(positions + self.rectangle.row_start, self.columns, rows))


def _copy(source: np.ndarray, chosen: Chosen, target: np.ndarray, where: Chosen) -> None:
    """Copy rows beside other threads, which NumPy would not."""
    if len(target) and len(source):
        copy_rows(torch.from_numpy(source), len(source), chosen, torch.from_numpy(target), where)
