"""Provide a process group of one rank, with gloo beside NCCL for tensors on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="package", autouse=True)
def group() -> Iterator[None]:
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
