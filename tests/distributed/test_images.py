"""Images of two ranks: one answer for all, whatever a single rank has."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed import references
from tests.distributed.models import Job, Plan
from tests.distributed.small_job import build, checkpointer, where
from tests.distributed.states import State, gather
from tests.distributed.worker_pool import WorkerPool
from torchrec_checknrun import Checkpointer, Consecutive, Images
from torchrec_checknrun.memory.image import RankImage
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.shared_memory import file as files

pytestmark = pytest.mark.skipif(not has_extension(), reason="the extension was not built")

Workers = Callable[[int], WorkerPool]
STEPS = 4
SAVED = 2
"""The step of the only checkpoint."""


class Run:
    """A run that is left at the end of some steps, one of them saved, and begun again."""

    def __init__(self, root: str, spec: dict[str, Any], plan: Plan, memory: str) -> None:
        self._arguments = (spec, plan)
        self._root, self._memory = root, memory
        self.job, self.saver = self.begin(0)
        self.saver.restore()
        for step in range(1, STEPS + 1):
            self.train()
            if step == SAVED:
                self.saver.save()

    def begin(self, seed: int) -> tuple[Job, Checkpointer]:
        files._mapped.clear()  # as in another process
        job = build(*self._arguments, seed=seed)
        images = Images(folder=self._memory)
        return job, checkpointer(self._root, job, survive=images, policy=Consecutive())

    @property
    def image(self) -> RankImage:
        image = self.saver._survival._image
        assert image is not None
        return image

    def train(self) -> None:
        self.job.train()
        self.saver.step()

    def again(self) -> tuple[str, int, tuple[str, ...]]:
        """Die on all ranks, and start again; return what the restore says."""
        dist.barrier()
        self.saver._release(failed=True)
        self.job, self.saver = self.begin(3)
        report = self.saver.restore()
        assert report is not None
        return report.source, report.step, report.without_images

    def is_at(self, step: int) -> bool:
        wanted = build(*self._arguments)
        wanted.train(step)
        state: State = gather(wanted)
        return references.differences(gather(self.job), state, None) == []


def all_at_the_last_step(**arguments: Any) -> None:
    run = Run(**arguments)
    assert run.again() == ("images", STEPS, ())
    assert run.is_at(STEPS)
    run.train()
    assert run.is_at(STEPS + 1)
    run.saver.close()


def one_rank_a_step_ahead(**arguments: Any) -> None:
    run = Run(**arguments)
    run.job.train()
    if dist.get_rank() == 0:
        run.image.end_step(STEPS + 1)
    assert run.again() == ("images", STEPS, ())
    assert run.is_at(STEPS)
    run.train()
    run.saver.close()


def one_rank_two_steps_ahead(**arguments: Any) -> None:
    """Refuse what synchronous training can't have come to: the state is overwritten."""
    run = Run(**arguments)
    for step in (1, 2):
        run.job.train()
        if dist.get_rank() == 0:
            run.image.end_step(STEPS + step)
    source, step, reasons = run.again()
    assert (source, step) == ("checkpoint", SAVED)
    assert "rank 0: it can go back to steps [5, 6], and the ranks need 4" in reasons[0]
    assert run.is_at(SAVED)
    run.saver.close()


def one_rank_without(**arguments: Any) -> None:
    run = Run(**arguments)
    if dist.get_rank() == 1:
        run.image.path.unlink()
    source, step, reasons = run.again()
    assert (source, step) == ("checkpoint", SAVED)
    assert len(reasons) == 1
    assert reasons[0].startswith("rank 1: ")
    assert reasons[0].endswith("there is none")
    assert run.is_at(SAVED)
    run.train()
    assert run.again()[:2] == ("images", SAVED + 1)
    assert run.is_at(SAVED + 1)
    run.train()
    run.saver.close()


def one_rank_of_another_start(**arguments: Any) -> None:
    run = Run(**arguments)
    if dist.get_rank() == 1:
        areas = run.image._areas
        assert areas is not None
        areas.publish("of another start")
    source, step, reasons = run.again()
    assert (source, step) == ("checkpoint", SAVED)
    assert reasons == ("the ranks' images were not begun together",)
    run.saver.close()


def one_rank_gives_up(**arguments: Any) -> None:
    run = Run(**arguments)
    if dist.get_rank() == 1:
        run.image.give_up("says the test")
    run.train()
    run.saver.restore()  # goes back to the checkpoint; no rank begins images without the others
    assert run.is_at(SAVED)
    run.train()
    run.train()
    assert run.image.is_broken
    assert run.again()[:2] == ("checkpoint", SAVED)
    run.saver.close()


@pytest.mark.parametrize(
    "case",
    [
        all_at_the_last_step,
        one_rank_a_step_ahead,
        pytest.param(one_rank_two_steps_ahead, marks=pytest.mark.slow),
        one_rank_without,
        pytest.param(one_rank_of_another_start, marks=pytest.mark.slow),
        one_rank_gives_up,
    ],
)
def test_all_ranks_do_the_same(workers: Workers, tmp_path: Path, case: Callable[..., None]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        workers(2).run(case, **where(tmp_path), memory=memory)
        assert list(Path(memory).iterdir()) == []  # the run has come to its end
