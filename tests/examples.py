"""Set what `make test` takes of sweeps: a quarter of a property's examples, some of the cases."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

ALL = os.environ.get("CHECKNRUN_TESTS") == "full"
"""True in a full run."""
OF_HISTORIES = settings(
    derandomize=not ALL,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
"""For long random histories: the same ones in each quick run, and none is shortened."""


def examples(count: int, quick: int | None = None) -> int:
    """Return the number of examples for this run, given the number for a full run.

    Args:
        quick: for `make test`, where a quarter takes too long.
    """
    return count if ALL else quick or -(-count // 4)


def some_of(cases: Iterable[Any], *often: int) -> list[Any]:
    """Mark the cases of a sweep slow; but for those at some indexes, one of each kind.

    A case that is a tuple has a value for each of several arguments.
    """
    found = []
    for index, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=() if index in often else pytest.mark.slow))
    assert max(often) < len(found)
    return found
