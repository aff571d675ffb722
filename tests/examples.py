"""Set the number of examples of property tests: all in `make test-full`, a third in `make test`."""

from __future__ import annotations

import os

_ALL = os.environ.get("CHECKNRUN_TESTS") == "full"


def examples(count: int, quick: int | None = None) -> int:
    """Return the number of examples for this run, given the number for a full run.

    Args:
        quick: for `make test`, where a third takes too long.
    """
    return count if _ALL else quick or -(-count // 3)
