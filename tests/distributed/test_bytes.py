"""A checkpoint's cost in storage, from listing the store, is what its rows should cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.models import CollectionSpec, Job, ModelSpec, Plan, TableSpec, uniform_plan
from tests.distributed.reader30 import read_rows
from tests.distributed.states import gather, row_bytes
from tests.distributed.worker_pool import WorkerPool
from tests.examples import some_of
from torchrec_checknrun import Checkpointer, Consecutive, Quantization

Workers = Callable[[int], WorkerPool]

SPEC = ModelSpec(
    (
        CollectionSpec(
            "a",
            (TableSpec("t0", 40_000, 64, ("f0",)), TableSpec("t1", 3_000, 32, ("f1", "f2"))),
        ),
        CollectionSpec("b", (TableSpec("t0", 20_000, 128, ("f3",)),)),
    ),
    hidden=2,
)
TAIL = {8: 8, 4: 4, 2: 4}
"""Scale and bias of a row: fp32 with 8 bit, fp16 with fewer."""


def train(root: str, spec: dict[str, Any], plan: Plan, bits: int | None) -> dict[str, Any]:
    """Save a consecutive checkpoint after some steps; return its report and the changed rows."""
    job = Job.build(ModelSpec.from_json(spec), plan, samples=200)
    saver = Checkpointer(
        root,
        model=job.model,
        retention=None,
        state={"optimizer": job.optimizer},
        policy=Consecutive(),
        quantization=Quantization(bits, "asymmetric", exact_below_rows=0),
    )
    with saver:
        job.train()
        saver.save()
        before = row_bytes(job.spec, gather(job))
        job.train(4)
        report = saver.save()
        assert report is not None
        after = row_bytes(job.spec, gather(job))
    changed = {key for key in after if after[key] != before[key]} if dist.get_rank() == 0 else ()
    tables = job.spec.table_paths
    return {
        "report": report.to_json(),
        "changed": {path: sum(table == path for table, _ in changed) for path in tables},
    }


@pytest.mark.parametrize(
    ("sharding", "bits"),
    some_of(
        [("row_wise", 4), ("table_wise", 4), ("row_wise", 8), ("row_wise", 2), ("row_wise", None)],
        *(0,),
    ),
)
def test_consecutive_checkpoint_is_as_small_as_its_rows(
    workers: Workers, tmp_path: Path, sharding: str, bits: int | None
) -> None:
    plan = uniform_plan(SPEC, sharding, 2)
    found = workers(2).run(train, root=str(tmp_path), spec=SPEC.to_json(), plan=plan, bits=bits)[0]
    report, changed = found["report"], found["changed"]
    assert report["kind"] == "differential"
    fraction = sum(changed.values()) / sum(table.rows for table in SPEC.table_paths.values())
    assert 0.02 < fraction < 0.6

    # Row counts, row format, and ids: a bit for each row of the table, or four bytes for each
    # stored one, whichever is less.
    weights = ids = optimizer = 0.0
    for path, table in SPEC.table_paths.items():
        row = 4 * table.dim if bits is None else table.dim * bits // 8 + TAIL[bits]
        weights += changed[path] * row
        ids += min(table.rows / 8, 4 * changed[path])
        optimizer += changed[path] * 4
    checkpoint = tmp_path / report["id"]
    sizes = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    assert sorted(sizes) == ["manifest.json", "rank-00000.bin", "rank-00001.bin"]

    # From the listing: what is neither dense, optimizer rows, index nor manifest.
    manifest = json.loads((checkpoint / "manifest.json").read_bytes())["manifest"]
    indexes = sum(file["index_length"] + 40 for file in manifest["files"])
    assert sum(len(rows) for rows in read_rows(checkpoint).values()) == sum(changed.values())
    payload = sum(sizes.values()) - sizes["manifest.json"] - indexes
    payload -= manifest["dense_bytes"] + optimizer
    assert payload == pytest.approx(weights + ids, rel=0.05)
    assert payload <= weights + ids + 8 * len(SPEC.table_paths)

    # The report says the same.
    assert sum(report["bytes"].values()) == report["total_bytes"] == sum(sizes.values())
    assert report["bytes"]["weights"] == weights
    assert report["bytes"]["ids"] == payload - weights
    assert report["bytes"]["optimizer"] == optimizer
    assert report["bytes"]["manifest"] == sizes["manifest.json"]
    assert report["modified_rows"] == sum(changed.values())
    values = sum(t.rows * t.dim for t in SPEC.table_paths.values())
    stored = sum(changed[path] * table.dim for path, table in SPEC.table_paths.items())
    assert report["modified_fraction"] == pytest.approx(stored / values)
    rows = sum(table.rows * 4 * (table.dim + 1) for table in SPEC.table_paths.values())
    assert report["full_fp32_bytes"] == rows + report["bytes"]["dense"]
