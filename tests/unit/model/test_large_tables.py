"""Train a table of more than 4 GiB with FBGEMM's own kernels, and mark all rows that change."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_checknrun.tracking import track

pytestmark = [
    pytest.mark.usefixtures("group"),
    pytest.mark.slow,  # takes seconds to allocate gigabytes, and to look through them
    pytest.mark.skipif(
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 12 << 30,
        reason="no 12 GiB of memory",
    ),
]
DIM = 64
BLOCK = 1 << 20


WRONG = (1 << 24) + 5_000, DataType.FP32, RowWiseAdagrad, 1
RIGHT = [
    ((1 << 24) + 5_000, DataType.FP32, RowWiseAdagrad, 2),
    ((1 << 24) + 5_000, DataType.FP32, torch.optim.SGD, 1),
    ((1 << 25) + 5_000, DataType.FP16, RowWiseAdagrad, 1),
]
Case = tuple[int, DataType, type[torch.optim.Optimizer], int]
"""Number of rows, their type, the fused optimizer, and the number of features of the table."""


@pytest.fixture(autouse=True)
def _room() -> Iterator[None]:
    """Free each model's gigabytes before the next is made."""
    yield
    gc.collect()


@pytest.mark.parametrize(("case", "wrong"), [(WRONG, True), *((case, False) for case in RIGHT)])
def test_rows_behind_4_gib(case: Case, wrong: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Warn where FBGEMM trains other rows than were looked up, which count as modified, too."""
    rows, _, _, features = case
    ids = [7, rows - 4_000, rows - 7]
    model = make_model(*case)
    tracked = track(model)
    with caplog.at_level(logging.WARNING, "torchrec_checknrun"):
        model(lookups(ids, features)).values().sum().backward()
    (shard,) = tracked.shards
    changed = changed_rows(shard.local.weight)
    assert len(changed) == len(ids)
    assert (changed != ids) == wrong
    assert ("4 GiB" in caplog.text) == wrong
    (modified,) = tracked.modified_rows().values()
    assert torch.isin(torch.tensor(changed), modified).all()
    assert (len(modified) == rows) == wrong
    tracked.close()


def make_model(
    rows: int, data_type: DataType, optimizer: type[torch.optim.Optimizer], features: int
) -> nn.Module:
    """Make a sharded model of one table of zeros."""
    model = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name="large",
                num_embeddings=rows,
                embedding_dim=DIM,
                feature_names=[f"f{number}" for number in range(features)],
                data_type=data_type,
                init_fn=nn.init.zeros_,
            )
        ],
        device=torch.device("meta"),
    )
    apply_optimizer_in_backward(optimizer, model.parameters(), {"lr": 0.5})
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        model,
        {"large": table_wise(rank=0)},
        sharder=sharder,
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"": plan}), sharders=[sharder]
    )


def lookups(ids: list[int], features: int) -> KeyedJaggedTensor:
    """Make a batch of a sample for each id, which all features look up."""
    return KeyedJaggedTensor(
        keys=[f"f{number}" for number in range(features)],
        values=torch.tensor(ids * features),
        lengths=torch.ones(len(ids) * features, dtype=torch.int64),
    )


def changed_rows(weight: torch.Tensor) -> list[int]:
    """Return the rows that are not zero."""
    blocks = ((first, weight[first : first + BLOCK]) for first in range(0, len(weight), BLOCK))
    return [first + int(row) for first, rows in blocks for row in (rows != 0).any(1).nonzero()]
