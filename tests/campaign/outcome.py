"""What trials come to: counts that add up, and failures that can be repeated."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

KINDS = ("lost", "silent", "error", "hung")
"""Of failures: something durable is gone; wrong state without a word, or an older one; an error
that isn't documented, or comes where none should; it did not end."""


@dataclass
class Failure:
    """Something that is not as promised.

    Attributes:
        trial: its number.
    """

    trial: int
    kind: str
    what: str


@dataclass
class Outcome:
    """Of some trials.

    Attributes:
        counts: of whatever was done and found, by name.
    """

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def fail(self, trial: int, kind: str, what: str) -> None:
        """Note a failure."""
        assert kind in KINDS, kind
        self.failures.append(Failure(trial, kind, what))

    def add(self, other: Outcome) -> None:
        """Add other trials'."""
        self.counts.update(other.counts)
        self.failures += other.failures

    def to_json(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "failures": [asdict(f) for f in self.failures]}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Outcome:
        failures = [Failure(**failure) for failure in document["failures"]]
        return cls(Counter(document["counts"]), failures)
