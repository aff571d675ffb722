"""All ranks are told of a model that a checkpoint doesn't fit, or that can't be tracked."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.models import CollectionSpec, ModelSpec, Plan
from tests.distributed.small_job import (
    SPEC,
    TABLES,
    Made,
    Note,
    Workers,
    build,
    checkpointer,
    is_at,
    restore_is_refused,
    three_checkpoints,
    where,
)
from tests.distributed.states import local_bytes
from tests.examples import some_of
from torchrec_checknrun import errors


def resized(rows: int = 40, dim: int = 8) -> ModelSpec:
    tables = (replace(TABLES[0], rows=rows, dim=dim), TABLES[1])
    return ModelSpec((CollectionSpec("a", tables), SPEC.collections[1]))


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (resized(rows=39), r"a\.embedding_bags\.t0.*40 × 8.*39 × 8"),
        (resized(dim=12), r"a\.embedding_bags\.t0.*40 × 8.*40 × 12"),
        (ModelSpec(SPEC.collections[:1]), r"b\.embedding_bags\.t0.*only in the checkpoint"),
        (ModelSpec((*SPEC.collections, CollectionSpec("c", TABLES))), r"c\..*only in the model"),
        (replace(SPEC, fused="sgd"), r"embedding_bags.*momentum1.*has none"),
        (replace(SPEC, hidden=5), r"model\.hidden\..*\[4.*\[5"),
    ],
    ids=["rows", "dim", "table_gone", "table_new", "fused_optimizer", "dense_shape"],
)
@pytest.mark.parametrize("by_id", some_of([False, True], 0))
def test_another_model(
    workers: Workers, made: Made, tmp_path: Path, spec: ModelSpec, match: str, by_id: bool
) -> None:
    names = made(tmp_path)
    workers(2).run(
        restore_is_refused,
        **where(tmp_path, spec),
        error="IncompatibleCheckpoint",
        match=match,
        name=names[-1] if by_id else None,
    )


DENSE_OPTIMIZERS = ["adagrad", "adam", "sgd"]


@pytest.mark.parametrize(
    ("wanted", "saved"),
    some_of(itertools.product(DENSE_OPTIMIZERS, repeat=2), 2, 3, 4),
)
def test_dense_optimizers(workers: Workers, tmp_path: Path, saved: str, wanted: str) -> None:
    """Include Adam in a new process, which creates its state only at its first step."""
    workers(2).run(three_checkpoints, **where(tmp_path, replace(SPEC, dense=saved)))
    other = where(tmp_path, replace(SPEC, dense=wanted))
    if saved == wanted:
        workers(2).run(restores_in_a_new_process, **other)
    else:
        workers(2).run(dense_optimizer_is_refused, **other)


def restores_in_a_new_process(root: str, spec: dict[str, Any], plan: Plan) -> None:
    job = build(spec, plan, seed=5)
    with checkpointer(root, job) as saver:
        report = saver.restore()
        assert report is not None
        assert is_at(job, root, report.id)


def dense_optimizer_is_refused(root: str, spec: dict[str, Any], plan: Plan) -> None:
    job, same = build(spec, plan, seed=5), build(spec, plan, seed=5)
    refused = pytest.raises(errors.IncompatibleCheckpoint, match=r"optimizer\.state\.dense\.")
    with checkpointer(root, job) as saver, refused:
        saver.restore()
    for either in (job, same):
        either.train(2)
    assert local_bytes(job) == local_bytes(same)


def key_is_missing(root: str, spec: dict[str, Any], plan: Plan, only_rank: int) -> None:
    """Ask for a state that the checkpoint lacks, on all ranks (-1) or one of them."""
    job = build(spec, plan, seed=5)
    extra = {"extra": Note("x")} if only_rank in (-1, dist.get_rank()) else {}
    if only_rank >= 0:
        before = local_bytes(job)
        told = rf"state\['extra'\] differs .*given on rank {only_rank}"
        with pytest.raises(ValueError, match=told):
            checkpointer(root, job, state=extra)
        assert local_bytes(job) == before
        return
    with checkpointer(root, job, state=extra) as saver:
        before = local_bytes(job)
        with pytest.raises(errors.IncompatibleCheckpoint, match="no state 'extra'"):
            saver.restore()
        assert local_bytes(job) == before


@pytest.mark.parametrize("only_rank", [-1, 0, 1])
def test_missing_state(workers: Workers, made: Made, tmp_path: Path, only_rank: int) -> None:
    made(tmp_path)
    workers(2).run(key_is_missing, **where(tmp_path), only_rank=only_rank)


def untrackable(root: str, spec: dict[str, Any], plan: Plan) -> None:
    job = build(spec, plan)
    with pytest.raises(errors.UnsupportedTable, match=r"embedding_bags\.t0.*frozen.*lr 0"):
        checkpointer(root, job)


def test_sharded_table_with_a_dense_optimizer(workers: Workers, tmp_path: Path) -> None:
    spec = replace(SPEC, fused="none", collections=SPEC.collections[1:])
    for sharding in ("row_wise", "table_wise:0"):  # on all ranks; on one
        plan = {"b.t0": sharding}
        workers(2).run(untrackable, root=str(tmp_path), spec=spec.to_json(), plan=plan)
