"""Tell of data-parallel tables that differ between ranks, of which each rank stores a share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.distributed.dense_jobs import MIXED, REPLICAS, T0, make
from tests.distributed.models import CollectionSpec, Job, ModelSpec, TableSpec, uniform_plan
from tests.distributed.small_job import Workers
from tests.distributed.watch import warnings_said
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.dcp import SavePlanner, StorageWriter
from torchrec_checknrun.tracking import track


def tell(root: str, which: str | None, staging: Any) -> list[str]:
    """Save twice, with a row or its optimizer's state changed on rank 1 alone."""
    job = make(MIXED, "adam", "plain")
    state = {"optimizer": job.optimizer, "job": job}
    with (
        warnings_said() as told,
        Checkpointer(root, model=job.model, state=state, staging=staging) as saver,
    ):
        for _ in range(2):
            job.train(1)
            saver.step()
            table = job.model.state_dict()[f"{T0}.weight"]
            if which is not None and dist.get_rank() == 1:
                (parameter,) = (p for p in job.model.parameters() if p.shape == table.shape)
                state_of = job.optimizer.state[parameter]
                rows = table if which == "weight" else state_of[which]
                with torch.no_grad():
                    rows[-1].add_(1)
            saver.save()
    return [text for text in told if "than on lower" in text]


@pytest.mark.parametrize("staging", ["copy_on_write", "copy", "encode"])
@pytest.mark.parametrize("which", ["weight", "exp_avg_sq"])
def test_replicas_that_differ(workers: Workers, tmp_path: Path, which: str, staging: str) -> None:
    (text,), nothing = workers(2).run(tell, root=str(tmp_path), which=which, staging=staging)
    assert nothing == []
    assert re.search(rf"tables {T0} hold other rows on rank 1 than on lower .*mixture", text)


def test_replicas_that_are_alike(workers: Workers, tmp_path: Path) -> None:
    for staging in ("copy_on_write", "copy"):
        root = str(tmp_path / staging)
        assert workers(2).run(tell, root=root, which=None, staging=staging) == [[], []]


LARGE = ModelSpec((CollectionSpec("a", (TableSpec("t0", 2500, 8, ("f0",)),)),), dense="adam")


def save_large(root: str) -> list[str]:
    """Save a replicated table of more rows than ranks compare, which nobody writes meanwhile."""
    job = Job.build(LARGE, uniform_plan(LARGE, "data_parallel", 2))
    state = {"optimizer": job.optimizer, "job": job}
    with (
        warnings_said() as told,
        Checkpointer(root, model=job.model, state=state, every_steps=2) as saver,
    ):
        saver.restore()
        for _ in range(3):
            job.train(1)
            saver.step()
        assert saver.wait() is not None
        job.train(1)
        saver.step()
        assert saver.save().step == 4
    return [text for text in told if "written" in text]


def test_large_replicas_are_saved(workers: Workers, tmp_path: Path) -> None:
    assert workers(2).run(save_large, root=str(tmp_path / "root")) == [[], []]


def direct(root: str) -> list[str]:
    """Change all rows of the first rank's copy, and save with DCP."""
    job = make(REPLICAS, "adam", "combined")
    tracked = track(job.model, [job.optimizer])
    if dist.get_rank() == 0:
        with torch.no_grad():
            job.model.state_dict()[f"{T0}.weight"].zero_()
    with warnings_said() as told:
        planner = SavePlanner(tracked)
        dcp.save({"model": job.model}, planner=planner, storage_writer=StorageWriter(root))
    return [text for text in told if "than on lower" in text]


def test_replicas_that_differ_in_a_direct_save(workers: Workers, tmp_path: Path) -> None:
    (text,), nothing = workers(2).run(direct, root=str(tmp_path / "root"))
    assert nothing == []
    assert f"tables {T0} hold" in text
