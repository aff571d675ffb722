"""Bring back TorchRec's object pools: rows by hand of a module that no optimizer trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.keyed_jagged_tensor_pool import KeyedJaggedTensorPoolSharder
from torchrec.distributed.tensor_pool import TensorPoolSharder
from torchrec.distributed.types import ObjectPoolShardingPlan, ObjectPoolShardingType, ShardingEnv
from torchrec.modules.keyed_jagged_tensor_pool import KeyedJaggedTensorPool
from torchrec.modules.tensor_pool import TensorPool
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.models import Job
from tests.unit.run.jobs import make_job, train
from tests.unit.run.lives import Lives, by_images
from torchrec_checknrun.native import has_extension

pytestmark = pytest.mark.usefixtures("one_rank")

CPU = torch.device("cpu")
SIZE = 20
KINDS = {
    "tensors": ("tensors", None),
    "tensors in parts": ("tensors", "ROW_WISE"),
    "lists": ("lists", None),
    "lists in parts": ("lists", "ROW_WISE"),
}


def make_pool(kind: str, sharding: str | None) -> Any:
    pool: nn.Module
    sharder: Any
    if kind == "tensors":
        pool, sharder = TensorPool(SIZE, 4, torch.float, device=CPU), TensorPoolSharder()
    else:
        lengths = {"clicks": 3, "views": 2}
        pool = KeyedJaggedTensorPool(SIZE, lengths, torch.int64, device=CPU)
        sharder = KeyedJaggedTensorPoolSharder()
    if sharding is None:
        return pool
    plan = ObjectPoolShardingPlan(ObjectPoolShardingType[sharding])
    assert dist.group.WORLD is not None
    return sharder.shard(pool, plan, ShardingEnv.from_process_group(dist.group.WORLD), CPU)


def change(pool: Any, number: int) -> None:
    """Write to some places of a pool."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randperm(SIZE, generator=generator)[:5]
    if "Jagged" not in type(pool).__name__:
        pool.update(ids, torch.rand(5, 4, generator=generator))
        return
    lengths = torch.cat([torch.randint(top, (5,), generator=generator) for top in (4, 3)])
    values = torch.randint(1000, (int(lengths.sum()),), generator=generator)
    pool.update(ids, KeyedJaggedTensor(["clicks", "views"], values, lengths=lengths))


def content(pool: Any) -> list[list[float]]:
    """Look up all that a pool has."""
    found = pool.lookup(torch.arange(SIZE))
    found = found.wait() if hasattr(found, "wait") else found
    if isinstance(found, KeyedJaggedTensor):
        return [found.values().tolist(), found.lengths().tolist()]
    return [found.flatten().tolist()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("images", [False, True])
def test_they_come_back_as_they_were(lives: Lives, kind: str, images: bool) -> None:
    if images and not has_extension():
        pytest.skip("the extension was not built")

    def make(seed: int) -> Job:
        job = make_job(seed)
        job.model.module.pool = make_pool(*KINDS[kind])
        return job

    lives.make = make
    options = {} if images else {"survive": None}
    wanted: list[list[float]] = []
    for life in range(3):
        job, saver = lives.begin(**options)
        pool = job.model.module.pool
        report = saver.restore()
        assert life == 0 or content(pool) == wanted
        assert not images or life == 0 or by_images(report)
        for step in range(2):
            change(pool, 10 * life + step)
            train(job, saver)
        wanted = content(pool)
        if not images:
            saver.save()
        lives.die()
