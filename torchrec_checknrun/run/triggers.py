"""When a checkpoint is begun: every so many steps or seconds, at the end, before a preemption.

A trigger is any object with ``by_step`` and ``due``, as small as those here; a ``Schedule`` asks it
after every training step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Protocol


@dataclass(frozen=True)
class Moment:
    """What a trigger is asked about.

    Attributes:
        step: optimizer steps done.
        seconds: since the last checkpoint was begun, or since the schedule was made.
    """

    step: int
    seconds: float


class Trigger(Protocol):
    """Says when a checkpoint is due.

    Attributes:
        by_step: whether the answer follows from ``Moment.step`` alone. If so, every rank asks at
            every step and saves at just the steps that are named. If not (it looks at a clock, a
            file, a queue), only rank 0 asks; the ranks then save together, a few steps later.
    """

    @property
    def by_step(self) -> bool: ...

    def due(self, now: Moment) -> bool:
        """Whether a checkpoint should be begun. One yes is enough: it is remembered until then."""


@dataclass(frozen=True)
class EverySteps:
    """At every ``steps``-th step, counted over all attempts.

    Raises:
        ValueError: ``steps`` is no whole number, or below 1.
    """

    steps: int
    by_step = True

    def __post_init__(self) -> None:
        steps: object = self.steps
        if not isinstance(steps, Real) or steps < 1 or steps % 1:
            raise ValueError(f"EverySteps needs at least 1 step, in whole ones, not {self.steps!r}")

    def due(self, now: Moment) -> bool:
        return now.step % self.steps == 0


@dataclass(frozen=True)
class EverySeconds:
    """As soon as the last checkpoint was begun ``seconds`` ago, by rank 0's clock.

    Raises:
        ValueError: ``seconds`` is no positive number.
    """

    seconds: float
    by_step = False

    def __post_init__(self) -> None:
        if not _is_duration(self.seconds):
            raise ValueError(f"EverySeconds needs a positive number, as 600, not {self.seconds!r}")

    def due(self, now: Moment) -> bool:
        return now.seconds >= self.seconds


@dataclass(frozen=True)
class AtEnd:
    """When the checkpointer is closed, unless the last step's checkpoint exists already."""

    by_step = True

    def due(self, now: Moment) -> bool:
        return False  # no step knows that it is the last one


@dataclass(frozen=True)
class OnSigterm:
    """When any rank gets SIGTERM: then the process ends as SIGTERM ends it. See ``Preemption``.

    Attributes:
        grace_seconds: from the signal on; a checkpoint that is not durable by then is given up, and
            the process exits. Choose less than whoever sends the signal waits before SIGKILL:
            torchrun and Kubernetes wait 30 seconds.

    Raises:
        ValueError: ``grace_seconds`` is no positive number.
    """

    grace_seconds: float = 25.0
    by_step = True

    def __post_init__(self) -> None:
        if not _is_duration(self.grace_seconds):
            raise ValueError(
                f"OnSigterm needs a positive number, as 25, not {self.grace_seconds!r}"
            )

    def due(self, now: Moment) -> bool:
        return False  # the ranks agree on the step when the signal has come


def _is_duration(seconds: object) -> bool:
    return isinstance(seconds, Real) and 0 < float(seconds) < math.inf
