"""Train a small job of one or two ranks, save three checkpoints of it, refuse a restore."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch.distributed as dist

from tests.distributed import references
from tests.distributed.models import CollectionSpec, Job, ModelSpec, Plan, TableSpec, uniform_plan
from tests.distributed.states import gather, local_bytes
from tests.distributed.worker_pool import WorkerPool
from torchrec_checknrun import Checkpointer, Consecutive, Full, errors

Workers = Callable[[int], WorkerPool]


class Made(Protocol):
    def __call__(self, tmp_path: Path, full: bool = False) -> list[str]: ...


TABLES = (TableSpec("t0", 40, 8, ("f0", "f1")), TableSpec("t1", 30, 4, ("f1",)))
SPEC = ModelSpec((CollectionSpec("a", TABLES), CollectionSpec("b", TABLES[:1])))


def plan_of(spec: ModelSpec, ranks: int = 2) -> Plan:
    return uniform_plan(spec, "row_wise", ranks)


def where(tmp_path: Path, spec: ModelSpec = SPEC, ranks: int = 2) -> dict[str, Any]:
    return {"root": str(tmp_path / "root"), "spec": spec.to_json(), "plan": plan_of(spec, ranks)}


def build(spec: dict[str, Any], plan: Plan, seed: int = 0) -> Job:
    return Job.build(ModelSpec.from_json(spec), plan, seed=seed)


def checkpointer(root: str, job: Job, **options: Any) -> Checkpointer:
    state = {"optimizer": job.optimizer, "job": job, **options.pop("state", {})}
    return Checkpointer(
        root, model=job.model, state=state, chunk_bytes=600, retention=None, **options
    )


def save(saver: Checkpointer) -> str:
    report = saver.save()
    assert report is not None
    return report.id


def keep(job: Job, root: str, name: str) -> None:
    state = gather(job)
    if dist.get_rank() == 0:
        references.store(Path(root).parent / f"{name}.npz", state)


def is_at(job: Job, root: str, name: str) -> bool:
    wanted = references.load(Path(root).parent / f"{name}.npz")
    return references.differences(gather(job), wanted, None) == []


def three_checkpoints(root: str, spec: dict[str, Any], plan: Plan, full: bool = False) -> list[str]:
    """Save a full checkpoint and two on top of it (or three full ones); copy the states."""
    job = build(spec, plan)
    names = []
    with checkpointer(root, job, policy=Full() if full else Consecutive()) as saver:
        for _ in range(3):
            for _ in range(2):
                job.train()
                saver.step()
            names.append(save(saver))
            keep(job, root, names[-1])
    return names


class Note:
    """A state object with one value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def restore_is_refused(
    root: str,
    spec: dict[str, Any],
    plan: Plan,
    error: str,
    match: str,
    name: str | None = None,
    verify: Any = "read",
) -> None:
    """Assert that a restore raises and changes nothing, and that training and saving go on."""
    job = build(spec, plan, seed=5)
    job.train(1)
    with checkpointer(root, job) as saver:
        before = local_bytes(job)
        with pytest.raises(getattr(errors, error), match=match):
            saver.restore(name, verify=verify)
        assert local_bytes(job) == before
        assert job.steps == 1
        job.train(1)
        saver.step()
