"""Threads that work also while the interpreter ends.

A script's last checkpoint may still be on its way then, and ``concurrent.futures`` takes no work
any more once the main thread has ended.
"""

from __future__ import annotations

import contextlib
import gc
import math
import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

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


@contextmanager
def gc_paused() -> Iterator[None]:
    """No collection meanwhile, in any thread; what has no references left goes all the same."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


Turn = AbstractContextManager[None]
"""Entered by one thread at a time, when what comes before has had its turn."""


Work = Callable[[int, Turn], None]
"""Does the thing of that number; it may enter its turn once, or not at all."""


Stage = tuple[Hashable, Hashable]
"""A lane and a step in it: turns of a lane come step by step, within a step in any order."""


def run_in_order(
    work: Work, sizes: Sequence[int], stages: Sequence[Stage], most: int, threads: int
) -> None:
    """Does things 0 to ``len(sizes) - 1``, each by whichever of some threads is free.

    Args:
        work: called for each.
        sizes: of the things, in bytes.
        stages: of the things; a lane's steps are in the order in which they come here first.
        most: how large those that are being done may be together; one is always done.
        threads: how many; this one is the first.

    Raises:
        Exception: the first failed thing's, in their order, when no thread is at work any more.
            All before it were done; of those after it, some.
    """
    line = _Line(sizes, stages, most)
    helpers = min(threads, len(sizes)) - 1
    if helpers < 1:
        _work(line, work)
    else:
        _with_helpers(line, work, helpers)
    if line.error is not None:
        raise line.error


def _with_helpers(line: _Line, work: Work, helpers: int) -> None:
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    inference = torch.is_inference_mode_enabled()

    def help_out() -> None:
        torch.set_num_threads(1)  # of this thread's operations
        with torch.inference_mode(inference), torch.cuda.stream(stream):
            _work(line, work)

    threads = [
        threading.Thread(target=help_out, name=f"checknrun-restore-{number}", daemon=True)
        for number in range(helpers)
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for thread in threads:
            thread.start()
        _work(line, work)
        for thread in threads:
            thread.join()
    finally:
        line.stop()  # where this thread was interrupted
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        torch.set_num_threads(before)


class _Stopped(Exception):
    """What came before has failed."""


class _Line:
    def __init__(self, sizes: Sequence[int], stages: Sequence[Stage], most: int) -> None:
        self._sizes, self._stages = sizes, stages
        self._free = most
        self._changed = threading.Condition()
        self._begun = 0
        self._busy = 0
        self._turn = threading.Lock()
        self._passed: set[int] = set()
        # By lane, how many things of each step are still to pass; steps that are over are gone.
        self._left: dict[Hashable, dict[Hashable, int]] = {}
        for lane, step in stages:
            steps = self._left.setdefault(lane, {})
            steps[step] = steps.get(step, 0) + 1
        self._failed = len(sizes)
        self.error: BaseException | None = None

    def begin(self) -> int | None:
        """The next thing, when there is room for it; None: no more."""
        with self._changed:
            while self._begun < min(self._failed, len(self._sizes)):
                size = self._sizes[self._begun]
                if size <= self._free or not self._busy:
                    self._free -= size
                    self._busy += 1
                    self._begun += 1
                    return self._begun - 1
                self._changed.wait()
            return None

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        lane, step = self._stages[number]
        with self._changed:
            self._changed.wait_for(
                lambda: next(iter(self._left[lane])) == step or self._failed < number
            )
            if self._failed < number:
                raise _Stopped
        with self._turn:
            yield
        self._pass(number)

    def end(self, number: int, error: BaseException | None = None) -> None:
        with self._changed:
            self._free += self._sizes[number]
            self._busy -= 1
            if error is None:
                self._pass(number)
            elif number < self._failed:
                self._failed, self.error = number, error
            self._changed.notify_all()

    def stop(self) -> None:
        """Nothing more is begun, and nobody's turn comes."""
        with self._changed:
            self._failed = -1
            self._changed.notify_all()

    def _pass(self, number: int) -> None:
        with self._changed:
            if number in self._passed:
                return
            self._passed.add(number)
            lane, step = self._stages[number]
            steps = self._left[lane]
            steps[step] -= 1
            while steps and not steps[first := next(iter(steps))]:
                del steps[first]
                self._changed.notify_all()


def _work(line: _Line, work: Work) -> None:
    while (number := line.begin()) is not None:
        try:
            work(number, line.turn(number))
        except _Stopped:
            line.end(number)
        except BaseException as error:
            line.end(number, error)
        else:
            line.end(number)
