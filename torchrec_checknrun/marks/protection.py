"""Count what the protection of rows costs training; without torch, since reports hold it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Protection:
    """The price of a cut's protection, paid by training.

    Attributes:
        seconds, longest_seconds: time spent in hooks, in all and of the longest one.
        memory_seconds: the part of it spent waiting for overflow memory.
        row_seconds: the longest wait for a row that the background was just copying.
        rows: number of rows copied before an update.
    """

    seconds: float = 0.0
    longest_seconds: float = 0.0
    memory_seconds: float = 0.0
    row_seconds: float = 0.0
    rows: int = 0
