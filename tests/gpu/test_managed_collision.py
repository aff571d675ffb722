"""Evict rows by the GPU's own kernels; those of other optimizers run in tests/distributed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.test_managed_collision import evictions, go_on, run_through

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="needs a CUDA GPU: FBGEMM resets rows of row-wise Adagrad, and puts hashed ids into "
        "their slots, only there",
    ),
]


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("bag", [True, False])
@pytest.mark.parametrize("fused", ["rowwise_adagrad", "adagrad"])
def test_rows_of_evicted_ids_count_as_modified(tmp_path: Path, fused: str, bag: bool) -> None:
    counts = evictions(str(tmp_path), {"device": "cuda", "fused": fused, "bag": bag})
    assert counts["evicted"] > 20
    assert (counts["missed"], counts["wrong"]) == (0, 0)


def test_rows_of_evicted_hashed_ids_count_as_modified(tmp_path: Path) -> None:
    spec: dict[str, Any] = {"device": "cuda", "fused": "rowwise_adagrad"}
    spec |= {"hashed": True, "evicts": True}
    counts = evictions(str(tmp_path), spec)
    assert counts["evicted"] > 20
    assert (counts["missed"], counts["wrong"]) == (0, 0)


@pytest.mark.parametrize("policy", ["distance_lfu", "lru"])
def test_a_restored_run_goes_on_as_if_never_interrupted(tmp_path: Path, policy: str) -> None:
    spec: dict[str, Any] = {"device": "cuda", "fused": "rowwise_adagrad", "policy": policy}
    for name in reversed(run_through(str(tmp_path), spec)):
        go_on(str(tmp_path), spec, name)
