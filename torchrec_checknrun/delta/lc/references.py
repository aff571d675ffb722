"""Keep in memory what a shard's rows restore to as fp32 values: as much memory as the table takes.

LC-Checkpoint adds a number to each value, and the sum is rounded; so nothing smaller than the sums
stands for them. As rows of ``Grid`` the values are stored bit for bit, and digests count them so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from torchrec_checknrun.bitwidth import lc_reference_bytes
from torchrec_checknrun.delta.digest import WORD, row_digests, total
from torchrec_checknrun.delta.grid import Grid, Kind
from torchrec_checknrun.delta.references import BLOCK_ROWS, References, Undo
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
        found = Grid.none(len(positions), self.rectangle.cols)
        known = self._known[positions]
        found.kind[known] = Kind.VERBATIM
        found.codes[known] = self._bits[positions[known]]
        return found

    def scatter(self, positions: np.ndarray, rows: Grid) -> None:
        if (rows.kind == Kind.GRID).any():
            raise ValueError("rows on grids, where values are due")
        gone = self._total(positions)
        self._known[positions] = rows.kind == Kind.VERBATIM
        self._bits[positions] = rows.codes
        self.weights_digest = (self.weights_digest - gone + self._total(positions)) % WORD

    def undo(self, positions: np.ndarray) -> Undo:
        known, bits = self._known[positions], self._bits[positions]

        def put_back() -> None:
            self._known[positions] = known
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
            found.weights_digest = (found.weights_digest + found._total(here)) % WORD
        found._take_states(self)
        return found

    def _total(self, positions: np.ndarray) -> int:
        """Return the sum of rows' digests."""
        ids = positions + self.rectangle.row_start
        return total(row_digests(ids, self.columns, self.gather(positions)))
