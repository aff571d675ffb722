"""Kill ranks in the middle of partial recoveries: they are repeated, and nothing is counted twice.

All points are ``python -m tests.crash.images.partial --json FILE``; this is a slice of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("every", "points"),
    [(19, 3), pytest.param(4, 14, marks=pytest.mark.slow)],
    ids=["some points", "more points"],
)
def test_a_killed_partial_recovery_is_repeated(tmp_path: Path, every: int, points: int) -> None:
    file = tmp_path / "partial.json"
    command = [sys.executable, "-m", "tests.crash.images.partial", "--json", str(file)]
    done = subprocess.run(
        [*command, "--every", str(every)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert file.exists(), f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    found = json.loads(file.read_text())
    assert not found["failures"], "\n".join(found["failures"])
    assert found["counts"]["kills"] >= points
    assert found["counts"]["runs compared"] == points + 2  # two references, too
