"""Keep marks in memory that outlives the process: for each row the interval of its last change.

An interval lies between two cuts. A row counts as modified since a checkpoint if it was last
changed in an interval after that checkpoint's cut. So a cut takes nothing away: as long as its
checkpoint is not known to be committed, its rows count as they did before. One byte per row is
enough, since numbers are given out again from time to time (``IntervalClock.full``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_MOST = 255
FIRST = 2
"""The interval at a start: 0 are rows as the baseline has them, 1 as the last checkpoint has."""


@dataclass
class IntervalClock:
    """The number of the present interval, for all shards of a rank."""

    interval: int = FIRST

    @property
    def full(self) -> bool:
        """Return whether no further interval has a number."""
        return self.interval >= _MOST


class KeptMarks:
    """The intervals in which the rows of one shard were last changed.

    Args:
        memory: ``(rows + 1,)`` uint8; the last byte takes the marks of pruned lookups.
        clock: tells the present interval.
    """

    def __init__(self, memory: torch.Tensor, clock: IntervalClock) -> None:
        self.memory = memory
        self._clock = clock

    @property
    def rows(self) -> torch.Tensor:
        """Return the interval of each row: ``(rows,)`` uint8."""
        return self.memory[:-1]

    def mark(self, ids: torch.Tensor) -> None:
        """Note that rows change: shard-local ids as ``Marks.mark`` fills them in."""
        self.memory.index_fill_(0, ids, self._clock.interval)

    def mark_all(self) -> None:
        """Note that every row changes."""
        self.memory.fill_(self._clock.interval)

    def add(self, rows: torch.Tensor) -> None:
        """Note that the rows of a mask change: ``(rows,)`` bool."""
        self.rows.masked_fill_(rows, self._clock.interval)

    def start(self, since_baseline: torch.Tensor, since_last: torch.Tensor) -> None:
        """Begin with what is marked, masks ``(rows,)`` bool; the clock must be at ``FIRST``."""
        self.memory.zero_()
        self.rows.masked_fill_(since_baseline, 1)
        self.rows.masked_fill_(since_last, FIRST)

    def renumber(self, baseline: int, last: int) -> None:
        """Give the numbers of all intervals but the present one back.

        Args:
            baseline, last: the intervals of the cuts of the baseline and the last checkpoint.
        """
        self.start(self.rows > baseline, self.rows > last)
