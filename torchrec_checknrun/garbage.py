"""Python's garbage collector, kept from looking at a million plan entries again and again.

On rank 0 of a large job the plans of all ranks are that many objects. While more are made, the
collector goes through all of them, with the GIL that training wants: time grows faster than the
number of ranks × tables (``recipes.benchmarks.planning`` measures it).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """No collection meanwhile, in any thread; what has no references left goes all the same."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
