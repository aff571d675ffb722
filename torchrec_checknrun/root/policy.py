"""When a checkpoint holds all rows and when only modified ones (Check-N-Run, section 5.1).

A policy is any object with ``decide``: it sees what was committed since the last full checkpoint
and says what the next one should be. It runs on rank 0 only; the other ranks hear the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torchrec_checknrun.format.manifest import Manifest


class Decision(Enum):
    """What the next checkpoint holds."""

    FULL = "all rows"
    SINCE_BASELINE = "rows modified since the last full checkpoint"
    SINCE_LAST = "rows modified since the last checkpoint"


class Policy(Protocol):
    """Decides about the next checkpoint."""

    def decide(self, history: Sequence[Manifest]) -> Decision:
        """What to save now.

        Args:
            history: the last full checkpoint and what was committed upon it, oldest first; never
                empty (a run's first checkpoint is full without asking).
        """


@dataclass(frozen=True)
class Full:
    """Every checkpoint holds all rows: the fastest restore, the most bytes."""

    def decide(self, history: Sequence[Manifest]) -> Decision:
        return Decision.FULL


@dataclass(frozen=True)
class OneShot:
    """All rows modified since the one full checkpoint: a restore reads two, whatever their number;
    checkpoints grow as training goes on.
    """

    def decide(self, history: Sequence[Manifest]) -> Decision:
        return Decision.SINCE_BASELINE


@dataclass(frozen=True)
class Consecutive:
    """Only rows modified since the last checkpoint: the fewest bytes; a restore reads them all."""

    def decide(self, history: Sequence[Manifest]) -> Decision:
        return Decision.SINCE_LAST


@dataclass(frozen=True)
class Intermittent:
    """Rows modified since the last full checkpoint, until writing all of them anew pays.

    After differential checkpoints of the sizes ``S_1 … S_i``, as fractions of a full one, a new
    full one and then growth as it was cost ``1 + ΣS``; going on costs at least ``S_i`` each time,
    so ``(i + 1) · S_i`` in as many. The next one is full as soon as that is not more
    (Check-N-Run, section 5.1).
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
"""By the names that configs use."""
