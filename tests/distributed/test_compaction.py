"""Compacted chains of real runs give the same bits on any ranks; a run is not disturbed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.distributed import references
from tests.distributed.models import CollectionSpec, Job, ModelSpec, Plan, TableSpec, uniform_plan
from tests.distributed.states import gather, scramble
from tests.distributed.worker_pool import WorkerPool
from tests.examples import some_of
from torchrec_checknrun import (
    Checkpointer,
    Consecutive,
    Intermittent,
    OneShot,
    PerRank,
    Quantization,
    compact,
)
from torchrec_checknrun.policy import Policy

Workers = Callable[[int], WorkerPool]
POLICIES: dict[str, Policy] = {
    "one_shot": OneShot(),
    "consecutive": Consecutive(),
    "intermittent": Intermittent(),
}
TABLES = (TableSpec("t0", 300, 8, ("f0", "f1")), TableSpec("t1", 50, 4, ("f1",)))
SPEC = ModelSpec((CollectionSpec("a", TABLES), CollectionSpec("b", TABLES[:1])))


class Own:
    """A state that differs between ranks."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": torch.tensor(self.value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = int(state["value"])


def add_up(states: list[dict[str, Any]]) -> dict[str, Any]:
    return {"value": torch.stack([state["value"] for state in states]).sum()}


def build(spec: dict[str, Any], plan: Plan) -> Job:
    return Job.build(ModelSpec.from_json(spec), plan, seed=3)


def checkpointer(
    root: str, job: Job, own: Own, policy: str = "consecutive", **quantization: Any
) -> Checkpointer:
    return Checkpointer(
        root,
        model=job.model,
        retention=None,
        state={"optimizer": job.optimizer, "job": job, "own": PerRank(own, add_up)},
        policy=POLICIES[policy],
        quantization=Quantization(**quantization, exact_below_rows=100),
        chunk_bytes=3000,
    )


def train(root: str, spec: dict[str, Any], plan: Plan, **options: Any) -> list[str]:
    job = build(spec, plan)
    names = []
    with checkpointer(root, job, Own(5 + dist.get_rank()), **options) as saver:
        for _ in range(5):
            job.train(2)
            saver.steps = job.steps
            report = saver.save()
            assert report is not None
            names.append(report.id)
    return names


def restores_alike(root: str, spec: dict[str, Any], plan: Plan, names: list[str]) -> list[str]:
    """Describe how two checkpoints differ; continue a run from the second."""
    job, own, found = build(spec, plan), Own(0), []
    with checkpointer(root, job, own) as saver:
        for name in names:
            scramble(job)
            own.value = 0
            saver.restore(name)
            found.append({**gather(job), "own": np.array(own.value)})
            assert own.value == (5 + dist.get_rank() if dist.get_world_size() == 2 else 5 + 6)
        job.train()
        saver.step()
        report = saver.save()
        assert report is not None
        assert report.sequence > 5
        if report.kind == "differential":
            assert report.parent == names[-1]
    return references.differences(found[1], found[0], None)


CASES: list[dict[str, Any]] = [
    {"policy": "consecutive", "sharding": "row_wise"},
    {"policy": "one_shot", "sharding": "column_wise", "bits": 4, "optimizer": "log8"},
    {"policy": "intermittent", "sharding": "table_wise", "bits": 2, "compress": True},
    {"policy": "consecutive", "sharding": "row_wise", "method": "importance"},
    {"policy": "consecutive", "sharding": "column_wise", "bits": 8, "optimizer": "bf16"},
    {"policy": "consecutive", "sharding": "row_wise", "method": "fp16"},
    {"policy": "one_shot", "sharding": "row_wise", "bits": 4, "method": "kmeans"},
]


@pytest.mark.parametrize(
    "case",
    some_of(CASES, 2),
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_the_same_bits(workers: Workers, tmp_path: Path, case: dict[str, Any]) -> None:
    if case.get("method") == "kmeans":
        pytest.importorskip("kmeans1d", reason="encoding k-means codebooks needs kmeans1d")
    options, root = dict(case), str(tmp_path / "root")
    plan = uniform_plan(SPEC, options.pop("sharding"), 2)
    where: dict[str, Any] = {"root": root, "spec": SPEC.to_json()}
    head = workers(2).run(train, **where, plan=plan, **options)[0][-1]
    report = compact(root, head)
    assert report is not None
    assert report.total_rows == 650
    for ranks, sharding in ((2, case["sharding"]), (1, "row_wise")):
        problems = workers(ranks).run(
            restores_alike,
            **where,
            plan=uniform_plan(SPEC, sharding, ranks),
            names=[head, report.id],
        )[0]
        assert problems == []


def goes_on(root: str, spec: dict[str, Any], plan: Plan, policy: str) -> None:
    """Compact what a run has saved, from another process, while the run trains and saves."""
    job = build(spec, plan)
    with checkpointer(root, job, Own(1), policy) as saver:
        names: list[str] = []
        copies: dict[str, Any] = {}
        for number in range(5):
            job.train()
            saver.steps = job.steps
            report = saver.save()
            assert report is not None
            copies[report.id] = gather(job)
            if names:
                assert report.parent == names[0 if policy == "one_shot" else -1]
            names.append(report.id)
            base: list[str | None] = [None]
            if dist.get_rank() == 0 and number in (1, 2):
                made = compact(root)
                assert made is not None
                base = [made.id]
            dist.broadcast_object_list(base)
            if base[0] is not None:
                copies[base[0]] = copies[report.id]
        assert len(copies) == 7
        found = saver.restore()
        assert found is not None
        assert found.id == names[-1]
        for name, wanted in copies.items():
            scramble(job)
            saver.restore(name)
            assert references.differences(gather(job), wanted, None) == [], name


@pytest.mark.parametrize("policy", some_of(["one_shot", "consecutive"], 1))
def test_a_run_goes_on_with_its_own_chain(workers: Workers, tmp_path: Path, policy: str) -> None:
    plan = uniform_plan(SPEC, "row_wise", 2)
    where: dict[str, Any] = {"root": str(tmp_path / "root"), "spec": SPEC.to_json()}
    workers(2).run(goes_on, **where, plan=plan, policy=policy)
