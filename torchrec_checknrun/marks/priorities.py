"""Choose the rows of a table that matter most, to save them more often than the others.

CPR's priorities (MLSys'21): a rank whose memory is lost goes back to rows of different
ages, and the fewer of the well-trained rows are old, the less the model loses. Each priority takes
at most ``capacity`` rows at a time, those with the highest score since it took them last:

- ``MostUpdated`` (MFU): how often a row was updated; 4 bytes a row;
- ``SubSampled`` (SSU): whether a row is in a list of ``capacity`` that every second update enters,
  and leaves at random; a byte a row;
- ``LargestChange`` (SCAR): how far a row's values have moved; a copy of all rows;
- ``LargestGrowth``: how much a row's Adagrad sum has grown; 4 bytes a row, and nothing in a step.

Rows that were not updated are never taken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Priority(ABC):
    """A choice among the rows of one table's shard.

    Args:
        capacity: most rows to take at a time.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a priority takes at least one row at a time, not {capacity}")
        self.capacity = capacity

    @abstractmethod
    def note(self, rows: torch.Tensor) -> None:
        """Note the rows that a step has updated, each as often as it was looked up."""

    @abstractmethod
    def take(self) -> torch.Tensor:
        """Return the rows to save now, in no order, and count them as saved."""

    def _highest(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the rows with the highest scores, of those that are not zero."""
        top = scores.topk(min(self.capacity, len(scores)), sorted=False)
        # A NaN sorts above all numbers: a row that diverged is saved.
        return top.indices[~(top.values <= 0)]


class MostUpdated(Priority):
    """The rows that were updated most often since they were taken (CPR-MFU)."""

    def __init__(self, capacity: int, weight: torch.Tensor) -> None:
        super().__init__(capacity)
        self._updates = torch.zeros(len(weight), dtype=torch.int32, device=weight.device)

    def note(self, rows: torch.Tensor) -> None:
        self._updates.index_add_(0, rows, torch.ones_like(rows, dtype=torch.int32))

    def take(self) -> torch.Tensor:
        rows = self._highest(self._updates)
        self._updates[rows] = 0
        return rows


class SubSampled(Priority):
    """The rows of a list that every second update enters, and leaves at random (CPR-SSU)."""

    PERIOD = 2
    """Updates of which one is noted."""

    def __init__(self, capacity: int, weight: torch.Tensor, seed: int = 0) -> None:
        super().__init__(capacity)
        self._listed = torch.empty(0, dtype=torch.int64, device=weight.device)
        self._is_listed = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
        self._seen = 0
        self._random = torch.Generator(device=weight.device).manual_seed(seed)

    def note(self, rows: torch.Tensor) -> None:
        sampled = rows[-self._seen % self.PERIOD :: self.PERIOD].unique()
        self._seen += len(rows)
        entering = sampled[~self._is_listed[sampled]]
        entering = self._shuffled(entering)[: self.capacity]
        leaving = max(0, len(self._listed) + len(entering) - self.capacity)
        listed = self._shuffled(self._listed)
        self._is_listed[listed[:leaving]] = False
        self._is_listed[entering] = True
        self._listed = torch.cat([listed[leaving:], entering])

    def take(self) -> torch.Tensor:
        rows, self._listed = self._listed, self._listed[:0]
        self._is_listed[rows] = False
        return rows

    def _shuffled(self, rows: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(len(rows), generator=self._random, device=rows.device)
        return rows[order]


class LargestChange(Priority):
    """The rows whose values are farthest from those that were taken (SCAR)."""

    def __init__(self, capacity: int, weight: torch.Tensor) -> None:
        super().__init__(capacity)
        self._weight, self._saved = weight.detach(), weight.detach().clone()

    def note(self, rows: torch.Tensor) -> None:
        """Do nothing: the rows tell it themselves."""

    def take(self) -> torch.Tensor:
        rows = self._highest((self._weight - self._saved).square_().sum(1))
        self._saved[rows] = self._weight[rows]
        return rows


class LargestGrowth(Priority):
    """The rows whose row-wise Adagrad sum has grown most since they were taken.

    Args:
        sums: the optimizer's own, ``(rows,)`` or ``(rows, 1)``.
    """

    def __init__(self, capacity: int, sums: torch.Tensor) -> None:
        super().__init__(capacity)
        if sums.numel() != len(sums):
            raise ValueError(
                f"sums of shape {tuple(sums.shape)} are not one number a row: take the state of "
                "row-wise Adagrad"
            )
        self._sums, self._saved = sums.detach().view(-1), sums.detach().flatten().clone()

    def note(self, rows: torch.Tensor) -> None:
        """Do nothing: the rows tell it themselves."""

    def take(self) -> torch.Tensor:
        rows = self._highest(self._sums - self._saved)
        self._saved[rows] = self._sums[rows]
        return rows
