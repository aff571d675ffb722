"""Run TorchRec's dynamic resharding on gloo, and compare what tests of it need."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.sharding import dynamic_sharding
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv
from torchrec.optim.keyed import CombinedOptimizer

from tests.distributed.models import CPU
from tests.distributed.zoo import Rows, changed_rows, table_arrays
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.tracking import Consumer, TrackedModel

TABLES = {"t0": "table_wise:0", "t1": "table_wise:1", "t2": "table_wise:1"}
COLUMNS = {"t0": "column_wise:0,1", "t1": "column_wise:1,0", "t2": "table_wise:1"}

Change = dict[str, list[int]]
"""By table, the ranks that its columns go to, in equal parts."""


class _Done:
    def wait(self) -> None: ...


class _Gloo:
    """``torch.distributed`` for TorchRec's transfers: gloo can't send to its own rank."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    @staticmethod
    def batch_isend_irecv(operations: list[dist.P2POp]) -> list[Any]:
        own = [op for op in operations if op.peer == dist.get_rank()]
        sent = {op.tag: op.tensor for op in own if op.op is dist.isend}
        for op in own:
            if op.op is dist.irecv:
                op.tensor.copy_(sent[op.tag])
        others = [op for op in operations if op.peer != dist.get_rank()]
        works = iter(dist.batch_isend_irecv(others) if others else [])
        return [_Done() if op.peer == dist.get_rank() else next(works) for op in operations]


@contextmanager
def gloo_can_reshard() -> Iterator[None]:
    """Let TorchRec, made for NCCL, reshard on gloo: its tags are hashes that differ by process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_sharding, "dist", _Gloo())
        patch.setattr(
            dynamic_sharding, "_generate_tag", lambda *what: zlib.crc32(repr(what).encode()) >> 1
        )
        yield


def reshard(
    job: Any,
    change: Change,
    path: str = "embeddings",
    by: str = "model",
    seen: bool = True,
    compute_kernel: str = "fused",
) -> None:
    """Move tables of a collection, and make a new optimizer for the job as TorchRec requires."""
    collection = job.model.module.get_submodule(path)
    moved = EmbeddingModuleShardingPlan()
    for table, ranks in change.items():
        config = collection._table_name_to_config[table]
        width = config.embedding_dim // len(ranks)
        shards = [
            ShardMetadata([0, i * width], [config.num_embeddings, width], f"rank:{rank}/cpu")
            for i, rank in enumerate(ranks)
        ]
        moved[table] = replace(
            collection.module_sharding_plan[table],
            compute_kernel=compute_kernel,
            ranks=ranks,
            sharding_spec=EnumerableShardingSpec(shards),
        )
    assert dist.group.WORLD is not None
    with gloo_can_reshard():
        if by == "model":
            job.model.reshard({path: (0.0, moved)}, path)
        else:
            env = ShardingEnv.from_process_group(dist.group.WORLD)
            update = collection.update_shards if seen else type(collection).update_shards
            update(*([] if seen else [collection]), moved, env, CPU)
    fused = job.model._init_optim(job.model._dmp_wrapped_module)
    job.optimizer = CombinedOptimizer([fused, *job.optimizer.optimizers[1:]])


def union(tracked: TrackedModel, consumer: Consumer) -> Rows:
    """Return the rows modified on any rank; assert that each is in a shard of its rank."""
    own = set()
    for table, rows in tracked.modified_rows(consumer).items():
        places = [s.rectangle for s in tracked.shards if s.table == table]
        assert all(any(r.row_start <= row < r.row_stop for r in places) for row in rows.tolist())
        own |= {(table, row) for row in rows.tolist()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return set().union(*everyone)


def assert_restores(root: str, job: Any, again: Any) -> None:
    """Assert that the newest checkpoint restores this job's tables into another one."""
    with Checkpointer(root, model=again.model, state={"optimizer": again.optimizer}) as saver:
        assert saver.restore() is not None
    wanted, found = table_arrays(job), table_arrays(again)
    for table, arrays in wanted.items():
        assert {n: a.shape for n, a in arrays.items()} == {
            n: a.shape for n, a in found[table].items()
        }
    assert not changed_rows(wanted, found)
