"""Serve a model on a GPU: predictions that are still in a stream see one version."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.models import ON_A_GPU
from tests.unit.serve.served import Job, Net, every_row, restored, served
from torchrec_checknrun import Follower

pytestmark = ON_A_GPU

LONG = 200_000_000
"""Cycles of a kernel before each prediction: a tenth of a second or so."""


@pytest.mark.parametrize("copies", [1, 2])
def test_predictions_in_streams_of_their_own(tmp_path: Path, copies: int) -> None:
    gpu = torch.device("cuda", torch.cuda.current_device())
    job, features = Job(tmp_path), every_row().to(gpu)
    follower = Follower(tmp_path, Net(gpu).to(gpu).eval(), copies=copies)
    streams = [torch.cuda.Stream(gpu) for _ in range(3)]
    torch.cuda.synchronize(gpu)
    found, wanted = [], []
    for seed, stream in enumerate(streams):
        job.train(seed, samples=20)
        job.save()
        served(follower)
        with torch.cuda.stream(stream), torch.no_grad(), follower.read() as (model, _):
            torch.cuda._sleep(LONG)
            found.append(model(features))
        wanted.append(restored(tmp_path).to(gpu)(features).detach())
    job.train(9, samples=20)
    job.save()
    served(follower)
    torch.cuda.synchronize(gpu)
    for own, expected in zip(found, wanted, strict=True):
        assert torch.equal(own, expected)
    job.saver.close()
