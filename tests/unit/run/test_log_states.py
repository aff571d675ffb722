"""Check which optimizer state is stored as logarithmic differences, and where a chain must begin
anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.models import CollectionSpec, Job, ModelSpec
from tests.unit.run.deltas import (
    TABLES,
    chain,
    delta,
    expected,
    lc,
    live,
    make_job,
    manifest,
    restored,
    same,
    saving,
    sound,
    train,
)
from torchrec_checknrun import Consecutive, Quantization
from torchrec_checknrun.format.entries import OptimizerSection, RowsEntry
from torchrec_checknrun.format.reader import read_indexes
from torchrec_checknrun.root.checkpoints import read_manifest
from torchrec_checknrun.store.folder import Folder

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def job(one_rank: None) -> Job:
    return make_job()


def states(root: Path, checkpoint: str) -> dict[str, list[OptimizerSection]]:
    """Return the states of a checkpoint's chunks, by the table's last name."""
    folder, found = Folder(root), dict[str, list[OptimizerSection]]()
    for chunk in read_indexes(folder, read_manifest(folder, checkpoint)):
        if isinstance(chunk.entry, RowsEntry):
            found.setdefault(chunk.entry.table[-2:], []).extend(chunk.entry.optimizer)
    return found


def schemes(root: Path, checkpoint: str) -> dict[str, set[object]]:
    return {
        table: {section.encoding["scheme"] for section in sections}
        for table, sections in states(root, checkpoint).items()
    }


def test_links_hold_differences_of_state(tmp_path: Path, job: Job) -> None:
    made = chain(tmp_path, job, 3, quantization=delta(optimizer="logdelta"))
    for number, (name, _) in enumerate(made):
        for sections in states(tmp_path, name).values():
            assert sections
            for section in sections:
                link = {"link": True} if number else {}
                assert section.encoding == {"scheme": "logdelta", **link}


@pytest.mark.parametrize("fused", ["adagrad", "sgd"])
def test_pointwise_state_is_exact(tmp_path: Path, fused: str) -> None:
    spec = ModelSpec((CollectionSpec("c", TABLES),), fused=fused)
    chosen = delta(optimizer="logdelta")
    job = make_job(spec=spec)
    with saving(tmp_path, job, quantization=chosen) as saver:
        for _ in range(3):
            train(job, saver)
            report = saver.save()
        wanted = live(saver)
    assert report.kind == "differential"
    assert all(found <= {"fp32"} for found in schemes(tmp_path, report.id).values())
    found = restored(tmp_path, spec=spec)
    assert not same(
        {n: v for n, v in found.items() if "/" in n}, {n: v for n, v in wanted.items() if "/" in n}
    )


@pytest.mark.parametrize(
    "chosen",
    [
        Quantization(
            bits=8,
            optimizer="logdelta",
            exact_below_rows=0,
            tables={"*t0": delta(optimizer="logdelta")},
        ),
        delta(optimizer="logdelta", tables={"*t1": Quantization(bits=4, optimizer="log8")}),
        delta(optimizer="logdelta", tables={"*t1": lc(optimizer="log8")}),
        delta(optimizer="logdelta", exact_below_rows=30),
        delta(optimizer="logdelta", reference_bytes=600),
    ],
    ids=["of others", "in patterns", "lc", "small", "beyond the budget"],
)
def test_other_tables_have_log8(tmp_path: Path, job: Job, chosen: Quantization) -> None:
    """Also where a table is exact because it is small, or stands alone for lack of memory."""
    with saving(tmp_path, job, quantization=chosen, policy=Consecutive()) as saver:
        for _ in range(3):
            train(job, saver)
            report = saver.save()
        wanted = expected(saver)
    assert report.kind == "differential"
    found = schemes(tmp_path, report.id)
    assert found["t0"] == {"logdelta"}
    assert found["t1"] == {"log8"}
    values = restored(tmp_path)
    for name in wanted:
        if "t0" in name:
            assert values[name].tobytes() == wanted[name].tobytes()
        elif "/" in name:
            assert np.allclose(values[name], wanted[name], rtol=0.07, atol=0)
    assert sound(tmp_path) == []


def refused() -> list[dict[str, Any]]:
    others: list[dict[str, Any]] = [{}, {"bits": 4}, {"method": "fisher", "step": 0.1}]
    others += [{"method": "lc", "bits": 2}, {"method": "importance"}, {"method": "fp16"}]
    patterns = {"*": Quantization(method="delta", optimizer="log8")}
    return [*others, {"bits": 8, "tables": patterns}]


@pytest.mark.parametrize("options", refused(), ids=str)
def test_without_rows_of_differences_it_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"method='delta'.*give optimizer='log8'"):
        Quantization(optimizer="logdelta", **options)


@pytest.mark.parametrize(
    ("one", "other"),
    [("log8", "logdelta"), ("logdelta", "fp32"), ("logdelta", "logdelta"), ("fp32", "log8")],
)
def test_another_scheme_begins_with_a_base(tmp_path: Path, job: Job, one: str, other: str) -> None:
    """Unless nothing that links build on is another."""
    chain(tmp_path, job, 2, quantization=delta(optimizer=one))
    again = make_job(seed=7)
    with saving(tmp_path, again, quantization=delta(optimizer=other)) as saver:
        saver.restore()
        kinds = []
        for _ in range(2):
            train(again, saver)
            kinds.append(saver.save().kind)
        wanted = expected(saver)
    other_base = "logdelta" in (one, other) and one != other
    assert kinds == ["full" if other_base else "differential", "differential"]
    if other != "log8":
        assert same(restored(tmp_path), wanted) == []
    assert sound(tmp_path) == []


def test_what_was_restored_is_stored_as_the_same_codes(tmp_path: Path, job: Job) -> None:
    """Restart and rewrite all rows without training: no row moves by a level."""
    chosen = delta(optimizer="logdelta")
    made = chain(tmp_path, job, 2, quantization=chosen)
    other = make_job(seed=7)
    with saving(tmp_path, other, quantization=chosen) as saver:
        saver.restore()
        before = manifest(tmp_path, made[-1][0])["deltas"]
        for shard in saver._target.tracked.shards:
            ids = torch.arange(shard.rectangle.rows)
            sums = {name: s.detach().clone() for name, s in shard.local.optimizer.items()}
            shard.write_rows(ids, shard.local.weight.detach().clone(), sums)
        saver.step()
        report = saver.save()
    assert report.kind == "differential"
    after = manifest(tmp_path, report.id)["deltas"]
    wanted = {name: value for name, value in made[-1][1].items() if "/" in name}
    found = restored(tmp_path)
    assert not same({name: found[name] for name in wanted}, wanted)
    assert before.keys() == after.keys()


def test_its_memory_is_counted(tmp_path: Path, job: Job) -> None:
    sizes = {}
    for scheme in ("fp32", "logdelta"):
        again = make_job()
        root = tmp_path / scheme
        with saving(root, again, quantization=delta(optimizer=scheme)) as saver:
            train(again, saver)
            saver.save()
            sizes[scheme] = saver._saver._links.bytes
    assert sizes["logdelta"] - sizes["fp32"] == 2 * sum(table.rows for table in TABLES)
