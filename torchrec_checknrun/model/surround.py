"""Surround a method of one object by contexts, where TorchRec and FBGEMM offer no hooks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

Around = Callable[..., AbstractContextManager[None]]
"""Makes a context for one call, given the call's arguments."""


class _Surrounded:
    """A method of one object, in its place, for all trackers that surround the method."""

    def __init__(self, owner: Any, name: str) -> None:
        # The owner, not the method: in a copy of the owner this must call the copy's.
        self.owner, self.name = owner, name
        self.own: Callable[..., Any] | None = vars(owner).get(name)
        self.around: list[Around] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method within all contexts."""
        with ExitStack() as stack:
            for around in self.around:
                stack.enter_context(around(*args, **kwargs))
            if self.own is not None:
                return self.own(*args, **kwargs)
            return getattr(type(self.owner), self.name)(self.owner, *args, **kwargs)


def surround(owner: Any, name: str, around: Around) -> Callable[[], None]:
    """Surround every call of an object's method by a context; do nothing if there is no such.

    Returns:
        A function that undoes it, once or more often; the last one restores the object's own
        method.
    """
    if not hasattr(owner, name):
        return lambda: None
    found = vars(owner).get(name)
    surrounded = found if isinstance(found, _Surrounded) else _Surrounded(owner, name)
    vars(owner)[name] = surrounded
    surrounded.around.append(around)

    def stop() -> None:
        if around not in surrounded.around:
            return
        surrounded.around.remove(around)
        if surrounded.around:
            return
        if surrounded.own is None:
            del vars(owner)[name]
        else:
            vars(owner)[name] = surrounded.own

    return stop
