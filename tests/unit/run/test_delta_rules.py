"""Refuse policies and options that differences can't follow; begin with a base where they must."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.models import Job
from tests.unit.run.deltas import (
    Own,
    chain,
    delta,
    live,
    make_job,
    restored,
    same,
    saving,
)
from torchrec_checknrun import (
    Full,
    Intermittent,
    OneShot,
    Quantization,
)

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def job(one_rank: None) -> Job:
    return make_job()


def manifest(root: Path, checkpoint: str) -> dict[str, Any]:
    document = json.loads((root / checkpoint / "manifest.json").read_bytes())
    found: dict[str, Any] = document["manifest"]
    return found


@pytest.mark.parametrize("policy", [OneShot(), Intermittent(), "one_shot", "intermittent"])
def test_policies_since_the_baseline_are_refused(tmp_path: Path, job: Job, policy: Any) -> None:
    with pytest.raises(ValueError, match=r"method='fisher'"):
        saving(tmp_path, job, policy=policy)
    tables = Quantization(tables={"*t0": delta()})
    with pytest.raises(ValueError, match=r"method='fisher'"):
        saving(tmp_path, job, policy=policy, quantization=tables)
    saving(tmp_path, job, policy=policy, quantization=delta(method="fisher")).close()


def test_a_process_that_writes_is_refused(tmp_path: Path, job: Job) -> None:
    with pytest.raises(ValueError, match=r"background='thread'.*'fisher'"):
        saving(tmp_path, job, background="process")


def test_since_the_baseline_becomes_a_base(tmp_path: Path, job: Job) -> None:
    made = chain(tmp_path, job, 3, policy=Own())
    kinds = [manifest(tmp_path, name)["kind"] for name, _ in made]
    assert kinds == ["full", "full", "differential", "full"]
    for name, wanted in made:
        assert same(restored(tmp_path, name), wanted) == []


def test_full_checkpoints_are_bases(tmp_path: Path, job: Job) -> None:
    made = chain(tmp_path, job, 2, policy=Full())
    for name, wanted in made:
        assert manifest(tmp_path, name)["kind"] == "full"
        assert same(restored(tmp_path, name), wanted) == []


def test_loss_needs_to_be_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step="):
        delta(loss=1e-5)
    with pytest.raises(ValueError, match="step="):
        delta(loss=1e-5, current_loss=0.4)
    told = {"loss": 1e-5, "current_loss": 0.4, "total_steps": 100, "batch_size": 4}
    made = chain(tmp_path, make_job(), 2, quantization=delta(**told))
    other = make_job(seed=7)
    with saving(tmp_path, other, quantization=delta(**told)) as saver:
        saver.restore()
        assert same(live(saver), made[-1][1]) == []


@pytest.mark.parametrize(
    "options",
    [
        {"method": "delta", "step": 0.0},
        {"method": "delta", "step": float("nan")},
        {"method": "delta", "step": 1.0, "mean_bits": 3.0},
        {"method": "delta", "bits": 8},
        {"method": "delta", "mean_bits": 30.0},
        {"method": "delta", "total_steps": 5},
        {"method": "fisher", "loss": 1e-5},
        {"method": "adaptive", "step": 1.0},
        {"bits": 8, "tail": True},
        {"method": "delta", "reference_bytes": -1},
    ],
)
def test_contradictions_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|give|leave|parameter|needs"):
        Quantization(**options)
