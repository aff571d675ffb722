"""Run work on threads, also while the interpreter ends; keep other threads' calls, and the garbage
collector, out.

``Threads`` replaces ``concurrent.futures``, which takes no more work once the main thread has
ended, though a script's last checkpoint may still be on its way then. ``gc_paused`` keeps Python's
garbage collector from rank 0's plans, millions of objects in a large job: the collector would walk
all of them again and again with the lock that training needs, and its time grows faster than
ranks × tables (``recipes.benchmarks.planning`` measures it). ``OneCaller`` refuses calls of an
object that come in the midst of another one.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Literal, TypeVar, cast

import torch

from torchrec_checknrun.errors import CheckNRunError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


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


class OneCaller:
    """A guard that refuses calls of an object that come while another one is at work, or that would
    save while another thread trains: rows would be of several steps.

    Args:
        name: of the object, for errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._process = os.getpid()
        self._closed = False
        self._trains = threading.current_thread()
        self._at_work: dict[None, Call] = {}
        """The one call at work, if any: set at once, whatever signal comes."""

    @property
    def closed(self) -> bool:
        """Return whether no more calls are allowed, as in a fork: the object is its parent's."""
        return self._closed or os.getpid() != self._process

    def close(self) -> None:
        """Allow no more calls."""
        self._closed = True

    def enter(self, call: Call) -> None:
        """Begin a call.

        Raises:
            CheckNRunError: it is refused; says how to do what was probably meant.
        """
        if os.getpid() != self._process:
            if call.role == "ends":
                return
            raise CheckNRunError(
                f"{call} was called in process {os.getpid()}, a fork of the process "
                f"{self._process} that made {self._name}: a fork has none of the threads that save "
                "or talk to other ranks. Call it there, or make a new one here, with process "
                "groups and a root of its own"
            )
        if self.closed and call.role in ("trains", "saves"):
            raise CheckNRunError(f"{self._name} is closed, its hooks are off: make a new one")
        if _within_backward() and call.role in ("trains", "saves"):
            raise CheckNRunError(
                f"{call} was called within a backward pass, as by a hook: some rows are of this "
                f"step already, and others are not. {_REMEDY}"
            )
        others = self._trains is not call.thread and self._trains.is_alive()
        if others and call.role in ("saves", "waits"):  # first: it must not keep training out
            raise CheckNRunError(
                f"{call} was called, but {self._trains.name} trains with {self._name} (it made it, "
                "or called restore() or step() last): rows may change meanwhile, and ranks would "
                f"save different steps. {_REMEDY}"
            )
        at_work = self._at_work.setdefault(None, call)
        if at_work is not call:
            raise CheckNRunError(
                f"{call} was called while {at_work} is at work, as by a signal handler or a timer, "
                f"but {self._name} does one thing at a time. {_REMEDY}"
            )
        if call.role == "trains":
            self._trains = call.thread

    def leave(self, call: Call) -> None:
        """End a call, if it was begun."""
        if self._at_work.get(None) is call:
            del self._at_work[None]


def _within_backward() -> bool:
    """Return whether a hook, or a function's ``backward``, of this thread's backward pass calls."""
    task: Callable[[], int] | None = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() >= 0


Role = Literal["trains", "saves", "waits", "ends"]
"""A call that tells which thread trains; one that this thread alone may make, as ``waits``, which
may also come when the object is closed; and one that any thread may make.
"""

_REMEDY = (
    "Call it between two steps, in the thread that trains; let a handler or a timer set a flag "
    "that the loop looks at, or use a trigger (EverySeconds, OnSigterm, or one of your own)"
)


class Call:
    """One call of a method, with the thread that makes it."""

    def __init__(self, name: str, role: Role) -> None:
        self.role: Role = role
        self.thread = threading.current_thread()
        self._name = name

    def __str__(self) -> str:
        return f"{self._name}() of {self.thread.name}"


def one_at_a_time(role: Role) -> Callable[[F], F]:
    """Make a method one that its object's ``_caller``, a ``OneCaller``, lets in or refuses."""

    def decorate(method: F) -> F:
        run = as_in_training(method)

        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            caller: OneCaller = self._caller
            this = Call(method.__name__, role)
            try:
                caller.enter(this)
                return run(self, *args, **kwargs)
            finally:
                caller.leave(this)

        return cast("F", call)

    return decorate


def as_in_training(method: F) -> F:
    """Let a method run outside of ``torch.inference_mode()``: nobody may write afterwards to what
    is made there, and that may be an optimizer's state, or a buffer.
    """

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False):
            return method(*args, **kwargs)

    return cast("F", call)


_pauses: set[object] = set()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection in all threads; reference counts still free objects.

    A fork of the process collects at once: it has none of the threads that would end their pauses.
    """
    if not gc.isenabled():
        yield
        return
    pause = object()
    _pauses.add(pause)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        _pauses.discard(pause)


def _end_pauses() -> None:
    if _pauses:
        _pauses.clear()
        gc.enable()


os.register_at_fork(after_in_child=_end_pauses)
