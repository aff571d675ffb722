"""Let a follower's thread work while no prediction runs, so that predictions find the cores free.

A low priority is not enough where predictions come in short bursts: a core that is busy with rows
has to be taken from them first, its caches hold rows, and its sibling and the memory are shared. So
between two blocks of rows, a fraction of a millisecond to a few, the thread waits until nobody
predicts. Where somebody always does, a small share of a core still lets versions become visible.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Pace:
    """The rests of one thread at a time.

    Time in which the thread waits, for storage or for a core, counts as rest.

    Args:
        share: of one core, above 0 and up to 1, to work while predictions run; 1: no rests.
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
        self._free = threading.Event()  # to work: nobody predicts, or somebody waits for the work
        self._free.set()
        self.begin()

    def begin(self) -> None:
        """Note that the calling thread begins to work, rested."""
        self._began, self._done = self._now(), self._worked()

    def rest(self) -> None:
        """Rest while predictions run, as long as the share asks for; called wherever work may
        stop, while no lock is held that a prediction needs.
        """
        if self._share >= 1:
            return
        if not self._free.is_set():
            worked = self._worked() - self._done
            seconds = worked / self._share - (self._now() - self._began)
            if seconds > 0:
                self._wait(self._free, seconds)
        self.begin()  # what was done while nobody predicted is not made up for

    @contextmanager
    def predicting(self) -> Iterator[None]:
        """Let the thread rest while a block runs."""
        with self._lock:
            self._predicting += 1
            self._tell()
        try:
            yield
        finally:
            with self._lock:
                self._predicting -= 1
                self._tell()

    @contextmanager
    def hurried(self) -> Iterator[None]:
        """End a rest, and have none while a block runs: somebody waits for the work's end."""
        with self._lock:
            self._hurrying += 1
            self._tell()
        try:
            yield
        finally:
            with self._lock:
                self._hurrying -= 1
                self._tell()

    def _tell(self) -> None:
        if self._hurrying or not self._predicting:
            self._free.set()
        else:
            self._free.clear()
