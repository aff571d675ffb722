"""Restore TorchRec's object pools, of which each rank has a part, on other numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.layouts import LayoutJob, build
from tests.distributed.test_other_tables import SPEC, Workers, checkpointer, layout
from tests.examples import some_of
from tests.unit.recovery.test_object_pools import SIZE, change, content, make_pool

KINDS = ("tensors", "lists")


def build_with_pools(ranks: int) -> tuple[LayoutJob, dict[str, Any]]:
    job = build(SPEC.to_json(), layout(ranks=ranks))
    pools = {kind: make_pool(kind, "ROW_WISE") for kind in KINDS}
    job.model.module.pools = torch.nn.ModuleDict(pools)
    return job, pools


def save_pools(root: str, ranks: int) -> dict[str, Any]:
    job, pools = build_with_pools(ranks)
    with checkpointer(root, job) as saver:
        for number in range(3):
            for pool in pools.values():
                change(pool, 10 * number + dist.get_rank())
            job.train(1)
            saver.save()
    return {kind: content(pool) for kind, pool in pools.items()}


def restore_pools(root: str, ranks: int) -> dict[str, Any]:
    job, pools = build_with_pools(ranks)
    with checkpointer(root, job) as saver:
        assert saver.restore() is not None
    return {kind: content(pool) for kind, pool in pools.items()}


@pytest.mark.parametrize(("before", "after"), some_of([(2, 1), (1, 2), (2, 2), (1, 1)], 0, 1))
def test_they_come_back_on_other_ranks(
    workers: Workers, tmp_path: Path, before: int, after: int
) -> None:
    saved = workers(before).run(save_pools, root=str(tmp_path), ranks=before)[0]
    found = workers(after).run(restore_pools, root=str(tmp_path), ranks=after)
    assert all(of_rank == saved for of_rank in found)
    assert len(saved["tensors"][0]) == 4 * SIZE
