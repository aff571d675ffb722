"""Build small sharded models whose tables have types of their own and move by much at each step.

Their states are gathered by place, so that tables keep theirs under other names.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchrec.distributed.comm as torchrec_comm
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.fused_on_cpu import any_fused_optimizer
from tests.distributed.layouts import (
    Layout,
    LayoutJob,
    OrderedModel,
    _optimizer,
    _shardings,
    table_names,
)
from tests.distributed.models import CPU, DENSE_FEATURES, ModelSpec, _pool
from tests.distributed.states import State, gather

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
KINDS = {"fp32": DataType.FP32, "fp16": DataType.FP16, "bf16": DataType.BF16}
UNTRAINABLE = ("adam", "partial_rowwise_adam", "lamb", "partial_rowwise_lamb")
SAMPLES = 24
MOST_IDS = 6
NAMES = {"sum": "momentum1", "exp_avg": "momentum1", "exp_avg_sq": "momentum2"}


class LinearModel(OrderedModel):
    """A model whose loss moves every row that a batch looks up by a step of its own."""

    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor, step: int = 0) -> Any:
        parts, moved = [dense], dense.new_zeros(())
        for collection in self._collections:
            looked_up = getattr(self, collection.name)(features)
            if not collection.bag:
                found = {"": _pool(list(looked_up.values()), dense.shape[0])}
            else:
                several = [f for t in collection.tables for f in t.features]
                found = {
                    f"{t.name}{f}": looked_up[f"{f}@{t.name}" if several.count(f) > 1 else f]
                    for t in collection.tables
                    for f in t.features
                }
            for number, value in enumerate(found.values()):
                draw = torch.Generator().manual_seed(step * 100 + number)
                along = torch.randn(value.shape[1], generator=draw)
                often = torch.rand(value.shape[0], 1, generator=draw) + 0.5
                moved = moved + (value * along * often).sum()
                parts.append(value.detach())
        hidden = torch.tanh(self.hidden(torch.cat(parts, dim=1).nan_to_num(0, 0, 0).clamp(-9, 9)))
        return moved + (self.out(hidden).squeeze(1) - dense.sum(dim=1)).square().mean()


@dataclass
class QuantizedJob(LayoutJob):
    """A job whose rows move by much at each step."""

    def loss(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        found: torch.Tensor = self.model(dense, sparse, self.steps)
        return found

    def batch(
        self, step: int, rows: Mapping[str, int] | None = None
    ) -> tuple[torch.Tensor, KeyedJaggedTensor]:
        """Draw this rank's bags, of ids that all lie in one part of a table or anywhere."""
        draw = torch.Generator().manual_seed(step * 64 + dist.get_rank())
        samples = SAMPLES // dist.get_world_size()
        features = self.spec.features
        lengths = torch.randint(0, MOST_IDS, (len(features) * samples,), generator=draw)
        values = []
        for most, part in zip(features.values(), lengths.split(samples), strict=True):
            ids = torch.randint(0, most, (int(part.sum()),), generator=draw)
            values.append(ids if step % 3 else ids // 7)
        dense = torch.randn(samples, DENSE_FEATURES, generator=draw)
        return dense, KeyedJaggedTensor(
            keys=list(features), values=torch.cat(values), lengths=lengths
        )


def build(spec: ModelSpec, where: Layout, dtypes: dict[str, str], seed: int = 0) -> QuantizedJob:
    """Shard a model whose tables have types of their own.

    Args:
        dtypes: by ``collection.table``.
    """
    assert dist.get_world_size() == where.world_size
    torchrec_comm._INTRA_PG = torchrec_comm._CROSS_PG = None
    os.environ["LOCAL_WORLD_SIZE"] = str(where.ranks_per_node)
    torch.manual_seed(seed)
    module = LinearModel(spec)
    set_types(module, spec, dtypes)
    sharders: list[Any] = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    plans = {
        c.name: construct_module_sharding_plan(
            getattr(module, c.name),
            _shardings(module, spec, where, c.name),
            sharder=sharders[0 if c.bag else 1],
            local_size=where.ranks_per_node,
            world_size=where.world_size,
            device_type="cpu",
        )
        for c in spec.collections
    }
    assert dist.group.WORLD is not None
    torch.manual_seed(seed + 1000 * dist.get_rank())
    with any_fused_optimizer() if spec.fused in UNTRAINABLE else contextlib.nullcontext():
        model = DistributedModelParallel(
            module,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=CPU,
            plan=ShardingPlan(plans),
            sharders=sharders,
        )
    return QuantizedJob(spec, model, _optimizer(model, spec, where.prefix, None))


def set_types(module: Any, spec: ModelSpec, dtypes: dict[str, str]) -> None:
    for path, (name, table) in table_names(spec).items():
        collection = getattr(module, path.split(".")[0])
        weight = module.get_parameter(f"{path}.weight")
        weight.data = weight.data.to(DTYPES[dtypes[name]])
        bag = "embedding_bags" in path
        configs = collection.embedding_bag_configs() if bag else collection.embedding_configs()
        (config,) = [c for c in configs if c.name == table.name]
        config.data_type = KINDS[dtypes[name]]


def arrays_of(job: QuantizedJob, where: Layout) -> State:
    """Gather the state by place: ``w0``, ``s0.momentum1`` as ``(rows, dim)``, and the rest."""
    with bf16_as_fp32():
        state = gather(job)
    found: State = {}
    for place, (path, (name, table)) in enumerate(table_names(job.spec).items()):
        found[f"w{place}"] = state.pop(f"model/{path}.weight")
        for key in [key for key in state if f"{path}.weight/" in key]:
            value = state.pop(key)
            last = key.rsplit("/", 1)[-1].rsplit(".", 1)[-1]
            if last == "step" or key.endswith("/step"):
                continue
            kind = NAMES.get(last, last)
            if value.ndim == 1 and len(value) % table.rows == 0:
                widths = where.widths(name, table.dim)
                parts = value.reshape(len(widths), table.rows)
                value = np.repeat(parts, widths, axis=0).T
            found[f"s{place}.{kind}"] = np.ascontiguousarray(
                np.broadcast_to(value, (table.rows, table.dim))
            )
    renamed = [t.name for t in job.spec.table_paths.values()]
    found |= {f"rest.{key}": v for key, v in state.items() if not any(n in key for n in renamed)}
    return found


@contextlib.contextmanager
def bf16_as_fp32() -> Iterator[None]:
    """Let ``gather`` give tensors of bf16 as fp32, which NumPy has."""
    real = torch.Tensor.numpy

    def numpy(tensor: torch.Tensor, **options: Any) -> np.ndarray:
        return real(tensor.float() if tensor.dtype == torch.bfloat16 else tensor, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "numpy", numpy)
        yield
