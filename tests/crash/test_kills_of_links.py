"""Kills in every phase of saves that store rows as differences to the last checkpoint.

Each restart checks the digest of all rows that it puts together against the manifest. A run that
was killed is not that of another, bit for bit, since each restore rounds its rows to their steps:
in the end its own rows are compared with those of its newest checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recipes.dlrm_criteo import final_state
from recipes.dlrm_criteo.final_state import Comparison
from recipes.dlrm_criteo.job import Job
from tests.crash.test_kills import OVERRIDES, STEPS, sweep_phases

STEP = 2.0**-12
"""The step of a row with a gradient of one; a row that lacks an update differs by far more."""
APART = 2.0**-4
"""Bounds what LC's links leave out in a row of the last checkpoint; lives check their digests."""
LEVELS = 2.0**0.125 - 1
"""Bounds the relative error of optimizer state on levels an eighth of an octave apart."""
ALWAYS = (
    "checkpoint.policy=consecutive",
    "checkpoint.at_end=true",  # else a last checkpoint that came too early would be left out
)
LINKS = {
    "delta": (*ALWAYS, "checkpoint.method=delta", f"checkpoint.step={STEP}"),
    "logdelta": (
        *ALWAYS,
        "checkpoint.method=delta",
        f"checkpoint.step={STEP}",
        "checkpoint.optimizer_state=logdelta",
    ),
    "lc": (*ALWAYS, "checkpoint.method=lc", "checkpoint.bits=4"),
}


@pytest.mark.slow  # always run: tests/campaign kills runs of differences, too
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", LINKS)
def test_every_phase_on_each_rank_and_on_both(tmp_path: Path, method: str) -> None:
    assert not sweep_kills(tmp_path, method)


def sweep_kills(directory: Path, method: str = "delta") -> list[str]:
    """Run the job through a kill in every phase; return what was lost."""
    run, lost = sweep_phases(directory, LINKS[method])
    restored = directory / "restored"
    links = [*LINKS[method], "checkpoint.keep=2"]
    settings = [*OVERRIDES, *links, f"trainer.final_state={restored}"]
    with Job(directory, settings) as job:
        *_, start = (event for event in job.events() if event["event"] == "start")
    if start["restored"]["id"] != run.checkpoints[-1]["id"]:
        lost.append(f"{run.checkpoints[-1]['id']} was the newest, {start['restored']} was restored")
    if start["step"] != STEPS:
        lost.append(f"the newest checkpoint is of step {start['step']}, not of {STEPS}")
    if len(start["restored"]["chain"]) < 2:
        lost.append("the newest checkpoint is no link")
    return lost + too_far(run.final_state, restored, method)


def too_far(live: Path, restored: Path, method: str) -> list[str]:
    """Describe what differs in two final states, of rows by more than links may round."""
    states = [final_state._load(path) for path in (live, restored)]
    found = Comparison()
    for part in ("progress", "dense"):
        found.compare(f"{part} ", states[0][0][part], states[1][0][part])
    a, b = (final_state._tables(state) for state in states)
    assert a.keys() == b.keys()
    for table in a:
        rows, others = a[table].pop("weight").double(), b[table].pop("weight").double()
        (sums,) = a[table].values()
        if method == "logdelta":
            (others_sums,) = b[table].values()
            if not torch.allclose(sums, others_sums, rtol=LEVELS, atol=0):
                found.add(f"optimizer state of {table} is more than {LEVELS} off")
        else:
            found.compare(f"table {table} ", a[table], b[table])
        apart = (rows - others).abs().amax(dim=1)
        limit = torch.full_like(apart, APART) if method == "lc" else _half_a_step(sums, rows)
        count = int((apart > limit).sum())
        if count:
            found.add(f"{count} of {len(rows)} rows of {table} are {apart.max()} off at most")
    return found.differences


def _half_a_step(sums: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Bound the error of each row: half the power of two next to ``STEP / sqrt(G)``, and its
    rounding to fp32. Rows without a gradient so far are exact.
    """
    mean = sums.double().reshape(len(rows), -1).mean(dim=1)
    steps = STEP * 2**0.5 / torch.where(mean > 0, mean, 1.0).sqrt()
    rounding = 2.0**-24 * rows.abs().amax(dim=1)
    return torch.where(mean > 0, steps / 2 * (1 + 2.0**-10) + rounding, 0.0)
