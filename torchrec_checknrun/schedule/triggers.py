"""Define when a checkpoint is begun: every so many steps or seconds, at the end, at a preemption.

A trigger is any object with ``by_step`` and ``due``, as small as the classes here; a ``Schedule``
asks every trigger after every training step.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from numbers import Real
from typing import Protocol, TypeGuard


@dataclass(frozen=True)
class Moment:
    """A moment after a training step, at which a trigger is asked.

    Attributes:
        step: optimizer steps done.
        seconds: seconds since the last checkpoint was begun, or since the schedule was made.
    """

    step: int
    seconds: float


class Trigger(Protocol):
    """A rule for when a checkpoint is due.

    Attributes:
        by_step: whether the answer follows from ``Moment.step`` alone. If so, every rank asks at
            every step and saves at exactly the named steps. If not (the trigger looks at a clock, a
            file, a queue), only rank 0 asks; the ranks then save together, a few steps later.
    """

    @property
    def by_step(self) -> bool: ...

    def due(self, now: Moment) -> bool:
        """Tell whether to begin a checkpoint; one True is remembered until a checkpoint begins,
        unless the trigger is ``by_step``.
        """


@dataclass(frozen=True)
class EverySteps:
    """A checkpoint at every ``steps``-th step, counted over all attempts.

    Raises:
        ValueError: ``steps`` is no whole number, or below 1.
    """

    steps: int
    by_step = True

    def __post_init__(self) -> None:
        steps: object = self.steps
        if not _is_number(steps) or steps < 1 or steps % 1:
            raise ValueError(
                f"EverySteps needs at least 1 step, a whole number as 1000, not {self.steps!r}"
            )

    def due(self, now: Moment) -> bool:
        return now.step % self.steps == 0


@dataclass(frozen=True)
class EverySeconds:
    """A checkpoint once the last one was begun ``seconds`` ago, by rank 0's clock.

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
    """A checkpoint when the checkpointer is closed, unless the last step is saved already."""

    by_step = True

    def due(self, now: Moment) -> bool:
        return False  # no step is known to be the last one


@dataclass(frozen=True)
class OnSigterm:
    """A last checkpoint when any rank gets SIGTERM, before SIGTERM ends the process.

    See ``Preemption`` for how the ranks tell a preemption from a dead peer.

    Attributes:
        grace_seconds: seconds from the signal to the exit; a checkpoint that is not durable by then
            is given up. Choose less than the sender waits before SIGKILL: torchrun and Kubernetes
            wait 30 seconds.

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
        return False  # the ranks agree on the step once the signal has come


def _is_duration(seconds: object) -> bool:
    return _is_number(seconds) and 0 < seconds <= sys.float_info.max


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)
