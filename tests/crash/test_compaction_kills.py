"""Kill a run in the middle of a compaction behind it: nothing is lost, and nothing lives on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.crash.compacting import checkpointer, make_job
from tests.crash.save_sweep import alone
from tests.distributed import references
from tests.distributed.states import gather
from tests.examples import examples
from torchrec_checknrun import verify
from torchrec_checknrun.format.names import parse_id

KILLS = examples(8, quick=2)
_PATIENCE = 120.0


def copies(root: Path, committed: bool) -> set[str]:
    """Name the compacted copies, those with or those without a manifest."""
    return {
        path.name
        for path in root.glob("seq-*")
        if (id := parse_id(path.name)) is not None
        and id.is_copy
        and (path / "manifest.json").exists() == committed
    }


def kill_while_compacting(root: Path, delay: float) -> tuple[int, set[str]]:
    """Run until a compaction has begun to write, and kill the run a moment later.

    Returns:
        The last step known to be durable, and the copies that were not committed then.
    """
    done, pid, before = 0, 0, copies(root, committed=False)
    command = [sys.executable, "-m", "tests.crash.compacting", str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            what, number = line.split()
            done, pid = (int(number), pid) if what == "saved" else (done, int(number))
            if copies(root, committed=False) - before:
                break
        time.sleep(delay)
        run.kill()
        begun = copies(root, committed=False) - before
        for line in run.stdout:
            what, number = line.split()
            done = int(number) if what == "saved" else done
    assert pid, "no compaction was begun"
    end = time.monotonic() + _PATIENCE
    while os.path.exists(f"/proc/{pid}") and "Z" not in _state(pid):
        assert time.monotonic() < end, "the compaction outlives the run"
        time.sleep(0.02)
    return done, begun


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked up in /proc")
def test_a_killed_run_loses_nothing(tmp_path: Path) -> None:
    left: set[str] = set()
    for number in range(KILLS):
        done, begun = kill_while_compacting(tmp_path, 0.05 * number / KILLS)
        left |= begun
        with alone():
            job = make_job(seed=3)
            saver = checkpointer(tmp_path, job)
            report = saver.restore()
            assert report is not None
            assert report.step >= done
            wanted = make_job()
            wanted.train(report.step)
            assert references.differences(gather(job), gather(wanted), None) == []
            saver._release(failed=True)
        assert not any(checkpoint.problems for checkpoint in verify(tmp_path))
    assert left, "no kill hit a compaction that was being written"
    kill_while_compacting(tmp_path, 0.0)  # a run prunes what the killed ones have left
    assert not left & copies(tmp_path, committed=False)
