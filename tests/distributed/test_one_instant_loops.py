"""One instant in other loops: pipelines, evictions, resharding, many rows.

See ``test_one_instant`` for what each case shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torchrec.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelineSparseDist,
)
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync

from tests.distributed import collisions, layouts, models
from tests.distributed.fused_on_cpu import any_fused_optimizer
from tests.distributed.models import CPU
from tests.distributed.resharding import COLUMNS, TABLES, reshard
from tests.distributed.slowed import Instants, on_all_ranks, overflow_pages, slowed
from tests.distributed.test_one_instant import train_and_save
from tests.distributed.test_optimizer_states import SPEC as STATES_SPEC
from tests.distributed.test_optimizer_states import layout, views
from tests.distributed.test_tracking_zoo import PLANS, _Stream, no_streams
from tests.distributed.worker_pool import WorkerPool
from tests.distributed.zoo import build_zoo
from tests.distributed.zoo import table_arrays as zoo_tables
from tests.examples import some_of
from tests.pipelines import newer
from torchrec_checknrun.marks import row_copies
from torchrec_checknrun.marks.row_copies import RowCopies

Workers = Callable[[int], WorkerPool]
LITE = newer("TrainPipelineSparseDistLite")
PIPELINES: dict[str, Any] = {
    "base": TrainPipelineBase,
    "sparse_dist": TrainPipelineSparseDist,
    "prefetch": PrefetchTrainPipelineSparseDist,
    "semi_sync": TrainPipelineSemiSync,
    "fused": TrainPipelineFusedSparseDist,
    **({} if LITE is None else {"lite": LITE}),
}


def pipelined(root: str, pipeline: str, plan: dict[str, str]) -> list[int]:
    zoo, again = build_zoo("bags", plan), build_zoo("bags", plan)
    batches: Iterator[Any] = (zoo.batch(i) for i in itertools.count())
    options = {"start_batch": 0} if pipeline == "semi_sync" else {}
    with no_streams(), slowed() as chunks:
        runner = PIPELINES[pipeline](zoo.model, zoo.optimizer, device=CPU, **options)
        if pipeline == "prefetch":  # without a stream it would prefetch nothing
            runner._data_dist_stream = _Stream()
            runner._stream_context = lambda _: nullcontext()
        instants = Instants(root, zoo, again, chunks)
        return train_and_save(instants, lambda: runner.progress(batches))


@pytest.mark.parametrize(
    ("pipeline", "plan"),
    some_of(
        [
            (pipeline, plan)
            for pipeline in PIPELINES
            for plan in ("rows", "columns", "mixed")
            # That pipeline steps replicas before their backward pass.
            if (pipeline, plan) != ("semi_sync", "mixed")
        ],
        *(8, 9),
    ),
)
def test_pipelines(workers: Workers, tmp_path: Path, pipeline: str, plan: str) -> None:
    found = workers(2).run(pipelined, root=str(tmp_path), pipeline=pipeline, plan=PLANS[plan])
    assert min(found[0]) > 0


def within_a_step(root: str) -> list[int]:
    """Cut between forward and backward passes, whose updates come after the cut."""
    zoo, again = build_zoo("bags", PLANS["rows"]), build_zoo("bags", PLANS["rows"])
    with slowed() as chunks:
        instants = Instants(root, zoo, again, chunks)
        zoo.train(2)
        for _ in range(3):
            loss = zoo.model(zoo.batch())[0]
            zoo.optimizer.zero_grad()
            instants.save(loss.backward, lambda: zoo.train(4))
        return instants.close()


def test_a_cut_within_a_step(workers: Workers, tmp_path: Path) -> None:
    assert min(workers(2).run(within_a_step, root=str(tmp_path))[0]) > 0


def retained(root: str) -> list[int]:
    """Go back through one graph several times; each pass updates the rows once more."""
    zoo, again = build_zoo("bags", PLANS["rows"]), build_zoo("bags", PLANS["rows"])
    bags: Any = zoo.model.module.embeddings
    with slowed() as chunks:
        instants = Instants(root, zoo, again, chunks)
        zoo.train(2)
        for number in range(2):
            loss = bags(zoo.batch(10 + number).features).values().square().sum()
            loss.backward(retain_graph=True)
            again_back = partial(loss.backward, retain_graph=True)

            def rest(back: Callable[[], object] = again_back) -> None:
                back()
                zoo.train(2)

            instants.save(again_back, rest)
        return instants.close()


def test_a_retained_graph(workers: Workers, tmp_path: Path) -> None:
    assert min(workers(2).run(retained, root=str(tmp_path))[0]) > 0


def evicting(root: str, spec: dict[str, Any]) -> list[int]:
    zoo = collisions.build(collisions.Spec(**spec))
    again = collisions.build(collisions.Spec(**spec), seed=7)
    with collisions.on_device(collisions.Spec(**spec)), slowed() as chunks:
        instants = Instants(root, zoo, again, chunks)
        zoo.train(2)
        given = 0
        for _ in range(3):
            before = zoo.mapping()
            instants.save(lambda: zoo.train(3), lambda: zoo.train(4))
            given += sum(
                before[table].get(raw) != row
                for table, rows in zoo.mapping().items()
                for raw, row in rows.items()
            )
        assert given > 20
        return instants.close()


@pytest.mark.parametrize(
    "spec",
    some_of([{}, {"fused": "sgd", "bag": False}, {"fused": "rowwise_adagrad"}], 0),
    ids=str,
)
def test_evictions(workers: Workers, tmp_path: Path, spec: dict[str, Any]) -> None:
    assert min(workers(2).run(evicting, root=str(tmp_path), spec=spec)[0]) > 0


def tables_of(zoo: Any) -> dict[str, Any]:
    """Copy all tables with their states, under names that resharding doesn't change."""
    found = zoo_tables(zoo)
    return {f"{table}/{name}": a for table, of in found.items() for name, a in of.items()}


def resharded(root: str, plan: dict[str, str], change: dict[str, list[int]], by: str) -> list[int]:
    """Move tables while their rows are being copied; the chunks are still those of the cut."""
    zoo = build_zoo("bags", plan)
    with slowed(0.005) as chunks:
        instants = Instants(root, zoo, build_zoo("bags", plan), chunks, take=tables_of)
        zoo.train(3)

        def move() -> None:
            reshard(zoo, change, by=by)
            zoo.train(3)

        instants.save(lambda: zoo.train(2), move)
        kinds = {t: plan[t].split(":")[0] for t in plan}
        moved = {t: f"{kinds[t]}:{','.join(map(str, ranks))}" for t, ranks in change.items()}
        instants.again = build_zoo("bags", {**plan, **moved})
        instants.reader.close()
        instants.reader = type(instants.saver)(
            root, model=instants.again.model, state={"optimizer": instants.again.optimizer}
        )
        instants.save(lambda: zoo.train(2), lambda: zoo.train(3))
        return instants.close()


@pytest.mark.parametrize("by", ["model", "update_shards"])
@pytest.mark.parametrize(
    ("plan", "change"),
    some_of([(TABLES, {"t0": [1], "t1": [0]}), (COLUMNS, {"t0": [1, 0], "t1": [0, 1]})], 1),
    ids=["tables", "columns"],
)
def test_resharding_meanwhile(
    workers: Workers, tmp_path: Path, plan: dict[str, str], change: dict[str, list[int]], by: str
) -> None:
    how: dict[str, Any] = {"plan": plan, "change": change, "by": by}
    assert min(workers(2).run(resharded, root=str(tmp_path), **how)[0]) > 0


HALF = models.ModelSpec(
    (models.CollectionSpec("a", (models.TableSpec("t0", 61, 8, ("f0", "f1")),)),), fused="sgd"
)


def half(root: str) -> list[int]:
    where = {"plan": {"a.t0": "row_wise"}, "world_size": 2, "local_size": 0, "prefix": "tables"}
    job, again = (
        layouts.build(HALF.to_json(), where, seed, half=True, dense_table_optimizer=None)
        for seed in (0, 5)
    )
    with slowed() as chunks:
        instants = Instants(root, job, again, chunks, chunk_bytes=300)
        return train_and_save(instants, job.train)


def test_tables_in_half_precision(workers: Workers, tmp_path: Path) -> None:
    assert min(workers(2).run(half, root=str(tmp_path))[0]) > 0


def states_of(job: Any) -> dict[str, Any]:
    """Copy the rows of all ranks' kernels with every optimizer state."""
    own = {
        f"{view.path}/{view.rows.start}/{view.columns.start}/{name}": tensor.numpy().copy()
        for view in views(job)
        for name, tensor in view.tensors.items()
    }
    return {f"{r}/{n}": a for r, of in enumerate(on_all_ranks(own)) for n, a in of.items()}


def with_moments(root: str, fused: str) -> list[int]:
    """Write rows as a fused optimizer would that FBGEMM trains on GPUs only: after its hook."""
    spec = models.ModelSpec(STATES_SPEC.collections, fused=fused).to_json()
    with any_fused_optimizer():
        job, again = (layouts.build(spec, layout(2, *["row_wise"] * 3), seed) for seed in (0, 4))
    generator = torch.Generator().manual_seed(3)
    with slowed() as chunks:
        instants = Instants(root, job, again, chunks, take=states_of)

        def update() -> None:
            for hook in instants.saver._target.tracked._hooks:
                for index, shard in enumerate(hook.kernel.shards):
                    ids = torch.randint(0, shard.rectangle.rows, (5,), generator=generator)
                    copies = hook.writes.copies
                    if copies is not None:
                        features = [index]
                        copies.before_update(ids.to(torch.int32), [0, len(ids)], features)
                    hook.writes.marks[index].mark(ids)
                    for tensor in shard.tensors:  # as unnoticed as FBGEMM's own writes
                        tensor.data[ids] += torch.rand(1, generator=generator)

        return train_and_save(instants, update)


@pytest.mark.parametrize(
    "fused", some_of(["adam", "partial_rowwise_adam", "lamb", "partial_rowwise_lamb"], 3)
)
def test_optimizers_with_several_states(workers: Workers, tmp_path: Path, fused: str) -> None:
    assert min(workers(2).run(with_moments, root=str(tmp_path), fused=fused)[0]) > 0


MANY = models.ModelSpec(
    (
        models.CollectionSpec(
            "a",
            (
                models.TableSpec("t0", 3000, 32, ("f0", "f1")),
                models.TableSpec("t1", 2000, 16, ("f1", "f2")),
            ),
        ),
    ),
    fused="adagrad",
)


def many_rows(root: str, pages: int, policy: str, background: str = "thread") -> list[Any]:
    """Train with so little overflow memory that training must wait for it, without deadlock."""
    plan = models.uniform_plan(MANY, "row_wise", 2)
    job = models.Job.build(MANY, plan, samples=150)
    again = models.Job.build(MANY, plan, seed=4)
    wait = RowCopies._wait_and_copy

    with slowed(0.0005 if pages < 64 else 0.003) as chunks:

        def let_go_and_wait(*arguments: Any) -> None:
            """Let the background free memory once training waits for it, no earlier."""
            chunks.go.set()
            wait(*arguments)

        instants = Instants(
            root, job, again, chunks, chunk_bytes=20_000, policy=policy, background=background
        )
        memory = instants.saver._saver._background.memory.on_write
        assert memory is not None
        size = pages * row_copies.PAGE_BYTES
        memory.overflow = row_copies.Overflow(torch.zeros(size, dtype=torch.uint8))
        job.train()
        with mock.patch.object(RowCopies, "_wait_and_copy", let_go_and_wait):
            for _ in range(3):
                instants.save(lambda: job.train(4), lambda: job.train(4))
                assert overflow_pages(instants.saver) == (pages, pages)
        waits = [report.memory_wait_seconds for report in instants.reports]
        return [instants.close(), on_all_ranks(waits)]


@pytest.mark.parametrize(
    ("pages", "policy", "background"),
    some_of([(2, "full", "thread"), (3, "one_shot", "thread"), (64, "full", "process")], 1),
)
def test_many_rows(
    workers: Workers, tmp_path: Path, pages: int, policy: str, background: str
) -> None:
    protected, waits = workers(2).run(
        many_rows, root=str(tmp_path), pages=pages, policy=policy, background=background
    )[0]
    assert min(protected) > 0
    for rank in waits:
        for seconds in rank:
            assert (seconds > 0) == (pages < 64), waits
