"""Build a model of tables and dense layers that are DTensors: FSDP2, HSDP, tensor parallelism."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim import Optimizer
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

ROWS, DIM = 40, 8

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
}


class Model(nn.Module):
    """A model of layers whose sizes no number of ranks divides: shards are uneven or empty."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f"]
        )
        self.ebc = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
        self.over = nn.Sequential(nn.Linear(DIM, 6), nn.Tanh(), nn.Linear(6, 5))
        self.mix = nn.Conv1d(1, 3, 3)  # three dimensions
        self.out = nn.Linear(9, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        hidden = torch.tanh(self.over(self.ebc(features).values()))
        return self.out(self.mix(hidden.unsqueeze(1)).flatten(1)).squeeze(1)


class PlacedJob:
    """A job whose dense part is sharded in some way.

    Args:
        placing: ``fsdp`` over all ranks, ``hsdp`` or ``tp`` (under FSDP) over two times the half;
            ``whole`` for plain parameters, on one rank.
        optimizer: of ``OPTIMIZERS``; with ``combined:`` before it in TorchRec's wrappers.
    """

    def __init__(self, placing: str, optimizer: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        world, module = dist.get_world_size(), Model()
        apply_optimizer_in_backward(torch.optim.Adagrad, module.ebc.parameters(), {"lr": 0.1})
        sharder: Any = EmbeddingBagCollectionSharder()
        plan = construct_module_sharding_plan(
            module.ebc,
            {"t": row_wise()},
            sharder=sharder,
            local_size=world,
            world_size=world,
            device_type="cpu",
        )
        self.model = DistributedModelParallel(
            module,
            device=torch.device("cpu"),
            plan=ShardingPlan({"ebc": plan}),
            sharders=[sharder],
            init_data_parallel=False,
        )
        self._place(placing)
        parameters = {n: p for n, p in self.model.named_parameters() if not n.startswith("ebc")}
        wrapped, _, name = optimizer.rpartition(":")
        self.optimizer: Optimizer
        if wrapped:
            dense = KeyedOptimizerWrapper(parameters, OPTIMIZERS[name])
            self.optimizer = CombinedOptimizer([self.model.fused_optimizer, ("dense", dense)])
        else:
            self.optimizer = OPTIMIZERS[name](list(parameters.values()))
        self.steps = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(self.batch()).square().sum().backward()
            self.optimizer.step()
            self.steps += 1

    def batch(self) -> KeyedJaggedTensor:
        """Draw this rank's next batch."""
        generator = torch.Generator().manual_seed(self.steps * 64 + dist.get_rank())
        ids = torch.randint(0, ROWS, (8,), generator=generator)
        return KeyedJaggedTensor(["f"], ids, lengths=torch.full((4,), 2))

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]

    def digests(self) -> dict[str, str]:
        """Hash every live tensor, whole; call it on all ranks."""
        found: dict[str, str] = {}
        for name, value in self.model.state_dict().items():
            found[name] = digest(value)
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        parts = [self.optimizer]
        if isinstance(self.optimizer, CombinedOptimizer):
            parts = [part for _, part in self.optimizer.optimizers]
        for part in parts:
            for parameter, state in part.state.items():
                for key, value in state.items():
                    found[f"{names.get(parameter, '?')}/{key}"] = digest(value)
        return found

    def _place(self, placing: str) -> None:
        module, world = self.model.module, dist.get_world_size()
        dense = [module.over, module.mix, module.out]
        if placing == "fsdp":
            mesh = init_device_mesh("cpu", (world,))
        elif placing == "hsdp":
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shards"))
        elif placing == "tp":
            both = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
            mesh = both["data"]
            split = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(module.over, both["tensor"], split)
        else:
            return
        for layer in dense:
            fully_shard(layer, mesh=mesh)


def digest(value: Any) -> str:
    """Hash a tensor as it is on all ranks together."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, ShardedTensor):
        mine = [(s.metadata.shard_offsets, s.tensor.detach().numpy()) for s in value.local_shards()]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        whole = torch.zeros(value.size(), dtype=value.dtype)
        for offsets, part in (part for parts in everyone for part in parts):
            place = tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))
            whole[place] = torch.from_numpy(part)
        value = whole
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()
    return repr(value)
