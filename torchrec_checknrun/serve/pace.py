"""Let a follower's thread work while no prediction runs, so that predictions find the cores free.

A low priority is not enough where predictions come in short bursts: a core that is busy with rows
has to be taken from them first, its caches hold rows, and its sibling and the memory are shared. So
between two blocks of rows, a fraction of a millisecond to a few, the thread rests until nobody has
predicted for a while. Where somebody always does, a small share of a core still lets versions
become visible.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PAUSE_SECONDS = 0.01
"""Predictions that follow one another sooner count as one: who works in between is in the way of
the next one."""


class Pace:
    """The rests of one thread at a time.

    Time in which the thread waits, for storage or for a core, counts as rest.

    Args:
        share: of one core, above 0 and up to 1, to work while predictions follow one another; 1: no
            rests.
        now: a clock, in seconds.
        worked: processor time of the calling thread, in seconds.
        wait: rests up to some seconds, until an event is set.
    """

    def __init__(
        self,
        share: float = 1.0,
        *,
        now: Callable[[], float] = time.perf_counter,
        worked: Callable[[], float] = time.thread_time,
        wait: Callable[[threading.Event, float], object] = threading.Event.wait,
    ) -> None:
        self._share = share
        self._now, self._worked, self._wait = now, worked, wait
        self._lock = threading.Lock()
        self._predicting = self._hurrying = 0
        self._predicted = -math.inf  # when the last prediction ended
        self._hurry = threading.Event()  # somebody waits for the work
        self.begin()

    def begin(self) -> None:
        """Note that the calling thread begins to work, rested."""
        self._began, self._done = self._now(), self._worked()

    def rest(self) -> None:
        """Rest while predictions follow one another, as long as the share asks for; called wherever
        work may stop, while no lock is held that a prediction needs.
        """
        if self._share >= 1:
            return
        end = self._began + (self._worked() - self._done) / self._share
        while not self._hurry.is_set():
            now = self._now()
            free = (now if self._predicting else self._predicted) + _PAUSE_SECONDS  # at the soonest
            seconds = min(end, free) - now
            if seconds <= 0:
                break
            self._wait(self._hurry, seconds)
        self.begin()  # what was done while nobody predicted is not made up for

    @contextmanager
    def predicting(self) -> Iterator[None]:
        """Let the thread rest while a block runs."""
        with self._lock:
            self._predicting += 1
        try:
            yield
        finally:
            with self._lock:
                self._predicting -= 1
                self._predicted = self._now()

    @contextmanager
    def hurried(self) -> Iterator[None]:
        """End a rest, and have none while a block runs: somebody waits for the work's end."""
        with self._lock:
            self._hurrying += 1
            self._hurry.set()
        try:
            yield
        finally:
            with self._lock:
                self._hurrying -= 1
                if not self._hurrying:
                    self._hurry.clear()
