"""Managed collisions and images: after a torn step ids are mapped, seen and evicted as ever."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync

from tests.distributed import references
from tests.distributed.collisions import (
    CPU,
    CollisionZoo,
    Options,
    Spec,
    build,
    on_device,
)
from tests.distributed.states import gather
from tests.distributed.test_images_zoo import Killed, warnings_logged
from tests.distributed.test_tracking_zoo import no_streams
from tests.distributed.worker_pool import WorkerPool
from tests.examples import some_of
from torchrec_checknrun import Checkpointer, Consecutive, Images, PartialRecovery, RestoreReport
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.shared_memory import file as files

pytestmark = pytest.mark.skipif(not has_extension(), reason="the extension was not built")

Workers = Callable[[int], WorkerPool]
STEPS = 11
"""Steps of the whole run; ids are evicted every third step."""
PIPELINES: dict[str, Any] = {
    "sparse_dist": TrainPipelineSparseDist,
    # Not semi-synchronous yet: it looks a batch up after the last update, before the step's end.
    "semi_sync": functools.partial(TrainPipelineSemiSync, start_batch=100),
}


class Life:
    """One process's part of a run."""

    def __init__(
        self,
        root: str,
        memory: str | None,
        spec: Options,
        pipeline: str = "",
        partial: PartialRecovery | None = None,
    ) -> None:
        files._mapped.clear()
        self.zoo = build(Spec(**spec))
        self._pipeline = None
        if pipeline:
            self._pipeline = PIPELINES[pipeline](self.zoo.model, self.zoo.optimizer, CPU)
        self._batches: Any = None
        self.saver = Checkpointer(
            root,
            model=self.zoo.model,
            state={"optimizer": self.zoo.optimizer, "steps": self.zoo},
            survive=None if memory is None else Images(folder=memory),
            partial=partial,
            policy=Consecutive(),
            every_steps=3,
            when_busy="wait",
            retention=None,
        )

    def restore(self) -> RestoreReport | None:
        return self.saver.restore()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
            self.saver.step()

    def step(self) -> None:
        if self._pipeline is None:
            self.zoo.train()
            return
        if self._batches is None:
            self._batches = map(self.zoo.batch, itertools.count(self.zoo.steps))
        self._pipeline.progress(self._batches)
        self.zoo.steps += 1

    def die(self, torn: bool) -> None:
        """End as by a kill; in the middle of a step, with the tables updated and ids remapped."""
        if torn:
            target = type(self.zoo.optimizer)
            with mock.patch.object(target, "step", side_effect=Killed), pytest.raises(Killed):
                self.step()
        self.saver._saver.settle(wait=True)
        self.saver._release(failed=True)
        dist.barrier()


def content(zoo: CollisionZoo) -> dict[str, Any]:
    return {"state": gather(zoo), "mapping": zoo.mapping(), "history": zoo.history()}


def differing(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    others = [name for name in ("mapping", "history") if found[name] != wanted[name]]
    return others + references.differences(found["state"], wanted["state"], None)


def survive(folder: str, memory: str, spec: Options, pipeline: str, at: int) -> Any:
    """Die after ``at`` steps in the next one, go on by images to the end; tell what differs."""
    with no_streams(), on_device(Spec(**spec)), warnings_logged() as told:
        calm = Life(f"{folder}/calm", None, spec, pipeline)
        calm.train(STEPS)
        wanted = content(calm.zoo)
        assert all(module._last_eviction_iter > at for module in calm.zoo.modules.values())
        calm.saver.close()
        life = Life(f"{folder}/root", memory, spec, pipeline)
        life.restore()
        life.train(at)
        for torn in (True, False):  # the second one right after it has gone back
            life.die(torn)
            life = Life(f"{folder}/root", memory, spec, pipeline)
            report = life.restore()
            assert report is not None
            assert (report.source, report.step, life.zoo.steps) == ("images", at, at)
        life.train(STEPS - at)
        found = content(life.zoo)
        life.saver.save()
        life.saver.close()
        other = Life(f"{folder}/root", None, spec, pipeline)
        other.restore()
        stored = differing(content(other.zoo), found)
        other.saver.close()
    ahead = any("looked up before the end of the step" in line for line in told)
    return differing(found, wanted), stored, ahead


CASES: dict[str, tuple[Options, int]] = {
    "bags": ({}, 4),
    "bags, at an eviction": ({}, 5),
    "sequence": ({"bag": False, "policy": "lru"}, 7),
    "lfu": ({"policy": "lfu", "interval": 2}, 6),
    "row-wise": ({"fused": "rowwise_adagrad"}, 5),
}


@pytest.mark.parametrize(("ranks", "case"), some_of(itertools.product([1, 2], CASES), 2, 6))
def test_ids_are_mapped_as_in_an_undisturbed_run(
    case: str, ranks: int, workers: Workers, tmp_path: Path
) -> None:
    spec, at = CASES[case]
    with tempfile.TemporaryDirectory(prefix="checknrun-test-", dir="/dev/shm") as memory:
        arguments: dict[str, Any] = {
            "folder": str(tmp_path),
            "memory": memory,
            "spec": spec,
            "at": at,
        }
        found = workers(ranks).run(survive, pipeline="", **arguments)
    assert found == [[[], [], False]] * ranks


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_pipeline_that_maps_ids_ahead_is_told_of(
    pipeline: str, workers: Workers, tmp_path: Path
) -> None:
    with tempfile.TemporaryDirectory(prefix="checknrun-test-", dir="/dev/shm") as memory:
        arguments: dict[str, Any] = {"folder": str(tmp_path), "memory": memory, "spec": {}}
        found = workers(2).run(survive, pipeline=pipeline, at=4, **arguments)
    for differences, stored, ahead in found:
        assert ahead or not differences, differences[:3]
        assert stored == []


def lose(folder: str, memory: str) -> Any:
    """Lose one rank's image where partial recovery is allowed; return what is restored instead."""
    partial = PartialRecovery(max_pls=1.0, total_steps=100)
    life = Life(folder, memory, {}, partial=partial)
    life.restore()
    life.train(3)
    life.saver.wait()
    wanted = content(life.zoo)
    life.train(1)
    life.die(torn=False)
    if dist.get_rank() == 1:
        for path in Path(memory).glob("*-1of2.image"):
            path.unlink()
    dist.barrier()
    life = Life(folder, memory, {}, partial=partial)
    report = life.restore()
    assert report is not None
    reasons = " ".join(report.without_images)
    life.saver.close()
    return report.source, differing(content(life.zoo), wanted), reasons


def test_a_lost_remapping_table_means_a_full_recovery(workers: Workers, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="checknrun-test-", dir="/dev/shm") as memory:
        found = workers(2).run(lose, folder=str(tmp_path), memory=memory)
    for source, differences, reasons in found:
        assert (source, differences) == ("checkpoint", [])
        assert "sharded tensors beside tables are lost" in reasons
