"""Generate the rows that training looks up in each interval between two checkpoints.

The content of a differential checkpoint depends on the trace alone, so the trace follows a known
law, not a dataset. Every row has a rate; an interval looks it up with the probability ``1 -
exp(-rate)``, independently of all other intervals. So all intervals are alike, from any baseline.

``skewed``: rates follow Zipf's law, ``rate = RATE * u ** (-1 / GROWTH)`` for a row at quantile u of
popularity. The rows modified within i intervals are then those that Check-N-Run reports of
production (figures 5 and 6): ``S_i = 0.26 * i ** 0.33`` of all, within 5 % for the first twelve; in
every single interval S_1 of them. ``independent``: all rows have the same rate, and ``S_i = 1 -
0.74 ** i``.

``batches`` turns an interval's rows into training steps. Every sample has a bag of the same number
of ids of a table, at least one; a step's bags are its share of the interval's shuffled ids, which
start over when they run out. So an interval's steps look up exactly its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, INT_FEATURE_COUNT
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

FIRST = 0.26  # of all rows, in one interval
GROWTH = 0.33
RATE = 0.0074
"""Rate of the least popular row: brings the S_i of a truncated Zipf's law closest to the power law
over a dozen intervals.
"""

Kind = Literal["skewed", "independent"]


def promised(kind: Kind, intervals: int) -> float:
    """Return the share of all rows that is modified within ``intervals`` intervals."""
    if kind == "skewed":
        return float(FIRST * intervals**GROWTH)
    return float(1 - (1 - FIRST) ** intervals)


class Trace:
    """The rows looked up in each interval.

    Args:
        tables: rows of each table.
        kind: ``skewed`` or ``independent``, as described above.
    """

    def __init__(self, tables: Sequence[int], kind: Kind = "skewed", seed: int = 0) -> None:
        self.tables = tuple(tables)
        self._seed = seed
        self._ends = np.cumsum(self.tables)
        total = sum(self.tables)
        if kind == "skewed":
            # Popular rows lie all over a table.
            quantile = 1 - np.random.default_rng([seed, 0]).random(total, dtype=np.float32)
            rate = RATE * quantile ** np.float32(-1 / GROWTH)
        else:
            rate = np.full(total, -np.log1p(-FIRST), dtype=np.float32)
        self._chance = -np.expm1(-rate)

    def rows(self, interval: int) -> list[np.ndarray]:
        """Return, by table, the sorted ids (int64) that an interval, counted from 0, looks up."""
        random = np.random.default_rng([self._seed, 1 + interval])
        drawn = random.random(len(self._chance), dtype=np.float32) < self._chance
        return [np.flatnonzero(part) for part in np.split(drawn, self._ends[:-1])]

    def fractions(self, intervals: int, start: int = 0) -> list[float]:
        """Return S_1 … of ``intervals`` intervals, as found, from a baseline before interval
        ``start``.
        """
        seen = [np.zeros(rows, dtype=bool) for rows in self.tables]
        found = []
        for interval in range(start, start + intervals):
            for table, rows in zip(seen, self.rows(interval), strict=True):
                table[rows] = True
            found.append(sum(int(table.sum()) for table in seen) / sum(self.tables))
        return found

    def batches(
        self, interval: int, steps: int, samples: int, rank: int = 0, ranks: int = 1
    ) -> list[Batch]:
        """Return one rank's part of an interval's steps.

        Args:
            samples: of a step, over all ranks.
        """
        random = np.random.default_rng([self._seed, 1 + interval, 1])
        own = slice(samples * rank // ranks, samples * (rank + 1) // ranks)
        count = own.stop - own.start
        bags = []
        for rows in self.rows(interval):
            size = -(-len(rows) // (steps * samples))
            ids = np.resize(random.permutation(rows), (steps, samples, size))
            bags.append(ids[:, own])
        lengths = torch.tensor([bag.shape[2] for bag in bags]).repeat_interleave(count)
        made = []
        for step in range(steps):
            values = np.concatenate([bag[step].ravel() for bag in bags])
            sparse = KeyedJaggedTensor(
                list(DEFAULT_CAT_NAMES), torch.from_numpy(values), lengths=lengths.to(torch.int32)
            )
            dense = random.standard_normal((samples, INT_FEATURE_COUNT), dtype=np.float32)[own]
            labels = random.integers(2, size=samples)[own].astype(np.float32)
            made.append(Batch(torch.from_numpy(dense), sparse, torch.from_numpy(labels)))
        return made
