"""Threads that work also while the interpreter ends.

A script's last checkpoint may still be on its way then, and ``concurrent.futures`` takes no work
any more once the main thread has ended.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """Does what is submitted, several things at a time; to be closed.

    Where the system, or an interpreter that ends (Python 3.12 and later), gives no thread at all,
    ``submit`` itself does the work.

    Args:
        most: how many threads.
        name: of theirs.
    """

    def __init__(self, most: int, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        with contextlib.suppress(RuntimeError):  # no more threads
            for number in range(most):
                # Daemons: whoever submits may wait for ever, for a rank that never comes.
                thread = threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, act: Callable[[], T]) -> Future[T]:
        """Runs ``act`` as soon as a thread is free."""
        done: Future[T] = Future()
        work = partial(_do, act, done)
        if self._threads:
            self._work.put(work)
        else:
            work()
        return done

    def close(self, cancel: bool = False, seconds: float | None = None) -> bool:
        """Wait for what was submitted; may be called again.

        Args:
            cancel: drop what wasn't begun. Nobody may be waiting for it.
            seconds: how long at most, as a thread may hang; None: until all is done.

        Returns:
            Whether all threads have ended. Those that have not are left to themselves.
        """
        if cancel:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._work.get_nowait()
        for _ in self._threads:
            self._work.put(None)
        end = math.inf if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            thread.join(None if seconds is None else max(0.0, end - time.monotonic()))
        ended = not any(thread.is_alive() for thread in self._threads)
        self._threads = []
        return ended

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # and its memory, before the next one comes


def _do(act: Callable[[], Any], done: Future[Any]) -> None:
    try:
        done.set_result(act())
    except BaseException as error:
        done.set_exception(error)
        del done  # else it and its error hold each other, and the memory of what has failed
