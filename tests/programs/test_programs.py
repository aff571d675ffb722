"""Kill training programs in the middle; resume them to the end of an uninterrupted run."""

from __future__ import annotations

import pytest

from tests.programs.conftest import Both
from tests.programs.resuming import compare, compare_bytes

PROGRAMS = ("dlrm_schedule", "two_towers", "transformer", "quickstart")


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_live_object_comes_back(both: Both, program: str) -> None:
    compare(*both(program))


@pytest.mark.parametrize("program", PROGRAMS)
def test_checkpoints_after_a_restore_are_no_larger(both: Both, program: str) -> None:
    compare_bytes(*both(program))


@pytest.mark.parametrize("program", ["two_towers", "quickstart"])
def test_a_restore_makes_no_state_for_the_tables(both: Both, program: str) -> None:
    """Make no state for the sharded tables' parameters, which Adam has as well, but never steps."""
    resumed, wanted = both(program)
    sharded = {"movie", "user", "product"}  # the store's table is data parallel
    for rank in (*resumed, *wanted):
        of_tables = [p for p in rank["live"] if "exp_avg" in p and "embedding_bags" in p]
        assert [path for path in of_tables if any(name in path for name in sharded)] == []
