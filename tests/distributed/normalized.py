"""A small sharded model with BatchNorm, whose statistics differ between ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_checknrun import Checkpointer

ROWS, WIDTH = 20, 4
CPU = torch.device("cpu")


class Normalized(nn.Module):
    """A model of a table, BatchNorm and a layer."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            name="t", num_embeddings=ROWS, embedding_dim=WIDTH, feature_names=["f"]
        )
        self.bags = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.norm(self.bags(features).values())).squeeze(1)
        return found


class NormalizedJob:
    """The sharded model with its dense optimizer; each rank has its own batches."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        world = dist.get_world_size()
        module, sharder = Normalized(), EmbeddingBagCollectionSharder()
        apply_optimizer_in_backward(torch.optim.SGD, module.bags.parameters(), {"lr": 0.1})
        tables = construct_module_sharding_plan(
            module.bags,
            {"t": row_wise()},
            sharder=sharder,
            local_size=world,
            world_size=world,
            device_type="cpu",
        )
        plan = ShardingPlan({"bags": tables})
        self.model = DistributedModelParallel(module, device=CPU, plan=plan, sharders=[sharder])
        dense = [p for n, p in self.model.named_parameters() if "bags" not in n]
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(dense, lr=0.1)
        self.steps = 0

    def features(self) -> KeyedJaggedTensor:
        generator = torch.Generator().manual_seed(self.steps * 64 + dist.get_rank())
        values = torch.randint(0, ROWS, (8,), generator=generator)
        return KeyedJaggedTensor(keys=["f"], values=values, lengths=torch.full((8,), 1))

    def train(self) -> None:
        self.optimizer.zero_grad()
        (self.model(self.features()) * 3).square().sum().backward()
        self.optimizer.step()
        self.steps += 1

    def statistics(self) -> dict[str, list[float]]:
        """Return this rank's buffers."""
        content = self.model.state_dict()
        names = ("running_mean", "running_var", "num_batches_tracked")
        return {name: content[f"norm.{name}"].reshape(-1).tolist() for name in names}

    def checkpointer(self, root: str, **options: Any) -> Checkpointer:
        state = {"optimizer": self.optimizer, **options.pop("state", {})}
        return Checkpointer(root, model=self.model, state=state, **options)
