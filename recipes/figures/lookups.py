"""Find the rows that a stream of samples looks up, and so modifies, between any two moments.

A row that a sample looks up is updated by its step, so that the modified rows follow from the
samples alone, without training a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from recipes.dlrm_criteo.samples import Dataset
from torchrec_checknrun.format import row_ids

_CHUNK_ROWS = 1 << 16
"""Rows whose ids are encoded together; the number hardly changes their size."""


@dataclass(frozen=True)
class Window:
    """The modified rows of one table from some slot on.

    Attributes:
        count: rows.
        ids_bytes: of the row ids in a checkpoint.
    """

    count: int
    ids_bytes: int


class Lookups:
    """The slot of each row's last lookup; slots are equal parts of the stream.

    From these follow the modified rows of any window that ends now: the rows looked up last within
    the window.

    Args:
        num_embeddings: rows of each table.
    """

    def __init__(self, num_embeddings: Sequence[int]) -> None:
        self.num_embeddings = tuple(int(n) for n in num_embeddings)
        ends = np.cumsum(self.num_embeddings)
        self._starts = ends - np.array(self.num_embeddings)
        self._last = np.full(int(ends[-1]), -1, np.int32)
        self._windows: dict[int, list[Window]] = {}
        self.slots = 0
        """Slots that have ended."""

    @property
    def rows(self) -> int:
        """Return the rows of all tables."""
        return len(self._last)

    def add(self, sparse: np.ndarray) -> None:
        """Add samples ``(n, tables)`` to the current slot: a row of each table."""
        self._last[sparse + self._starts] = self.slots

    def end_slot(self) -> None:
        """End a slot: the next samples belong to the next slot."""
        self.slots += 1
        self._windows = {}

    @property
    def modified_fraction(self) -> float:
        """Return the part of all rows that was ever looked up."""
        return float(np.mean(self._last >= 0))

    def fractions(self) -> np.ndarray:
        """Return ``(slots,)``: the part of all rows modified from each slot on until now."""
        counts = np.bincount(self._last + 1, minlength=self.slots + 1)[1:]
        fractions: np.ndarray = counts[::-1].cumsum()[::-1] / self.rows
        return fractions

    def since(self, slot: int) -> list[Window]:
        """Return, by table, the rows modified from a slot on until now."""
        if slot not in self._windows:
            tables = np.split(self._last, self._starts[1:])
            self._windows[slot] = [_window(np.flatnonzero(last >= slot)) for last in tables]
        return self._windows[slot]


def _window(ids: np.ndarray) -> Window:
    chunks = (ids[start : start + _CHUNK_ROWS] for start in range(0, len(ids), _CHUNK_ROWS))
    return Window(len(ids), sum(len(row_ids.encode(chunk)[1]) for chunk in chunks))


def read_slots(
    dataset: Dataset, batch: int, batches: int, limit: int
) -> Iterator[list[np.ndarray]]:
    """Yield the lookups ``(batch, tables)`` of each whole slot of ``batches`` batches, at most
    ``limit`` batches in all.
    """
    stream = islice((samples.sparse for samples in dataset.read(0, batch, 0, 1)), limit)
    while len(slot := list(islice(stream, batches))) == batches:
        yield slot


def batches_until(
    dataset: Dataset, num_embeddings: Sequence[int], batch: int, fraction: float
) -> int:
    """Count the batches from the start until a part of all rows was modified.

    Raises:
        ValueError: there are too few samples.
    """
    lookups = Lookups(num_embeddings)
    reached, number = 0.0, 0
    for number, samples in enumerate(dataset.read(0, batch, 0, 1), 1):
        lookups.add(samples.sparse)
        # Few rows are new in a batch: no need to count after each.
        if number % max(1, number // 16) == 0:
            reached = lookups.modified_fraction
            if reached >= fraction:
                return number
    raise ValueError(
        f"after all {number * batch} samples {reached:.1%} of the rows are modified, not "
        f"{fraction:.0%}: give more samples, a smaller --scale or --fraction, or an --interval"
    )
