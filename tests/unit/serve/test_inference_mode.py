"""Follow with a model that was made, or is polled, within ``torch.inference_mode()`` or not."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.unit.serve.served import Job, Net, differences, quantized, restored
from torchrec_checknrun import Follower

pytestmark = pytest.mark.usefixtures("one_rank")


def mode(on: bool) -> AbstractContextManager[object]:
    return torch.inference_mode() if on else nullcontext()


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize(("made", "followed", "first"), product([True, False], repeat=3))
def test_each_poll_in_either_mode(
    tmp_path: Path, copies: int, bits: int | None, made: bool, followed: bool, first: bool
) -> None:
    job = Job(tmp_path)
    with mode(made):
        model = quantized(Net(), bits)
    with mode(followed):
        follower = Follower(tmp_path, model, copies=copies)
    job.save()
    for seed, on in enumerate((first, not first, first)):
        job.train(seed)
        job.save()
        with mode(on):
            version = follower.poll()
        assert version is not None
        assert version.step == seed + 1
        wanted = quantized(restored(tmp_path), bits)
        with mode(made):  # FBGEMM's quantized tables count their predictions
            assert differences(follower, wanted) == []
    job.saver.close()
