"""Kill runs with images, by real SIGKILLs: their end is that of an undisturbed run, bit for bit.

The whole sweep is ``python -m tests.crash.images``; this is a slice of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]


def sweep(folder: Path, *arguments: str, ranks: int = 2) -> dict[str, Any]:
    """Run a sweep in a process of its own: a process that forks must have no threads."""
    file = folder / "images.json"
    command = [sys.executable, "-m", "tests.crash.images", "--json", str(file), *arguments]
    env = {**os.environ, "CHECKNRUN_TEST_RANKS": str(ranks)}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=280
    )
    assert file.exists(), f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_no_step_is_lost_and_every_bit_is_right(tmp_path: Path) -> None:
    found = sweep(tmp_path, "--moments", "5", "--backward", "5", "--uncommitted", "3")
    assert not found["failures"], "\n".join(found["failures"])
    assert sum(n for name, n in found["counts"].items() if " " in name) > 0
    assert found["counts"]["recoveries of a rank by images"] >= 20


def test_commits_nobody_has_heard_of_and_kills_in_recoveries(tmp_path: Path) -> None:
    found = sweep(tmp_path, "--unheard", "2", "--recovery", "6")
    assert not found["failures"], "\n".join(found["failures"])
    assert found["counts"]["in the middle of a recovery"] >= 3


def test_three_ranks_whose_sums_depend_on_their_order(tmp_path: Path) -> None:
    found = sweep(tmp_path, "--backward", "2", ranks=3)
    assert not found["failures"], "\n".join(found["failures"])
    assert found["counts"]["recoveries of a rank by images"] >= 6


@pytest.mark.slow
def test_kills_at_every_point_of_a_recovery(tmp_path: Path) -> None:
    found = sweep(tmp_path, "--every-point")
    assert not found["failures"], "\n".join(found["failures"])
    assert found["counts"]["in the middle of a recovery"] >= 18


@pytest.mark.parametrize(
    ("sabotage", "kills", "reason"),
    [
        ("one_table_unjournaled", ("--backward", "6"), "differs in model/c.embedding_bags"),
        ("state_not_written", ("--backward", "6"), "no images though step"),
        ("marks_not_pending", ("--uncommitted", "2"), "chain lacks model/c.embedding_bags"),
        pytest.param(
            *("unmarked", ("--moments", "2"), "chain lacks model/c.embedding_bags"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("journals_dropped_early", ("--backward", "6"), "differs in model/c.embedding_bags"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("older_state", ("--backward", "6"), "no images though step|differs|did not end"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_sabotage_turns_it_red(
    sabotage: str, kills: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    found = sweep(tmp_path, "--sabotage", sabotage, *kills)
    assert any(part in failure for part in reason.split("|") for failure in found["failures"])
