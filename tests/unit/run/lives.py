"""Let a run with images live several times: each life ends as a killed process does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.distributed import references
from tests.distributed.models import Job
from tests.distributed.states import State, gather
from tests.unit.run.jobs import checkpointer, make_job
from torchrec_checknrun import Checkpointer, Images, RestoreReport
from torchrec_checknrun.memory.image import RankImage
from torchrec_checknrun.shared_memory import file as files


class Lives:
    """The lives of one run: each is a new job with a new Checkpointer."""

    def __init__(self, folder: Path) -> None:
        self.root, self.memory = folder / "root", folder / "memory"
        self.memory.mkdir()
        self.make: Callable[[int], Job] = make_job
        """Makes a life's job, by a seed."""
        self._left: list[tuple[Job, Checkpointer]] = []

    def begin(self, **options: Any) -> tuple[Job, Checkpointer]:
        """Make a job of other weights, and its Checkpointer, in what passes for a new process."""
        files._mapped.clear()
        job = self.make(len(self._left))
        options = {"survive": Images(folder=str(self.memory)), **options}
        saver = checkpointer(self.root, job, **options)
        self._left.append((job, saver))
        return job, saver

    def die(self) -> None:
        """End the last life as a killed process does: nothing is closed or saved."""
        _, saver = self._left[-1]
        saver._saver.settle(wait=True)
        saver._release(failed=True)

    def end(self) -> None:
        """Take all hooks off the models."""
        for _, saver in self._left:
            saver._release(failed=True)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.memory.iterdir())


def undisturbed(steps: int) -> State:
    job = make_job(seed=0)
    job.train(steps)
    return gather(job)


def differences(job: Job, wanted: State) -> list[str]:
    return references.differences(gather(job), wanted, None)


def by_images(report: RestoreReport | None) -> bool:
    return report is not None and report.source == "images"


def image_of(saver: Checkpointer) -> RankImage:
    image = saver._survival._image
    assert image is not None
    return image


def a_shard(saver: Checkpointer) -> tuple[str, torch.Tensor]:
    shard = saver._target.tracked.shards[0]
    shard.writes.kernel.flush()
    weight: torch.Tensor = shard.writes.kernel.module.split_embedding_weights()[shard.index]
    return shard.table, weight
