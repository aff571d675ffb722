"""Run work on threads, also while the interpreter ends; keep out of training's way.

``Threads`` replaces ``concurrent.futures``, which takes no more work once the main thread has
ended, though a script's last checkpoint may still be on its way then. ``gc_paused`` keeps Python's
garbage collector from rank 0's plans, millions of objects in a large job: the collector would walk
all of them again and again with the lock that training needs, and its time grows faster than
ranks × tables (``recipes.benchmarks.planning`` measures it).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import math
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

BEHIND_TRAINING = 5
"""Steps of niceness of threads that work for a save behind training, which else shares its
processors with them. No more than that: other work of the machine must not starve them.
"""
_END_SECONDS = 10.0
_MOST_AT_ONCE = 8


@dataclass
class _End:
    stop: Callable[[], object]
    left: Callable[[], object]
    hangs: bool = False


_ends: weakref.WeakKeyDictionary[threading.Thread, _End] = weakref.WeakKeyDictionary()
"""Threads that an interpreter that ends waits for."""


def lower_priority(by: int) -> None:
    """Let other threads have the processor before the calling one and threads that it starts.

    On Linux, where each thread has a priority of its own; elsewhere nothing changes. A thread
    can't take its priority back.

    Args:
        by: steps of niceness. Of a processor that two threads want, the one with 5 more gets a
            quarter, the one with 10 more a tenth.
    """
    if sys.platform != "linux":
        return
    own = threading.get_native_id()
    with contextlib.suppress(OSError):  # not in each sandbox
        lower = min(19, os.getpriority(os.PRIO_PROCESS, own) + by)
        os.setpriority(os.PRIO_PROCESS, own, lower)


def end_at_exit(
    thread: threading.Thread,
    stop: Callable[[], object] = lambda: None,
    left: Callable[[], object] = lambda: None,
) -> None:
    """Have an interpreter that ends, by an error as well, wait seconds for a daemon thread.

    A thread that comes back from PyTorch's code into an interpreter that has ended aborts the
    process: signal 6 takes the place of the program's own exit code.

    Args:
        stop: asks the thread to end; must not fail.
        left: called where the thread has not ended in time; must not fail.
    """
    _ends[thread] = _End(stop, left)


def leave_at_exit(thread: threading.Thread) -> None:
    """Have an interpreter that ends not wait for a thread, which hangs."""
    if (end := _ends.get(thread)) is not None:
        end.hangs = True


@atexit.register
def end_all() -> None:
    """End the threads of ``end_at_exit``."""
    asked = list(_ends.items())
    for _, end in asked:
        end.stop()
    until = time.monotonic() + _END_SECONDS
    for thread, end in asked:
        if not end.hangs:
            thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            end.left()


class Threads:
    """A pool of daemon threads; must be closed.

    Where the system, or an interpreter that ends (Python 3.12 and later), starts no thread at all,
    ``submit`` does the work itself.

    Args:
        most: number of threads.
        name: prefix of the threads' names.
    """

    def __init__(self, most: int, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        with contextlib.suppress(RuntimeError):  # no more threads
            for number in range(most):
                # Daemons: submitted work may wait forever, for a rank that never comes.
                thread = threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, act: Callable[[], T]) -> Future[T]:
        """Run ``act`` as soon as a thread is free."""
        done: Future[T] = Future()
        work = partial(_do, act, done)
        if self._threads:
            self._work.put(work)
        else:
            work()
        return done

    def close(self, cancel: bool = False, seconds: float | None = None) -> bool:
        """Wait for the submitted work and end the threads; may be called again.

        Args:
            cancel: drop work that has not begun; no thread may be waiting for its future.
            seconds: the longest wait, as a thread may hang; None: until all work is done.

        Returns:
            Whether all threads have ended; a thread that has not is abandoned.
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
            del work  # frees its memory before the next item comes


def at_once(acts: Sequence[Callable[[], T]], name: str) -> list[T]:
    """Do several things that mostly wait, such as requests to a store, at once; return their
    results in order.

    Args:
        name: prefix of the threads' names.

    Raises:
        Exception: the first one's that failed; those that were not begun are not done.
    """
    if len(acts) < 2:
        return [act() for act in acts]
    threads = Threads(min(_MOST_AT_ONCE, len(acts)), name)
    try:
        found = [each.result() for each in [*map(threads.submit, acts)]]
    except BaseException as error:
        # An interrupt leaves a request that hangs alone.
        threads.close(cancel=True, seconds=None if isinstance(error, Exception) else 0.0)
        raise
    threads.close()
    return found


class ReadyThread:
    """A daemon thread, started ahead, that does one piece of work once it is given.

    ``Thread.start`` waits until the new thread runs, which then keeps the interpreter to itself for
    some milliseconds; giving work to a thread that is there costs its giver almost nothing. Without
    any work the thread ends with this object.

    Raises:
        RuntimeError: the system gives no more threads.
    """

    def __init__(self, name: str) -> None:
        work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._work = work
        self._thread = threading.Thread(target=_do_one, args=(work,), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, work.put, _nothing).atexit = False

    def give(self, act: Callable[[], object]) -> threading.Thread | None:
        """Let the thread run ``act`` and end; call it once.

        Returns:
            The thread; None if it is gone, as in a fork of the process.
        """
        if not self._thread.is_alive():
            return None
        self._work.put(act)
        return self._thread

    def end(self) -> None:
        """End the thread, which has no work."""
        if (thread := self.give(_nothing)) is not None:
            thread.join()


def _do_one(work: queue.SimpleQueue[Callable[[], object]]) -> None:
    work.get()()


def _nothing() -> None:
    pass


def _do(act: Callable[[], Any], done: Future[Any]) -> None:
    try:
        done.set_result(act())
    except BaseException as error:
        done.set_exception(error)
        del done  # the future and its error would keep each other, and the failed work's memory


_pauses: set[object] = set()


def pause_gc() -> Callable[[], None]:
    """Pause garbage collection in all threads until the returned function is called, by any thread;
    reference counts still free objects.

    Collection goes on once all pauses have ended. A fork of the process collects at once: it has
    none of the threads that would end their pauses. Where the program has disabled collection, it
    stays so.
    """
    if not (_pauses or gc.isenabled()):
        return _nothing
    pause = object()
    _pauses.add(pause)
    gc.disable()
    return partial(_end_pause, pause)


def _end_pause(pause: object) -> None:
    if pause in _pauses:
        _pauses.discard(pause)
        if not _pauses:
            gc.enable()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection within a block; see ``pause_gc``."""
    resume = pause_gc()
    try:
        yield
    finally:
        resume()


def _end_pauses() -> None:
    if _pauses:
        _pauses.clear()
        gc.enable()


os.register_at_fork(after_in_child=_end_pauses)
