"""Images of every kind of loop: after a torn step, the next ones are those of a run without it."""

from __future__ import annotations

import functools
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import (
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelineSparseDist,
)
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig

from tests.distributed import references, zoo
from tests.distributed.optimizer_nests import clip, warm
from tests.distributed.states import State, gather
from tests.distributed.test_tracking_zoo import PLANS, no_streams
from tests.distributed.worker_pool import WorkerPool
from tests.examples import some_of
from tests.pipelines import newer
from torchrec_checknrun import Checkpointer, Consecutive, Images
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.shared_memory import file as files

pytestmark = pytest.mark.skipif(not has_extension(), reason="the extension was not built")

Workers = Callable[[int], WorkerPool]
TORN, STEPS = 5, 9
"""The steps that are done when a step is torn, and those of the whole run."""
NEWER: dict[str, Any] = {
    "lite": newer("TrainPipelineSparseDistLite"),
    "hybrid": newer("TrainEvalHybridPipelineBase", "experimental_pipelines"),
}
PIPELINES: dict[str, Any] = {
    "base": TrainPipelineBase,
    "sparse_dist": TrainPipelineSparseDist,
    "fused": TrainPipelineFusedSparseDist,
    "semi_sync": functools.partial(TrainPipelineSemiSync, start_batch=0),
    **{how: kind for how, kind in NEWER.items() if kind is not None},
}


class Killed(BaseException):
    """Ends a life in the middle of a step, with the tables updated and nothing else."""


@dataclass
class Steps:
    """The batches that were trained."""

    done: int = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


@dataclass
class Loop:
    """A training loop of one kind, in one life."""

    kind: str
    plan: str
    how: str
    steps: Steps = field(default_factory=Steps)

    def __post_init__(self) -> None:
        precise = functools.partial(EmbeddingBagConfig, data_type=DataType.FP16)
        half = mock.patch.object(zoo, "EmbeddingBagConfig", precise)
        with half if self.how == "fp16" else mock.patch.object(zoo, "SAMPLES", zoo.SAMPLES):
            self.zoo = zoo.build_zoo(self.kind, PLANS[self.plan])
        if self.how == "clipped_warm_up":
            self.zoo.optimizer = clip(warm(self.zoo.optimizer))
        if self.how in PIPELINES:
            model, optimizer = self.zoo.model, self.zoo.optimizer
            self._pipeline = PIPELINES[self.how](model, optimizer, device=zoo.CPU)
            self._batches: Iterator[Any] | None = None

    def step(self) -> None:
        """Train a batch."""
        if self.how in PIPELINES:
            if self._batches is None:
                self._batches = iter([self.zoo.batch(i) for i in range(self.steps.done, STEPS + 4)])
            self._pipeline.progress(self._batches)
        else:
            optimizer, batch = self.zoo.optimizer, self.zoo.batch(self.steps.done)
            optimizer.zero_grad()
            if self.how == "sam":
                self._climb(batch)
                optimizer.zero_grad()
            loss, _ = self.zoo.model(batch)
            loss.backward()
            if self.how == "sam":
                self._descend()
            optimizer.step()
        self.steps.done += 1

    def _climb(self, batch: Any) -> None:
        """Move the dense part uphill, as sharpness-aware minimization does before its step; the
        tables are updated once more on the way.
        """
        loss, _ = self.zoo.model(batch)
        loss.backward()
        self._moves = []
        with torch.no_grad():
            for parameter in self._dense():
                move = 0.05 * (torch.zeros(()) if parameter.grad is None else parameter.grad)
                parameter.add_(move)
                self._moves.append((parameter, move))

    def _descend(self) -> None:
        with torch.no_grad():
            for parameter, move in self._moves:
                parameter.sub_(move)

    def _dense(self) -> list[torch.nn.Parameter]:
        out = self.zoo.model.module.out
        return [out.weight, out.bias]

    def tear(self) -> None:
        """Begin a step, and be killed when its tables are updated."""
        target = type(self.zoo.optimizer)
        with mock.patch.object(target, "step", side_effect=Killed), pytest.raises(Killed):
            self.step()


def undisturbed(kind: str, plan: str, how: str) -> State:
    loop = Loop(kind, plan, how)
    for _ in range(STEPS):
        loop.step()
    return gather(loop.zoo)


def begin(root: str, memory: str | None, loop: Loop) -> Checkpointer:
    files._mapped.clear()
    return Checkpointer(
        root,
        model=loop.zoo.model,
        state={"optimizer": loop.zoo.optimizer, "steps": loop.steps},
        survive=None if memory is None else Images(folder=memory),
        policy=Consecutive(),
        every_steps=3,
        when_busy="wait",
        retention=None,
    )


@contextmanager
def warnings_logged() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    # A subclass of Handler would be as long as this function.
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]  # a stub
    logger = logging.getLogger("torchrec_checknrun")
    logger.addHandler(handler)
    disabled = logging.root.manager.disable  # workers log no warnings
    logging.disable(logging.NOTSET)
    try:
        yield found
    finally:
        logging.disable(disabled)
        logger.removeHandler(handler)


def survive(folder: str, memory: str, kind: str, plan: str, how: str) -> list[Any]:
    """Be killed in a step, go on by images, and come to the end; return how that differs."""
    with no_streams(), warnings_logged() as told:
        wanted = undisturbed(kind, plan, how)
        loop = Loop(kind, plan, how)
        saver = begin(folder, memory, loop)
        saver.restore()
        for _ in range(TORN):
            loop.step()
            saver.step()
        loop.tear()
        saver._release(failed=True)
        dist.barrier()
        loop = Loop(kind, plan, how)
        saver = begin(folder, memory, loop)
        report = saver.restore()
        assert report is not None
        assert (report.source, report.step, loop.steps.done) == ("images", TORN, TORN)
        for _ in range(STEPS - TORN):
            loop.step()
            saver.step()
        found = gather(loop.zoo)
        saver.save()
        saver.close()
        other = Loop(kind, plan, how)
        reader = begin(folder, None, other)
        reader.restore()
        same = references.differences(gather(other.zoo), found, None)
        reader.close()
    ahead = any("a batch was looked up before the end of the step" in line for line in told)
    assert not any("number of ranks" in line for line in told), told
    return [references.differences(found, wanted, None), same, ahead]


CASES = [
    *((kind, "rows", "plain") for kind in ("bags", "vbe", "sequence", "weighted")),
    ("bags", "columns", "plain"),
    ("vbe", "one_rank", "plain"),
    *(("bags", "rows", how) for how in ("fp16", "clipped_warm_up", "sam")),
    *(("bags", plan, how) for plan in ("rows", "columns") for how in ("base", "sparse_dist")),
    *(("bags", "rows", how) for how in NEWER if how in PIPELINES),
    *((kind, "rows", "fused") for kind in ("bags", "vbe", "weighted", "feature_processed")),
]


@pytest.mark.parametrize(("kind", "plan", "how"), some_of(CASES, 1, 8, 12))
def test_the_next_steps_are_those_of_an_undisturbed_run(
    kind: str, plan: str, how: str, workers: Workers, tmp_path: Path
) -> None:
    with tempfile.TemporaryDirectory(prefix="checknrun-test-", dir="/dev/shm") as memory:
        arguments: dict[str, Any] = {"folder": str(tmp_path), "memory": memory}
        found = workers(2).run(survive, kind=kind, plan=plan, how=how, **arguments)
    assert found == [[[], [], False]] * 2


def test_a_pipeline_that_may_look_ahead_is_exact_or_told_of(
    workers: Workers, tmp_path: Path
) -> None:
    with tempfile.TemporaryDirectory(prefix="checknrun-test-", dir="/dev/shm") as memory:
        arguments: dict[str, Any] = {"folder": str(tmp_path), "memory": memory}
        found = workers(2).run(survive, kind="bags", plan="rows", how="semi_sync", **arguments)
    for differences, restored, ahead in found:
        assert ahead or not differences, differences[:3]
        assert restored == []  # the checkpoint after it is that of the live state
