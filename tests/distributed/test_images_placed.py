"""Dense parameters that are DTensors, and images: new optimizers make the state that was saved."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.distributed.placed import PlacedJob
from tests.distributed.test_images_zoo import Killed
from tests.distributed.worker_pool import WorkerPool
from tests.examples import some_of
from torchrec_checknrun import Checkpointer, Images
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.shared_memory import file as files

pytestmark = pytest.mark.skipif(not has_extension(), reason="the extension was not built")

Workers = Callable[[int], WorkerPool]
STEPS, AT = 6, 3


class Life:
    """One process's part of a run."""

    def __init__(self, root: str, memory: str, placing: str, optimizer: str) -> None:
        files._mapped.clear()
        self.job = PlacedJob(placing, optimizer)
        self.saver = Checkpointer(
            root,
            model=self.job.model,
            state={"optimizer": self.job.optimizer, "steps": self.job},
            survive=Images(folder=memory),
        )
        self.report = self.saver.restore()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.job.train(1)
            self.saver.step()

    def die(self) -> None:
        """End as by a kill in the middle of a step, with the tables updated."""
        step = mock.patch.object(type(self.job.optimizer), "step", side_effect=Killed)
        with step, pytest.raises(Killed):
            self.job.train(1)
        self.saver._release(failed=True)
        dist.barrier()


def survive(root: str, memory: str, placing: str, optimizer: str) -> list[str]:
    """Die after some steps, before any checkpoint, and go on; tell what differs at the end."""
    calm = PlacedJob(placing, optimizer)
    calm.train(STEPS)
    life = Life(root, memory, placing, optimizer)
    life.train(AT)
    for _ in range(2):
        life.die()
        life = Life(root, memory, placing, optimizer)
        assert life.report is not None
        assert (life.report.source, life.report.step, life.job.steps) == ("images", AT, AT)
    life.train(STEPS - AT)
    found, wanted = life.job.digests(), calm.digests()
    life.saver.close()
    return sorted(n for n in wanted | found if wanted.get(n) != found.get(n))


@pytest.mark.parametrize(
    ("world_size", "placing", "optimizer"),
    some_of(
        [
            (2, "fsdp", "adam"),
            (2, "fsdp", "combined:momentum"),
            (1, "fsdp", "adam"),
            (4, "hsdp", "adam"),
            (4, "tp", "combined:adam"),
        ],
        0,
        1,
    ),
)
def test_the_run_goes_on_from_the_images(
    workers: Workers, tmp_path: Path, world_size: int, placing: str, optimizer: str
) -> None:
    how: dict[str, Any] = {"placing": placing, "optimizer": optimizer}
    with tempfile.TemporaryDirectory(prefix="checknrun-test-", dir="/dev/shm") as memory:
        found = workers(world_size).run(survive, root=str(tmp_path / "root"), memory=memory, **how)
    assert found == [[]] * world_size
