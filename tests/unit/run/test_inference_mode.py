"""Call a Checkpointer within ``torch.inference_mode()``, as an evaluation between steps does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.models import Job
from tests.distributed.states import gather
from tests.unit.run.jobs import checkpointer, make_job, restored, train
from torchrec_checknrun import Images

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("survive", [None, Images()], ids=["plain", "images"])
def test_training_goes_on_after_each_call(tmp_path: Path, job: Job, survive: Images | None) -> None:
    root = tmp_path / "run"
    with torch.inference_mode():
        saver = checkpointer(root, job, survive=survive)
        saver.restore()
    for _ in range(3):
        job.train()
        with torch.inference_mode():
            saver.step()
            saver.save()
        train(job, saver)
        saver.save()
    wanted = gather(job)
    with torch.inference_mode():
        saver.close()
    assert restored(root, wanted) == []


def test_training_goes_on_after_a_restore(tmp_path: Path, job: Job) -> None:
    with checkpointer(tmp_path / "run", job) as saver:
        train(job, saver)
        saver.save()
        train(job, saver)
    again = make_job(seed=7)
    with checkpointer(tmp_path / "run", again) as saver:
        with torch.inference_mode():
            assert saver.restore() is not None
        train(again, saver)
        saver.save()
    assert restored(tmp_path / "run", gather(again)) == []
