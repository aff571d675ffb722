"""Make the jobs whose accuracy is measured: DLRMs on Criteo's format, two models of ratings.

All are TorchRec models with row-wise Adagrad, so that the public Checkpointer saves and restores
each as it would any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recipes.dlrm_criteo.reader import Reader, to_batch
from recipes.dlrm_criteo.samples import Samples
from recipes.dlrm_criteo.train import shard
from recipes.figures.accuracy.scale import Scale
from recipes.figures.movielens import FEATURES, Ratings, ratings
from recipes.figures.small_job import SmallJob, process, small_job

_DIM = 16  # of the models of ratings
_HELD_OUT = 10  # one in so many ratings
_LIKED = 4.0  # stars


class Sources(NamedTuple):
    """The user's data; None: synthetic."""

    criteo: Path | None = None
    ratings: Path | None = None


@dataclass(frozen=True)
class Task:
    """A model and its data.

    Attributes:
        title: of tables and figures.
        job: makes it, in a process group of its own.
        loss: of each sample, from logits and labels.
        liked: labels above this one count as 1 in the AUC.
    """

    title: str
    job: Callable[[Scale, Sources], AbstractContextManager[SmallJob]]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    liked: float = 0.5


def logloss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return each sample's logloss."""
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")


def squared_error(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return each sample's squared error."""
    return (logits - labels).square()


def dlrm(dim: int, scale: Scale, sources: Sources) -> AbstractContextManager[SmallJob]:
    """Make the main job with tables of ``dim`` columns."""
    data = [] if sources.criteo is None else ["dataset=criteo_tsv"]
    if sources.criteo is not None:
        data.append(f"dataset.path='{sources.criteo}'")
    return small_job(
        [
            *data,
            *scale.dlrm,
            f"model.embedding_dim={dim}",
            f"model.bottom_mlp=[64,32,{dim}]",
            f"trainer.eval_samples={scale.eval_samples}",
        ]
    )


class OfRatings(nn.Module):
    """A model of ratings: a table for each feature, and a head that makes one number of the rows.

    Args:
        sizes: rows of each feature's table.
    """

    def __init__(
        self,
        features: Sequence[str],
        sizes: Sequence[int],
        head: nn.Module,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"t_{name}",
                    embedding_dim=_DIM,
                    num_embeddings=size,
                    feature_names=[name],
                )
                for name, size in zip(features, sizes, strict=True)
            ],
            device=torch.device("meta"),
        )
        self.head = head
        self._features, self._loss = list(features), loss

    def forward(
        self, batch: Batch
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return the loss, and loss, logits and labels without gradients."""
        found = self.tables(batch.sparse_features)
        rows = torch.stack([found[name] for name in self._features], dim=1)
        logits, labels = self.head(rows), batch.labels
        loss = self._loss(logits, labels).mean()
        return loss, (loss.detach(), logits.detach(), labels.detach())


class Factorisation(nn.Module):
    """A weighted product of a user's and an item's row; a row's first value is a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Linear(_DIM - 1, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a number for each sample."""
        product = self.weights(rows[:, 0, 1:] * rows[:, 1, 1:]).view(-1)
        stars: torch.Tensor = rows[:, :, 0].sum(1) + product
        return stars


class DeepFM(nn.Module):
    """A factorisation machine and an MLP on the same rows; a row's first value is a bias."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.deep = nn.Sequential(
            nn.Linear(features * (_DIM - 1), 64),
            nn.ReLU(),
            nn.Linear(64, 32),
            nn.ReLU(),
            nn.Linear(32, 1),
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a logit for each sample."""
        factors = rows[:, :, 1:]
        pairs = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
        logits: torch.Tensor = rows[:, :, 0].sum(1) + pairs + self.deep(factors.flatten(1)).view(-1)
        return logits


class RatedSamples:
    """Ratings as a stream of samples, in a fixed random order, over and over."""

    def __init__(self, ids: np.ndarray, labels: np.ndarray) -> None:
        order = np.random.default_rng(0).permutation(len(labels))
        held_out = len(order) // _HELD_OUT
        self._ids, self._labels = ids, labels
        self._trained, self._held_out = order[held_out:], order[:held_out]

    def read(
        self, position: int, global_batch: int, rank: int, world_size: int
    ) -> Iterator[Samples]:
        """Yield batches without an end; one rank only."""
        assert world_size == 1
        while True:
            numbers = np.arange(position, position + global_batch) % len(self._trained)
            yield self._samples(self._trained[numbers])
            position += global_batch

    def read_eval(self, limit: int, batch: int, rank: int, world_size: int) -> Iterator[Samples]:
        """Yield the held-out ratings."""
        chosen = self._held_out[:limit]
        for start in range(0, len(chosen), batch):
            yield self._samples(chosen[start : start + batch])

    def _samples(self, rows: np.ndarray) -> Samples:
        none = np.zeros((len(rows), 0), np.float32)
        return Samples(none, self._ids[rows], self._labels[rows])


@contextmanager
def rated(
    scale: Scale,
    found: Ratings,
    features: Sequence[str],
    labels: np.ndarray,
    head: nn.Module,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    rates: tuple[float, float],
) -> Iterator[SmallJob]:
    """Make a job on ratings; ``rates``: of the tables and of the head."""
    tables, dense = rates
    overrides = [f"optimizer.tables.lr={tables}", f"optimizer.dense.lr={dense}"]
    with process(overrides) as (cfg, worker):
        own = slice(len(features))
        model = OfRatings(features, found.sizes[own], head.to(worker.device), loss)
        sharded, optimizer = shard(cfg, model, model.tables, worker.device)
        dataset = RatedSamples(found.ids[:, own], labels)
        reader = Reader(dataset, scale.rated_batch, 0, 1, "cpu", features)
        held_out = [
            to_batch(samples, torch.device("cpu"), features)
            for samples in dataset.read_eval(scale.eval_samples, scale.rated_batch, 0, 1)
        ]
        yield SmallJob(sharded, optimizer, reader, held_out, worker.device)


def _factorisation(scale: Scale, sources: Sources) -> AbstractContextManager[SmallJob]:
    found = ratings(sources.ratings, count=scale.synthetic_ratings)
    labels = found.stars - found.stars.mean(dtype=np.float64).astype(np.float32)
    return rated(scale, found, FEATURES[:2], labels, Factorisation(), squared_error, (0.1, 0.01))


def _deepfm(scale: Scale, sources: Sources) -> AbstractContextManager[SmallJob]:
    found = ratings(sources.ratings, count=scale.synthetic_ratings)
    labels = (found.stars >= _LIKED).astype(np.float32)
    head = DeepFM(len(FEATURES))
    return rated(scale, found, FEATURES, labels, head, logloss, (0.05, 0.01))


TASKS: dict[str, Task] = {
    "dlrm16": Task("DLRM, dim 16", partial(dlrm, 16), logloss),
    "dlrm64": Task("DLRM, dim 64", partial(dlrm, 64), logloss),
    "mf": Task("matrix factorisation of ratings", _factorisation, squared_error, liked=0.0),
    "deepfm": Task("DeepFM of ratings", _deepfm, logloss),
}
