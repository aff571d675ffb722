"""The number of examples of property tests: all in `make test-full`, a third in `make test`."""

from __future__ import annotations

import os

_ALL = os.environ.get("CHECKNRUN_TESTS") == "full"


def examples(count: int) -> int:
    """Return how many of the examples of a whole run this one draws."""
    return count if _ALL else -(-count // 3)
