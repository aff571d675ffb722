"""The bit width of a lineage follows from its expected restores, then from its actual ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.models import CollectionSpec, Job, ModelSpec, Plan, TableSpec, uniform_plan
from tests.distributed.watch import warnings_said
from tests.distributed.worker_pool import WorkerPool
from tests.examples import some_of
from torchrec_checknrun import Checkpointer, CheckpointReport, Consecutive, Quantization

Workers = Callable[[int], WorkerPool]

SPEC = ModelSpec(
    (
        CollectionSpec(
            "a",
            (TableSpec("t0", 300, 16, ("f0",)), TableSpec("small", 40, 8, ("f1", "f2"))),
        ),
    ),
    hidden=2,
)


def lives(
    root: str, spec: dict[str, Any], plan: Plan, quantization: dict[str, Any], times: int
) -> list[dict[str, Any]]:
    """Start a job so often, save two checkpoints in each life, and return what was saved."""
    found = []
    for _ in range(times):
        job = Job.build(ModelSpec.from_json(spec), plan, samples=200)
        reports: list[CheckpointReport] = []
        with (
            warnings_said() as said,
            Checkpointer(
                root,
                model=job.model,
                retention=None,
                state={"optimizer": job.optimizer},
                policy=Consecutive(),
                quantization=Quantization(**quantization),
                callbacks=[reports.append],
            ) as saver,
        ):
            saver.restore()
            for _ in range(2):
                job.train(2)
                saver.save()
        found.append(
            {
                "kinds": [report.kind for report in reports],
                "restores": [report.lossy_restores for report in reports],
                "error": [report.error_mean for report in reports],
                "warned": [text for text in said if "8 bits from now on" in text],
            }
        )
    return found


@pytest.mark.parametrize(
    "quantization",
    some_of(
        [
            {"bits": "auto"},
            {"bits": 4, "method": "greedy"},
            {"method": "importance", "mean_bits": 3},
        ],
        *(0, 2),
    ),
    ids=["auto", "greedy", "importance"],
)
def test_eight_bits_after_more_restores_than_expected(
    workers: Workers, tmp_path: Path, quantization: dict[str, Any]
) -> None:
    plan = uniform_plan(SPEC, "row_wise", 2)
    asked = {**quantization, "expected_restores": 1, "exact_below_rows": 100}
    for rank, found in enumerate(
        workers(2).run(
            lives, root=str(tmp_path), spec=SPEC.to_json(), plan=plan, quantization=asked, times=4
        )
    ):
        kinds = [life["kinds"] for life in found]
        assert kinds[:2] == [["full", "differential"], ["differential", "differential"]]
        assert kinds[2:] == [["full", "differential"], ["differential", "differential"]]
        assert [life["restores"] for life in found] == [[0, 0], [1, 1], [2, 2], [3, 3]]
        narrow = [error for life in found[:2] for error in life["error"]]
        wide = [error for life in found[2:] for error in life["error"]]
        assert min(narrow) > 0.03
        assert max(wide) < 0.01
        warnings = [len(life["warned"]) for life in found]
        assert warnings == ([0, 0, 1, 1] if rank == 0 else [0, 0, 0, 0])


def test_as_many_restores_as_expected(workers: Workers, tmp_path: Path) -> None:
    """Count no restores of exact checkpoints, which disturb nothing."""
    plan = uniform_plan(SPEC, "row_wise", 1)
    where: dict[str, Any] = {"spec": SPEC.to_json(), "plan": plan, "times": 4}
    enough = {"bits": "auto", "expected_restores": 3, "exact_below_rows": 0}
    (found,) = workers(1).run(lives, root=str(tmp_path / "a"), quantization=enough, **where)
    assert [life["kinds"][0] for life in found] == ["full", *["differential"] * 3]
    exact = {"bits": "auto", "expected_restores": 1, "exact_below_rows": 1000}
    (found,) = workers(1).run(lives, root=str(tmp_path / "b"), quantization=exact, **where)
    assert [life["restores"] for life in found] == [[0, 0]] * 4
    assert [life["error"] for life in found] == [[None, None]] * 4


def test_importance_is_the_same_for_all_tables_and_ranks(workers: Workers, tmp_path: Path) -> None:
    """Find one constant over the rows of all tables; the manifest names it."""
    plan = uniform_plan(SPEC, "row_wise", 2)
    asked = {"method": "importance", "mean_bits": 4, "exact_below_rows": 0}
    where: dict[str, Any] = {"spec": SPEC.to_json(), "plan": plan, "quantization": asked}
    workers(2).run(lives, root=str(tmp_path), times=1, **where)
    checkpoints = sorted(tmp_path.glob("*/manifest.json"))
    assert len(checkpoints) == 2
    for path in checkpoints:
        tables = json.loads(path.read_bytes())["manifest"]["tables"].values()
        codecs = [codec for table in tables for codec in table["codecs"]]
        assert {codec["name"] for codec in codecs} == {"importance"}
        assert {codec["mean_bits"] for codec in codecs} == {4}
        assert len({codec["constant"] for codec in codecs}) == 1
