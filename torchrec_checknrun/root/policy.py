"""Policies: decide whether a checkpoint holds all rows or modified ones (Check-N-Run, section 5.1).

A policy is any object with a method ``decide``, which takes the checkpoints committed since the
last full one. A policy runs on rank 0 only; the other ranks receive the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torchrec_checknrun.format.manifest import Manifest


class Decision(Enum):
    """The content of the next checkpoint."""

    FULL = "all rows"
    SINCE_BASELINE = "rows modified since the last full checkpoint"
    SINCE_LAST = "rows modified since the last checkpoint"


class Policy(Protocol):
    """A rule for the content of the next checkpoint."""

    def decide(self, history: Sequence[Manifest]) -> Decision:
        """Decide what to save now.

        Args:
            history: the last full checkpoint and those based on it, oldest first; never empty (a
                run's first checkpoint is full without a decision).
        """


@dataclass(frozen=True)
class Full:
    """A policy of full checkpoints only: the fastest restore, the most bytes."""

    def decide(self, history: Sequence[Manifest]) -> Decision:
        return Decision.FULL


@dataclass(frozen=True)
class OneShot:
    """A policy of one full checkpoint, then rows modified since: a restore reads at most two
    checkpoints, and checkpoints grow during training.
    """

    def decide(self, history: Sequence[Manifest]) -> Decision:
        return Decision.SINCE_BASELINE


@dataclass(frozen=True)
class Consecutive:
    """A policy of rows modified since the last checkpoint: the fewest bytes, the longest chains."""

    def decide(self, history: Sequence[Manifest]) -> Decision:
        return Decision.SINCE_LAST


@dataclass(frozen=True)
class Intermittent:
    """A policy of rows modified since the last full checkpoint, until a new full one is cheaper.

    After differential checkpoints of sizes ``S_1 … S_i``, as fractions of a full one, a new full
    checkpoint followed by the same growth costs ``1 + ΣS``. As many further differential ones cost
    at least ``S_i`` each, together ``(i + 1) · S_i``. The next checkpoint is full once the former
    is not more (Check-N-Run, section 5.1).
    """

    def decide(self, history: Sequence[Manifest]) -> Decision:
        baseline, *later = history
        if not later:
            return Decision.SINCE_BASELINE
        sizes = [*later[-1].earlier_fractions, later[-1].fraction_of(baseline)]
        full = 1 + sum(sizes) <= (len(sizes) + 1) * sizes[-1]
        return Decision.FULL if full else Decision.SINCE_BASELINE


POLICIES: Mapping[str, Callable[[], Policy]] = {
    "full": Full,
    "one_shot": OneShot,
    "consecutive": Consecutive,
    "intermittent": Intermittent,
}
"""Policies by their names in configs."""
