"""A process with tables on a GPU is restored from the host's memory, and reads no rank file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.gpu.models import KERNELS, ON_A_GPU, assert_equal, build
from torchrec_checknrun import HostCopies, Images
from torchrec_checknrun.errors import ImagesRefused

pytestmark = ON_A_GPU


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_is_read_from_the_storage(tmp_path: Path, kernel: str) -> None:
    job, again = (build(kernel, "rowwise_adagrad", seed=seed) for seed in (0, 9))
    with tempfile.TemporaryDirectory(prefix="checknrun-test-", dir="/dev/shm") as memory:
        survive = HostCopies(folder=memory)
        saver = job.checkpointer(tmp_path, survive=survive)
        for _ in range(3):
            job.train(2)
            saver.save()
        wanted = job.everything()
        saver._release(failed=True)  # as a killed process: nothing is closed or saved
        for path in tmp_path.glob("*/rank-*.bin"):
            path.write_bytes(bytes(path.stat().st_size))
        with again.checkpointer(tmp_path, survive=survive) as other:
            report = other.restore()
            assert report is not None
            assert (len(report.chain), report.passed_over) == (3, ())
            assert report.memory_bytes > 0
            assert_equal(again.everything(), wanted)
        assert list(Path(memory).iterdir()) == []


def test_images_name_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ImagesRefused, match=r"survive=HostCopies\(\)"):
        build("fused", "rowwise_adagrad").checkpointer(tmp_path, survive=Images())
