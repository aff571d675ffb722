"""Count the outcomes of trials, and keep failures that can be repeated."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

KINDS = ("lost", "silent", "error", "hung")
"""Kinds of failures. lost: something durable is gone; silent: a wrong or older state without a
word; error: an undocumented or unexpected error; hung: the trial did not end.
"""


@dataclass
class Failure:
    """A broken promise.

    Attributes:
        trial: number of the trial.
    """

    trial: int
    kind: str
    what: str


@dataclass
class Outcome:
    """The outcome of some trials.

    Attributes:
        counts: of actions and findings, by name.
    """

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def fail(self, trial: int, kind: str, what: str) -> None:
        """Add a failure."""
        assert kind in KINDS, kind
        self.failures.append(Failure(trial, kind, what))

    def add(self, other: Outcome) -> None:
        """Add the outcome of other trials."""
        self.counts.update(other.counts)
        self.failures += other.failures

    def to_json(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "failures": [asdict(f) for f in self.failures]}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Outcome:
        failures = [Failure(**failure) for failure in document["failures"]]
        return cls(Counter(document["counts"]), failures)
