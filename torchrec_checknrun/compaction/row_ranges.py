"""Lay a compacted table out as a full checkpoint does: whole runs of rows, a chunk each.

The baseline of the chain is a full checkpoint already, so its own chunks are the layout: of most
of them only some rows are replaced. Where its chunks are no runs that follow each other, the rows
are divided evenly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from torchrec_checknrun.format.row_chunk import RowsHeader
from torchrec_checknrun.shards import CHUNK_BYTES

_COPIES = 5
"""Copies of a row's values that a chunk's memory has to hold; see ``shards.row_memory``."""
_ID_BYTES = 48


@dataclass(frozen=True)
class RowRanges:
    """The ranges of rows of a table's new chunks.

    Attributes:
        starts: ``(ranges + 1,)`` int64: the first row of each, and the number of all rows.
        are_the_baseline: whether they are those of the baseline's chunks.
    """

    starts: np.ndarray
    are_the_baseline: bool

    @classmethod
    def of(cls, rows: int, baseline: Sequence[RowsHeader]) -> RowRanges:
        """Choose the ranges of a table's rows in some columns.

        Args:
            baseline: the chunks of the full checkpoint, in any order.
        """
        headers = sorted(baseline, key=lambda header: header.rectangle.row_start)
        ends = [0]
        for header in headers:
            place = header.rectangle
            if place.row_start != ends[-1] or header.count != place.rows:
                break
            ends.append(place.row_stop)
        if ends[-1] == rows:
            return cls(np.array(ends), are_the_baseline=True)
        size = min(map(_usual_rows, headers))
        return cls(np.array([*range(0, rows, size), rows]), are_the_baseline=False)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def number(self, row: int) -> int:
        """Return the number of the range that a row lies in."""
        return int(np.searchsorted(self.starts, row, side="right")) - 1

    def split(self, ids: np.ndarray) -> Iterator[tuple[int, slice]]:
        """Divide sorted rows among the ranges: yield a range's number, and where its rows are."""
        first, last = self.number(int(ids[0])), self.number(int(ids[-1]))
        ends = np.searchsorted(ids, self.starts[first : last + 2])
        for number in range(first, last + 1):
            start, stop = int(ends[number - first]), int(ends[number - first + 1])
            if start < stop:
                yield number, slice(start, stop)


def _usual_rows(header: RowsHeader) -> int:
    """Return the rows of a chunk of a full checkpoint of such rows, by default."""
    values = 4 * header.cols
    for dtype, rowwise in header.optimizer.values():
        values += max(4, dtype.itemsize) * (1 if rowwise else header.cols)
    return max(1, CHUNK_BYTES // (_COPIES * values + _ID_BYTES))
