"""Bound every wait for the storage: a call that never returns is given up, and the error names it.

No thread can be killed. So a call to a store runs in a daemon thread of its own, and whoever asked
waits only so long. What a call that was given up still does, some hours later perhaps, must harm
nobody: operations that make something visible ask ``given_up`` first.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from torchrec_checknrun.errors import StorageUnreachable

T = TypeVar("T")

TIMEOUT_SECONDS = 1800.0
"""How long ranks and storage are waited for unless the user says otherwise."""
EXIT_SECONDS = 10.0
"""How long the end of the interpreter waits for one call to the storage."""
_SHARE = 0.8
"""Of the timeout, for one call: the other ranks, who wait meanwhile, are to hear why."""
_IN_DOUBT = 1 / 8
"""Of that, for the calls that follow one that was given up, until one of them is answered."""
_LEAST_IN_DOUBT = 1.0
_IDLE_SECONDS = 5.0
_LOOK_SECONDS = 1.0


class _Call(Generic[T]):
    """One call: what it is, since when nothing was heard of it, and what became of it."""

    def __init__(self, what: str, act: Callable[[], T]) -> None:
        self.what = what
        self.act = act
        self.heard = time.monotonic()
        self.given_up = False
        self.done = threading.Event()
        self.value: T
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.value = self.act()
        except BaseException as error:
            self.error = error
        self.done.set()


_lock = threading.Lock()
_in_flight: set[_Call[Any]] = set()
_idle: list[_Worker] = []
_current = threading.local()


class _Worker:
    """A daemon thread that runs one call after the other."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[_Call[Any]] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="checknrun-storage", daemon=True)
        self.thread.start()

    def begin(self, call: _Call[Any]) -> None:
        self.thread.name = threading.current_thread().name  # stacks and logs say whose call it is
        self.calls.put(call)

    def _run(self) -> None:
        while (call := self._next()) is not None:
            _current.call = call
            call.run()
            _current.call = None
            del call  # and its memory, before the next one comes
            with _lock:
                _idle.append(self)

    def _next(self) -> _Call[Any] | None:
        while True:
            try:
                return self.calls.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with _lock:
                    if self in _idle:
                        _idle.remove(self)
                        return None


def _forget_threads() -> None:
    """Start anew in a forked child, where none of the threads is."""
    global _lock
    _lock = threading.Lock()
    _idle.clear()
    _in_flight.clear()


os.register_at_fork(after_in_child=_forget_threads)


def given_up() -> bool:
    """Return whether nobody waits any more for the call that this thread is running."""
    call = getattr(_current, "call", None)
    return call is not None and call.given_up


def longest_silence() -> tuple[float, str]:
    """Return for how many seconds, and in which call, the storage has been silent for longest.

    ``(0.0, "")`` where no call is under way.
    """
    now = time.monotonic()
    with _lock:
        silent = [(now - call.heard, call.what) for call in _in_flight]
    return max(silent, default=(0.0, ""))


class Patience:
    """How long one store's silence is borne; shared by all folders of a root.

    After a call that was given up the next ones are waited for shorter, until one is answered: else
    whatever asks a dead store five things would wait five times.

    Args:
        timeout_seconds: the whole time that a save, restore or close may wait in vain.

    Attributes:
        heard: when a call was last answered, by the monotonic clock.
    """

    def __init__(self, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.timeout_seconds = timeout_seconds
        self.heard = time.monotonic()
        self._doubt = threading.Event()

    def apart(self) -> Patience:
        """Return patience with the same store that hears only what it asked for itself."""
        other = Patience(self.timeout_seconds)
        other._doubt = self._doubt
        return other

    @property
    def seconds(self) -> float:
        """How long the next call is waited for."""
        seconds = self.timeout_seconds * _SHARE
        if self._doubt.is_set():
            return min(seconds, max(_LEAST_IN_DOUBT, seconds * _IN_DOUBT))
        return seconds

    def beat(self) -> None:
        """Note a sign of life."""
        self.heard = time.monotonic()
        self._doubt.clear()

    def call(self, act: Callable[[], T], what: str) -> T:
        """Run ``act`` in another thread and return its result.

        Raises:
            StorageUnreachable: it didn't return in time; it may still be running.
            BaseException: what ``act`` raised.
        """
        if getattr(_current, "call", None) is not None:
            return act()  # part of a call that is waited for already
        call = _Call(what, act)
        with _lock:
            worker = _idle.pop() if _idle else None
        try:
            worker = worker or _Worker()
        except RuntimeError:  # no more threads, or the interpreter is about to end
            return act()
        with self._watched(call):
            worker.begin(call)
            limit = self.seconds
            try:
                answered = call.done.wait(limit)
            except BaseException:
                call.given_up = True
                raise
        if not answered:
            call.given_up = True
            raise self._silent(what, limit)
        self.beat()
        if call.error is not None:
            try:
                raise call.error
            finally:
                del call  # else it and its error hold each other
        return call.value

    def result(
        self, future: Future[T], what: str, progress: Callable[[], object] = lambda: None
    ) -> T:
        """Return a future's result.

        Args:
            progress: a value that changes as long as something is done for it.

        Raises:
            StorageUnreachable: nothing was done for it for too long.
        """
        limit, last, call = self.seconds, progress(), _Call(what, lambda: None)
        with self._watched(call):
            while not future.done():
                left = call.heard + limit - time.monotonic()
                if left <= 0:
                    raise self._silent(what, limit)
                try:
                    future.exception(min(left, _LOOK_SECONDS))
                except TimeoutError:
                    if progress() != last:
                        last, call.heard = progress(), time.monotonic()
        self.beat()
        return future.result()

    @contextmanager
    def watch(self, what: str) -> Iterator[Callable[[], None]]:
        """Count what is done within as one call, for ``longest_silence``; yield a function that
        notes a sign of life of it.
        """
        call = _Call(what, lambda: None)

        def beat() -> None:
            call.heard = time.monotonic()
            self.beat()

        with self._watched(call):
            yield beat

    @contextmanager
    def _watched(self, call: _Call[Any]) -> Iterator[None]:
        with _lock:
            _in_flight.add(call)
        try:
            yield
        finally:
            with _lock:
                _in_flight.discard(call)

    def _silent(self, what: str, seconds: float) -> StorageUnreachable:
        self._doubt.set()
        return silent(what, seconds, self.timeout_seconds)


def silent(what: str, seconds: float, timeout_seconds: float) -> StorageUnreachable:
    """Return the error that says for what, and how long, the storage was waited for in vain."""
    return StorageUnreachable(
        errno.ETIMEDOUT,
        f"{what}: nothing was heard from the storage for {seconds:.3g} s "
        f"(timeout_seconds={timeout_seconds:g}), and the operation was given up: look whether the "
        "storage can be reached, or allow it more time",
    )
