"""Score rows by importance, and find one constant for all tables so that the widths fit a budget.

The constant that ``ImportanceWeighted`` adds to every row's score must be the same in all chunks of
a checkpoint: a budget per chunk would give a table that hardly matters as many bits as one that
decides. So each rank surveys the rows that it is about to write (a sample of each shard), rank 0
adds the surveys up, and the constant that fits the budget holds for all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

ROW_WIDTHS = (2, 4, 8)
"""Bits that a row may get."""
BORDERS = (3.0, 6.0)
"""Scores up to which a row gets the first and the second width."""
SAMPLE_ROWS = 4096
"""Rows of a shard that a survey looks at."""
_GATHERED_ROWS = 4096
_RANGE, _PER_BIT = 64, 16
_BINS = 2 * _RANGE * _PER_BIT
_CENTRES = (np.arange(_BINS) + 0.5) / _PER_BIT - _RANGE
_NORMAL_BITS = 0.5 * float(np.log2(2 * np.pi * np.e))
"""Entropy of a normal distribution of width 1."""


def importance(rows: torch.Tensor, ids: torch.Tensor, accumulator: torch.Tensor) -> torch.Tensor:
    """Score ``rows[ids]`` by ``log2(G) / 2 + log2(rms(row))``.

    Args:
        rows: ``(m, dim)`` floating point.
        ids: ``(n,)`` int64, on the rows' device.
        accumulator: ``(n,)``, G: row-wise Adagrad's sum of squared gradients of these rows.

    Returns:
        ``(n,)`` float32 on the CPU; -1e6 for a row that was never trained or is not finite.
    """
    squares = [
        rows.index_select(0, part).to(torch.float32).square().mean(dim=1).cpu()
        for part in ids.split(_GATHERED_ROWS)
    ]
    mean_square = torch.cat(squares) if squares else torch.empty(0, device="cpu")
    trained = accumulator.detach().to(torch.float32).cpu()
    score = 0.5 * (torch.log2(trained) + torch.log2(mean_square))
    return score.nan_to_num(nan=-1e6, posinf=-1e6, neginf=-1e6)


@dataclass
class ImportanceSurvey:
    """Numbers of values by the score of their row.

    Attributes:
        scores: histogram of scores before the constant is added, in steps of 1/16.
        states: histogram of ``log2(G) / 2``, G the sum of row-wise Adagrad, likewise.
        untrained: values in rows without a finite score; these get the least width.
    """

    scores: np.ndarray = field(default_factory=lambda: np.zeros(_BINS))
    states: np.ndarray = field(default_factory=lambda: np.zeros(_BINS))
    untrained: float = 0.0

    def add(self, rows: torch.Tensor, accumulator: torch.Tensor, weight: float = 1.0) -> None:
        """Count rows ``(n, dim)`` with their sums ``(n,)``, each as ``weight`` rows."""
        score = importance(rows, torch.arange(len(rows), device=rows.device), accumulator)
        trained = score > -_RANGE
        state = 0.5 * torch.log2(accumulator.detach().to(torch.float32).cpu()[trained])
        values = weight * rows.shape[1]
        self.scores += values * _histogram(score[trained])
        self.states += values * _histogram(state)
        self.untrained += values * float((~trained).sum())

    def merge(self, other: ImportanceSurvey) -> None:
        """Add another survey's numbers."""
        self.scores += other.scores
        self.states += other.states
        self.untrained += other.untrained

    def constant_for_budget(self, mean_bits: float) -> float:
        """Find the largest constant at which the mean width is at most ``mean_bits``."""
        total = float(self.scores.sum()) + self.untrained
        low, high = -2.0 * _RANGE, 2.0 * _RANGE
        for _ in range(40):
            middle = (low + high) / 2
            widths = np.asarray(ROW_WIDTHS)[np.searchsorted(BORDERS, _CENTRES + middle)]
            bits = float(self.scores @ widths) + ROW_WIDTHS[0] * self.untrained
            low, high = (middle, high) if bits <= mean_bits * total else (low, middle)
        return low

    def step_for_budget(self, mean_bits: float) -> float:
        """Find the logarithm, to base 2, of the step at which trained rows take ``mean_bits`` a
        value on average, entropy-coded. A row that scores ``s`` takes about ``log2(1 + 2 ** (s -
        step + log2(2 * pi * e) / 2))`` bits a value, as normally distributed values do.
        """
        low, high = -2.0 * _RANGE, 2.0 * _RANGE
        for _ in range(40):
            middle = (low + high) / 2
            bits = np.log2(1 + np.exp2(_CENTRES - middle + _NORMAL_BITS))
            fits = float(self.scores @ bits) <= mean_bits * float(self.scores.sum())
            low, high = (low, middle) if fits else (middle, high)
        return high

    def constant_for_offset(self, offset: float) -> float:
        """Return the constant that scores a row with the median sum by ``offset + log2(rms)``."""
        return offset - _median(self.states)


def _histogram(values: torch.Tensor) -> np.ndarray:
    bins = ((values + _RANGE) * _PER_BIT).to(torch.int64).clamp_(0, _BINS - 1)
    return torch.bincount(bins, minlength=_BINS).numpy().astype(np.float64)


def _median(histogram: np.ndarray) -> float:
    if not histogram.any():
        return 0.0
    return float(_CENTRES[np.searchsorted(histogram.cumsum(), histogram.sum() / 2)])
