"""Training steps as a stream: TorchRec's pipelines, with the ends that they leave to their caller.

TorchRec's pipelines read ahead: they hold batches that were read and not yet trained. Whoever
counts progress must therefore count what comes out here, once per optimizer step, and not what was
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
    """What one batch gave on this rank."""

    loss: torch.Tensor
    logits: torch.Tensor
    labels: torch.Tensor


def make_pipeline(
    kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> Pipeline:
    """TorchRec's pipeline of that name.

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
    """One output per batch, until the batches end and none is in flight.

    Trains if the model is in training mode.
    """
    while True:
        try:
            output = pipeline.progress(batches)
        except StopIteration:
            pipeline.reset()
            return
        yield Output(*output)
