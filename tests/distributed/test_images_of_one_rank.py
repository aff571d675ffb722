"""One rank gives its image up: no other rank waits for it, and all restore from the storage. One
rank alone shows the state of an object: all take it, and ask the object alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.models import Job, Plan
from tests.distributed.partial_lives import Gathered
from tests.distributed.small_job import SPEC, Workers, build, checkpointer, plan_of, where
from torchrec_checknrun import Checkpointer, Images, PerRank, Replicated
from torchrec_checknrun.memory.image import RankImage
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.shared_memory import file as files


@contextmanager
def one_step_done(root: str, job: Job) -> Iterator[tuple[Job, Checkpointer, RankImage]]:
    """Train one step with images and a state that the ranks gather; close it in the end."""
    images, state = Images(str(Path(root).parent)), {"shown": Replicated(Gathered())}
    with checkpointer(root, job, timeout_seconds=20.0, survive=images, state=state) as saver:
        saver.restore()
        job.train()
        saver.step()
        image = saver._survival._image
        assert image is not None
        yield job, saver, image


def give_up_one(root: str, spec: dict[str, Any], plan: Plan) -> None:
    with one_step_done(root, build(spec, plan)) as (job, saver, image):
        saver.save()
        if dist.get_rank() == 1:
            image.give_up("says the test")
        job.train()
        saver.step()
        report = saver.restore()
        assert report is not None
        assert report.source == "checkpoint"
        for _ in range(3):
            job.train()
            saver.step()
        assert saver.save().step == 4


def test_one_rank_gives_its_image_up(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(give_up_one, **where(tmp_path))


def gather_by_images(root: str, spec: dict[str, Any], plan: Plan) -> list[list[float]]:
    found = []
    for life in range(2):
        files._mapped.clear()  # as in another process
        job, shown, own = build(spec, plan, seed=life), Gathered(), Gathered()
        saver = checkpointer(
            root,
            job,
            timeout_seconds=20.0,
            survive=Images(str(Path(root).parent)),
            state={"shown": Replicated(shown), "own": PerRank(own)},
        )
        report = saver.restore()
        assert (report is not None and report.source == "images") == bool(life)
        found += [shown.part.tolist()] * life
        for _ in range(2):
            job.train()
            shown.part = torch.tensor([saver.steps, dist.get_rank()]).float()
            saver.step()
        saver._release(failed=True)
    return found


def save_amid_a_step(root: str, spec: dict[str, Any], plan: Plan) -> bool:
    """Save before ``step()`` where rank 0 alone has tables; return whether rows changed."""
    with one_step_done(root, build(spec, plan)) as (job, saver, image):
        job.loss(*job.batch(1)).backward()
        assert image._journal is not None
        changed = image._journal.is_open
        job.optimizer.step()
        assert saver.save().step == 1
        return changed


@pytest.mark.skipif(not has_extension(), reason="the extension was not built")
def test_a_save_before_the_end_of_a_step(workers: Workers, tmp_path: Path) -> None:
    place = where(tmp_path) | {"plan": dict.fromkeys(plan_of(SPEC), "table_wise:0")}
    assert workers(2).run(save_amid_a_step, **place) == [True, False]


@pytest.mark.skipif(not has_extension(), reason="the extension was not built")
def test_a_state_that_one_rank_shows(workers: Workers, tmp_path: Path) -> None:
    zero, one = workers(2).run(gather_by_images, **where(tmp_path))
    assert (zero, one) == ([[1.0, 0.0]], [[1.0, 1.0]])
