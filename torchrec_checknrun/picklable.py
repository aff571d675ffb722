"""Errors that reach the other ranks and processes.

An exception is pickled on its way there. One that can't be (a class made within a function, one
that holds a connection) would fail in the middle of a collective, and leave all others waiting.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


def picklable(error: Exception) -> Exception:
    """The error itself, or one that says the same: an ``OSError`` stays one."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:
        pass  # whatever the class does
    text = traceback.format_exception_only(error)[-1].strip()
    kind = OSError if isinstance(error, OSError) else RuntimeError
    return kind(text).with_traceback(error.__traceback__)


@contextmanager
def picklable_errors() -> Iterator[None]:
    """Errors leave the block in a form in which they reach other ranks."""
    try:
        yield
    except Exception as error:
        raised = picklable(error)
        if raised is error:
            raise
        raise raised from error
