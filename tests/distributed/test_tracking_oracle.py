"""Compare the rows in differential checkpoints with the rows whose bytes have changed.

The comparison uses TorchRec's state dicts before and after, the stored rows are read by
``reader30``: neither knows of marks. None may be missed; an extra row is one that was trained with
a gradient of zero.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.models import (
    CollectionSpec,
    Job,
    ModelSpec,
    TableSpec,
    random_plan,
    random_spec,
    uniform_plan,
)
from tests.distributed.reader30 import read_rows
from tests.distributed.states import gather, row_bytes
from tests.distributed.worker_pool import WorkerPool
from tests.examples import some_of
from torchrec_checknrun import Checkpointer, Consecutive, OneShot

Workers = Callable[[int], WorkerPool]

# f0 feeds several tables, f1 two of different sizes; t0 and t1 are in all three collections.
SPEC = ModelSpec(
    (
        CollectionSpec(
            "a", (TableSpec("t0", 60, 8, ("f0", "f1")), TableSpec("t1", 40, 4, ("f1", "f2")))
        ),
        CollectionSpec("b", (TableSpec("t0", 90, 12, ("f0",)), TableSpec("t1", 33, 8, ("f3",)))),
        CollectionSpec(
            "c",
            (TableSpec("t0", 50, 8, ("f2", "f3")), TableSpec("t1", 21, 8, ("f0",))),
            bag=False,
        ),
    )
)
BEYOND = {"f1": 60, "f2": 70, "f3": 50}
"""Ids drawn up to here exceed one table of the feature, or all."""
ORDINARY = ["train", "train", "train"]
OTHER_PASSES = ["eval", "train", "no_backward", "no_grad", "train", "eval", "accumulate"]


def compare(
    root: str, spec: dict[str, Any], plan: dict[str, str], actions: list[str], one_shot: bool
) -> dict[str, int]:
    """Run two intervals of ``actions``, each ended by a differential checkpoint, and compare."""
    job = Job.build(ModelSpec.from_json(spec), plan, seed=3)
    policy = OneShot() if one_shot else Consecutive()
    checkpointer = Checkpointer(
        root, model=job.model, policy=policy, chunk_bytes=1500, retention=None
    )
    job.train()
    checkpointer.save()
    before = row_bytes(job.spec, gather(job))
    since: set[tuple[str, int]] = set()
    counts = {"changed": 0, "missed": 0, "extra": 0, "unexplained": 0, "wrong": 0}
    for _ in range(2):
        for action in actions:
            since |= act(job, action)
        report = checkpointer.save()
        assert report is not None
        assert report.kind == "differential"
        after = row_bytes(job.spec, gather(job))
        if dist.get_rank() == 0:
            stored = read_rows(Path(root) / report.id)
            changed = {key for key in after if after[key] != before[key]}
            extra = stored.keys() - changed
            counts["changed"] += len(changed)
            counts["missed"] += len(changed - stored.keys())
            counts["extra"] += len(extra)
            counts["unexplained"] += len(extra - since)
            for (table, row), parts in stored.items():
                whole = ((0, job.spec.table_paths[table].dim), *after[table, row])
                counts["wrong"] += parts != [whole]
            assert report.modified_rows == len(stored)
        if not one_shot:
            before, since = after, set()
    checkpointer.close()
    return counts


def act(job: Job, action: str) -> set[tuple[str, int]]:
    """Run one pass; return the rows, on all ranks, that its backward pass reaches."""
    dense, sparse = job.batch(job.steps, rows=BEYOND if action == "out_of_range" else None)
    job.steps += 1
    if action in ("eval", "no_grad"):
        job.model.train(action != "eval")
        with torch.no_grad():
            job.model(dense, sparse)
        job.model.train()
        return set()
    if action == "no_backward":
        job.model(dense, sparse)
        return set()
    job.optimizer.zero_grad()
    loss = job.loss(dense, sparse)
    if action == "accumulate":  # one batch's forward pass between another's and its backward pass
        loss.backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        loss = job.loss(dense, sparse) + job.loss(dense, sparse)
    if action == "zero_gradient":
        loss = loss * 0.0
    loss.backward()
    job.optimizer.step()
    looked_up: list[Any] = [None] * dist.get_world_size()
    values = {feature: sparse[feature].values().tolist() for feature in job.spec.features}
    dist.all_gather_object(looked_up, values)
    return {
        (path, row)
        for path, table in job.spec.table_paths.items()
        for feature in table.features
        for of_rank in looked_up
        for row in of_rank[feature]
    }


def check(counts: dict[str, int], at_least: int = 20) -> None:
    assert counts["changed"] >= at_least, "the case changes too little to say anything"
    assert counts["missed"] == 0
    assert counts["wrong"] == 0
    assert counts["unexplained"] == 0


SHARDINGS = ("row_wise", "table_wise")


@pytest.mark.parametrize(
    ("sharding", "fused"),
    some_of(itertools.product(SHARDINGS, ["sgd", "rowwise_adagrad", "adagrad"]), 1, 5),
)
def test_stored_rows_are_the_changed_ones(
    workers: Workers, tmp_path: Path, sharding: str, fused: str
) -> None:
    spec = ModelSpec(SPEC.collections, fused=fused)
    counts = workers(2).run(
        compare,
        root=str(tmp_path),
        spec=spec.to_json(),
        plan=uniform_plan(spec, sharding, 2),
        actions=ORDINARY,
        one_shot=False,
    )[0]
    check(counts)
    assert counts["extra"] == 0


@pytest.mark.parametrize(
    ("sharding", "index_dtype", "one_shot"),
    some_of(itertools.product(SHARDINGS, ["int32", "int64"], [False, True]), 1, 6),
)
def test_passes_that_train_nothing_store_nothing(
    workers: Workers, tmp_path: Path, sharding: str, index_dtype: str, one_shot: bool
) -> None:
    spec = ModelSpec(SPEC.collections, index_dtype=index_dtype)
    counts = workers(2).run(
        compare,
        root=str(tmp_path),
        spec=spec.to_json(),
        plan=uniform_plan(spec, sharding, 2),
        actions=OTHER_PASSES,
        one_shot=one_shot,
    )[0]
    check(counts)
    assert counts["extra"] == 0


@pytest.mark.parametrize("sharding", some_of(SHARDINGS, 0))
def test_extra_rows_are_those_with_a_gradient_of_zero(
    workers: Workers, tmp_path: Path, sharding: str
) -> None:
    counts = workers(2).run(
        compare,
        root=str(tmp_path),
        spec=SPEC.to_json(),
        plan=uniform_plan(SPEC, sharding, 2),
        actions=["train", "zero_gradient"],
        one_shot=False,
    )[0]
    check(counts)
    assert counts["extra"] > 0


@pytest.mark.parametrize(
    ("sharding", "index_dtype"), some_of(itertools.product(SHARDINGS, ["int32", "int64"]), 1, 2)
)
def test_ids_out_of_range_mark_the_row_that_is_updated_instead(
    workers: Workers, tmp_path: Path, sharding: str, index_dtype: str
) -> None:
    spec = ModelSpec(SPEC.collections, index_dtype=index_dtype)
    counts = workers(2).run(
        compare,
        root=str(tmp_path),
        spec=spec.to_json(),
        plan=uniform_plan(spec, sharding, 2),
        actions=["out_of_range", "out_of_range"],
        one_shot=False,
    )[0]
    check(counts)
    assert counts["extra"] == 0


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("seed", some_of(range(4), 2))
def test_random_models(workers: Workers, tmp_path: Path, seed: int, world_size: int) -> None:
    spec = random_spec(seed)
    counts = workers(world_size).run(
        compare,
        root=str(tmp_path),
        spec=spec.to_json(),
        plan=random_plan(spec, world_size, seed),
        actions=[*ORDINARY, *OTHER_PASSES],
        one_shot=bool(seed % 2),
    )[0]
    check(counts, at_least=1)
