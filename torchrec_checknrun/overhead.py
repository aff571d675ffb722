"""Say what failures cost a job, by kind of recovery and by interval (CPR, MLSys'21).

First-order arithmetic: parts of the time that training takes without saves and failures. With ``S``
the time that training waits for a save, ``D`` that a checkpoint takes to count, ``L`` to load all
shards, ``R`` to start the processes again, ``F`` between failures of the job, ``N`` ranks that hold
tables and ``I`` from one save to the next:

- full recovery, all ranks go back: ``S/I + (I/2 + D + L + R) / F``, least at ``I = √(2·S·F)``;
- partial recovery, the lost rank alone goes back: ``S/I + (L/N + R) / F``. Its rows are stale: the
  portion of lost samples (PLS) is ``(I/2 + D) / (N·F)``; a budget allows ``I = 2·(PLS·N·F − D)``;
- images: tables in memory that outlives a process. A share ``p`` of the failures ends processes
  only and costs ``R``; the others, one in ``F/(1 − p)``, cost full or partial recovery.

The paper has ``D = 0``, and parameter servers of which one fails alone: partial recovery without
images is for such. Where ``k`` ranks are lost together, ``N/k`` stands for ``N``. Without torch, so
that ``checknrun plan`` starts at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from reprlib import repr as shown

_HOUR = 3600.0
MOST = 1e18
"""Bound of any number, so that all results stay finite."""

FIRST_ORDER = 0.1
"""Overhead up to which the arithmetic holds within 8 %; of faster failures it is a lower bound."""

JOURNAL = 0.025
"""Part of the training time that images take: 2.4 to 2.5 %, by ``recipes/results/images.json``."""


class Recovery(Enum):
    """The state that a job goes back to after a failure."""

    FULL = "full"
    """All ranks go back to the newest checkpoint, at the interval that costs the least."""
    NAIVE = "naive partial"
    """Only the lost ranks go back, at the interval of full recovery."""
    PARTIAL = "partial"
    """Only the lost ranks go back, at the longest interval within the budget of PLS."""
    IMAGES_FULL = "images, else full"
    """Nobody goes back while memory is there, else all ranks do."""
    IMAGES_PARTIAL = "images, else partial"
    """Nobody goes back while memory is there, else only the lost ranks do."""

    @property
    def in_this_release(self) -> bool:
        """Return whether a job can recover so today; the other kinds are arithmetic."""
        return self in (Recovery.FULL, Recovery.IMAGES_FULL, Recovery.IMAGES_PARTIAL)

    @property
    def keeps_images(self) -> bool:
        """Return whether a failure that only ends processes loses nothing."""
        return self in (Recovery.IMAGES_FULL, Recovery.IMAGES_PARTIAL)

    @property
    def partial(self) -> bool:
        """Return whether lost ranks alone go back, to stale rows."""
        return self in (Recovery.NAIVE, Recovery.PARTIAL, Recovery.IMAGES_PARTIAL)


@dataclass(frozen=True)
class FailingJob:
    """A job that fails now and then, with what its saves and recoveries take.

    Args:
        job_hours: time the job trains, without saves and failures.
        mtbf_hours: mean time between failures of the whole job, of any of its machines.
        ranks: number of ranks that hold tables.
        save_seconds: how long training waits for a save: a report's ``stall_seconds``.
        load_seconds: how long all ranks together take to load a checkpoint.
        restart_seconds: from a failure until processes run again, with their model built.
        durable_seconds: from a save's begin until its checkpoint counts: a report's
            ``committed_seconds``. A failure in between goes back to the checkpoint before.
        lost_ranks: number of ranks whose memory is gone after one failure: those of a machine.
        lost_load_seconds: how long these ranks take to load their shards; None: their share of
            ``load_seconds``, as where the storage is what limits.
        process_deaths: share of the failures that end processes and leave their machines' memory.
        journal: part of the training time that keeping images takes.

    Raises:
        ValueError: out of range, or the job fails faster than it recovers.
    """

    job_hours: float
    mtbf_hours: float
    ranks: int
    save_seconds: float
    load_seconds: float
    restart_seconds: float
    durable_seconds: float = 0.0
    lost_ranks: int = 1
    lost_load_seconds: float | None = None
    process_deaths: float = 0.0
    journal: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("job_hours", 1e-9), ("mtbf_hours", 1e-9), ("ranks", 1)):
            if not least <= getattr(self, name) <= MOST:
                self._refuse(name, f"must be from {least:g} to {MOST:g}")
        times = ("save_seconds", "load_seconds", "restart_seconds", "durable_seconds")
        for name in (*times, "lost_load_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MOST:
                self._refuse(name, f"must be from 0 to {MOST:g}")
        for name in ("process_deaths", "journal"):
            if not 0 <= getattr(self, name) <= 1:
                self._refuse(name, "must be a share from 0 to 1")
        if not 1 <= self.lost_ranks <= self.ranks:
            self._refuse("lost_ranks", f"must be from 1 to the {self.ranks} ranks that hold tables")
        if not self.least_interval_hours > 1e-12:
            raise ValueError(
                "save_seconds and durable_seconds are both 0, so that no interval is too short: "
                "give at least one of them as measured"
            )
        if self.mtbf_hours <= self.load_hours + self.restart_hours:
            raise ValueError(
                f"the job fails every {self.mtbf_hours:.3g} hours, and takes "
                f"{self.load_hours + self.restart_hours:.3g} to load and to restart: it would make "
                "no progress; use fewer nodes, or faster restarts"
            )
        if self.least_interval_hours > self.job_hours:
            raise ValueError(
                f"a checkpoint takes {self.least_interval_hours:.3g} hours, longer than the job of "
                f"{self.job_hours:.3g}: compare save_seconds, durable_seconds and job_hours"
            )

    def _refuse(self, name: str, expected: str) -> None:
        raise ValueError(f"{name} {expected}, not {shown(getattr(self, name))}")

    @property
    def save_hours(self) -> float:
        """Return ``save_seconds`` in hours."""
        return self.save_seconds / _HOUR

    @property
    def load_hours(self) -> float:
        """Return ``load_seconds`` in hours."""
        return self.load_seconds / _HOUR

    @property
    def lost_load_hours(self) -> float:
        """Return the hours in which the lost ranks load their shards."""
        if self.lost_load_seconds is None:
            return self.load_hours * self.lost_ranks / self.ranks
        return self.lost_load_seconds / _HOUR

    @property
    def restart_hours(self) -> float:
        """Return ``restart_seconds`` in hours."""
        return self.restart_seconds / _HOUR

    @property
    def durable_hours(self) -> float:
        """Return ``durable_seconds`` in hours."""
        return self.durable_seconds / _HOUR

    @property
    def least_interval_hours(self) -> float:
        """Return the shortest interval: one save at a time, and none shorter than training waits
        for it.
        """
        return max(self.save_hours, self.durable_hours)

    def losses(self, recovery: Recovery) -> float:
        """Return the expected losses of memory in an hour of training."""
        kept = self.process_deaths if recovery.keeps_images else 0.0
        return (1 - kept) / self.mtbf_hours


@dataclass(frozen=True)
class Candidate:
    """The cost of one kind of recovery at one interval, as parts of the training time.

    Attributes:
        interval_hours: time that is trained from one save to the next; at most the whole job.
        saving: training waits for saves.
        lost: steps are trained again.
        recovering: processes restart and load.
        journal: images are kept.
        pls: portion of lost samples: trained, and gone from the lost ranks' tables.
        allowed: whether this is within the budget of PLS.
    """

    recovery: Recovery
    interval_hours: float
    saving: float
    lost: float
    recovering: float
    journal: float
    pls: float
    allowed: bool = True

    @property
    def overhead(self) -> float:
        """Return all parts together."""
        return self.saving + self.lost + self.recovering + self.journal


@dataclass(frozen=True)
class Choice:
    """The cheapest candidate within the budget, and all of them."""

    best: Candidate
    candidates: tuple[Candidate, ...]


def choose(job: FailingJob, max_pls: float) -> Choice:
    """Choose the kind of recovery and the interval that cost the least time.

    Args:
        max_pls: most portion of lost samples that the model's quality allows; 0: none.

    Raises:
        ValueError: ``max_pls`` is no portion.
    """
    if not 0 <= max_pls <= 1:
        raise ValueError(f"max_pls must be a portion from 0 to 1, not {shown(max_pls)}")
    kinds = [kind for kind in Recovery if job.process_deaths or not kind.keeps_images]
    found = [cost(job, kind, best_interval(job, kind, max_pls), max_pls) for kind in kinds]
    # Of equal ones the first, which is the simplest; full recovery is always allowed.
    best = min((one for one in found if one.allowed), key=lambda one: one.overhead)
    return Choice(best, tuple(found))


def best_interval(job: FailingJob, recovery: Recovery, max_pls: float) -> float:
    """Return the hours from one save to the next that cost the least, within the budget if any do.

    At least as long as a checkpoint takes, at most the whole job.
    """
    losses = job.losses(recovery)
    if losses == 0:  # nothing is ever restored
        return job.job_hours
    # Young's; a partial recovery without any budget has no better one.
    interval = math.sqrt(2 * job.save_hours / losses)
    if recovery in (Recovery.PARTIAL, Recovery.IMAGES_PARTIAL) and max_pls > 0:
        budget = max_pls * job.ranks / (job.lost_ranks * losses)
        interval = 2 * (budget - job.durable_hours)
    return min(max(interval, job.least_interval_hours), job.job_hours)


def cost(
    job: FailingJob, recovery: Recovery, interval_hours: float, max_pls: float = 1.0
) -> Candidate:
    """Return the expected cost of a kind of recovery at an interval.

    Raises:
        ValueError: the interval is not positive, or longer than the job.
    """
    if not 0 < interval_hours <= job.job_hours:
        raise ValueError(
            f"an interval of {shown(interval_hours)} hours must be above 0 and within the job of "
            f"{job.job_hours:g} hours"
        )
    losses = job.losses(recovery)
    stale = losses * (interval_hours / 2 + job.durable_hours)
    load = job.lost_load_hours if recovery.partial else job.load_hours
    pls = stale * job.lost_ranks / job.ranks if recovery.partial else 0.0
    return Candidate(
        recovery,
        interval_hours,
        saving=job.save_hours / interval_hours,
        lost=0.0 if recovery.partial else stale,
        recovering=job.restart_hours / job.mtbf_hours + load * losses,
        journal=job.journal if recovery.keeps_images else 0.0,
        pls=pls,
        allowed=pls <= max_pls * (1 + 1e-9),
    )
