"""Build models in any layout: a plan (a sharding per table), a number of ranks and of nodes.

Every job here trains the same global batches, whatever its layout: ``unsharded`` says what they
must come to.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torchrec.distributed.comm as torchrec_comm
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import optimizers
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.models import (
    CPU,
    DENSE_FEATURES,
    Job,
    Model,
    ModelSpec,
    Plan,
    TableSpec,
    _pool,
)

BATCH = 24
"""Samples of a global batch: any of the world sizes 1, 2, 3, 4 and 8 divides it."""
LEARNING_RATE = 0.05
EPS = 1e-3
"""Large, so that a tiny gradient's rounding is not a step of full length."""
OPTIMIZERS: dict[str, tuple[Any, dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": LEARNING_RATE}),
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": LEARNING_RATE, "eps": EPS}),
    "adagrad": (torch.optim.Adagrad, {"lr": LEARNING_RATE, "eps": EPS}),
    # Sharded tables of these can be built on a CPU, but not trained (fused_on_cpu.py).
    "adam": (torch.optim.Adam, {"lr": LEARNING_RATE, "eps": EPS}),
    "partial_rowwise_adam": (optimizers.PartialRowWiseAdam, {"lr": LEARNING_RATE}),
    "lamb": (optimizers.LAMB, {"lr": LEARNING_RATE}),
    "partial_rowwise_lamb": (optimizers.PartialRowWiseLAMB, {"lr": LEARNING_RATE}),
}


@dataclass(frozen=True)
class Layout:
    """A placement of all rows.

    Attributes:
        plan: by ``collection.table``: ``table_wise:RANK``, ``row_wise``,
            ``column_wise:RANK,RANK…``, ``columns:SIZE,SIZE…`` (one shard on each rank),
            ``table_row_wise:NODE``,
            ``grid_shard:NODE,NODE…`` or ``data_parallel``.
        local_size: ranks per node.
        prefix: of the names of data-parallel tables in the combined optimizer.
    """

    plan: Plan
    world_size: int
    local_size: int = 0
    prefix: str = "tables"

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Layout:
        return cls(**document)

    @property
    def ranks_per_node(self) -> int:
        return self.local_size or self.world_size

    def widths(self, name: str, dim: int) -> list[int]:
        """Return the number of columns of each of a table's column shards."""
        kind, _, rest = self.plan[name].partition(":")
        if kind == "columns":
            return [int(size) for size in rest.split(",")]
        parts = len(rest.split(",")) if kind in ("column_wise", "grid_shard") else 1
        return [dim // parts] * parts


def splits_into_whole_blocks(rows: int, ranks: int) -> bool:
    """Tell whether every rank gets rows of a row-wise table: FBGEMM trains no others on a CPU."""
    return rows > -(-rows // ranks) * (ranks - 1)


def table_names(spec: ModelSpec) -> dict[str, tuple[str, TableSpec]]:
    """Map state-dict names without ``.weight`` to the name in plans and the table."""
    names = [f"{c.name}.{t.name}" for c in spec.collections for t in c.tables]
    return {p: (n, t) for (p, t), n in zip(spec.table_paths.items(), names, strict=True)}


class OrderedModel(Model):
    """A model that takes looked-up values by name: TorchRec's order depends on the sharding."""

    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        parts = [dense]
        for collection in self._collections:
            looked_up = getattr(self, collection.name)(features)
            if not collection.bag:
                parts.append(_pool(list(looked_up.values()), dense.shape[0]))
                continue
            pairs = [(t.name, f) for t in collection.tables for f in t.features]
            uses = Counter(feature for _, feature in pairs)
            parts += [looked_up[f"{f}@{t}" if uses[f] > 1 else f] for t, f in pairs]
        hidden = torch.tanh(self.hidden(torch.cat(parts, dim=1)))
        return self.out(hidden).squeeze(1)


@dataclass
class LayoutJob(Job):
    """A job whose ranks share global batches."""

    def batch(
        self, step: int, rows: Mapping[str, int] | None = None
    ) -> tuple[torch.Tensor, KeyedJaggedTensor]:
        """Return this rank's slice of the global batch."""
        dense, features = global_batch(self.spec, self.data_seed, step)
        share = BATCH // dist.get_world_size()
        own = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
        return dense[own], keyed([bags[own] for bags in features.values()], list(features))

    def loss(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        return (self.model(dense, sparse) - dense.sum(dim=1)).square().mean()


def global_batch(
    spec: ModelSpec, data_seed: int, step: int
) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
    """Draw dense features ``(BATCH, …)``, and for each feature a bag of up to two ids a sample."""
    generator = torch.Generator().manual_seed(data_seed * 1009 + step)
    dense = torch.randn(BATCH, DENSE_FEATURES, generator=generator)
    features = {}
    for feature, rows in spec.features.items():
        lengths = torch.randint(0, 3, (BATCH,), generator=generator)
        ids = torch.randint(0, rows, (int(lengths.sum()),), generator=generator)
        features[feature] = list(ids.split(lengths.tolist()))
    return dense, features


def keyed(features: Sequence[Sequence[torch.Tensor]], names: list[str]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=names,
        values=torch.cat([ids for bags in features for ids in bags]),
        lengths=torch.tensor([len(ids) for bags in features for ids in bags]),
    )


def build(
    spec: dict[str, Any],
    layout: dict[str, Any],
    seed: int = 0,
    *,
    half: bool = False,
    dtensor: bool = False,
    dense_table_optimizer: str | None = None,
) -> LayoutJob:
    """Shard a model; give data-parallel tables an optimizer beside the dense one.

    Args:
        half: store tables as fp16.
        dtensor: give sharded tensors of the state dict as DTensor.
        dense_table_optimizer: the data-parallel tables' optimizer, if not the fused one.
    """
    model_spec, where = ModelSpec.from_json(spec), Layout.from_json(layout)
    assert dist.get_world_size() == where.world_size
    # Groups within and across nodes are kept for the process; an earlier case's are gone.
    torchrec_comm._INTRA_PG = torchrec_comm._CROSS_PG = None
    os.environ["LOCAL_WORLD_SIZE"] = str(where.ranks_per_node)
    torch.manual_seed(seed)
    module = OrderedModel(model_spec)
    sharders: list[Any] = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    plans = {}
    for collection in model_spec.collections:
        tables = getattr(module, collection.name)
        if half:
            tables.half()
            for config in tables.embedding_bag_configs():
                config.data_type = DataType.FP16
        plans[collection.name] = construct_module_sharding_plan(
            tables,
            _shardings(module, model_spec, where, collection.name),
            sharder=sharders[0 if collection.bag else 1],
            local_size=where.ranks_per_node,
            world_size=where.world_size,
            device_type="cpu",
        )
    torch.manual_seed(seed + 1000 * dist.get_rank())  # ranks hold different rows
    assert dist.group.WORLD is not None
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    env.output_dtensor = dtensor
    model = DistributedModelParallel(
        module, env=env, device=CPU, plan=ShardingPlan(plans), sharders=sharders
    )
    optimizer = _optimizer(model, model_spec, where.prefix, dense_table_optimizer)
    return LayoutJob(model_spec, model, optimizer)


def _shardings(
    module: OrderedModel, spec: ModelSpec, where: Layout, collection: str
) -> dict[str, Any]:
    """Give a collection's sharded tables their fused optimizer; return all tables' shardings."""
    kind, options = OPTIMIZERS[spec.fused]
    shardings = {}
    for path, (name, table) in table_names(spec).items():
        if not path.startswith(f"{collection}."):
            continue
        shardings[table.name] = generator_of(where.plan[name])
        if where.plan[name] != "data_parallel":
            weight = module.get_parameter(f"{path}.weight")
            apply_optimizer_in_backward(kind, [weight], dict(options))
    return shardings


def _optimizer(
    model: DistributedModelParallel, spec: ModelSpec, prefix: str, of_replicated: str | None
) -> CombinedOptimizer:
    """Combine the fused optimizer with one for data-parallel tables and one for the dense part."""
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    weights = {f"{path}.weight" for path in spec.table_paths}
    parts: list[KeyedOptimizer | tuple[str, KeyedOptimizer]] = [model.fused_optimizer]
    replicated = {name: dense.pop(name) for name in sorted(dense.keys() & weights)}
    if replicated:
        kind, options = OPTIMIZERS[of_replicated or spec.fused]
        parts.append((prefix, KeyedOptimizerWrapper(replicated, lambda p: kind(p, **options))))
    kind, options = OPTIMIZERS[spec.dense]
    parts.append(("dense", KeyedOptimizerWrapper(dense, lambda p: kind(p, **options))))
    return CombinedOptimizer(parts)


def generator_of(sharding: str, kernel: str | None = None) -> Any:
    """Return TorchRec's sharding of a table, from its name in a plan.

    Args:
        kernel: the compute kernel of a table-, row- or column-wise table; by default the one that
            fits its optimizer.
    """
    kind, _, rest = sharding.partition(":")
    numbers = [int(number) for number in rest.split(",")] if rest else []
    fused = {} if kernel is None else {"compute_kernel": kernel}
    return {
        "table_wise": lambda: table_wise(rank=numbers[0], **fused),
        "row_wise": lambda: row_wise(**fused),
        "column_wise": lambda: column_wise(ranks=numbers, **fused),
        "columns": lambda: column_wise(size_per_rank=numbers, **fused),
        "table_row_wise": lambda: table_row_wise(host_index=numbers[0]),
        "grid_shard": lambda: grid_shard(host_indexes=numbers),
        "data_parallel": data_parallel,
    }[kind]()
