"""One small trainable model of each kind of path from a batch to a table in TorchRec.

``Zoo`` holds the model, its optimizers and its batches; ``changed_rows`` finds by TorchRec's state
dicts which rows have other bytes than before, ``stored_rows`` which a checkpoint holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torchrec.distributed.comm as torchrec_comm
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import EmainplaceModeDefinition
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from tests.distributed.layouts import generator_of
from tests.distributed.models import CPU
from tests.distributed.reader30 import read_rows
from tests.distributed.states import gather

SAMPLES = 6
Row = tuple[str, int]
"""Table and global row."""
Rows = set[Row]

# One feature in two tables, a table with two features, a table that no id ever reaches.
ROWS = {"t0": 43, "t1": 32, "t2": 21}
FEATURES = {"t0": ["f0", "f1"], "t1": ["f1"], "t2": ["silent"]}
IDS = {"f0": 43, "f1": 32, "silent": 0}

FUSED: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
}
EMA: dict[str, Any] = {
    "optimizer": EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD,
    "learning_rate": 0.05,
    "emainplace_mode": EmainplaceModeDefinition(step_ema=4, step_start=0, step_ema_coef=0.5),
}
"""No optimizer class stands for this one: TorchRec gets it with the sharder."""


@dataclass
class ZooBatch(Pipelineable):
    dense: torch.Tensor
    features: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> ZooBatch:
        return ZooBatch(self.dense.to(device), self.features.to(device))

    def record_stream(self, stream: Any) -> None:
        self.features.record_stream(stream)

    def pin_memory(self) -> ZooBatch:
        return self


class Net(nn.Module):
    """A model of any embedding module, a linear layer and the loss, for TorchRec's pipelines."""

    def __init__(self, embeddings: nn.Module, width: int, sequence: bool) -> None:
        super().__init__()
        self.embeddings = embeddings
        self._sequence = sequence
        self.out = nn.Linear(width + 2, 1)

    def forward(self, batch: ZooBatch) -> tuple[torch.Tensor, torch.Tensor]:
        looked_up = self.embeddings(batch.features)
        if isinstance(looked_up, tuple):  # managed collisions return the remapped ids as well
            looked_up = looked_up[0]
        if self._sequence:  # per id; which sample an id is of doesn't matter here
            pooled = torch.stack([j.values().sum(dim=0) for j in looked_up.values()]).sum(dim=0)
            values = pooled.expand(batch.dense.shape[0], -1)
        else:
            values = looked_up.values()
        out = self.out(torch.cat([batch.dense, values], dim=1)).squeeze(1)
        loss = (out - batch.dense.sum(dim=1)).square().mean()
        return loss, out.detach()


@dataclass
class Zoo:
    """A model with its optimizers and batches; batch ``i`` differs from rank to rank."""

    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    kind: str
    steps: int = 0

    def batch(self, step: int | None = None) -> ZooBatch:
        step = self.steps if step is None else step
        generator = torch.Generator().manual_seed(step * 64 + dist.get_rank())
        dense = torch.randn(SAMPLES, 2, generator=generator)
        if self.kind == "vbe":
            return ZooBatch(dense, _variable_batch(generator))
        lengths, values = [], []
        for rows in IDS.values():
            per_sample = torch.randint(0, 3, (SAMPLES,), generator=generator) * bool(rows)
            if step % 5 == 4:
                per_sample *= 0  # an empty batch
            lengths.append(per_sample)
            raw = 10**6 if self.kind == "managed_collision" else max(rows, 1)
            values.append(torch.randint(0, raw, (int(per_sample.sum()),), generator=generator))
        ids = torch.cat(values)
        weights = None
        if self.kind in ("weighted", "feature_processed"):
            weights = torch.rand(len(ids), generator=generator) + 0.5
        features = KeyedJaggedTensor(
            keys=list(IDS), values=ids, lengths=torch.cat(lengths), weights=weights
        )
        return ZooBatch(dense, features)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(self.batch())[0].backward()
            self.optimizer.step()
            self.steps += 1


def _variable_batch(generator: torch.Generator) -> KeyedJaggedTensor:
    """Make a batch with a different number of distinct bags for each feature."""
    lengths, values, strides, inverse = [], [], [], []
    for number, rows in enumerate(IDS.values()):
        bags = number + 2
        per_bag = torch.randint(0, 3, (bags,), generator=generator) * bool(rows)
        lengths.append(per_bag)
        values.append(torch.randint(0, max(rows, 1), (int(per_bag.sum()),), generator=generator))
        strides.append([bags])
        inverse.append(torch.randint(0, bags, (SAMPLES,), generator=generator))
    return KeyedJaggedTensor(
        keys=list(IDS),
        values=torch.cat(values),
        lengths=torch.cat(lengths),
        stride_per_key_per_rank=strides,
        inverse_indices=(list(IDS), torch.stack(inverse)),
    )


def _embeddings(
    kind: str, dim: int, fused_params: dict[str, Any] | None
) -> tuple[nn.Module, nn.Module, str, Any, int]:
    """Return module, collection in it, the collection's path, sharder and output width."""
    meta = torch.device("meta")
    if kind == "sequence":
        configs = [
            EmbeddingConfig(
                name=t, num_embeddings=ROWS[t], embedding_dim=dim, feature_names=FEATURES[t]
            )
            for t in ROWS
        ]
        sequence = EmbeddingCollection(tables=configs, device=meta)
        return sequence, sequence, "", EmbeddingCollectionSharder(fused_params), dim
    bags = [
        EmbeddingBagConfig(
            name=t,
            num_embeddings=ROWS[t],
            embedding_dim=dim,
            feature_names=FEATURES[t],
            pooling=PoolingType.SUM,
        )
        for t in ROWS
    ]
    width = dim * sum(len(features) for features in FEATURES.values())
    weighted = kind in ("weighted", "feature_processed")
    collection = EmbeddingBagCollection(tables=bags, device=meta, is_weighted=weighted)
    if kind == "feature_processed":
        processors = PositionWeightedModuleCollection(dict.fromkeys(IDS, 3))
        processed = FeatureProcessedEmbeddingBagCollection(collection, processors)
        sharder: Any = FeatureProcessedEmbeddingBagCollectionSharder()
        return processed, collection, "_embedding_bag_collection", sharder, width
    if kind == "managed_collision":
        modules = {
            t: MCHManagedCollisionModule(
                zch_size=rows,
                device=CPU,
                eviction_policy=DistanceLFU_EvictionPolicy(),
                eviction_interval=100,
                input_hash_size=10**6,
            )
            for t, rows in ROWS.items()
        }
        managed = ManagedCollisionEmbeddingBagCollection(
            collection, ManagedCollisionCollection(modules, bags), return_remapped_features=False
        )
        sharder = ManagedCollisionEmbeddingBagCollectionSharder()
        return managed, collection, "_embedding_module", sharder, width
    return collection, collection, "", EmbeddingBagCollectionSharder(fused_params), width


def build_zoo(
    kind: str,
    plan: dict[str, str],
    fused: str | dict[str, str] = "rowwise_adagrad",
    dense: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    dim: int = 8,
    nodes: int = 1,
) -> Zoo:
    """Shard a model of one kind.

    Args:
        plan: by table, as in ``layouts``.
        fused: the fused optimizer of all tables, or by table; ``ema`` (of all) also moves rows that
            were not looked up.
        dense: the dense optimizer, which steps data-parallel tables as well; Adagrad by default.
    """
    torch.manual_seed(1)
    fused_params = EMA if fused == "ema" else None
    module, collection, _, sharder, width = _embeddings(kind, dim, fused_params)
    net = Net(module, width, kind == "sequence")
    return Zoo(*shard_net(net, collection, sharder, plan, fused, dense, nodes=nodes), kind)


def shard_net(
    net: Net,
    collection: nn.Module,
    sharder: Any,
    plan: dict[str, str],
    fused: str | dict[str, str],
    dense: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    device: torch.device = CPU,
    nodes: int = 1,
    at: str = "embeddings",
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Shard a net's module ``at``, with the tables of ``collection``; make its optimizers."""
    torchrec_comm._INTRA_PG = torchrec_comm._CROSS_PG = None
    world = dist.get_world_size()
    os.environ["LOCAL_WORLD_SIZE"] = str(world // nodes)
    for name, parameter in collection.named_parameters():
        table = name.split(".")[-2]
        if fused != "ema" and plan[table] != "data_parallel":
            optimizer = FUSED[fused if isinstance(fused, str) else fused[table]]
            apply_optimizer_in_backward(optimizer, [parameter], {"lr": 0.05})
    sharding = construct_module_sharding_plan(
        net.get_submodule(at),
        {t: generator_of(kind, "fused" if fused == "ema" else None) for t, kind in plan.items()},
        sharder=sharder,
        local_size=world // nodes,
        world_size=world,
        device_type=device.type,
    )
    model = DistributedModelParallel(
        net, device=device, plan=ShardingPlan({at: sharding}), sharders=[sharder]
    )
    parameters = in_backward_optimizer_filter(model.named_parameters())
    wrapper = KeyedOptimizerWrapper(
        {name: parameter for name, parameter in parameters if parameter.requires_grad},
        dense or (lambda parameters: torch.optim.Adagrad(parameters, lr=0.05)),
    )
    return model, CombinedOptimizer([model.fused_optimizer, ("dense", wrapper)])


def table_arrays(zoo: Any) -> dict[str, dict[str, np.ndarray]]:
    """Return by table the weight ``(rows, dim)`` and the optimizer state with rows first."""
    state = gather(zoo)
    found: dict[str, dict[str, np.ndarray]] = {}
    weights = {
        key.removeprefix("model/"): value
        for key, value in state.items()
        if key.startswith("model/") and (".embedding_bags." in key or ".embeddings." in key)
    }
    for key, weight in weights.items():
        rows = len(weight)
        arrays = {"weight": weight}
        for name, value in state.items():
            if not name.startswith("optimizer/") or f"{key}/" not in name or value.size < rows:
                continue
            row_first = value.reshape(-1, rows).T if value.ndim == 1 else value
            arrays[name.rsplit("/", 1)[-1]] = np.ascontiguousarray(row_first)
        found[key.removesuffix(".weight")] = arrays
    return found


def changed_rows(
    before: dict[str, dict[str, np.ndarray]], after: dict[str, dict[str, np.ndarray]]
) -> Rows:
    changed: Rows = set()
    for table, arrays in after.items():
        for name, now in arrays.items():
            then = before[table].get(name)
            if then is None:  # a dense optimizer has just made its state
                continue
            different = (now.view(np.uint8) != then.view(np.uint8)).reshape(len(now), -1).any(1)
            changed |= {(table, int(row)) for row in np.flatnonzero(different)}
    return changed


def stored_rows(checkpoint: Path, after: dict[str, dict[str, np.ndarray]]) -> tuple[Rows, Rows]:
    """Return a checkpoint's rows, and those that are incomplete or have other bytes."""
    stored = read_rows(checkpoint)
    wrong: Rows = set()
    for (table, row), parts in stored.items():
        weight = after[table]["weight"][row]
        columns = sorted(columns for columns, _, _ in parts)
        joined = [c for start, stop in columns for c in range(start, stop)]
        right = all(weight[s:e].tobytes() == data for (s, e), data, _ in parts)
        if not right or joined != list(range(len(weight))):
            wrong.add((table, row))
    return set(stored), wrong
