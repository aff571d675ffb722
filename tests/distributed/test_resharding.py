"""TorchRec's dynamic resharding in the middle of a run: marks move with their rows, exactly.

What it moves, and when, is compared by bytes as in ``test_tracking_zoo``. Tables change ranks or
columns; TorchRec can't change sharding types or data-parallel tables, nor join column shards.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.distributed.layouts import Layout, build
from tests.distributed.models import CollectionSpec, ModelSpec, TableSpec
from tests.distributed.resharding import Change, assert_restores, reshard, union
from tests.distributed.test_tracking_zoo import Watch, judge, warnings_said
from tests.distributed.worker_pool import WorkerPool
from tests.distributed.zoo import (
    ROWS,
    Rows,
    build_zoo,
    changed_rows,
    stored_rows,
    table_arrays,
)
from torchrec_checknrun import Checkpointer, Consecutive
from torchrec_checknrun.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from torchrec_checknrun.errors import SaveDeferred, SaveFailed, UnsupportedTable
from torchrec_checknrun.tracking import Consumer, track

Workers = Callable[[int], WorkerPool]
TABLES = {"t0": "table_wise:0", "t1": "table_wise:1", "t2": "table_wise:1"}
COLUMNS = {"t0": "column_wise:0,1", "t1": "column_wise:1,0", "t2": "table_wise:1"}
STAYS = {"t0": "row_wise", "t1": "table_wise:0", "t2": "column_wise:0,1"}
PATH = "embeddings.embedding_bags."


def moves(
    root: str, plan: dict[str, str], changes: list[Change], fused: str, by: str
) -> dict[str, int]:
    """Each resharding in the middle of an interval, and once at its beginning and its end."""
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
    assert watch.saver.restore() is not None  # into a model whose optimizer was made anew since
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


@pytest.mark.parametrize("fused", ["rowwise_adagrad", "adagrad"])
@pytest.mark.parametrize("case", sorted(MOVES))
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
    """Two who track the model, each bit with rows of its own, several reshardings in a row."""
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
    zoo.train(1)  # hooks are there once, and only the other's
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
    """The collection is inside a module that gives it other ids or weights."""
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
    """Columns are joined and split again: TorchRec keeps one part's row-wise state, and no chain of
    differential checkpoints gives the same.
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


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("fused", ["rowwise_adagrad", "sgd"])
def test_other_columns_need_a_full_checkpoint(
    workers: Workers, tmp_path: Path, fused: str, seen: bool
) -> None:
    kinds = workers(2).run(other_columns, root=str(tmp_path), fused=fused, seen=seen)[0]
    first = ["full", "differential"]
    assert kinds == first * 3 + ["differential"] * 2


def directly(root: str) -> None:
    """``dcp.save`` says nothing of its end, so the marks it took are pending in a resharding."""
    zoo = build_zoo("bags", COLUMNS)
    tracked = track(zoo.model)
    folder = Path(root)

    def save(name: str) -> str:
        writer = StorageWriter(folder / name)
        kind: str = dcp.save(
            {}, storage_writer=writer, planner=SavePlanner(tracked)
        ).planner_data.kind
        return kind

    assert save("full") == "full"
    zoo.train(2)
    assert save("committed") == "differential"
    reshard(zoo, {"t0": [1, 0], "t2": [0]})
    zoo.train(1)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr("os.link", lambda *_, **__: 1 / 0)
        with pytest.raises(CheckpointException, match="ZeroDivisionError"):
            save("failed")
    reshard(zoo, {"t0": [0, 1], "t1": [0, 1], "t2": [1]})
    assert not union(tracked, Consumer.LAST)
    reshard(zoo, {"t1": [1, 0]})
    zoo.train(1)
    assert save("last") == "differential"
    after = table_arrays(zoo)
    stored, wrong = stored_rows(folder / "last", after)
    assert not wrong
    assert stored == rows_of_steps(2, 4)  # those of the failed save, not those committed before
    again = build_zoo("bags", COLUMNS)
    other = track(again.model)
    dcp.load({}, storage_reader=StorageReader(folder / "last"), planner=LoadPlanner(other))
    assert not changed_rows(after, table_arrays(again))
    reshard(zoo, {"t0": [1]})
    assert save("other columns") == "full"
    assert save("on") == "differential"


def rows_of_steps(start: int, stop: int) -> Rows:
    """The rows that those steps change, by training them again."""
    zoo = build_zoo("bags", COLUMNS)
    zoo.train(start)
    before = table_arrays(zoo)
    zoo.train(stop - start)
    return changed_rows(before, table_arrays(zoo))


def test_a_cut_that_is_pending(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(directly, root=str(tmp_path))


def failed_saves(root: str) -> dict[str, int]:
    """A save fails before the resharding, and one after it."""
    zoo = build_zoo("bags", COLUMNS)
    watch = Watch(zoo, root)

    def fail() -> None:
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 0:
                patch.setattr("os.link", lambda *_, **__: 1 / 0)
            with pytest.raises(SaveFailed):
                watch.saver.save()

    zoo.train(1)
    fail()
    reshard(zoo, {"t0": [1, 0], "t1": [0, 1], "t2": [0]})
    zoo.train(1)
    fail()
    reshard(zoo, {"t0": [0, 1], "t2": [1]})
    watch.check()
    watch.saver.close()
    return watch.counts


def test_failed_saves_around_it(workers: Workers, tmp_path: Path) -> None:
    judge(workers(2).run(failed_saves, root=str(tmp_path))[0])


def unseen(root: str) -> dict[str, int]:
    """Someone else moves the shards: all rows of new kernels count as modified, with a warning."""
    zoo = build_zoo("bags", TABLES)
    watch = Watch(zoo, root)
    zoo.train(1)
    with warnings_said() as said:
        reshard(zoo, {"t0": [1]}, by="collection", seen=False)
        watch.check()
    assert len(watch.stored) == sum(ROWS.values())
    assert sum("was resharded" in line for line in said) == 1
    zoo.train(1)
    reshard(zoo, {"t0": [0]})
    watch.check()
    assert len(watch.stored) < sum(ROWS.values()) / 2
    watch.saver.close()
    return watch.counts


def test_an_unseen_resharding(workers: Workers, tmp_path: Path) -> None:
    judge(workers(2).run(unseen, root=str(tmp_path))[0], extra=sum(ROWS.values()))


def refused(root: str) -> dict[str, int]:
    """TorchRec gives up half-way, the kernels are new and hold nobody knows what; then it works."""
    zoo = build_zoo("bags", TABLES)
    watch = Watch(zoo, root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchrec.distributed.embeddingbag.prepare_comm_ops", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            reshard(zoo, {"t0": [1]})
    reshard(zoo, {"t2": [0]})
    watch.check()
    assert len(watch.stored) == sum(ROWS.values())
    watch.saver.close()
    return watch.counts


def test_a_resharding_that_fails(workers: Workers, tmp_path: Path) -> None:
    judge(workers(2).run(refused, root=str(tmp_path))[0], extra=sum(ROWS.values()))


def other_kernels(root: str) -> None:
    """One rank gets a table in a kernel that can't be tracked: all hear of it, and none hangs."""
    zoo = build_zoo("bags", TABLES, "sgd")
    watch = Watch(zoo, root)
    zoo.train(1)
    with pytest.raises(UnsupportedTable, match=r"t0.*BatchedDenseEmbeddingBag"):
        reshard(zoo, {"t0": [1]}, by="collection", compute_kernel="dense")
    with pytest.raises(UnsupportedTable, match=r"t0.*BatchedDenseEmbeddingBag"):
        watch.saver.save()
    reshard(zoo, {"t0": [0]}, by="collection", compute_kernel="fused")
    watch.check()
    assert len(watch.stored) == sum(ROWS.values())
    assert not watch.counts["missed"]
    watch.saver.close()


def test_a_kernel_that_cannot_be_tracked(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(other_kernels, root=str(tmp_path))


def lost_states(root: str) -> dict[str, int]:
    """Beside a table without optimizer state, TorchRec lets that of the others begin at zero."""
    fused = {"t0": "rowwise_adagrad", "t1": "rowwise_adagrad", "t2": "sgd"}
    plan = {"t0": "column_wise:0,1", "t1": "column_wise:1,0", "t2": "column_wise:1,0"}
    zoo = build_zoo("bags", plan, fused)
    zoo.train(2)
    watch = Watch(zoo, root)
    reshard(zoo, {"t2": [0, 1]})
    watch.check()
    assert_restores(root, zoo, build_zoo("bags", {**plan, "t2": "column_wise:0,1"}, fused))
    watch.saver.close()
    return watch.counts


def test_optimizer_state_that_is_lost(workers: Workers, tmp_path: Path) -> None:
    judge(workers(2).run(lost_states, root=str(tmp_path))[0], extra=sum(ROWS.values()))


# Two collections: one is sharded anew, the other has a data-parallel table.
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
    """A resharding between the backward passes of a dense step: rows of the other collection are
    pending in their hooks, and wait there.
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


def begins_anew(root: str) -> None:
    """TorchRec begins with counter and learning rate anew; a checkpoint holds what the model has.
    With the dense optimizer alone as its state, nobody here holds on to the old kernels.
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
    workers(2).run(begins_anew, root=str(tmp_path))
