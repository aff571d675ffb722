"""Notice rows that changed though nothing told of it, by a sample of the rows.

No counter moves with writes through ``.data`` or NumPy, a collective on a table, or a kernel of the
program's own; a differential checkpoint would leave such rows out. But training changes no row that
isn't marked. So a few rows of the largest tables are compared at each cut with what they were at
the one before. Rows that training has changed make way for others, until the sample is of rows that
it rarely looks up: those that only such a write changes. A write to most rows of a table is noticed
with near certainty, one to a few rows seldom.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from torchrec_checknrun.marks.layers import Consumer
from torchrec_checknrun.shards import LocalShard

_ROWS = 32
_TRIES = 512
"""Rows of a table that are tried in the sample: of small tables training changes all."""


class UntouchedRows:
    """A sample of one shard's rows, and their content at the last look.

    Args:
        shard: the rows' memory, wherever it is at each look.

    Attributes:
        table: the table's name.
        forgotten: whether nothing is known of the rows' content.
    """

    def __init__(self, shard: LocalShard) -> None:
        self.table = shard.table
        self._shard = shard
        drawn = np.random.default_rng(0).integers(shard.rectangle.rows, size=_TRIES)
        self._rows, self._others = drawn[:_ROWS].copy(), drawn[_ROWS:]
        self._content = np.empty((0, 0), np.uint8)
        self.forgotten = True

    def remember(self) -> None:
        """Compare with the rows' present content from now on."""
        self._content = self._memory()[self._rows]
        self.forgotten = False

    def forget(self) -> None:
        """Compare nothing until the rows' content is remembered again."""
        self.forgotten = True

    def changed(self, live: torch.Tensor) -> bool:
        """Return whether a row changed since the last look that isn't marked; remember all.

        Args:
            live: the shard's marks since then, ``(rows,)`` uint8.
        """
        if self.forgotten:
            self.remember()
            return False
        memory = self._memory()
        now = memory[self._rows]
        others = (now != self._content).any(axis=1).nonzero()[0]
        if not len(others):
            return False
        marks = live.numpy()[self._rows[others]]
        # In place, and drawn ahead: training waits, with all of this out of the processor's cache.
        more = len(self._others) - len(others)
        if more < 0:
            self._rows, now = np.delete(self._rows, others[more:]), np.delete(now, others[more:], 0)
            others = others[:more]
        self._rows[others], self._others = np.split(self._others, [len(others)])
        now[others] = memory[self._rows[others]]
        self._content = now
        return not (marks & int(Consumer.LAST)).all()

    def _memory(self) -> npt.NDArray[np.uint8]:
        """Return the rows' bytes, a view ``(rows, row_bytes)``: NaN equals itself there."""
        return self._shard.weight.view(torch.uint8).numpy()
