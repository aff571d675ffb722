"""Kill the commands that settle which checkpoints count: each decision is made, or not made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.repairing import COMMANDS
from tests.examples import some_of


@pytest.mark.parametrize("instant", some_of(["before", "half", "after"], 1))
def test_a_killed_decision_is_made_or_not(instant: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.repairing", str(tmp_path), instant],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kills = json.loads(done.stdout.splitlines()[-1])
    assert kills.keys() == COMMANDS.keys()
    assert min(kills.values()) >= 5
