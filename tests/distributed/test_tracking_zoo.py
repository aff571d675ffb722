"""Compare the rows that a checkpoint holds with those that changed, for every way to look rows up.

No row may be missed; extra rows had a gradient of zero, or an update that was rounded away.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync

from tests.distributed.watch import Watch, judge, warnings_said
from tests.distributed.worker_pool import WorkerPool
from tests.distributed.zoo import (
    CPU,
    ROWS,
    ZooBatch,
    build_zoo,
    changed_rows,
    table_arrays,
)
from tests.examples import some_of
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.errors import SaveDeferred

Workers = Callable[[int], WorkerPool]

PLANS = {
    "rows": {"t0": "row_wise", "t1": "row_wise", "t2": "row_wise"},
    "one_rank": {"t0": "table_wise:0", "t1": "table_wise:0", "t2": "table_wise:0"},
    "columns": {"t0": "column_wise:0,0", "t1": "column_wise:1,0", "t2": "table_wise:1"},
    "replicas": {"t0": "data_parallel", "t1": "data_parallel", "t2": "data_parallel"},
    "mixed": {"t0": "data_parallel", "t1": "column_wise:1,0", "t2": "row_wise"},
}


def plain_loop(
    root: str, kind: str, plan: dict[str, str], fused: str, dim: int = 8, nodes: int = 1
) -> dict[str, int]:
    zoo = build_zoo(kind, plan, fused, dim=dim, nodes=nodes)
    watch = Watch(zoo, root)
    for _ in range(2):
        zoo.train(3)
        watch.check()
    zoo.model.eval()
    with torch.no_grad():
        zoo.model(zoo.batch(99))
    zoo.model.train()
    zoo.model(zoo.batch(98))  # without a backward pass
    watch.check()
    assert not watch.stored
    zoo.train(3)  # one of them has an empty batch
    watch.check()
    watch.saver.close()
    return watch.counts


KINDS = ("bags", "weighted", "sequence", "feature_processed", "vbe")
LOOPS = [(kind, plan) for kind in KINDS for plan in sorted(PLANS)]
OFTEN = [
    *(("bags", "mixed"), ("weighted", "columns"), ("sequence", "rows"), ("vbe", "one_rank")),
    ("feature_processed", "replicas"),
]
"""Every kind of tables, and every plan."""


@pytest.mark.parametrize(
    ("kind", "plan"), some_of(LOOPS, *(i for i, loop in enumerate(LOOPS) if loop in OFTEN))
)
def test_plain_loop(workers: Workers, tmp_path: Path, kind: str, plan: str) -> None:
    if kind in ("sequence", "vbe") and plan in ("replicas", "mixed"):
        pytest.skip("needs a CUDA GPU: data-parallel tables of this kind don't train on a CPU")
    counts = workers(2).run(
        plain_loop, root=str(tmp_path), kind=kind, plan=PLANS[plan], fused="rowwise_adagrad"
    )[0]
    # A variable batch may hold bags that no sample uses: their gradient is zero.
    judge(counts, extra=30 if kind == "vbe" else 0)


NODES = {
    # One node: a table's rows over its ranks. Two: columns over nodes, of at least 128 each.
    "one_node": ({"t0": "table_row_wise:0", "t1": "table_row_wise:0", "t2": "row_wise"}, 1, 8),
    "grid": ({"t0": "grid_shard:0,1", "t1": "table_row_wise:1", "t2": "grid_shard:1,0"}, 2, 256),
}


@pytest.mark.parametrize(
    ("kind", "plan"),
    some_of(
        [
            (kind, plan)
            for kind in ("bags", "weighted", "feature_processed", "vbe")
            for plan in sorted(NODES)
            if (kind, plan) != ("vbe", "grid")  # which TorchRec doesn't train
        ],
        *(0, 6),  # a grid, and one node
    ),
)
def test_plain_loop_over_nodes(workers: Workers, tmp_path: Path, kind: str, plan: str) -> None:
    shardings, nodes, dim = NODES[plan]
    counts = workers(2).run(
        plain_loop,
        root=str(tmp_path),
        kind=kind,
        plan=shardings,
        fused="rowwise_adagrad",
        dim=dim,
        nodes=nodes,
    )[0]
    judge(counts, extra=30 if kind == "vbe" else 0)


@pytest.mark.parametrize("fused", some_of(["sgd", "adagrad"], 0))
def test_plain_loop_with_other_optimizers(workers: Workers, tmp_path: Path, fused: str) -> None:
    counts = workers(2).run(
        plain_loop, root=str(tmp_path), kind="bags", plan=PLANS["mixed"], fused=fused
    )[0]
    judge(counts, extra=3)


def test_managed_collisions(workers: Workers, tmp_path: Path) -> None:
    """Train managed collisions without evictions; for those see test_managed_collision.py."""
    options: Any = {"kind": "managed_collision", "plan": PLANS["rows"], "fused": "rowwise_adagrad"}
    judge(workers(2).run(plain_loop, root=str(tmp_path), **options)[0])


class _Stream:
    device = CPU

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, _: object) -> None: ...

    def wait_event(self, _: object) -> None: ...

    def record_event(self, _: object = None) -> None: ...

    def record(self, _: object = None) -> None: ...

    def wait(self, _: object = None) -> None: ...


class _Device:
    """A stub of the CPU's device module: everything in one stream."""

    Stream = Event = staticmethod(lambda *_, **__: _Stream())
    stream = staticmethod(lambda *_, **__: _Stream())
    current_stream = staticmethod(lambda *_, **__: _Stream())
    synchronize = staticmethod(lambda: None)
    is_available = staticmethod(lambda: False)  # asked by a torch that was built for CUDA


@contextmanager
def no_streams() -> Iterator[None]:
    """Let pipelines that overlap streams run on a CPU, in order."""
    patch = pytest.MonkeyPatch()
    with patch.context() as stubs:
        stubs.setattr(torch, "get_device_module", lambda *_: _Device)
        stubs.setattr(torch.Tensor, "record_stream", lambda *_: None)
        yield


def pipelined(root: str, pipeline: str, plan: dict[str, str]) -> dict[str, int]:
    zoo = build_zoo("bags", plan)
    watch = Watch(zoo, root)
    batches: Iterator[ZooBatch] = iter([zoo.batch(i) for i in range(12)])
    kinds = {"base": TrainPipelineBase, "sparse_dist": TrainPipelineSparseDist}
    runner: Any
    with no_streams():
        if pipeline == "semi_sync":
            runner = TrainPipelineSemiSync(zoo.model, zoo.optimizer, device=CPU, start_batch=0)
        else:
            runner = kinds[pipeline](zoo.model, zoo.optimizer, device=CPU)
        for step in range(10):
            runner.progress(batches)
            if step % 2:
                watch.check()
    watch.saver.close()
    return watch.counts


@pytest.mark.parametrize(
    ("pipeline", "plan"),
    some_of(itertools.product(["base", "sparse_dist", "semi_sync"], ["rows", "columns"]), 3, 4),
)
def test_pipelines(workers: Workers, tmp_path: Path, pipeline: str, plan: str) -> None:
    judge(workers(2).run(pipelined, root=str(tmp_path), pipeline=pipeline, plan=PLANS[plan])[0])


def accumulate(root: str, plan: dict[str, str]) -> dict[str, int]:
    """Run several backward passes for a dense step, and try to save after each of them."""
    zoo = build_zoo("bags", plan)
    watch = Watch(zoo, root)
    for _ in range(3):
        zoo.optimizer.zero_grad()
        for _ in range(3):
            zoo.model(zoo.batch())[0].backward()
            zoo.steps += 1
            with pytest.raises(SaveDeferred):
                watch.saver.save()
            assert watch.saver.step() is None
        zoo.optimizer.step()
        assert watch.saver.step() is None  # starts the deferred save
        report = watch.saver.wait()
        assert report is not None
        watch.compare(report)
    watch.saver.close()
    return watch.counts


@pytest.mark.parametrize("plan", some_of(["rows", "replicas", "mixed"], 2))
def test_gradient_accumulation(workers: Workers, tmp_path: Path, plan: str) -> None:
    judge(workers(2).run(accumulate, root=str(tmp_path), plan=PLANS[plan])[0])


def scaler_skips(root: str, plan: dict[str, str]) -> dict[str, int]:
    """Skip dense steps, as a gradient scaler that finds infinity does; fused ones have stepped."""
    zoo = build_zoo("bags", plan)
    watch = Watch(zoo, root)
    for step in range(6):
        zoo.optimizer.zero_grad()
        zoo.model(zoo.batch())[0].backward()
        zoo.steps += 1
        if step % 2:  # skipped
            with pytest.raises(SaveDeferred):
                watch.saver.save()
            continue
        zoo.optimizer.step()
        if step:
            assert watch.saver.step() is None
        report = watch.saver.wait() if step else watch.saver.save()
        assert report is not None
        watch.compare(report)
    watch.saver.close()
    return watch.counts


@pytest.mark.parametrize("plan", some_of(["rows", "mixed"], 1))
def test_gradient_scaler_that_skips(workers: Workers, tmp_path: Path, plan: str) -> None:
    counts = workers(2).run(scaler_skips, root=str(tmp_path), plan=PLANS[plan])[0]
    judge(counts, extra=0 if plan == "rows" else 60)


DENSE: dict[str, Any] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "decay": lambda p: torch.optim.Adagrad(p, lr=0.01, weight_decay=0.1),
    "unknown": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def all_rows(root: str, dense: str) -> dict[str, Any]:
    """Train with dense optimizers that change rows not looked up, and restore."""
    zoo = build_zoo("bags", PLANS["mixed"], dense=DENSE[dense])
    zoo.train(1)
    with warnings_said() as said:
        watch = Watch(zoo, root)
        for _ in range(2):
            zoo.train(2)
            watch.check()
            assert {row for row in watch.stored if row[0].endswith("t0")} == {
                ("embeddings.embedding_bags.t0", row) for row in range(43)
            }
    watch.saver.close()
    wanted = table_arrays(zoo)
    again = build_zoo("bags", PLANS["mixed"], dense=DENSE[dense])
    with Checkpointer(root, model=again.model, state={"optimizer": again.optimizer}) as saver:
        assert saver.restore() is not None
    found = table_arrays(again)
    different = changed_rows(wanted, found)
    again.steps = zoo.steps
    for job in (zoo, again):
        job.train(3)
    different |= changed_rows(table_arrays(zoo), table_arrays(again))
    warned = [line for line in said if "all rows" in line]
    return {**watch.counts, "warned": len(warned), "different": len(different)}


@pytest.mark.parametrize("dense", some_of(sorted(DENSE), 1, 3))
def test_optimizers_that_change_other_rows(workers: Workers, tmp_path: Path, dense: str) -> None:
    counts = workers(2).run(all_rows, root=str(tmp_path), dense=dense)[0]
    warned, different = counts.pop("warned"), counts.pop("different")
    judge(counts, extra=200)
    assert warned == 1
    assert different == 0


def moving_average(root: str, plan: dict[str, str]) -> dict[str, Any]:
    """Train with EMA in place: every few steps it moves all rows, even without lookups."""
    zoo = build_zoo("bags", plan, "ema")
    with warnings_said() as said:
        watch = Watch(zoo, root)
        moved = 0
        for steps in (3, 2, 4):
            before = table_arrays(zoo)
            zoo.train(steps)
            watch.check()
            assert len(watch.stored) == sum(ROWS.values())
            moved += sum(t.endswith("t2") for t, _ in changed_rows(before, table_arrays(zoo)))
        with torch.no_grad():  # FBGEMM averages in every forward pass
            for number in range(5):
                zoo.model(zoo.batch(90 + number))
        watch.check()
    watch.saver.close()
    return {**watch.counts, "moved": moved, "warned": sum("all rows" in line for line in said)}


@pytest.mark.parametrize("plan", some_of(["rows", "columns"], 1))
def test_moving_average_in_place(workers: Workers, tmp_path: Path, plan: str) -> None:
    counts = workers(2).run(moving_average, root=str(tmp_path), plan=PLANS[plan])[0]
    moved, warned = counts.pop("moved"), counts.pop("warned")
    judge(counts, extra=200)
    assert moved > 0
    assert 1 <= warned <= 2  # once for each kernel


def by_hand(root: str, plan: dict[str, str]) -> None:
    zoo = build_zoo("bags", plan)
    watch = Watch(zoo, root)
    zoo.train(1)
    watch.check()
    table = "embeddings.embedding_bags.t0"
    watch.saver.mark(table, [0, 7, 42])
    watch.check()
    assert watch.stored == {(table, row) for row in (0, 7, 42)}
    watch.saver.mark_all("embeddings.embedding_bags.t2")
    watch.check()
    assert watch.stored == {("embeddings.embedding_bags.t2", row) for row in range(21)}
    watch.saver.mark_all()
    watch.check()
    assert len(watch.stored) == 43 + 32 + 21
    with pytest.raises(KeyError, match="no sharded table 't9'"):
        watch.saver.mark("t9", [0])
    watch.saver.close()


@pytest.mark.parametrize("plan", some_of(["rows", "columns", "mixed"], 2))
def test_rows_marked_by_hand(workers: Workers, tmp_path: Path, plan: str) -> None:
    workers(2).run(by_hand, root=str(tmp_path), plan=PLANS[plan])
