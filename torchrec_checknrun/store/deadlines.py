"""Bound every wait for the storage: a call that never returns is given up, and the error names it.

A thread can't be killed. So a call to a store runs in a daemon thread of its own, and the caller
waits for a bounded time. A call that was given up may go on, even hours later, and must do no harm
then: operations that make something visible check ``given_up`` first.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_some
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from torchrec_checknrun.errors import StorageUnreachable

T = TypeVar("T")

TIMEOUT_SECONDS = 1800.0
"""Default limit of waits for ranks and storage."""
EXIT_SECONDS = 10.0
"""Longest wait for one call to the storage while the interpreter ends."""
_SHARE = 0.8
"""Part of the timeout that one call may take: the rest is for telling the waiting ranks why."""
_IN_DOUBT = 1 / 8
"""Part of that for calls that follow one that was given up, until a call is answered."""
_LEAST_IN_DOUBT = 1.0
_IDLE_SECONDS = 5.0
_LOOK_SECONDS = 1.0


class _Call(Generic[T]):
    """One call to the storage: name, time of the last sign of life, and outcome."""

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
    """A daemon thread that runs calls one after another."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[_Call[Any]] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="checknrun-storage", daemon=True)
        self.thread.start()

    def begin(self, call: _Call[Any]) -> None:
        self.thread.name = threading.current_thread().name  # stacks and logs name the caller
        self.calls.put(call)

    def _run(self) -> None:
        while (call := self._next()) is not None:
            _current.call = call
            call.run()
            _current.call = None
            del call  # frees its memory before the next call comes
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
    """Start fresh in a forked child, which has none of the threads."""
    global _lock
    _lock = threading.Lock()
    _idle.clear()
    _in_flight.clear()


os.register_at_fork(after_in_child=_forget_threads)


def given_up() -> bool:
    """Tell whether the call that this thread is running was given up."""
    call = getattr(_current, "call", None)
    return call is not None and call.given_up


def longest_silence() -> tuple[float, str]:
    """Return the longest current silence of the storage: seconds, and the name of the call.

    ``(0.0, "")`` where no call is in progress.
    """
    now = time.monotonic()
    with _lock:
        silent = [(now - call.heard, call.what) for call in _in_flight]
    return max(silent, default=(0.0, ""))


class Patience:
    """The limits of waits for one store; shared by all folders of a root.

    After a call that was given up the next ones get less time, until one is answered: otherwise
    five calls to a dead store would take five times the limit.

    Args:
        timeout_seconds: the longest that a save, restore or close may wait in vain.

    Attributes:
        heard: time of the last answer, by the monotonic clock.
    """

    def __init__(self, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.timeout_seconds = timeout_seconds
        self.heard = time.monotonic()
        self._doubt = threading.Event()

    def apart(self) -> Patience:
        """Return limits for the same store that count only their own calls' answers."""
        other = Patience(self.timeout_seconds)
        other._doubt = self._doubt
        return other

    @property
    def seconds(self) -> float:
        """Return the longest wait for the next call, in seconds."""
        seconds = self.timeout_seconds * _SHARE
        if self._doubt.is_set():
            return min(seconds, max(_LEAST_IN_DOUBT, seconds * _IN_DOUBT))
        return seconds

    def beat(self) -> None:
        """Record a sign of life."""
        self.heard = time.monotonic()
        self._doubt.clear()

    def call(self, act: Callable[[], T], what: str) -> T:
        """Run ``act`` in another thread and return its result.

        Raises:
            StorageUnreachable: ``act`` didn't return in time; it may still be running.
            BaseException: raised by ``act``.
        """
        if getattr(_current, "call", None) is not None:
            return act()  # part of a call that is bounded already
        call = _Call(what, act)
        with _lock:
            worker = _idle.pop() if _idle else None
        try:
            worker = worker or _Worker()
        except RuntimeError:  # no more threads, or the interpreter is about to end
            with self._watched(call):  # which gives the call up by itself
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
                del call  # the call and its error would keep each other
        return call.value

    def result(
        self, future: Future[T], what: str, progress: Callable[[], object] = lambda: None
    ) -> T:
        """Return a future's result.

        Args:
            progress: returns a value that changes as long as the work makes progress.

        Raises:
            StorageUnreachable: the work made no progress for too long.
        """
        limit, last, call = self.seconds, progress(), _Call(what, lambda: None)
        with self._watched(call):
            while not future.done():
                left = call.heard + limit - time.monotonic()
                if left <= 0:
                    raise self._silent(what, limit)
                wait_for_some([future], min(left, _LOOK_SECONDS))
                if progress() != last:
                    last, call.heard = progress(), time.monotonic()
        self.beat()
        return future.result()

    @contextmanager
    def watch(self, what: str) -> Iterator[Callable[[], None]]:
        """Count the block as one call for ``longest_silence``.

        Yields:
            A function that records a sign of life of the block.
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
    """Make the error for a wait in vain: names the operation and the seconds waited."""
    return StorageUnreachable(
        errno.ETIMEDOUT,
        f"{what}: nothing was heard from the storage for {seconds:.3g} s "
        f"(timeout_seconds={timeout_seconds:g}), and the operation was given up: check that the "
        "storage can be reached, or raise timeout_seconds (with `checknrun`, the environment's "
        "CHECKNRUN_RETRY_SECONDS)",
    )
