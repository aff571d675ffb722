"""Write to a table by hand right behind a cut, whose checkpoint is of the cut, or fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.models import KERNELS, ON_A_GPU, assert_equal, build
from torchrec_checknrun.errors import SaveFailed

pytestmark = ON_A_GPU


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_write_behind_the_cut_is_in_the_next_checkpoint(tmp_path: Path, kernel: str) -> None:
    job, again = (build(kernel, rows=200_000, seed=seed) for seed in (0, 9))
    job.train(2)
    wanted = job.everything()
    (weight,) = [p for name, p in job.model.named_parameters() if name.endswith("t0.weight")]
    with job.checkpointer(tmp_path) as saver:
        saver.save(wait=False)
        with torch.no_grad():
            weight.add_(1)
        try:
            saver.wait()
        except SaveFailed:  # the write came before the copies were made
            saver.save()
            wanted = job.everything()
    with again.checkpointer(tmp_path) as saver:
        assert saver.restore() is not None
    assert_equal(again.everything(), wanted)
