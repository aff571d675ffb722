"""Tables stored as LC-Checkpoint does, through the public Checkpointer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.models import Job
from tests.examples import some_of
from tests.unit.delta.lc.test_buckets import plainly
from tests.unit.run.deltas import (
    Tables,
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
from tests.unit.run.test_delta_failures import Fail, fails_when_written, storage_fails
from torchrec_checknrun import Consecutive, Quantization, Retention, load_tables
from torchrec_checknrun.compaction.compact import compact
from torchrec_checknrun.dcp import SavePlanner
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.format import chunk
from torchrec_checknrun.format.entries import RowsEntry
from torchrec_checknrun.format.reader import read_chunk, read_indexes
from torchrec_checknrun.format.row_chunk import RowsHeader
from torchrec_checknrun.format.row_reader import StoredRows
from torchrec_checknrun.root.checkpoints import read_manifest
from torchrec_checknrun.snapshot import items
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.diff import compare
from torchrec_checknrun.tracking import track

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def job(one_rank: None) -> Job:
    return make_job()


def chunk_ids(root: Path, checkpoint: str) -> list[tuple[str, np.ndarray]]:
    """Return the ids of each chunk of rows, with its table's name."""
    folder = Folder(root)
    found = []
    for stored in read_indexes(folder, read_manifest(folder, checkpoint)):
        if isinstance(stored.entry, RowsEntry):
            assert isinstance(stored.header, RowsHeader)
            rows = StoredRows(stored.header, read_chunk(folder, stored))
            found.append((stored.entry.table, rows.ids))
    return found


@pytest.mark.parametrize("bits", some_of([2, 3, 4], 1))
def test_links_are_the_papers(tmp_path: Path, job: Job, bits: int) -> None:
    """Follow a run by the paper's words, value by value, chunk by chunk."""
    kept: Tables = {}
    with saving(tmp_path, job, quantization=lc(bits)) as saver:
        for number in range(8):
            train(job, saver)
            report = saver.save()
            assert report.kind == ("differential" if number else "full")
            now = live(saver)
            weights = {name.split("[")[0]: rows for name, rows in now.items() if "/" not in name}
            for table, ids in chunk_ids(tmp_path, report.id):
                changed = weights[table][ids]
                if not number:
                    kept.setdefault(table, np.empty_like(weights[table]))[ids] = changed
                    continue
                before = torch.from_numpy(kept[table][ids])
                values = plainly(torch.from_numpy(changed), before, bits)
                kept[table][ids] = np.array(values, np.float32).reshape(changed.shape)
            found = restored(tmp_path, report.id)
            for name, rows in found.items():
                wanted = now[name] if "/" in name else kept[name.split("[")[0]]
                assert rows.tobytes() == wanted.tobytes(), (number, name)
    assert sound(tmp_path) == []


def test_every_link_restores_and_is_compacted(tmp_path: Path, job: Job) -> None:
    """A copy has whole rows and the digest of its link; a run goes on from it with links."""
    made = chain(tmp_path, job, 6, quantization=lc())
    for name, wanted in made:
        assert same(restored(tmp_path, name), wanted) == []
    for name, wanted in made[1:]:
        report = compact(tmp_path, name)
        assert report is not None
        copy, original = manifest(tmp_path, report.id), manifest(tmp_path, name)
        assert copy["kind"] == "full"
        for table, digests in copy["deltas"].items():
            assert digests == {"before": None, "after": original["deltas"][table]["after"]}
        assert same(restored(tmp_path, report.id), wanted) == []
    other = make_job(seed=7)
    with saving(tmp_path, other, quantization=lc()) as saver:
        saver.restore()
        assert same(live(saver), made[-1][1]) == []
        train(other, saver)
        report = saver.save()
        assert report.kind == "differential"
        wanted = expected(saver)
    assert same(restored(tmp_path), wanted) == []
    assert sound(tmp_path) == []


@pytest.mark.parametrize("fails", [storage_fails, fails_when_written])
def test_failed_saves_are_undone(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch, fails: Fail
) -> None:
    kinds = []
    with saving(tmp_path, job, quantization=lc(2)) as saver:
        for number in range(5):
            train(job, saver)
            if number:
                before = expected(saver)
                with monkeypatch.context() as patch:
                    fails(patch)
                    with pytest.raises(SaveFailed):
                        saver.save()
                undone = expected(saver)
                assert same(undone, before) == []
                train(job, saver)
            kinds.append(saver.save().kind)
            assert same(restored(tmp_path), expected(saver)) == []
    assert kinds == ["full"] + ["differential"] * 4
    assert sound(tmp_path) == []


def test_every_tool_sees_what_a_restore_gives(tmp_path: Path, job: Job) -> None:
    made = chain(tmp_path, job, 3, quantization=lc(2))
    found = compare(tmp_path, made[1][0], made[3][0], window_bytes=300)
    for table in found.tables:
        (name,) = (n for n in made[1][1] if n.startswith(f"{table.table}[") and "/" not in n)
        one, other = made[1][1][name], made[3][1][name]
        assert table.changed_rows == int((one != other).any(axis=1).sum()) > 0
    other_job = make_job(seed=7)
    load_tables(tmp_path, other_job.model, ["t0"])
    with saving(tmp_path / "other", other_job) as saver:
        values = live(saver)
    (name,) = (n for n in values if "t0" in n and "/" not in n)
    assert values[name].tobytes() == made[-1][1][name].tobytes()


def test_tables_mix_codecs(tmp_path: Path, job: Job) -> None:
    """Links of two kinds in one chain, restored, compacted, pruned, gone on with."""
    chosen = Quantization(exact_below_rows=0, tables={"*t0": lc(4), "*t1": delta()})
    with saving(tmp_path, job, quantization=chosen, retention=Retention(keep=1)) as saver:
        for number in range(6):
            train(job, saver)
            report = saver.save()
            assert report.kind == "differential" or not number
            wanted = expected(saver)
            assert saver._saver.writer._pruner is not None
            saver._saver.writer._pruner.wait(60)
    compact(tmp_path)
    assert same(restored(tmp_path), wanted) == []
    assert sound(tmp_path) == []


@pytest.mark.parametrize(
    "before", [delta(), Quantization(exact_below_rows=0), lc(2)], ids=["delta", "exact", "lc"]
)
def test_another_method_begins_with_a_base(tmp_path: Path, job: Job, before: Quantization) -> None:
    """Rows that another method keeps are no predecessors; other bits are no other method."""
    chain(tmp_path, job, 2, quantization=before, policy=Consecutive())
    for chosen, kind in ((lc(2), "full"), (delta(), "full")):
        other = make_job(seed=7)
        with saving(tmp_path, other, quantization=chosen, policy=Consecutive()) as saver:
            saver.restore()
            train(other, saver)
            same_method = before.method == chosen.method == "lc"
            assert saver.save().kind == ("differential" if same_method else kind)
            wanted = expected(saver)
        assert same(restored(tmp_path), wanted) == []
    assert sound(tmp_path) == []


def test_what_is_outside_of_training(tmp_path: Path, job: Job) -> None:
    """Rows written by hand: NaN, infinities, denormals, zeros; each restores what was kept."""
    with saving(tmp_path, job, quantization=lc(2)) as saver:
        train(job, saver)
        saver.save()
        (shard,) = (s for s in saver._target.tracked.shards if s.table.endswith("t0"))
        for value in (float("nan"), 1e-40, 3e38, -3e38, float("inf"), -0.0, 0.01):
            ids, state = torch.tensor([1, 5, 9]), torch.full((3,), 1e-3)
            shard.write_rows(ids, torch.full((3, 8), value), {"momentum1": state})
            train(job, saver)
            saver.save()
            wanted = expected(saver)
            if not np.isfinite(value):
                (name,) = (n for n in wanted if "t0" in n and "/" not in n)
                assert not np.isfinite(wanted[name][[1, 5, 9]]).any()
            assert same(restored(tmp_path), wanted) == []
    assert sound(tmp_path) == []


@pytest.mark.parametrize("staging", ["copy_on_write", "copy", "encode"])
def test_no_row_is_encoded_while_training_waits(tmp_path: Path, job: Job, staging: Any) -> None:
    made = chain(tmp_path, job, 2, quantization=lc(), staging=staging)
    assert same(restored(tmp_path), made[-1][1]) == []


@pytest.mark.parametrize("policy", ["one_shot", "intermittent"])
def test_policies_since_the_baseline_are_refused(tmp_path: Path, job: Job, policy: Any) -> None:
    with pytest.raises(ValueError, match=r"method='lc'.*Consecutive.*method='adaptive'"):
        saving(tmp_path, job, policy=policy, quantization=lc())
    with pytest.raises(ValueError, match=r"method='lc'.*'thread'.*method='adaptive'"):
        saving(tmp_path, job, background="process", quantization=lc())
    with pytest.raises(ValueError, match=r"method='lc'.*only Checkpointer.*method='adaptive'"):
        SavePlanner(track(job.model), quantization=lc())


@pytest.mark.parametrize(
    "options",
    [{}, {"bits": 8}, {"bits": "auto", "expected_restores": 3}, {"bits": 2, "mean_bits": 3.0},
     {"bits": 2, "step": 1.0}],
)  # fmt: skip
def test_other_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"bits|step"):
        Quantization(method="lc", **options)


def test_bits_stay_after_many_restores() -> None:
    chosen = lc(2, expected_restores=1)
    assert chosen.resolved(lossy_restores=5) == chosen


def test_beyond_the_budget_tables_stand_alone(
    tmp_path: Path, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = lc(4, reference_bytes=1400)  # t0: 40 rows of 33 bytes; t1 is larger
    made = chain(tmp_path, job, 2, quantization=chosen)
    assert "'adaptive' instead of 'lc'" in caplog.text
    found = manifest(tmp_path, made[-1][0])
    assert list(found["deltas"]) == ["c.embedding_bags.t0"]
    (codec,) = found["tables"]["c.embedding_bags.t1"]["codecs"]
    assert (codec["name"], codec["bits"]) == ("fbgemm_rowwise", 4)
    values = restored(tmp_path)
    assert all(same({n: values[n]}, {n: made[-1][1][n]}) == [] for n in values if "t0" in n)


@pytest.mark.parametrize("chosen", [lc(), delta()], ids=["lc", "delta"])
def test_links_without_changes_are_read_whatever_chunk_bytes(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch, chosen: Quantization
) -> None:
    """A few bytes stand for all rows of a chunk, of which readers accept a limited number."""
    for module in (chunk, items):
        monkeypatch.setattr(module, "DECODED_BYTES", 600)
    monkeypatch.setattr(chunk, "_EXPANSION", 1)
    with saving(tmp_path, job, quantization=chosen, chunk_bytes=1 << 20, dense="whole") as saver:
        train(job, saver)
        saver.save()
        for shard in saver._target.tracked.shards:
            rows = shard.local.weight.detach().clone()
            states = {name: state.clone() for name, state in shard.local.optimizer.items()}
            shard.write_rows(torch.arange(len(rows)), rows, states)
        assert saver.save().kind == "differential"
        wanted = expected(saver)
    assert sound(tmp_path) == []
    assert same(restored(tmp_path), wanted) == []
