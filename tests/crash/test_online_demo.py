"""The demo of online training runs, and is ended by a signal, with real processes."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.dlrm_criteo.job import is_alive
from recipes.dlrm_criteo.online_demo import __main__ as online_demo
from recipes.dlrm_criteo.online_demo.outcome import FIRST, FOLLOWED, RELOADED, TRUTH
from tests.crash.conftest import REPOSITORY
from tests.distributed.forked import Forked
from tests.distributed.forked_torchrun import fork_scripts
from tests.examples import ALL

ROWS = Path(os.environ.get("CRITEO_TSV") or REPOSITORY / "../shared/data/criteo_kaggle_head.tsv")
TINY = replace(
    online_demo.SYNTHETIC, batch=512, per_second=8, seconds=11, warm_up=40, publish_seconds=1
)


@pytest.mark.timeout(200)
def test_following_helps_where_the_truth_drifts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not ALL:
        fork_scripts(monkeypatch)
    monkeypatch.setattr(online_demo, "SYNTHETIC", TINY)
    figures = tmp_path / "online.json"
    arguments = ["--drift", "2", "--runs", str(tmp_path / "runs"), "--json", str(figures)]
    # Fails if an answer is of no version, of an older one than before, or of one that had seen
    # its samples; if a process is left; if following doesn't help.
    assert online_demo.main(arguments) == 0
    assert "DEMO OK: 45056 samples" in capsys.readouterr().out.splitlines()[-1]
    found = json.loads(figures.read_text())
    models = found["models"]
    assert {each["samples"] for each in models.values()} == {TINY.batches * TINY.batch}
    assert models[FOLLOWED]["versions"] > models[RELOADED]["versions"] > models[FIRST]["versions"]
    assert models[FIRST]["versions"] == 1
    logloss = {name: each["logloss"] for name, each in models.items()}
    assert logloss[TRUTH] < logloss[FOLLOWED] < logloss[FIRST]
    behind = models[FOLLOWED]["step_to_visible"], models[RELOADED]["step_to_visible"]
    assert behind[0]["median"] < behind[1]["median"]
    log = (tmp_path / "runs" / "trainer" / "train.jsonl").read_text().splitlines()
    trained = json.loads(log[-1])["samples"]
    settings = found["settings"]
    assert trained == settings["warm_up_samples"] + settings["samples"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    not ROWS.is_file(), reason=f"no Criteo rows in {ROWS}: set CRITEO_TSV to a TSV file"
)
def test_on_real_rows_to_the_end_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--data", str(ROWS), "--seconds", "500", "--runs", str(tmp_path)]
    assert online_demo.main(arguments) == 0
    assert "DEMO OK" in capsys.readouterr().out.splitlines()[-1]


def descendants(pid: int) -> set[int]:
    """Return the processes below a process."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_ends_all_processes(number: signal.Signals, tmp_path: Path) -> None:
    output, log = tmp_path / "output", tmp_path / "runs" / "trainer" / "train.jsonl"
    demo = Forked("tests.crash.online_demo_of_forks", "--runs", str(tmp_path / "runs"), log=output)
    while not log.exists() or '"step"' not in log.read_text():
        assert demo.poll() is None, output.read_text()
        time.sleep(0.05)
    below = descendants(demo.pid)
    assert len(below) >= 6  # torchrun, two ranks, the server, and two that fork
    demo.send_signal(number)
    assert demo.wait(120) == 128 + number, output.read_text()
    assert f"ended by {number.name}" in output.read_text()
    deadline = time.monotonic() + 20
    while any(map(is_alive, below)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in below if is_alive(pid)]
