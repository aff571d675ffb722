"""Make a small model sharded over a group of one, with tables whole and in parts."""

from typing import Any

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_checknrun.tracking import Consumer, TrackedModel, TrackedShard

ROWS, DIM = 30, 8
WIDE, TALL, SPLIT = (f"ebc.embedding_bags.{name}" for name in ("wide", "tall", "split"))


class Model(nn.Module):
    """A model with features ``a`` and ``shared``, which feeds two tables, one in two parts."""

    def __init__(self) -> None:
        super().__init__()
        features = {"wide": ["a"], "tall": ["shared", "b"], "split": ["shared"]}
        self.ebc = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=ROWS,
                    embedding_dim=DIM,
                    feature_names=feature_names,
                )
                for name, feature_names in features.items()
            ],
            device=torch.device("meta"),
        )

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled: torch.Tensor = self.ebc(features).values()
        return pooled


def make_model(
    optimizer: type[torch.optim.Optimizer] = RowWiseAdagrad, fused: dict[str, Any] | None = None
) -> nn.Module:
    """Make the model.

    Args:
        fused: further parameters of the kernels.
    """
    torch.manual_seed(0)
    model = Model()
    apply_optimizer_in_backward(optimizer, model.ebc.parameters(), {"lr": 0.5})
    sharder = EmbeddingBagCollectionSharder(fused)
    plan = construct_module_sharding_plan(
        model.ebc,
        {
            "wide": row_wise(),
            "tall": table_wise(rank=0),
            "split": column_wise(ranks=[0, 0]),
        },
        sharder=sharder,
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"ebc": plan}), sharders=[sharder]
    )


def batch(**bags: list[list[int]]) -> KeyedJaggedTensor:
    """Make a batch of one bag or more per feature; features not named look up nothing."""
    samples = max(len(bag) for bag in bags.values())
    by_feature = [bags.get(name, [[]] * samples) for name in ("a", "shared", "b")]
    return KeyedJaggedTensor(
        keys=["a", "shared", "b"],
        values=torch.tensor([i for bags in by_feature for bag in bags for i in bag]).long(),
        lengths=torch.tensor([len(bag) for bags in by_feature for bag in bags]),
    )


def train(model: nn.Module, **bags: list[list[int]]) -> None:
    model(batch(**bags)).square().sum().backward()


def table(model: nn.Module, name: str) -> torch.Tensor:
    """Return a table's weights from TorchRec's own state dict."""
    whole = torch.full((ROWS, DIM), torch.nan)
    for shard in model.state_dict()[f"{name}.weight"].local_shards():
        row, col = shard.metadata.shard_offsets
        part = shard.tensor.detach()
        whole[row : row + part.shape[0], col : col + part.shape[1]] = part
    return whole


def only(tracked: TrackedModel, name: str) -> TrackedShard:
    (shard,) = (shard for shard in tracked.shards if shard.table == name)
    return shard


def modified(tracked: TrackedModel, consumer: Consumer = Consumer.USER) -> dict[str, list[int]]:
    """Return modified rows by table, named by the last part of its name."""
    found = tracked.modified_rows(consumer)
    assert set(found) == {WIDE, TALL, SPLIT}
    return {name.split(".")[-1]: ids.tolist() for name, ids in found.items() if len(ids)}
