"""Describe small sharded models by JSON, and build them on every rank.

A ``ModelSpec`` and a plan say all there is to know; a worker builds a ``Job`` from them. ``states``
gathers and compares what a job holds.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

FUSED: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "rowwise_adagrad": RowWiseAdagrad,
    "adagrad": torch.optim.Adagrad,
}
DENSE: dict[str, Any] = {
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}
CPU = torch.device("cpu")
DENSE_FEATURES = 3

Plan = dict[str, str]
"""By ``collection.table``: ``row_wise``, ``table_wise:RANK`` or ``data_parallel``, which leaves the
table to the dense optimizer."""


@dataclass(frozen=True)
class TableSpec:
    name: str
    rows: int
    dim: int
    features: tuple[str, ...]


@dataclass(frozen=True)
class CollectionSpec:
    name: str
    tables: tuple[TableSpec, ...]
    bag: bool = True


@dataclass(frozen=True)
class ModelSpec:
    """A model: embedding collections whose outputs go through one linear layer with the rest."""

    collections: tuple[CollectionSpec, ...]
    fused: str = "rowwise_adagrad"
    dense: str = "adagrad"
    hidden: int = 4
    index_dtype: str = "int64"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ModelSpec:
        collections = tuple(
            CollectionSpec(
                c["name"],
                tuple(TableSpec(**{**t, "features": tuple(t["features"])}) for t in c["tables"]),
                c["bag"],
            )
            for c in document["collections"]
        )
        return cls(**{**document, "collections": collections})

    @property
    def features(self) -> dict[str, int]:
        """Return every feature, with the rows of the smallest table that it feeds."""
        found: dict[str, int] = {}
        for collection in self.collections:
            for table in collection.tables:
                for feature in table.features:
                    found[feature] = min(table.rows, found.get(feature, table.rows))
        return found

    @property
    def table_paths(self) -> dict[str, TableSpec]:
        """Return the tables by their state-dict names without ``.weight``."""
        return {
            f"{c.name}.{'embedding_bags' if c.bag else 'embeddings'}.{t.name}": t
            for c in self.collections
            for t in c.tables
        }


def random_spec(seed: int) -> ModelSpec:
    """Draw a model: equal table names in two collections, shared features, tiny tables."""
    draw = random.Random(seed)
    names = ["t0", "t1", "t2"]
    features = ["f0", "f1", "f2", "f3"]
    dims = [draw.choice([4, 8, 12, 16]) for _ in range(3)]
    collections = []
    for c in range(draw.randint(1, 3)):
        bag = c == 0 or draw.random() < 0.7
        tables = tuple(
            TableSpec(
                name=names[t],  # equal names in every collection
                rows=draw.choice([1, 2, 3, 5, 17, 40, 100]),
                dim=draw.choice([4, 8, 12, 20]) if bag else dims[c],  # EmbeddingCollection: one dim
                features=tuple(draw.sample(features, draw.randint(1, 2))),
            )
            for t in range(draw.randint(1, 3))
        )
        collections.append(CollectionSpec(f"c{c}", tables, bag))
    return ModelSpec(
        tuple(collections),
        fused=draw.choice(sorted(FUSED)),
        dense=draw.choice(["adagrad", "sgd"]),
        hidden=draw.randint(1, 6),
        index_dtype=draw.choice(["int32", "int64"]),
    )


def random_plan(spec: ModelSpec, world_size: int, seed: int) -> Plan:
    """Draw ``row_wise`` or ``table_wise`` on some rank, for each table."""
    draw = random.Random(seed)
    plan: Plan = {}
    for collection in spec.collections:
        for table in collection.tables:
            kind = draw.choice(["row_wise", f"table_wise:{draw.randrange(world_size)}"])
            plan[f"{collection.name}.{table.name}"] = kind
        _leave_no_kernel_empty(plan, collection, world_size)
    return plan


def uniform_plan(spec: ModelSpec, sharding: str, world_size: int) -> Plan:
    """Give all tables the same sharding; deal ``table_wise`` ones out over the ranks, and halve the
    columns of ``column_wise`` ones.
    """
    names = [f"{c.name}.{t.name}" for c in spec.collections for t in c.tables]
    if sharding == "table_wise":
        return {name: f"table_wise:{i % world_size}" for i, name in enumerate(names)}
    if sharding == "column_wise":
        return dict.fromkeys(names, f"column_wise:0,{world_size - 1}")
    plan = dict.fromkeys(names, sharding)
    for collection in spec.collections:
        _leave_no_kernel_empty(plan, collection, world_size)
    return plan


def _leave_no_kernel_empty(plan: Plan, collection: CollectionSpec, world_size: int) -> None:
    """Make a collection's row-wise tables table-wise if FBGEMM can't train them on some rank.

    Where a table has no row, as row-wise tables with fewer rows than ranks, or nearly, FBGEMM's CPU
    kernels take it and the table behind it for one, of its own columns: the memory behind it must
    have room for as many such rows, and for one at least, else the process crashes.
    """
    tables = [f"{collection.name}.{t.name}" for t in collection.tables]
    row_wise_tables = [
        table
        for table, name in zip(collection.tables, tables, strict=True)
        if plan[name] == "row_wise"
    ]
    for rank in range(world_size):
        behind, following = 0, 1
        for table in reversed(row_wise_tables):
            block = -(-table.rows // world_size)
            rows = min(block, max(0, table.rows - rank * block))
            if rows == 0 and behind < following * table.dim:
                for i, name in enumerate(tables):
                    if plan[name] == "row_wise":
                        plan[name] = f"table_wise:{i % world_size}"
                return
            behind += rows * table.dim
            following = rows or following


class Model(nn.Module):
    """A model of embedding collections, dense features and two linear layers to one logit."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        width = DENSE_FEATURES
        self._collections = spec.collections
        for collection in spec.collections:
            module: nn.Module
            if collection.bag:
                module = EmbeddingBagCollection(
                    tables=[
                        EmbeddingBagConfig(
                            name=t.name,
                            num_embeddings=t.rows,
                            embedding_dim=t.dim,
                            feature_names=list(t.features),
                        )
                        for t in collection.tables
                    ],
                    device=torch.device("meta"),
                )
                width += sum(t.dim * len(t.features) for t in collection.tables)
            else:
                module = EmbeddingCollection(
                    tables=[
                        EmbeddingConfig(
                            name=t.name,
                            num_embeddings=t.rows,
                            embedding_dim=t.dim,
                            feature_names=list(t.features),
                        )
                        for t in collection.tables
                    ],
                    device=torch.device("meta"),
                )
                width += collection.tables[0].dim
            setattr(self, collection.name, module)
        self.hidden = nn.Linear(width, spec.hidden)
        self.out = nn.Linear(spec.hidden, 1)

    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        parts = [dense]
        for collection in self._collections:
            looked_up = getattr(self, collection.name)(features)
            if collection.bag:
                parts.append(looked_up.values())
            else:
                parts.append(_pool(list(looked_up.values()), dense.shape[0]))
        hidden = torch.tanh(self.hidden(torch.cat(parts, dim=1)))
        return self.out(hidden).squeeze(1)


def _pool(jagged: list[Any], batch: int) -> torch.Tensor:
    """Sum a sequence model's embeddings per sample, over all features."""
    pooled = torch.zeros(batch, jagged[0].values().shape[1])
    for feature in jagged:
        sample = torch.repeat_interleave(torch.arange(batch), feature.lengths())
        pooled = pooled.index_add(0, sample, feature.values())
    return pooled


@dataclass
class Job:
    """A sharded model that trains; ``steps`` counts its batches, which differ from rank to rank."""

    spec: ModelSpec
    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    data_seed: int = 0
    samples: int = 4
    steps: int = 0

    @classmethod
    def build(cls, spec: ModelSpec, plan: Plan, seed: int = 0, samples: int = 4) -> Job:
        """Shard a model over all ranks.

        Args:
            seed: of the starting weights.
            samples: in a rank's batch.
        """
        torch.manual_seed(seed)
        world = dist.get_world_size()
        module = Model(spec)
        sharders: list[Any] = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
        plans = {}
        for collection in spec.collections:
            shardings = {
                t.name: _generator(plan[f"{collection.name}.{t.name}"]) for t in collection.tables
            }
            tables = getattr(module, collection.name)
            if spec.fused != "none":
                fused = [
                    parameter
                    for name, parameter in tables.named_parameters()
                    if plan[f"{collection.name}.{name.split('.')[-2]}"] != "data_parallel"
                ]
                apply_optimizer_in_backward(FUSED[spec.fused], fused, {"lr": 0.1})
            plans[collection.name] = construct_module_sharding_plan(
                tables,
                shardings,
                sharder=sharders[0 if collection.bag else 1],
                local_size=world,
                world_size=world,
                device_type="cpu",
            )
        torch.manual_seed(seed + 1000 * dist.get_rank())  # ranks hold different rows
        model = DistributedModelParallel(
            module, device=CPU, plan=ShardingPlan(plans), sharders=sharders
        )
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(model.named_parameters())),
            lambda parameters: DENSE[spec.dense](parameters, lr=0.05),
        )
        optimizer = CombinedOptimizer([model.fused_optimizer, ("dense", dense)])
        return cls(spec, model, optimizer, samples=samples)

    def batch(
        self, step: int, rows: Mapping[str, int] | None = None
    ) -> tuple[torch.Tensor, KeyedJaggedTensor]:
        """Draw this rank's batch: bags of zero to three ids, some of them often empty.

        Args:
            rows: by feature, ids are drawn below this; by default every table has them.
        """
        generator = torch.Generator().manual_seed(
            (self.data_seed * 1009 + step) * 64 + dist.get_rank()
        )
        samples = self.samples
        features = {**self.spec.features, **(rows or {})}
        lengths = torch.randint(0, 4, (len(features) * samples,), generator=generator)
        lengths[torch.rand(lengths.shape, generator=generator) < 0.3] = 0
        values = [
            torch.randint(0, rows, (int(part.sum()),), generator=generator)
            for rows, part in zip(features.values(), lengths.split(samples), strict=True)
        ]
        dtype = torch.int32 if self.spec.index_dtype == "int32" else torch.int64
        dense = torch.randn(samples, DENSE_FEATURES, generator=generator)
        sparse = KeyedJaggedTensor(
            keys=list(features), values=torch.cat(values).to(dtype), lengths=lengths.to(dtype)
        )
        return dense, sparse

    def loss(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        return (self.model(dense, sparse) - dense.sum(dim=1)).square().sum()

    def train(self, steps: int = 1) -> None:
        """Train that many batches."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.loss(*self.batch(self.steps)).backward()
            self.optimizer.step()
            self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data: this makes a job a state object of a checkpoint."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def _generator(sharding: str) -> Any:
    kind, _, rank = sharding.partition(":")
    if kind == "table_wise":
        return table_wise(rank=int(rank))
    if kind == "column_wise":
        return column_wise(ranks=[*map(int, rank.split(","))])
    return data_parallel() if kind == "data_parallel" else row_wise()
