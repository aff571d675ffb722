"""Make a model of one table with row-wise Adagrad, for benchmarks in which only its size counts."""

from __future__ import annotations

import logging

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recipes.dlrm_criteo import sharding

TABLE = "embedding_bags.table"
_CPU = torch.device("cpu")


def one_table(rows: int, dim: int) -> DistributedModelParallel:
    """Make a model of one table of distinct values, and touch all of its memory."""
    logging.getLogger("torch.fx").setLevel(logging.ERROR)  # hides warnings that TorchRec traces
    table = EmbeddingBagConfig(
        name="table", embedding_dim=dim, num_embeddings=rows, feature_names=["feature"]
    )
    collection = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.1})
    plan = sharding.table_wise(collection, _CPU)
    model = DistributedModelParallel(
        collection, device=_CPU, plan=plan, sharders=[sharding.Sharder()]
    )
    for tensor in model.state_dict().values():
        for shard in tensor.local_shards():
            shard.tensor.uniform_(-1, 1)
    for states in model.fused_optimizer.state_dict()["state"].values():
        for tensor in states.values():
            for shard in tensor.local_shards():
                shard.tensor.uniform_()
    return model


def step(model: DistributedModelParallel, rows: torch.Tensor) -> None:
    """Do one training step that looks up rows, each in a bag of its own."""
    lengths = torch.ones(len(rows), dtype=torch.int32)
    lookup = KeyedJaggedTensor(["feature"], rows, lengths=lengths)
    model(lookup).wait().values().sum().backward()
