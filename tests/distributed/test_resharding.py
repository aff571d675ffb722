"""TorchRec's dynamic resharding in the middle of a run: marks move with their rows, exactly.

Checkpoints are compared with the changed rows by bytes, as in ``test_tracking_zoo``. Tables change
ranks or columns; TorchRec can't change sharding types or data-parallel tables, nor join column
shards.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.layouts import Layout, build
from tests.distributed.models import CollectionSpec, ModelSpec, TableSpec
from tests.distributed.resharding import COLUMNS, TABLES, Change, assert_restores, reshard, union
from tests.distributed.watch import Watch, judge
from tests.distributed.worker_pool import WorkerPool
from tests.distributed.zoo import (
    build_zoo,
    changed_rows,
    table_arrays,
)
from tests.examples import some_of
from torchrec_checknrun import Checkpointer, Consecutive
from torchrec_checknrun.errors import SaveDeferred
from torchrec_checknrun.tracking import Consumer, track

Workers = Callable[[int], WorkerPool]
STAYS = {"t0": "row_wise", "t1": "table_wise:0", "t2": "column_wise:0,1"}
PATH = "embeddings.embedding_bags."


def moves(
    root: str, plan: dict[str, str], changes: list[Change], fused: str, by: str
) -> dict[str, int]:
    """Reshard in the middle of intervals, and once at the beginning and the end of one."""
    zoo = build_zoo("bags", plan, fused)
    zoo.train(1)
    watch = Watch(zoo, root)
    for change in changes:
        zoo.train(1)
        reshard(zoo, change, by=by)
        zoo.train(1)
        watch.check()
    reshard(zoo, changes[0], by=by)
    watch.check()
    assert not watch.stored
    zoo.train(2)
    for change in changes[1:]:
        reshard(zoo, change, by=by)
    watch.check()
    last = {t: f"{plan[t].split(':')[0]}:{','.join(map(str, r))}" for t, r in changes[-1].items()}
    assert_restores(root, zoo, build_zoo("bags", {**plan, **last}, fused))
    saved = table_arrays(zoo)
    zoo.train(1)
    assert watch.saver.restore() is not None  # into a model with a new optimizer since
    assert not changed_rows(saved, table_arrays(zoo))
    watch.saver.close()
    assert "update_shards" not in vars(zoo.model.module.embeddings)
    return watch.counts


MOVES: dict[str, tuple[dict[str, str], list[Change]]] = {
    "a table to another rank": (TABLES, [{"t0": [1]}, {"t0": [0]}]),
    "tables change places": (TABLES, [{"t0": [1], "t1": [0]}, {"t0": [0], "t1": [1], "t2": [0]}]),
    "a rank without a shard": (TABLES, [{"t1": [0], "t2": [0]}, {"t0": [1], "t1": [1], "t2": [1]}]),
    "columns change places": (COLUMNS, [{"t0": [1, 0]}, {"t0": [0, 1], "t1": [0, 1], "t2": [0]}]),
    "row-wise beside": (STAYS, [{"t1": [1]}, {"t1": [0], "t2": [1, 0]}]),
}


@pytest.mark.parametrize(
    ("case", "fused"),
    some_of(
        itertools.product(sorted(MOVES), ["rowwise_adagrad", "adagrad"]),
        *(4, 7),
    ),
)
def test_marks_move_with_their_rows(
    workers: Workers, tmp_path: Path, case: str, fused: str
) -> None:
    plan, changes = MOVES[case]
    by = "model" if fused == "adagrad" else "collection"
    run = workers(2).run
    judge(run(moves, root=str(tmp_path), plan=plan, changes=changes, fused=fused, by=by)[0])


def test_marks_move_over_several_ranks(workers: Workers, tmp_path: Path) -> None:
    plan = {"t0": "column_wise:0,1", "t1": "table_wise:0", "t2": "table_wise:2"}
    changes: list[Change] = [{"t0": [1, 2], "t1": [2]}, {"t0": [2, 0], "t2": [0]}, {"t0": [0, 1]}]
    run, root = workers(3).run, str(tmp_path)
    judge(run(moves, root=root, plan=plan, changes=changes, fused="sgd", by="model")[0], extra=3)


def every_consumer(plan: dict[str, str], changes: list[Change]) -> None:
    """Reshard several times under two trackers, each consumer with other rows."""
    zoo = build_zoo("bags", plan)
    one, other = track(zoo.model), track(zoo.model)
    consumers = (Consumer.LAST, Consumer.BASELINE, Consumer.USER)
    for consumer in consumers:
        zoo.train(1)
        one.clear(consumer)
    zoo.train(1)
    other.clear(Consumer.LAST)
    other.mark(PATH + "t2", [20])
    before = [union(t, c) for t in (one, other) for c in consumers]
    assert len({frozenset(rows) for rows in before}) >= 5
    for change in changes:
        reshard(zoo, change)
        assert [union(t, c) for t in (one, other) for c in consumers] == before
        weights = {s.local.weight.untyped_storage().data_ptr() for s in one.shards}
        assert weights == {s.local.weight.untyped_storage().data_ptr() for s in other.shards}
    one.close()
    reshard(zoo, changes[0])
    assert union(other, Consumer.USER) == before[5]
    zoo.train(1)  # only the other tracker's hooks remain, once each
    modules = [kernel.kernel.module for kernel in other._hooks]
    assert [len(module._forward_hooks) for module in modules] == [1] * len(modules)
    other.close()
    assert [len(module._forward_hooks) for module in modules] == [0] * len(modules)


@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        (TABLES, [{"t0": [1], "t1": [0]}, {"t2": [0]}, {"t0": [0]}]),
        (COLUMNS, [{"t0": [1, 0], "t2": [0]}, {"t0": [1]}, {"t0": [0, 1], "t1": [0, 1]}]),
    ],
    ids=["tables", "columns"],
)
def test_marks_of_every_consumer(
    workers: Workers, plan: dict[str, str], changes: list[Change]
) -> None:
    workers(2).run(every_consumer, plan=plan, changes=changes)


def inside(kind: str, path: str) -> None:
    """Reshard a collection inside a module that gives it other ids or weights."""
    zoo = build_zoo(kind, COLUMNS)
    tracked = track(zoo.model)
    zoo.train(2)
    marked = union(tracked, Consumer.USER)
    reshard(zoo, {"t0": [1, 0], "t2": [0]}, path=path, by="collection")
    assert union(tracked, Consumer.USER) == marked
    tracked.clear()
    before = table_arrays(zoo)
    zoo.train(2)
    assert union(tracked, Consumer.USER) == changed_rows(before, table_arrays(zoo)) != set()
    tracked.close()


@pytest.mark.parametrize(
    ("kind", "path"),
    [("weighted", ""), ("feature_processed", "._embedding_bag_collection")],
)
def test_collections_in_other_modules(workers: Workers, kind: str, path: str) -> None:
    workers(2).run(inside, kind=kind, path=f"embeddings{path}")


def other_columns(root: str, fused: str, seen: bool) -> list[str]:
    """Join columns and split them again.

    TorchRec keeps one part's row-wise state, which no chain of differential checkpoints restores.
    """
    zoo = build_zoo("bags", COLUMNS, fused)
    zoo.train(2)
    kinds = []
    with Checkpointer(
        root,
        model=zoo.model,
        retention=None,
        state={"optimizer": zoo.optimizer},
        policy=Consecutive(),
    ) as saver:
        for ranks in ([0, 1], [1], [1, 0], [1, 0]):
            zoo.train(1)
            reshard(zoo, {"t0": ranks}, by="collection", seen=seen)
            for _ in range(2):
                zoo.train(1)
                report = saver.save()
                assert report is not None
                kinds.append(report.kind)
                plan = {**COLUMNS, "t0": f"column_wise:{','.join(map(str, ranks))}"}
                assert_restores(root, zoo, build_zoo("bags", plan, fused))
    return kinds


@pytest.mark.parametrize(
    ("fused", "seen"),
    some_of(itertools.product(["rowwise_adagrad", "sgd"], [True, False]), 0),
)
def test_other_columns_need_a_full_checkpoint(
    workers: Workers, tmp_path: Path, fused: str, seen: bool
) -> None:
    kinds = workers(2).run(other_columns, root=str(tmp_path), fused=fused, seen=seen)[0]
    first = ["full", "differential"]
    assert kinds == first * 3 + ["differential"] * 2


# Two collections: one is resharded, the other has a data-parallel table.
SPEC = ModelSpec(
    (
        CollectionSpec(
            "a", (TableSpec("t0", 40, 8, ("f0", "f1")), TableSpec("t1", 30, 8, ("f1",)))
        ),
        CollectionSpec("b", (TableSpec("t0", 50, 8, ("f0",)), TableSpec("t1", 20, 8, ("f2",)))),
    )
)
BESIDE = {
    "a.t0": "table_wise:0",
    "a.t1": "table_wise:1",
    "b.t0": "data_parallel",
    "b.t1": "row_wise",
}


def beside(root: str, spec: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    """Reshard between the backward passes of a dense step.

    Rows of the other collection stay pending in their hooks.
    """
    job: Any = build(spec, layout)
    job.train(1)
    watch = Watch(job, root)
    stays = [shard for shard in watch.saver._target.tracked.shards if ".b." in f".{shard.table}"]
    for ranks in ([1], [0]):
        job.optimizer.zero_grad()
        for _ in range(2):
            job.loss(*job.batch(job.steps)).backward()
            job.steps += 1
            with pytest.raises(SaveDeferred):
                watch.saver.save()
            reshard(job, {"t0": ranks, "t1": [1 - ranks[0]]}, path="a")
            with pytest.raises(SaveDeferred):
                watch.saver.save()
        job.optimizer.step()
        report = watch.saver.save()
        assert report is not None
        watch.compare(report)
        now = watch.saver._target.tracked.shards
        assert all(any(shard is other for other in now) for shard in stays)
    assert_restores(root, job, build(spec, layout))
    watch.saver.close()
    return watch.counts


def test_other_collections_stay_as_they_are(workers: Workers, tmp_path: Path) -> None:
    layout = vars(Layout(BESIDE, 2))
    counts = workers(2).run(beside, root=str(tmp_path), spec=SPEC.to_json(), layout=layout)[0]
    judge(counts, extra=0)


def start_over(root: str) -> None:
    """Save after TorchRec's counter and learning rate start over, and restore the new ones.

    With only the dense optimizer as state, nothing keeps the old kernels alive.
    """
    zoo = build_zoo("bags", TABLES)
    dense = zoo.optimizer.optimizers[1][1]
    with Checkpointer(root, model=zoo.model, state={"dense": dense}) as saver:
        zoo.train(3)
        for group in zoo.model.fused_optimizer.param_groups:
            group["lr"] = 0.01
        assert {p.step for p in saver._target.tracked.progress().values()} == {3}
        gone = [weakref.ref(hook.kernel.module) for hook in saver._target.tracked._hooks]
        assert gone
        reshard(zoo, {"t0": [1], "t1": [0]})
        gc.collect()
        assert [kernel() for kernel in gone] == [None] * len(gone)
        for progress in saver._target.tracked.progress().values():
            assert progress.step == 0
            assert progress.learning_rate == pytest.approx(0.05)
        zoo.train(2)
        report = saver.save()
        assert report is not None
    again = build_zoo("bags", TABLES)
    dense = again.optimizer.optimizers[1][1]
    with Checkpointer(root, model=again.model, state={"dense": dense}) as saver:
        saver.restore()
        for progress in saver._target.tracked.progress().values():
            assert progress.step == 2
            assert progress.learning_rate == pytest.approx(0.05)
    assert not changed_rows(table_arrays(zoo), table_arrays(again))


def test_counter_and_learning_rate(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(start_over, root=str(tmp_path))
