"""Run training steps as a stream, by TorchRec's pipelines.

TorchRec's pipelines read ahead: they hold batches that were read and not yet trained. Progress must
therefore be counted by the outputs of this stream, one per optimizer step, and not by the batches
read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist

Pipeline: TypeAlias = TrainPipelineBase[Batch, Any] | TrainPipelineSparseDist[Batch, Any]


class Output(NamedTuple):
    """The result of one batch on this rank."""

    loss: torch.Tensor
    logits: torch.Tensor
    labels: torch.Tensor


def make_pipeline(
    kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> Pipeline:
    """Make TorchRec's pipeline of a name.

    `base` runs one batch at a time, `sparse_dist` meanwhile distributes the ids of the next one;
    `auto` decides by the device.
    """
    if kind == "auto":
        kind = "sparse_dist" if device.type == "cuda" else "base"
    if kind == "base":
        return TrainPipelineBase(model, optimizer, device)
    if kind == "sparse_dist":
        return TrainPipelineSparseDist(model, optimizer, device)
    raise ValueError(f"trainer.pipeline is {kind!r}; expected auto, base or sparse_dist")


def outputs(pipeline: Pipeline, batches: Iterator[Batch]) -> Iterator[Output]:
    """Yield one output per batch, until the batches end and none is in flight.

    Trains if the model is in training mode.
    """
    while True:
        try:
            output = pipeline.progress(batches)
        except StopIteration:
            pipeline.reset()
            return
        yield Output(*output)
