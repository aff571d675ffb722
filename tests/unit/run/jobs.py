"""Train small jobs on one rank, with a Checkpointer for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.crash.save_sweep import SPEC
from tests.distributed import references
from tests.distributed.models import Job, uniform_plan
from tests.distributed.states import State, gather
from torchrec_checknrun import Checkpointer, Consecutive


def make_job(seed: int = 0) -> Job:
    return Job.build(SPEC, uniform_plan(SPEC, "table_wise", 1), seed=seed)


def checkpointer(root: Path | str, job: Job, **options: Any) -> Checkpointer:
    options = {"policy": Consecutive(), "retention": None, "chunk_bytes": 1000, **options}
    state = {"optimizer": job.optimizer, "job": job}
    return Checkpointer(root, model=job.model, state=state, **options)


def train(job: Job, saver: Checkpointer, steps: int = 1) -> None:
    for _ in range(steps):
        job.train()
        saver.step()


def restored(root: Path | str, wanted: State) -> list[str]:
    """Return how the state that a new process restores differs."""
    other = make_job(seed=7)
    with checkpointer(root, other) as saver:
        assert saver.restore() is not None
    return references.differences(gather(other), wanted, None)
