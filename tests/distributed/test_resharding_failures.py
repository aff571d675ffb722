"""Saves and reshardings that fail, or go unnoticed, beside each other: no modified row is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.distributed.resharding import COLUMNS, TABLES, assert_restores, reshard, union
from tests.distributed.watch import Watch, judge, warnings_said
from tests.distributed.worker_pool import WorkerPool
from tests.distributed.zoo import (
    ROWS,
    Rows,
    build_zoo,
    changed_rows,
    stored_rows,
    table_arrays,
)
from torchrec_checknrun.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from torchrec_checknrun.errors import SaveFailed, UnsupportedTable
from torchrec_checknrun.tracking import Consumer, track

Workers = Callable[[int], WorkerPool]


def directly(root: str) -> None:
    """Reshard with marks pending: ``dcp.save`` does not report its end."""
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
    assert stored == rows_of_steps(2, 4)  # rows of the failed save, not of the committed one
    again = build_zoo("bags", COLUMNS)
    other = track(again.model)
    dcp.load({}, storage_reader=StorageReader(folder / "last"), planner=LoadPlanner(other))
    assert not changed_rows(after, table_arrays(again))
    reshard(zoo, {"t0": [1]})
    assert save("other columns") == "full"
    assert save("on") == "differential"


def rows_of_steps(start: int, stop: int) -> Rows:
    """Return the rows that these steps change, by training them again."""
    zoo = build_zoo("bags", COLUMNS)
    zoo.train(start)
    before = table_arrays(zoo)
    zoo.train(stop - start)
    return changed_rows(before, table_arrays(zoo))


def test_a_cut_that_is_pending(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(directly, root=str(tmp_path))


def failed_saves(root: str) -> dict[str, int]:
    """Fail one save before the resharding, and one after it."""
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
    """Move shards unseen: all rows of new kernels count as modified, with a warning."""
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
    """Fail a resharding half-way: the new kernels' content is unknown. Then reshard again."""
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
    """Move a table to an untrackable kernel on one rank: all ranks raise, and none hangs."""
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
    """Reshard beside a table without optimizer state: TorchRec resets all other state to zero."""
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
