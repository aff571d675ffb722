"""Restores into tables that differ from the saved ones: renamed, resized, a part, other types."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.distributed.layouts import Layout, LayoutJob, build
from tests.distributed.models import CollectionSpec, ModelSpec, TableSpec
from tests.distributed.states import local_bytes
from tests.distributed.unsharded import Whole, differences, whole_state
from tests.distributed.worker_pool import WorkerPool
from tests.examples import some_of
from torchrec_checknrun import Checkpointer, load_tables
from torchrec_checknrun.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.tracking import Consumer, track

Workers = Callable[[int], WorkerPool]

TABLES = (TableSpec("t0", 41, 8, ("f0", "f1")), TableSpec("t1", 30, 8, ("f1",)))
SPEC = ModelSpec((CollectionSpec("a", TABLES),))
T0, T1 = "a.embedding_bags.t0", "a.embedding_bags.t1"


def layout(spec: ModelSpec = SPEC, sharding: str = "row_wise", ranks: int = 2) -> dict[str, Any]:
    names = [f"{c.name}.{t.name}" for c in spec.collections for t in c.tables]
    return asdict(Layout(dict.fromkeys(names, sharding), ranks))


def other(*tables: TableSpec) -> ModelSpec:
    return ModelSpec((CollectionSpec("a", tables),))


def checkpointer(root: str, job: LayoutJob, /, **state: Any) -> Checkpointer:
    return Checkpointer(root, model=job.model, state=state, chunk_bytes=700, retention=None)


def save_two(root: str, spec: dict[str, Any], layout: dict[str, Any], copy: str) -> None:
    """Save a full and a differential checkpoint, without the optimizer's dense part."""
    job = build(spec, layout)
    job.train(2)
    with checkpointer(root, job) as saver:
        saver.save()
        job.train(1)
        saver.save()
    whole = whole_state(job, layout)
    if dist.get_rank() == 0:
        whole.store(copy)


@pytest.fixture(scope="module")
def made_once(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    where: dict[str, Any] = {"root": str(folder / "root"), "copy": str(folder / "copy.npz")}
    workers(2).run(save_two, **where, spec=SPEC.to_json(), layout=layout())
    return folder


@pytest.fixture
def saved(made_once: Path, tmp_path: Path) -> dict[str, Any]:
    shutil.copytree(made_once, tmp_path, dirs_exist_ok=True)
    return {"root": str(tmp_path / "root"), "copy": str(tmp_path / "copy.npz")}


def restore_other(
    root: str,
    copy: str,
    spec: dict[str, Any],
    layout: dict[str, Any],
    options: dict[str, Any],
    rows: dict[str, list[Any]],
) -> tuple[str, ...]:
    """Restore, and check each table against a saved one.

    Args:
        rows: by table here, the saved table and how many of its rows are here.
    """
    job = build(spec, layout, seed=9)
    job.train(1)  # so that rows left alone have optimizer state to keep
    before, saved = whole_state(job, layout), Whole.load(copy)
    with checkpointer(root, job) as saver:
        report = saver.restore(**options)
        assert report is not None
        after = whole_state(job, layout)
        for part in ("weights", "states"):
            for table, value in getattr(after, part).items():
                source, count = rows.get(table, ("", 0))
                wanted = getattr(before, part)[table].copy()
                if count:
                    wanted[:count] = getattr(saved, part)[source][:count]
                assert np.array_equal(value, wanted), (part, table)
        job.train(1)
        first = saver.save()
        assert first is not None
        assert first.kind == "full"
    return report.skipped


@pytest.mark.parametrize(
    "sharding", some_of(["row_wise", "column_wise:0,1", "column_wise:1,1"], 0, 1)
)
def test_tables_grow(workers: Workers, saved: dict[str, Any], sharding: str) -> None:
    spec = other(replace(TABLES[0], rows=60), TABLES[1])
    skipped = None
    if sharding == "row_wise":
        skipped = workers(2).run(
            restore_other,
            **saved,
            spec=spec.to_json(),
            layout=layout(spec, sharding),
            options={},
            rows={T0: [T0, 41], T1: [T1, 30]},
        )[0]
        assert skipped == []
    else:
        workers(2).run(new_rows_stay, **saved, spec=spec.to_json(), layout=layout(spec, sharding))


def new_rows_stay(root: str, copy: str, spec: dict[str, Any], layout: dict[str, Any]) -> None:
    """Keep weights and state of new rows, even where optimizer state is converted."""
    job = build(spec, layout, seed=9)
    job.train(2)
    before, saved = whole_state(job, layout), Whole.load(copy)
    with checkpointer(root, job) as saver:
        assert saver.restore() is not None
    after = whole_state(job, layout)
    assert np.array_equal(after.weights[T0][:41], saved.weights[T0])
    assert np.allclose(after.states[T0][:41], saved.states[T0], rtol=1e-6, atol=0)
    assert np.array_equal(after.weights[T0][41:], before.weights[T0][41:])
    assert np.array_equal(after.states[T0][41:], before.states[T0][41:])
    assert before.states[T0][41:].any() or not before.states[T0].any()


def test_tables_shrink_and_change_names(workers: Workers, saved: dict[str, Any]) -> None:
    spec = other(replace(TABLES[0], rows=33), replace(TABLES[1], name="new"))
    skipped = workers(2).run(
        restore_other,
        **saved,
        spec=spec.to_json(),
        layout=layout(spec),
        options={"shrink": True, "map": {"t1": "new"}},
        rows={T0: [T0, 33], "a.embedding_bags.new": [T1, 30]},
    )[0]
    assert skipped == []


def other_optimizer(root: str, layout: dict[str, Any], spec: dict[str, Any]) -> list[str]:
    job = build(spec, layout, seed=9)
    with checkpointer(root, job) as saver:
        report = saver.restore(strict=False)
        assert report is not None
        return list(report.skipped)


def test_what_each_rank_skips_is_told_on_all(workers: Workers, saved: dict[str, Any]) -> None:
    """Leave out the optimizer state of tables that only one rank holds."""
    spec = replace(SPEC, fused="sgd")
    placed = asdict(Layout({"a.t0": "table_wise:0", "a.t1": "table_wise:1"}, 2))
    told = workers(2).run(other_optimizer, root=saved["root"], spec=spec.to_json(), layout=placed)
    assert told[0] == told[1]
    for table in (T0, T1):
        assert sum(line.startswith(f"table '{table}': optimizer state") for line in told[0]) == 1


def restarted(root: str, layout: dict[str, Any], spec: dict[str, Any]) -> list[str]:
    """Restore twice with the same new names, as a job does that torchrun restarts."""
    job = build(spec, layout, seed=9)
    with checkpointer(root, job) as saver:
        saver.restore(map={"t1": "new"})
        job.train(1)
        saver.save()
    before = whole_state(job, layout)
    again = build(spec, layout, seed=8)
    with checkpointer(root, again) as saver:
        assert saver.restore(map={"t1": "new"}) is not None
        after = whole_state(again, layout)
        for part in ("weights", "states"):
            for table, values in getattr(before, part).items():
                assert np.array_equal(getattr(after, part)[table], values), (part, table)
        again.train(1)
        return [saver.save().kind]


def test_a_job_that_renames_may_be_restarted(workers: Workers, saved: dict[str, Any]) -> None:
    spec = other(TABLES[0], replace(TABLES[1], name="new"))
    kinds = workers(2).run(restarted, root=saved["root"], spec=spec.to_json(), layout=layout(spec))
    assert kinds == [["differential"]] * 2


def test_tables_come_and_go(workers: Workers, saved: dict[str, Any]) -> None:
    spec = other(TABLES[0], TableSpec("extra", 12, 8, ("f1",)))
    skipped = workers(2).run(
        restore_other,
        **saved,
        spec=spec.to_json(),
        layout=layout(spec),
        options={"strict": False},
        rows={T0: [T0, 41]},
    )[0]
    assert any("t1" in line and "only in the checkpoint" in line for line in skipped)
    assert any("extra" in line and "only in the model" in line for line in skipped)


REFUSED: dict[str, tuple[ModelSpec, dict[str, Any], list[str]]] = {
    "shrunk": (other(replace(TABLES[0], rows=33), TABLES[1]), {}, ["t0", "41 × 8", "33 × 8"]),
    "wider": (
        other(replace(TABLES[0], dim=12), TABLES[1]),
        {"strict": False, "shrink": True},
        ["t0", "41 × 8", "41 × 12"],
    ),
    "missing": (other(TABLES[0]), {}, ["t1", "30 × 8", "strict=False"]),
    "added": (other(*TABLES, TableSpec("t2", 9, 8, ("f0",))), {}, ["t2", "9 × 8", "strict=False"]),
    "unknown_name": (
        other(TABLES[0], replace(TABLES[1], name="new")),
        {"map": {"t7": "new"}},
        ["t7", "the checkpoint"],
    ),
    "two_into_one": (SPEC, {"map": {"t0": "t1", "t1": "t1"}}, ["two tables into one"]),
    "optimizer": (replace(SPEC, fused="sgd"), {}, ["t0", "momentum1", "none"]),
}


def refuse(
    root: str, copy: str, spec: dict[str, Any], layout: dict[str, Any], options: dict[str, Any]
) -> str:
    job = build(spec, layout, seed=9)
    before = local_bytes(job)
    with checkpointer(root, job) as saver:
        with pytest.raises(IncompatibleCheckpoint) as caught:
            saver.restore(**options)
        assert local_bytes(job) == before
        saver.save()  # the model is whole
    return str(caught.value)


@pytest.mark.parametrize("mismatch", sorted(REFUSED))
def test_what_does_not_fit_changes_nothing(
    workers: Workers, saved: dict[str, Any], mismatch: str
) -> None:
    spec, options, words = REFUSED[mismatch]
    said = workers(2).run(
        refuse, **saved, spec=spec.to_json(), layout=layout(spec), options=options
    )
    for message in said:
        assert all(word in message for word in words), message


def warm_start(
    root: str, copy: str, spec: dict[str, Any], layout: dict[str, Any], optimizer: bool
) -> None:
    job = build(spec, layout, seed=9)
    job.train(1)
    other_tracker = track(job.model)
    other_tracker.clear(Consumer.EVERY)
    before, saved = whole_state(job, layout), Whole.load(copy)
    load_tables(root, job.model, ["t0"], optimizer=optimizer)
    after = whole_state(job, layout)
    wanted = before.copy()
    wanted.weights[T0] = saved.weights[T0]
    if optimizer:
        wanted.states[T0] = saved.states[T0]
    assert differences(after, wanted, set()) == []
    marked = other_tracker.modified_rows()
    held = {s.table: s.rectangle.rows for s in other_tracker.shards}
    assert len(marked[T0]) == held[T0]
    assert not len(marked[T1])
    other_tracker.close()


@pytest.mark.parametrize("optimizer", [False, True])
def test_tables_into_another_model(
    workers: Workers, saved: dict[str, Any], optimizer: bool
) -> None:
    spec = other(TABLES[0], replace(TABLES[1], rows=77))
    workers(2).run(
        warm_start, **saved, spec=spec.to_json(), layout=layout(spec), optimizer=optimizer
    )


def schedule(root: str, layout: dict[str, Any]) -> None:
    """Restore fused optimizers' counter and learning rate, which later updates show."""
    job = build(SPEC.to_json(), layout)
    for group in job.model.fused_optimizer.param_groups:
        group["lr"] = 0.01
    job.train(3)
    with checkpointer(root, job, optimizer=job.optimizer, job=job) as saver:
        saver.save()
    again = build(SPEC.to_json(), layout, seed=5)
    with checkpointer(root, again, optimizer=again.optimizer, job=again) as saver:
        assert saver.restore() is not None
    assert {g["lr"] for g in again.model.fused_optimizer.param_groups} == {0.01}
    assert counters(again) == counters(job) != {0}
    for either in (job, again):
        either.train(2)
    assert differences(whole_state(again, layout), whole_state(job, layout), set()) == []
    assert counters(again) == counters(job)


def counters(job: LayoutJob) -> set[int]:
    return {
        int(kernel._emb_module.iter[0])
        for module in job.model.modules()
        for lookup in getattr(module, "_lookups", [])
        for kernel in lookup._emb_modules
    }


@pytest.mark.parametrize("sharding", some_of(["row_wise", "column_wise:0,1"], 1))
def test_step_counter_and_learning_rate(workers: Workers, tmp_path: Path, sharding: str) -> None:
    workers(2).run(schedule, root=str(tmp_path), layout=layout(sharding=sharding))


def half(root: str, layout: dict[str, Any]) -> None:
    job = build(SPEC.to_json(), layout, half=True)
    job.train(1)
    with checkpointer(root, job, optimizer=job.optimizer, job=job) as saver:
        saver.save()
        job.train(1)
        report = saver.save()
        assert report is not None
        assert report.kind == "differential"
    again = build(SPEC.to_json(), layout, seed=5, half=True)
    with checkpointer(root, again, optimizer=again.optimizer, job=again) as saver:
        assert saver.restore() is not None
    found, wanted = whole_state(again, layout), whole_state(job, layout)
    assert found.weights[T0].dtype == np.float16
    assert differences(found, wanted, set()) == []
    full = build(SPEC.to_json(), layout, seed=5)
    with (
        checkpointer(root, full, optimizer=full.optimizer, job=full) as saver,
        pytest.raises(IncompatibleCheckpoint, match=r"float16.*float32"),
    ):
        saver.restore()


def test_half_precision_tables(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(half, root=str(tmp_path), layout=layout())


def half_of_both_kinds(root: str, fused: str) -> None:
    """Restore state of both kinds: fp16 in a dense optimizer, fp32 in a fused one, rounded once."""
    spec = replace(SPEC, fused=fused).to_json()
    layouts = [layout(sharding=s) for s in ("data_parallel", "row_wise", "data_parallel")]
    job = build(spec, layouts[0], half=True)
    job.train(2)
    first = whole_state(job, layouts[0])
    for where in layouts:
        with checkpointer(root, job, optimizer=job.optimizer, job=job) as saver:
            saver.save()
        job = build(spec, where, seed=5, half=True)
        with checkpointer(root, job, optimizer=job.optimizer, job=job) as saver:
            assert saver.restore() is not None
        found = whole_state(job, where)
        for table, state in first.states.items():
            assert np.array_equal(found.states[table].astype(np.float16), state)
            assert np.array_equal(found.weights[table], first.weights[table])
    job.train(1)


@pytest.mark.parametrize("fused", some_of(["adagrad", "rowwise_adagrad"], 1))
def test_half_precision_of_both_kinds(workers: Workers, tmp_path: Path, fused: str) -> None:
    workers(2).run(half_of_both_kinds, root=str(tmp_path), fused=fused)


def dtensors(root: str, source: dict[str, Any], target: dict[str, Any], tracked: bool) -> None:
    """Save from DTensor, restore into ShardedTensor, and the other way round."""
    for number, dtensor in enumerate((True, False)):
        job = build(SPEC.to_json(), source, dtensor=dtensor)
        job.train(2)
        twin = build(SPEC.to_json(), source)
        twin.train(2)
        again = build(SPEC.to_json(), target, seed=5, dtensor=not dtensor)
        path = f"{root}/{number}"
        dcp.save(
            {"model": job.model, "optimizer": job.optimizer},
            planner=SavePlanner(track(job.model) if tracked else None),
            storage_writer=StorageWriter(path),
        )
        dcp.load(
            {"model": again.model, "optimizer": again.optimizer},
            planner=LoadPlanner(track(again.model) if tracked else None),
            storage_reader=StorageReader(path),
        )
        # The state dicts of one kind can be put together here: train on, and compare by the loss.
        again.steps = twin.steps
        for either in (twin, again):
            either.train(2)
        losses = [float(each.loss(*each.batch(50))) for each in (twin, again)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize(
    ("target", "tracked"),
    some_of(itertools.product(["row_wise", "table_wise:1"], [True, False]), 1, 2),
)
def test_dtensor(workers: Workers, tmp_path: Path, target: str, tracked: bool) -> None:
    workers(2).run(
        dtensors,
        root=str(tmp_path),
        source=layout(),
        target=layout(sharding=target),
        tracked=tracked,
    )
