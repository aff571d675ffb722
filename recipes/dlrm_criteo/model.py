"""Build the job's DLRM from `configs/model/`, with starting weights that depend on the seed alone.

Two runs can only be compared if they start from the same bits, also on another number of ranks and
with another sharding plan. Therefore every table's content is a function of (seed, table, global
row, column), written into the rectangle of the table that a rank holds, and every dense parameter
is a function of (seed, name).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.datasets.criteo import CAT_FEATURE_COUNT, DEFAULT_CAT_NAMES, INT_FEATURE_COUNT
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

SMALLEST_TABLE = 3  # the smallest cardinality in Criteo's data
CHUNK_ROWS = (
    # Rows drawn from one random stream; another number changes every table's starting weights
    65536
)


@dataclass(frozen=True)
class CrossNetwork:
    """The low-rank cross layers of DCN v2, in place of the pairwise dot products."""

    layers: int
    rank: int


@dataclass(frozen=True)
class Architecture:
    """A DLRM for Criteo: 26 tables of one width, a bottom and a top MLP (sizes after the input)."""

    cardinalities: Sequence[int]  # distinct ids of each categorical feature
    embedding_dim: int
    bottom_mlp: Sequence[int]
    top_mlp: Sequence[int]
    cross: CrossNetwork | None = None
    scale: float = 1.0  # factor of the cardinalities, for smaller models of the same shape

    def __post_init__(self) -> None:
        if len(self.cardinalities) != CAT_FEATURE_COUNT or min(self.cardinalities) < 1:
            raise ValueError(
                f"model.cardinalities is {list(self.cardinalities)}; expected "
                f"{CAT_FEATURE_COUNT} numbers of at least 1, one per categorical feature of Criteo"
            )
        if not self.scale > 0:
            raise ValueError(f"model.scale is {self.scale}; expected a positive factor")
        if not self.bottom_mlp or self.bottom_mlp[-1] != self.embedding_dim:
            raise ValueError(
                f"model.bottom_mlp is {list(self.bottom_mlp)}; its last layer must have the size "
                f"of model.embedding_dim, {self.embedding_dim}"
            )
        if len(self.top_mlp) < 2 or self.top_mlp[-1] != 1:
            raise ValueError(
                f"model.top_mlp is {list(self.top_mlp)}; expected at least two layers, the last "
                "of size 1 (the logit)"
            )

    @property
    def num_embeddings_per_feature(self) -> list[int]:
        return [max(SMALLEST_TABLE, round(n * self.scale)) for n in self.cardinalities]

    def build(self, dense_device: torch.device) -> DLRMTrain:
        """Build the model with its loss.

        The tables are on the meta device: sharding allocates a rank's parts.
        """
        tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"t_{feature}",
                    embedding_dim=self.embedding_dim,
                    num_embeddings=rows,
                    feature_names=[feature],
                )
                for feature, rows in zip(
                    DEFAULT_CAT_NAMES, self.num_embeddings_per_feature, strict=True
                )
            ],
            device=torch.device("meta"),
        )
        # DLRM_DCN passes no device on to its cross network, hence the context.
        with dense_device:
            if self.cross is None:
                dlrm = DLRM(
                    tables,
                    INT_FEATURE_COUNT,
                    list(self.bottom_mlp),
                    list(self.top_mlp),
                    dense_device,
                )
            else:
                dlrm = DLRM_DCN(
                    tables,
                    INT_FEATURE_COUNT,
                    list(self.bottom_mlp),
                    list(self.top_mlp),
                    self.cross.layers,
                    self.cross.rank,
                    dense_device,
                )
        return DLRMTrain(dlrm)


@torch.no_grad()
def initialise_dense(model: nn.Module, seed: int) -> None:
    """Initialise everything that is not on the meta device, as in the DLRM reference.

    Matrices (m, n): N(0, sqrt(2 / (m + n))); biases of m values: N(0, sqrt(1 / m)), but zero in a
    cross network.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        if "crossnet" in name and parameter.dim() == 1:
            parameter.zero_()
            continue
        spread = math.sqrt((2 if parameter.dim() == 2 else 1) / sum(parameter.shape))
        values = _random(seed, name).standard_normal(tuple(parameter.shape), dtype=np.float32)
        parameter.copy_(torch.from_numpy(values).mul_(spread))


@torch.no_grad()
def initialise_tables(model: DistributedModelParallel, seed: int) -> None:
    """Initialise this rank's part of every table by U(-1 / sqrt(rows), 1 / sqrt(rows))."""
    for name, shape, part, (row, column) in _table_parts(model):
        for first, values in table_values(seed, name, shape, row, part.shape[0]):
            rows = slice(first - row, first - row + len(values))
            part[rows] = torch.from_numpy(values[:, column : column + part.shape[1]])


def table_values(
    seed: int, name: str, shape: Sequence[int], row: int, rows: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the starting values of `rows` rows from `row` on, as (first row, values)."""
    if not rows:
        return
    bound = 1 / math.sqrt(shape[0])
    for chunk in range(row // CHUNK_ROWS, -(-(row + rows) // CHUNK_ROWS)):
        start = chunk * CHUNK_ROWS
        first, stop = max(row, start), min(row + rows, start + CHUNK_ROWS)
        values = _random(seed, name, chunk).random((stop - start, shape[1]), dtype=np.float32)
        yield first, values[first - start :] * np.float32(2 * bound) - np.float32(bound)


def _table_parts(
    model: DistributedModelParallel,
) -> Iterator[tuple[str, Sequence[int], torch.Tensor, Sequence[int]]]:
    """Yield (name, shape of the whole table, this rank's part, its first row and column)."""
    for name, value in model.state_dict().items():
        if ".embedding_bags." not in name:
            continue
        if isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                yield name, value.size(), shard.tensor, shard.metadata.shard_offsets
        else:  # data-parallel: every rank has the whole table
            yield name, value.shape, value, (0, 0)


def _random(seed: int, *name: object) -> np.random.Generator:
    """Return an independent random stream for a name."""
    digest = hashlib.blake2b(repr((seed, *name)).encode(), digest_size=16).digest()
    return np.random.default_rng(np.frombuffer(digest, np.uint32))
