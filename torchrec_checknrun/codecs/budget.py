"""One constant for the widths of all tables' rows, so that bits go where they matter most.

What `codecs.importance` adds to every row's bits must be the same in all chunks of a checkpoint:
a budget for each chunk would give the rows of a table that hardly matters as many bits as those of
one that decides. So each rank counts how important the rows are that it is about to write (a sample
of each shard), rank 0 adds the counts up, and what fits the budget is the constant for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from torchrec_checknrun.codecs.importance import BORDERS, WIDTHS, ImportanceWeighted, importance
from torchrec_checknrun.codecs.quantization import TableEncoding

SAMPLE_ROWS = 4096
_RANGE, _PER_BIT = 64, 16
_BINS = 2 * _RANGE * _PER_BIT
_CENTRES = (np.arange(_BINS) + 0.5) / _PER_BIT - _RANGE

Key = tuple[float | None, float | None]
"""Which codec: its offset and budget. Tables may be given different ones."""


@dataclass
class Survey:
    """How many values are in rows of what importance.

    Attributes:
        scores: histogram of a row's bits before the constant is added, in 1/16 bit.
        states: histogram of ``log2(G) / 2``, G the sum of row-wise Adagrad, likewise.
        untrained: values in rows without a finite importance; these get the least width.
    """

    scores: np.ndarray = field(default_factory=lambda: np.zeros(_BINS))
    states: np.ndarray = field(default_factory=lambda: np.zeros(_BINS))
    untrained: float = 0.0

    def add(self, rows: torch.Tensor, accumulator: torch.Tensor, weight: float = 1.0) -> None:
        """Counts rows ``(n, dim)`` and their sums ``(n,)``, each as so many rows."""
        score = importance(rows, torch.arange(len(rows), device=rows.device), accumulator)
        trained = score > -_RANGE
        state = 0.5 * torch.log2(accumulator.detach().to(torch.float32).cpu()[trained])
        values = weight * rows.shape[1]
        self.scores += values * _histogram(score[trained])
        self.states += values * _histogram(state)
        self.untrained += values * float((~trained).sum())

    def merge(self, other: Survey) -> None:
        self.scores += other.scores
        self.states += other.states
        self.untrained += other.untrained

    def constant(self, codec: ImportanceWeighted) -> float:
        """What all rows' scores get on top: the most that fits the budget, or the codec's offset
        to a row with the median sum.
        """
        if codec.mean_bits is None:
            assert codec.offset is not None
            return codec.offset - _median(self.states)
        total = float(self.scores.sum()) + self.untrained
        low, high = -2.0 * _RANGE, 2.0 * _RANGE
        for _ in range(40):
            middle = (low + high) / 2
            widths = np.asarray(WIDTHS)[np.searchsorted(BORDERS, _CENTRES + middle)]
            bits = float(self.scores @ widths) + WIDTHS[0] * self.untrained
            low, high = (middle, high) if bits <= codec.mean_bits * total else (low, middle)
        return low


def constants(surveys: Iterable[Mapping[Key, Survey]]) -> dict[Key, float]:
    """Of all ranks' surveys."""
    sums: dict[Key, Survey] = {}
    for found in surveys:
        for key, part in found.items():
            sums.setdefault(key, Survey()).merge(part)
    return {key: whole.constant(ImportanceWeighted(*key)) for key, whole in sums.items()}


def with_constant(encoding: TableEncoding, found: Mapping[Key, float]) -> TableEncoding:
    """The encoding with its codec's constant, if it has one."""
    codec = encoding.codec
    if isinstance(codec, ImportanceWeighted) and key_of(codec) in found:
        return replace(encoding, codec=codec.at(found[key_of(codec)]))
    return encoding


def key_of(codec: ImportanceWeighted) -> Key:
    """Name a codec among those that surveys are made for."""
    return codec.offset, codec.mean_bits


def _histogram(values: torch.Tensor) -> np.ndarray:
    bins = ((values + _RANGE) * _PER_BIT).to(torch.int64).clamp_(0, _BINS - 1)
    return torch.bincount(bins, minlength=_BINS).numpy().astype(np.float64)


def _median(histogram: np.ndarray) -> float:
    if not histogram.any():
        return 0.0
    return float(_CENTRES[np.searchsorted(histogram.cumsum(), histogram.sum() / 2)])
