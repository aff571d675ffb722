"""Save what was changed after a step's end: the checkpoint is newer than the image."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torchrec.optim.optimizers import Adam

from tests.distributed.fused_on_cpu import any_fused_optimizer
from tests.distributed.models import FUSED, CollectionSpec, Job, ModelSpec, TableSpec
from tests.distributed.states import gather
from tests.unit.run.jobs import train
from tests.unit.run.lives import Lives, by_images, differences
from torchrec_checknrun.native import has_extension

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(not has_extension(), reason="the extension was not built"),
]

SPEC = ModelSpec(
    (CollectionSpec("c", (TableSpec("t0", 40, 8, ("f0",)), TableSpec("dp", 30, 4, ("f1",)))),)
)


PLAN = {"c.t0": "table_wise:0", "c.dp": "data_parallel"}


def make_job(seed: int) -> Job:
    return Job.build(SPEC, PLAN, seed=seed)


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
    else:
        job.steps += 5


@pytest.mark.parametrize(
    "what", ["data-parallel table", "optimizer state", "rate", "kernel's rate", "state object"]
)
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


def test_an_evaluation_makes_nothing_newer(lives: Lives, caplog: pytest.LogCaptureFixture) -> None:
    lives.make = make_job
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    wanted = gather(job)
    with torch.no_grad():
        job.model(*job.batch(90))  # the kernel counts this lookup
    torch.rand(3)
    saver.save()
    assert "a killed process means" not in caplog.text
    lives.die()
    job, saver = lives.begin()
    assert by_images(saver.restore())
    assert differences(job, wanted) == []


def test_a_counter_that_updates_use_is_state(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(seed: int) -> Job:
        with any_fused_optimizer():
            return Job.build(replace(SPEC, fused="adam"), PLAN, seed=seed)

    monkeypatch.setitem(FUSED, "adam", Adam)
    lives.make = make
    _, saver = lives.begin()
    saver.restore()
    saver.step()
    (kernel,) = (k for k in saver._target.tracked._kernels() if not k.data_parallel)
    kernel.module._emb_module.iter.fill_(5)
    saver.save()
    lives.die()
    _, saver = lives.begin()
    report = saver.restore()
    assert report is not None
    assert report.source == "checkpoint"
