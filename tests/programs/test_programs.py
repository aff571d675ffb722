"""Training programs killed in the middle and resumed end as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.worker_pool import WorkerPool
from tests.programs.resuming import compare, compare_bytes, killed_and_resumed

PROGRAMS = ("dlrm_schedule", "two_towers", "transformer", "quickstart")


@pytest.mark.parametrize("program", PROGRAMS)
def test_killed_and_resumed(ranks: WorkerPool, tmp_path: Path, program: str) -> None:
    resumed, wanted = killed_and_resumed(ranks, tmp_path, program)
    compare(resumed, wanted)
    compare_bytes(resumed, wanted)


@pytest.mark.parametrize("program", ["two_towers", "quickstart"])
def test_a_restore_makes_no_state_for_the_tables(
    ranks: WorkerPool, tmp_path: Path, program: str
) -> None:
    """Adam has the tables' parameters but never steps them; nor may a checkpoint grow by that."""
    resumed, wanted = killed_and_resumed(ranks, tmp_path, program)
    for rank in resumed:
        made = [p for p in rank["live"] if "exp_avg" in p and "embedding_bags" in p]
        assert [path for path in made if "store" not in path] == []  # that is data parallel
    compare_bytes(resumed, wanted)
