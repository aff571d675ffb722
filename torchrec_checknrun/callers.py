"""Let one caller in at a time, between two steps, and outside of ``torch.inference_mode()``.

A save in the midst of another call, of a training step on another thread, or of a backward pass
would hold rows of several steps; what is made in inference mode can't be trained with.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, TypeVar, cast

import torch

from torchrec_checknrun.errors import CheckNRunError

F = TypeVar("F", bound=Callable[..., Any])


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
