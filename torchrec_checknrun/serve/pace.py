"""Let a follower's thread use only a share of a core, so that predictions find theirs free.

A low priority is not enough where predictions come in short bursts: a core that is busy with rows
has to be taken from them first, its caches hold rows, and its sibling and the memory are shared. So
the thread works for a few milliseconds, then rests, again and again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SLICE_SECONDS = 0.002
"""Processor time between two rests, as far as single operations are that short."""


class Pace:
    """The rests of one thread at a time.

    Time in which the thread waits, for storage or for a core, counts as rest.

    Args:
        share: of one core, above 0 and up to 1; 1: no rests.
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
        self._hurry = threading.Event()
        self._lock = threading.Lock()
        self._hurrying = 0
        self.begin()

    def begin(self) -> None:
        """Note that the calling thread begins to work, rested."""
        self._began, self._done = self._now(), self._worked()

    def rest(self) -> None:
        """Rest, if a slice was worked since the last rest; called wherever work may stop, while
        no lock is held that a prediction needs.
        """
        if self._share >= 1:
            return
        if self._hurry.is_set():
            self.begin()  # what was done in a hurry is not made up for
            return
        worked = self._worked() - self._done
        if worked < SLICE_SECONDS:
            return
        seconds = worked / self._share - (self._now() - self._began)
        if seconds > 0:
            self._wait(self._hurry, seconds)
        self.begin()

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
