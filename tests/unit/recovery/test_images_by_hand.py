"""Write tables beside training, and die before the next step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.distributed.models import Job
from tests.unit.run.jobs import make_job, train
from tests.unit.run.lives import Lives, a_shard, differences, undisturbed
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.native import has_extension

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(not has_extension(), reason="the extension was not built"),
]


def evaluates(job: Job, saver: Checkpointer) -> None:
    _, shard = a_shard(saver)
    with torch.no_grad():
        shard.copy_(torch.ones_like(shard))  # averaged weights, say
        job.model.eval()
        job.loss(*job.batch(77))


def loads_a_model(job: Job, saver: Checkpointer) -> None:
    job.model.load_state_dict(make_job(seed=9).model.state_dict())


@pytest.mark.parametrize("write", [evaluates, loads_a_model])
def test_tables_that_are_swapped(lives: Lives, write: Callable[[Job, Checkpointer], None]) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    saver.save()
    train(job, saver, 1)
    write(job, saver)
    assert differences(job, undisturbed(3)) != []
    lives.die()
    job, saver = lives.begin()
    report = saver.restore()
    assert report is not None
    assert differences(job, undisturbed(report.step)) == []
    assert report.without_images
