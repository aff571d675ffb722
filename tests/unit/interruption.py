"""Do something else right before any one call of the storage."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from torchrec_checknrun.store.local import LocalStore

CALLS = (
    *("list", "sizes", "size", "modified", "read", "read_into"),
    *("create", "new_file", "put", "delete", "remove"),
)


@contextmanager
def interrupted(at: int, meanwhile: Callable[[], object]) -> Iterator[Callable[[], bool]]:
    """Act right before a call of the storage, counted from 0; yield what tells if it was reached.

    Calls of the other act are not counted.
    """
    count = itertools.count()
    reached = False

    def around(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal reached
            if not reached and next(count) == at:
                reached = True
                meanwhile()
            return real(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(LocalStore, name, around(getattr(LocalStore, name)))
        yield lambda: reached
