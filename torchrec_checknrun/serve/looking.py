"""Look at a root again and again, in a thread that ends with the follower that it looks for."""

from __future__ import annotations

import random
import threading
import weakref
from typing import Protocol

from torchrec_checknrun.threads import end_at_exit, lower_priority

NICE = 10
"""Priority of the thread below that of predictions."""
_CHANCE = random.Random()
"""Draws apart from the program's generator, whose numbers training may depend on."""
_LONGEST_PAUSE = 60.0
"""The longest pause between two looks after errors, unless the interval is longer."""


class Looks(Protocol):
    """A follower."""

    def look(self) -> bool:
        """Poll; return whether that failed."""


def start_looking(
    follower: Looks, closing: threading.Event, interval_seconds: float
) -> threading.Thread:
    """Start a thread that looks until an event is set, or the follower is dropped."""
    thread = threading.Thread(
        target=_keep_looking,
        args=(weakref.ref(follower), closing, interval_seconds),
        name="checknrun-follower",
        daemon=True,
    )
    thread.start()
    end_at_exit(thread, closing.set)
    return thread


def _keep_looking(follower: weakref.ref[Looks], closing: threading.Event, interval: float) -> None:
    """Look with pauses, which grow after errors."""
    lower_priority(NICE)
    failures = 0
    while not closing.is_set():
        still = follower()
        if still is None:
            return
        failures = failures + 1 if still.look() else 0
        del still  # nobody else may hold it any more
        pause = interval
        if failures:
            longest = max(interval, _LONGEST_PAUSE)
            pause = min(longest, interval * 2.0 ** min(failures, 16)) * _CHANCE.uniform(0.5, 1)
        closing.wait(max(interval, pause))
