"""Provide worker pools for the whole pytest session, one per number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.worker_pool import WorkerPool


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[[int], WorkerPool]]:
    """Yield ``workers``: ``workers(2).run(function, …)`` runs a function on two ranks."""
    pools: dict[int, WorkerPool] = {}

    def pool(world_size: int) -> WorkerPool:
        return pools.setdefault(world_size, WorkerPool(world_size))

    yield pool
    for started in pools.values():
        started.stop()
