"""Build a job whose tables two sharding groups hold and average (two-dimensional parallelism)."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import model_parallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.collisions import CollisionZoo, Spec, net_of
from torchrec_checknrun import Checkpointer, Consecutive

ROWS, DIM, GROUP = 40, 8, 2
NAMES = ("t0", "t1", "t2")
SHARDINGS = {"t0": row_wise(), "t1": table_wise(rank=1), "t2": data_parallel()}


@functools.cache
def collection_on_cpu() -> type[Any]:
    """Return TorchRec's ``DMPCollection``, which refuses CPUs, without this refusal, and without
    places that name one of several CPUs.
    """
    source = inspect.getsource(model_parallel.DMPCollection)
    for old, new in (
        ("class DMPCollection(DistributedModelParallel)", "class OnCpu(DMPCollection)"),
        ("super().__init__(", "super(DMPCollection, self).__init__("),
        ('device.type == "cuda" or', "True or"),
        ("{self._device.type}:{shard_rank % get_local_size()}", "{self._device.type}"),
    ):
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    names = dict(vars(model_parallel))
    exec(compile(source, "DMPCollection on a CPU", "exec"), names)
    found: type[Any] = names["OnCpu"]
    return found


def averaged_zoo(spec: Spec, seed: int = 1) -> CollisionZoo:
    """Build a model with managed collisions on four ranks; two groups of two hold all tables."""
    torch.manual_seed(seed)
    net, collection = net_of(spec, torch.device("meta"))
    sharder: Any = ManagedCollisionEmbeddingBagCollectionSharder()
    for table in collection.embedding_bags.values():
        apply_optimizer_in_backward(torch.optim.Adagrad, table.parameters(), {"lr": 0.1})
    tables = construct_module_sharding_plan(
        net.embeddings,
        dict.fromkeys(spec.rows, row_wise()),
        sharder=sharder,
        local_size=GROUP,
        world_size=GROUP,
        device_type="cpu",
    )
    model = averaged(net, ShardingPlan({"embeddings": tables}), sharder)
    return CollisionZoo(model, CombinedOptimizer([model.fused_optimizer]), "collisions")


def averaged(module: nn.Module, plan: ShardingPlan, sharder: Any) -> Any:
    """Shard a module among the ranks of each group."""
    return collection_on_cpu()(
        module=module,
        device=torch.device("cpu"),
        plan=plan,
        world_size=dist.get_world_size(),
        sharding_group_size=GROUP,
        global_pg=dist.group.WORLD,
        sharders=[sharder],
    )


class Model(nn.Module):
    """Tables and a layer."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"of_{name}"]
            )
            for name in NAMES
        ]
        self.bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.out = nn.Linear(DIM * len(NAMES), 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.bags(features).values()).squeeze(1)
        return found


class AveragedJob:
    """A job of four ranks; two groups of two hold all tables. Each rank has its own batches."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        module, sharder = Model(), EmbeddingBagCollectionSharder()
        for name in ("t0", "t1"):
            table = module.bags.embedding_bags[name]
            apply_optimizer_in_backward(RowWiseAdagrad, table.parameters(), {"lr": 0.1})
        tables = construct_module_sharding_plan(
            module.bags,
            SHARDINGS,
            sharder=sharder,
            local_size=GROUP,
            world_size=GROUP,
            device_type="cpu",
        )
        self.model = averaged(module, ShardingPlan({"bags": tables}), sharder)
        dense = [p for n, p in self.model.named_parameters() if "out" in n or "t2" in n]
        self.dense = torch.optim.Adagrad(dense, lr=0.1)
        self.steps = 0

    def checkpointer(self, root: str, **options: Any) -> Checkpointer:
        state = {"fused": self.model.fused_optimizer, "dense": self.dense}
        return Checkpointer(
            root,
            model=self.model,
            state=state,
            policy=options.pop("policy", Consecutive()),
            retention=None,
            **options,
        )

    def train(self, saver: Checkpointer, steps: int, sync: bool = True) -> None:
        """Train; average the replicas after the last step."""
        for _ in range(steps):
            generator = torch.Generator().manual_seed(64 * self.steps + dist.get_rank())
            count = 4 * len(NAMES)
            values = torch.randint(0, ROWS, (count,), generator=generator)
            features = KeyedJaggedTensor(
                keys=[f"of_{name}" for name in NAMES],
                values=values,
                lengths=torch.ones(count, dtype=torch.int32),
            )
            self.dense.zero_grad()
            (self.model(features) - 1).square().sum().backward()
            self.dense.step()
            self.steps += 1
            saver.step()
        if sync:
            self.model.sync()
