"""Train by TorchRec's pipelines, which read ahead, from loaders that count what they hand out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.distributed.train_pipeline import StagedTrainPipeline, TrainPipelineBase
from torchrec.distributed.train_pipeline.pipeline_stage import PipelineStage
from torchrec.streamable import Pipelineable

from tests.crash.save_sweep import alone
from tests.distributed.test_tracking_zoo import _Stream, no_streams
from tests.pipelines import newer
from tests.unit.integrations.test_trainers import CUT, EVERY, STEPS, Net, Reader, optimizer
from torchrec_checknrun import Checkpointer

PAGE = Path("docs/how-to/integrations.md")


class Loader(Reader):
    """A loader that says of itself what torchdata's do."""


Loader.__module__ = "torchdata.stateful_dataloader.stateful_dataloader"


@dataclass
class Number(Pipelineable):
    """A batch that is only a number."""

    value: int

    def to(self, device: torch.device, non_blocking: bool = False) -> Number:
        return self

    def pin_memory(self) -> Number:
        return self

    def record_stream(self, stream: Any) -> None:
        pass


class Losses(Net):
    def forward(self, number: Any) -> Any:
        return super().forward(number.value), number.value


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    with alone():
        yield


def trained_class() -> Any:
    """Return the class of the page."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if "class Trained" in block), names)
    return names["Trained"]


def train(root: Path, wrap: Any, steps: int, ahead: bool = True) -> list[int]:
    """Train until a step, and leave the last checkpoint as a killed process does.

    Args:
        wrap: makes the state object of the loader.
    """
    net, given = Losses(), wrap(Loader(None))
    adam, _ = optimizer(net)
    saver = Checkpointer(
        root,
        model=net,
        state={"adam": adam, "loader": given},
        every_steps=EVERY,
        when_busy="wait",
    )
    saver.restore()
    numbers = map(Number, given)
    pipeline = TrainPipelineBase(net, adam, torch.device("cpu")) if ahead else None
    seen = []
    while saver.steps < steps:
        seen.append(next(numbers).value if pipeline is None else pipeline.progress(numbers))
        if hasattr(given, "step"):
            given.step()
        saver.step()
    saver.close()
    return seen


@pytest.mark.filterwarnings("ignore")
def test_every_batch_is_trained_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained = trained_class()
    assert train(tmp_path, trained, CUT) == [*range(1, CUT + 1)]
    saved = CUT - CUT % EVERY
    assert train(tmp_path, trained, STEPS) == [*range(saved + 1, STEPS + 1)]
    assert "ahead of training" not in caplog.text


def found_or_skip(name: str, module: str = "train_pipelines") -> Any:
    found = newer(name, module)
    if found is None:
        pytest.skip(f"this TorchRec has no {name}")
    return found


def pipeline_of(kind: str, net: Any, adam: Any) -> Any:
    """Make a pipeline of TorchRec's."""
    device = torch.device("cpu")
    if kind == "StagedTrainPipeline":
        with no_streams():
            return StagedTrainPipeline([PipelineStage("copy", Number.to, _Stream())])
    if kind == "accumulated":
        config = found_or_skip("GradientAccumulationConfig", "gradient_accumulation")(True, 2)
        wrapper = found_or_skip("GradientAccumulationWrapper", "gradient_accumulation")
        return wrapper(TrainPipelineBase(net, adam, device), adam, net, config)
    return found_or_skip(kind)(net, adam, device)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("TrainPipelineBase", "TrainPipelineBase"),
        ("TrainPipelineSparseDistLite", "TrainPipelineSparseDistLite"),
        ("StagedTrainPipeline", "StagedTrainPipeline"),
        ("accumulated", "TrainPipelineBase"),
        ("TrainPipelinePT2", None),
        ("EvalPipelineSparseDist", None),
        ("EvalPipelineFusedSparseDist", None),
    ],
)
def test_pipelines_that_read_ahead_are_named(
    kind: str, told: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = Losses()
    adam, _ = optimizer(net)
    pipeline = pipeline_of(kind, net, adam)
    state: dict[str, Any] = {"adam": adam, "loader": Loader(None)}
    with Checkpointer(tmp_path, model=net, state=state) as saver:
        saver.step()
    found = [line.split()[1] for line in caplog.messages if "ahead of training" in line]
    assert found == [told] * (told is not None)
    del pipeline


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ahead", [True, False])
def test_a_loader_that_is_ahead_is_told_of_once(
    ahead: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, lambda loader: loader, STEPS, ahead)
    told = [line for line in caplog.messages if "ahead of training, and state 'loader'" in line]
    assert len(told) == ahead
    assert all("a TrainPipelineBase reads batches" in line for line in told)
