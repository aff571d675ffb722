"""Set the number of examples of property tests: a quarter of all in `make test`."""

from __future__ import annotations

import os

ALL = os.environ.get("CHECKNRUN_TESTS") == "full"
"""Whether this is a full run."""


def examples(count: int, quick: int | None = None) -> int:
    """Return the number of examples for this run, given the number for a full run.

    Args:
        quick: for `make test`, where a quarter takes too long.
    """
    return count if ALL else quick or -(-count // 4)
