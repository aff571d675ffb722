"""Save what was changed after a step's end: once it is durable, it is newer than the image."""

from __future__ import annotations

from threading import Event

import pytest
import torch

from tests.distributed.models import CollectionSpec, Job, ModelSpec, TableSpec
from tests.distributed.states import gather
from tests.unit.run.jobs import train
from tests.unit.run.lives import Lives, by_images, differences
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.save import background

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(not has_extension(), reason="the extension was not built"),
]

SPEC = ModelSpec(
    (CollectionSpec("c", (TableSpec("t0", 40, 8, ("f0",)), TableSpec("dp", 30, 4, ("f1",)))),)
)


def make_job(seed: int) -> Job:
    return Job.build(SPEC, {"c.t0": "table_wise:0", "c.dp": "data_parallel"}, seed=seed)


def change(job: Job, what: str) -> None:
    dense = job.optimizer.optimizers[-1][1]
    if what == "data-parallel table":
        with torch.no_grad():
            dict(job.model.named_parameters())["c.embedding_bags.dp.weight"][7].fill_(3.0)
    elif what == "optimizer state":
        for state in dense.state.values():
            state["sum"].fill_(3.0)
    elif what == "rate":
        dense.param_groups[0]["lr"] = 0.01
    elif what == "kernel's rate":
        for group in job.model.fused_optimizer.param_groups:
            group["lr"] = 0.01
    elif what == "evaluation":
        with torch.no_grad():
            job.model(*job.batch(90))  # the kernel counts this lookup
    elif what == "half a step":
        job.loss(*job.batch(job.steps)).backward()
        job.optimizer.zero_grad()
    else:
        job.steps += 5


WHATS = ["data-parallel table", "optimizer state", "rate", "kernel's rate", "state object"]


@pytest.mark.parametrize("what", WHATS)
def test_the_checkpoint_is_newer_than_the_image(lives: Lives, what: str) -> None:
    lives.make = make_job
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    change(job, what)
    saver.save()
    wanted, steps = gather(job), job.steps
    lives.die()
    job, saver = lives.begin()
    report = saver.restore()
    assert report is not None
    assert report.source == "checkpoint"
    assert differences(job, wanted) == []
    assert job.steps == steps
    train(job, saver)
    torch.rand(3)  # a generator alone makes nothing newer: evaluations draw from it as well
    saver.save()
    wanted = gather(job)
    lives.die()
    job, saver = lives.begin()
    assert by_images(saver.restore())
    assert differences(job, wanted) == []


@pytest.mark.parametrize("what", [*WHATS, "evaluation", "half a step"])
def test_the_image_counts_until_the_checkpoint_is_durable(
    lives: Lives, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives.make = make_job
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    wanted = gather(job)
    change(job, what)
    written = Event()
    with monkeypatch.context() as patch:
        patch.setattr(background, "write_rank_file", lambda *_: written.wait(60))
        saver.save(wait=False)
        saver._release(failed=True)  # as a kill does, with the checkpoint still to be written
        written.set()
    job, saver = lives.begin()
    assert by_images(saver.restore())
    assert differences(job, wanted) == []
    assert job.steps == 2
    job.train()
    change(job, what)
    saver.save()
    wanted = gather(job)
    lives.die()
    job, saver = lives.begin()
    saver.restore()
    assert differences(job, wanted) == []
