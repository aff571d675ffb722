"""Play a job that fails at random, event by event, beside the arithmetic of its expected cost.

The clock runs while the job trains and while training waits for a save, and failures come at any
instant of it; while the job recovers none comes. A save is of the instant at which it begins and
counts once it is durable. Where all ranks go back, the steps since then are trained once more, with
their saves.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from torchrec_checknrun.overhead import FailingJob, Recovery


@dataclass
class Outcome:
    """The history of one job; times in hours of the clock.

    Attributes:
        saving: training waited for saves.
        lost: steps were trained that a failure took.
        recovering: processes restarted and loaded.
        pls: portion of lost samples.
        failures: number of failures.
    """

    saving: float = 0.0
    lost: float = 0.0
    recovering: float = 0.0
    pls: float = 0.0
    failures: int = 0


class Play:
    """One job with its failures."""

    def __init__(
        self, job: FailingJob, recovery: Recovery, interval_hours: float, random: Random
    ) -> None:
        self.outcome = Outcome()
        self._job, self._recovery, self._interval = job, recovery, interval_hours
        self._random = random
        self._clock = self._trained = 0.0
        self._next_save = interval_hours
        self._counts_from = 0.0  # position of the newest checkpoint that counts
        self._in_flight: tuple[float, float] | None = None  # position, and when it will count
        self._fails_at = self._draw()

    def run(self) -> Outcome:
        """Play until everything is trained."""
        while self._trained < self._job.job_hours:
            goal = min(self._next_save, self._job.job_hours)
            self._trained += self._pass(goal - self._trained)
            if self._clock >= self._fails_at:
                self._fail()
                continue
            self._trained = goal
            if goal == self._next_save and goal < self._job.job_hours:
                self._save()
        return self.outcome

    def _draw(self) -> float:
        return self._clock + self._random.expovariate(1 / self._job.mtbf_hours)

    def _pass(self, hours: float) -> float:
        """Let time pass until then or the failure, and return how much did."""
        passed = min(hours, self._fails_at - self._clock)
        self._clock = self._fails_at if passed < hours else self._clock + hours
        return passed

    def _save(self) -> None:
        self._settle()
        self._in_flight = (self._trained, self._clock + self._job.durable_hours)
        self._next_save = self._trained + self._interval
        self.outcome.saving += self._pass(self._job.save_hours)
        if self._clock >= self._fails_at:
            self._fail()

    def _settle(self) -> None:
        """Let the save in flight count if it has become durable."""
        if self._in_flight is not None and self._in_flight[1] <= self._clock:
            self._counts_from, self._in_flight = self._in_flight[0], None

    def _fail(self) -> None:
        job, outcome = self._job, self.outcome
        self._settle()
        self._in_flight = None  # ended with its process
        outcome.failures += 1
        hours = job.restart_hours
        if not (self._recovery.keeps_images and self._random.random() < job.process_deaths):
            since = self._trained - self._counts_from
            if self._recovery.partial:
                hours += job.lost_load_hours
                outcome.pls += since / job.job_hours * job.lost_ranks / job.ranks
            else:
                hours += job.load_hours
                outcome.lost += since
                self._trained = self._counts_from
                self._next_save = self._trained + self._interval
        outcome.recovering += hours
        self._clock += hours
        self._fails_at = self._draw()
