"""The demo runs, on rows of the real data set where there are any."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from recipes.dlrm_criteo import demo
from tests.crash.conftest import REPOSITORY
from tests.distributed.forked_torchrun import fork_scripts
from tests.examples import ALL

IMAGES = r"DEMO OK: with images: killed in step \d+, 0 steps lost; without images: killed in step "
IMAGES_FIT = shutil.disk_usage(demo.SHARED_MEMORY).free >= demo.LEAST_SHARED_MEMORY
SHORT = demo.Plan(
    steps=44,
    interval=10,
    kill_at=36,
    overrides=(*demo.SYNTHETIC.overrides, "trainer.eval_samples=256"),
)
ROWS = Path(os.environ.get("CRITEO_TSV") or REPOSITORY / "../shared/data/criteo_kaggle_head.tsv")


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ALL:
        fork_scripts(monkeypatch)


@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not ROWS.is_file(), reason=f"no Criteo rows in {ROWS}: set CRITEO_TSV to a TSV file"
)
def test_on_real_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ALL:
        # Seconds of training behind the kill: it is asked for from outside, by what a file tells.
        monkeypatch.setattr(demo, "TSV", replace(demo.TSV, steps=74, interval=10, kill_at=32))
    assert demo.main(["--data", str(ROWS), "--once", "--runs", str(tmp_path)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.match(IMAGES if IMAGES_FIT else "DEMO OK: killed in step ", last)
    assert "equal bit for bit" in last


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("arguments", "plan"),
    [
        pytest.param([], demo.SYNTHETIC, id="exact", marks=pytest.mark.slow),
        # Real rows show the same.
        pytest.param(["--once"], SHORT, id="once", marks=[pytest.mark.slow] * ROWS.is_file()),
        pytest.param(["--bits", "8"], demo.SYNTHETIC, id="8 bit", marks=pytest.mark.slow),
    ],
)
def test_on_synthetic_rows(
    arguments: list[str],
    plan: demo.Plan,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "SYNTHETIC", plan)
    assert demo.main([*arguments, "--runs", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert ("two uninterrupted runs end bit for bit equal" in printed) == (not arguments)
    last = printed.splitlines()[-1]
    assert re.match(IMAGES if IMAGES_FIT else "DEMO OK: killed in step ", last)
    assert ("(lossy)" if "--bits" in arguments else "equal bit for bit") in last


def test_a_parent_whose_report_was_lost_is_shown(tmp_path: Path) -> None:
    """A kill may come between a checkpoint's commit and its report."""
    stored = dict.fromkeys(("weights", "ids", "optimizer", "dense", "manifest", "other"), 1)
    event = {
        **{"step": 30, "sequence": 4, "kind": "differential", "bytes": stored},
        **{"parent": "seq-000003_step-00000020_0badcafe", "modified_fraction": 0.1},
        **{"total_bytes": 6, "full_fp32_bytes": 60, "stall_seconds": 0.001},
    }
    console = Console(width=200)
    with console.capture() as shown:
        console.print(demo.table(demo.Run(tmp_path, checkpoints=[event])))
    assert "seq 3" in shown.get()
