"""Ranks go on together from a copy that a process of rank 0's has made behind training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tests.distributed import references
from tests.distributed.models import Plan, uniform_plan
from tests.distributed.states import gather, scramble
from tests.distributed.test_compaction import POLICIES, SPEC, Own, add_up, build
from tests.distributed.worker_pool import WorkerPool
from torchrec_checknrun import Checkpointer, CompactAfter, PerRank, Quantization, Retention
from torchrec_checknrun.format.names import parse_id

Workers = Callable[[int], WorkerPool]


def checkpointer(
    root: str, job: Any, policy: str, keep: int | None, links: int = 3, **quantization: Any
) -> Any:
    return Checkpointer(
        root,
        model=job.model,
        retention=None if keep is None else Retention(keep),
        state={"optimizer": job.optimizer, "job": job, "own": PerRank(Own(1), add_up)},
        policy=POLICIES[policy],
        quantization=Quantization(**quantization, exact_below_rows=100),
        chunk_bytes=3000,
        compact_after=CompactAfter(links, share=0.3) if links else None,
    )


def wait_for_copy(saver: Checkpointer) -> None:
    """Wait on rank 0 until nothing is being compacted; the other ranks wait for rank 0."""
    done = [saver._saver.going_on.wait(120)]
    dist.broadcast_object_list(done)
    assert done[0]


def is_copy(name: str | None) -> bool:
    id = None if name is None else parse_id(name)
    return id is not None and id.is_copy


def goes_on(
    root: str, spec: dict[str, Any], plan: Plan, policy: str, keep: int | None, **options: Any
) -> list[str]:
    """Train and save; wait for copies sometimes, and return the parents of all checkpoints."""
    job = build(spec, plan)
    known, parents = {}, []
    with checkpointer(root, job, policy, keep, **options) as saver:
        for number in range(11):
            job.train(2)
            saver.steps = job.steps
            report = saver.save()
            known[report.id] = gather(job)
            parents.append(report.parent)
            if number in (5, 9):
                wait_for_copy(saver)
        if options:  # rows are read back with a loss
            return parents
        saver._saver.writer.wait_for_pruning()
        dist.barrier()  # rank 0 deletes; from here on all ranks see the same names
        for name, wanted in known.items():
            if (Path(root) / name / "manifest.json").exists():
                scramble(job)
                saver.restore(name)
                assert references.differences(gather(job), wanted, None) == [], name
    return parents


def newest_of(root: str, spec: dict[str, Any], plan: Plan, policy: str, keep: int | None) -> Any:
    """Restore the newest checkpoint, go on with the run, and restore what was saved.

    Nothing is compacted, in a process that nobody would wait for.

    Returns:
        The chain, and digests of the state that was restored, and of the one saved last.
    """
    job = build(spec, plan)
    with checkpointer(root, job, policy, keep, links=0) as saver:
        scramble(job)
        report = saver.restore()
        found = gather(job)
        for _ in range(2):
            job.train()
            saver.steps += 1
            later = saver.save()
        wanted = gather(job)
        scramble(job)
        saver.restore(later.id)
        assert references.differences(gather(job), wanted, None) == []
        return list(report.chain), digest(found), digest(wanted)


def digest(state: dict[str, np.ndarray]) -> str:
    """Digest a job's whole state, which no number of ranks makes a difference to."""
    parts = (name.encode() + np.ascontiguousarray(state[name]).tobytes() for name in sorted(state))
    return hashlib.sha256(b"".join(parts)).hexdigest()


@pytest.mark.parametrize(
    ("policy", "sharding", "keep"),
    [
        ("consecutive", "row_wise", None),
        pytest.param("consecutive", "column_wise", 2, marks=pytest.mark.slow),
        pytest.param("one_shot", "table_wise", 1, marks=pytest.mark.slow),
        pytest.param("intermittent", "row_wise", 2, marks=pytest.mark.slow),
        pytest.param("consecutive", "data_parallel", None, marks=pytest.mark.slow),
    ],
)
def test_ranks_go_on_from_the_copy(
    workers: Workers, tmp_path: Path, policy: str, sharding: str, keep: int | None
) -> None:
    where: dict[str, Any] = {"root": str(tmp_path / "root"), "spec": SPEC.to_json()}
    rule: dict[str, Any] = {"policy": policy, "keep": keep}
    plan = uniform_plan(SPEC, sharding, 2)
    parents = workers(2).run(goes_on, **where, **rule, plan=plan)[0]
    if policy != "intermittent":  # which may make a full one before the copy is there
        assert sum(is_copy(parent) for parent in parents) >= 2
    other = "row_wise" if sharding == "data_parallel" else sharding
    before = None
    for ranks in (2, 3, 1):
        plan = uniform_plan(SPEC, other, ranks)
        chain, found, last = workers(ranks).run(newest_of, **where, **rule, plan=plan)[0]
        assert before in (None, found)
        before = last
        assert is_copy(chain[0]) or ranks != 2 or policy == "intermittent"


@pytest.mark.slow
def test_quantized_rows_go_on(workers: Workers, tmp_path: Path) -> None:
    """Rows of 4 bits and log8 stay as they were stored, copy after copy."""
    where: dict[str, Any] = {"root": str(tmp_path / "root"), "spec": SPEC.to_json()}
    plan = uniform_plan(SPEC, "row_wise", 2)
    rule: dict[str, Any] = {"policy": "consecutive", "keep": None}
    parents = workers(2).run(goes_on, **where, **rule, plan=plan, bits=4, optimizer="log8")[0]
    assert sum(is_copy(parent) for parent in parents) >= 2
