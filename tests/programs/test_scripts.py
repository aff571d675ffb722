"""Run the programs as scripts: torchrun starts them, and restarts them after the kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.fork_server import REPOSITORY
from tests.programs.conftest import Both
from tests.programs.resuming import compare, compare_bytes


def restarted(folder: Path, program: str) -> list[dict[str, Any]]:
    """Run a script of two ranks, one of which is killed once; return each rank's final objects."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        # Otherwise gloo finds the dead process's addresses
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"),
            *("--nproc-per-node=2", str(REPOSITORY / "tests" / "programs" / f"{program}.py")),
            *(str(folder / "root"), str(folder)),
        ],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    ends = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    assert not any(end["first"] for end in ends), "nothing was killed"
    return ends


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("two_towers", marks=pytest.mark.slow),
        pytest.param("dlrm_schedule", marks=pytest.mark.slow),
        pytest.param("transformer", marks=pytest.mark.slow),
        pytest.param("quickstart", marks=pytest.mark.slow),
    ],
)
def test_restarted_by_torchrun(both: Both, tmp_path: Path, program: str) -> None:
    _, wanted = both(program)
    resumed = restarted(tmp_path, program)
    assert min(rank["resumed_from"] for rank in resumed) >= 6
    compare(resumed, wanted)
    compare_bytes(resumed, wanted)
