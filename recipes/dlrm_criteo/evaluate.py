"""Evaluate the model on held-out samples: logloss and AUC over all ranks.

The AUC is exact: rank 0 collects every prediction. Evaluation sets are bounded by
`trainer.eval_samples`, so this stays small.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchrec.datasets.utils import Batch

from recipes.dlrm_criteo.pipeline import Pipeline, outputs


class Score(NamedTuple):
    """The quality of predictions on held-out samples."""

    eval_samples: int
    logloss: float
    auc: float | None  # None where all labels are the same


@torch.no_grad()
def evaluate(model: nn.Module, pipeline: Pipeline, batches: Iterator[Batch]) -> Score | None:
    """Return the score on rank 0; None on the other ranks, and where there are no batches.

    All ranks must give equally many samples.
    """
    model.eval()
    logits, labels = [], []
    for output in outputs(pipeline, batches):
        logits.append(output.logits.cpu())
        labels.append(output.labels.cpu())
    model.train()
    if not logits:
        return None
    everything = _gather(torch.stack([torch.cat(logits).double(), torch.cat(labels).double()]))
    return None if everything is None else score(everything[0], everything[1])


def score(logits: torch.Tensor, labels: torch.Tensor) -> Score:
    """Compute the quality of predictions."""
    return Score(
        eval_samples=len(labels),
        logloss=F.binary_cross_entropy_with_logits(logits, labels).item(),
        auc=auc(logits, labels),
    )


def auc(logits: torch.Tensor, labels: torch.Tensor) -> float | None:
    """Return the exact AUC; None where all labels, 0 or 1, are the same."""
    if labels.min() == labels.max():
        return None
    # By ranks (Mann-Whitney): equal logits share the mean of theirs. torchmetrics' function gives
    # the same, and loads matplotlib, seconds of processor time in each process that scores.
    _, places, counts = torch.unique(logits, return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0) - (counts - 1).double() / 2
    clicked = labels > 0
    clicks = int(clicked.sum())
    above = ranks[places[clicked]].sum().item() - clicks * (clicks + 1) / 2
    return above / (clicks * (len(labels) - clicks))


def _gather(values: torch.Tensor) -> torch.Tensor | None:
    """Join the ranks' values on rank 0."""
    if dist.get_rank() != 0:
        dist.gather(values, None, dst=0)
        return None
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.gather(values, parts, dst=0)
    return torch.cat(parts, dim=1)
