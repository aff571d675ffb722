"""Train and save with compactions behind training, until somebody kills this process.

Run by a fork server. Prints the pid of each compaction's process as it begins, and each
checkpoint's step once durable.
"""

from __future__ import annotations

import time
from pathlib import Path

from tests.crash.save_sweep import alone
from tests.distributed.models import CollectionSpec, Job, ModelSpec, TableSpec, uniform_plan
from torchrec_checknrun import Checkpointer, Consecutive, Retention

_PAUSE = 0.05
"""Seconds after each step: the compaction is niced, and has to come forward on a busy machine."""
SPEC = ModelSpec((CollectionSpec("c", (TableSpec("t0", 20_000, 16, ("f0",)),)),))


def make_job(seed: int = 0) -> Job:
    return Job.build(SPEC, uniform_plan(SPEC, "table_wise", 1), seed=seed)


def checkpointer(root: Path, job: Job) -> Checkpointer:
    return Checkpointer(
        root,
        model=job.model,
        state={"optimizer": job.optimizer, "job": job},
        policy=Consecutive(),
        retention=Retention(2),
        chunk_bytes=20_000,  # many chunks, so that a compaction takes a while
        compact_after=1,
    )


def main(root: str) -> None:
    """Restore, then train for ever."""
    told = None
    with alone():
        job = make_job()
        with checkpointer(Path(root), job) as saver:
            saver.restore()
            while True:
                job.train()
                saver.step()
                report = saver.save()
                print("saved", report.step, flush=True)
                process = saver._saver.going_on._process
                if process is not None and process._process.pid != told:
                    told = process._process.pid
                    print("compacts", told, flush=True)
                time.sleep(_PAUSE)
