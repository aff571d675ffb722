"""Kill a run in the middle of a compaction behind it: nothing is lost, and nothing lives on."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.compacting import checkpointer, make_job
from tests.crash.save_sweep import alone
from tests.distributed import references
from tests.distributed.fork_server import server
from tests.distributed.states import gather
from tests.examples import examples
from torchrec_checknrun import verify
from torchrec_checknrun.format.names import parse_id

KILLS = examples(8, quick=1)
"""Besides the last one, whose run finds what the others have left."""
TRIES = 8
"""Further kills at most, until one has hit a compaction that was being written: on a busy machine
it may be done before the kill.
"""
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
    before = copies(root, committed=False)
    with tempfile.TemporaryDirectory(prefix="compacting-") as folder:
        log = Path(folder) / "log"
        run = server(0).fork("tests.crash.compacting", str(root), log, dict(os.environ))
        _wait(log, lambda: bool(copies(root, committed=False) - before))
        time.sleep(delay)
        os.kill(run, signal.SIGKILL)
        _wait("the run outlives its kill", lambda: _is_gone(run))
        begun = copies(root, committed=False) - before
        text = log.read_text()
    compacts, saved = (
        [int(number) for number in re.findall(rf"^{what} (\d+)$", text, re.MULTILINE)]
        for what in ("compacts", "saved")
    )
    assert compacts, "no compaction was begun"
    _wait("the compaction outlives the run", lambda: _is_gone(compacts[-1]))
    return saved[-1], begun


def _wait(problem: str | Path, until: Callable[[], bool]) -> None:
    """Wait until something holds; fail with a text, or with what a file holds then."""
    end = time.monotonic() + _PATIENCE
    while not until():
        late = time.monotonic() > end
        assert not late, problem if isinstance(problem, str) else problem.read_text()
        time.sleep(0.005)


def _is_gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}") or "Z" in _state(pid)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked up in /proc")
def test_a_killed_run_loses_nothing(tmp_path: Path) -> None:
    left: set[str] = set()
    for number in range(KILLS + TRIES):
        if number >= KILLS and left:
            break
        done, begun = kill_while_compacting(tmp_path, 0.05 * (number % KILLS) / KILLS)
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
