"""Restore what a program writes to tables through ``.data`` or NumPy, untold by PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.distributed.models import Job
from tests.distributed.states import gather
from tests.unit.run.jobs import checkpointer, restored, train
from torchrec_checknrun import Consecutive, Intermittent, OneShot
from torchrec_checknrun.model.kernels import find_kernels
from torchrec_checknrun.root.policy import Policy

pytestmark = pytest.mark.usefixtures("one_rank")
TOLD = "changed that no lookup touched"


def tables(job: Job) -> list[torch.Tensor]:
    kernels, _ = find_kernels(job.model)
    return [shard.weight for kernel in kernels for shard in kernel.shards]


def decay(job: Job) -> None:
    for weight in tables(job):
        weight.data.mul_(0.9)


def keep_norms(job: Job) -> None:
    for weight in tables(job):
        norms = weight.data.norm(dim=1, keepdim=True)
        weight.data.mul_(0.1 / norms.clamp(min=0.1))


def shift_the_largest(job: Job) -> None:
    max(tables(job), key=torch.Tensor.numel).numpy()[:] += 0.25


@pytest.mark.parametrize("write", [decay, keep_norms, shift_the_largest])
@pytest.mark.parametrize("policy", [Consecutive(), OneShot(), Intermittent()])
def test_what_was_written_between_two_checkpoints(
    tmp_path: Path,
    job: Job,
    write: Callable[[Job], None],
    policy: Policy,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with checkpointer(tmp_path, job, policy=policy) as saver:
        train(job, saver)
        saver.save()
        train(job, saver)
        saver.save()
        with caplog.at_level(logging.WARNING, "torchrec_checknrun"):
            write(job)
            train(job, saver)
            assert saver.save().kind == "differential"
        wanted = gather(job)
    assert caplog.text.count(TOLD) == 1
    assert restored(tmp_path, wanted) == []


def test_what_was_written_after_a_restore(
    tmp_path: Path, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    with checkpointer(tmp_path, job) as saver:
        train(job, saver)
        saver.save()
    with checkpointer(tmp_path, job) as saver:
        saver.restore()
        decay(job)
        train(job, saver)
        saver.save()
        wanted = gather(job)
    assert caplog.text.count(TOLD) == 1
    assert restored(tmp_path, wanted) == []
