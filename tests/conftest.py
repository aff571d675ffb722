"""Provide worker pools for the whole session, one per number of ranks; give examples time."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from tests.distributed.worker_pool import WorkerPool
from tests.examples import examples

# No test is about the time that an example takes, least of all beside others on a busy machine.
settings.register_profile("patient", deadline=None, max_examples=examples(100))
settings.load_profile("patient")


def pytest_collection_finish() -> None:
    """Exempt what is imported from garbage collections, each of which would take a second."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # nanobind would tell of leaks


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Exempt what a module's tests leave as well, reports and libraries' caches: looks at all
    objects, as for what follows an optimizer, would take longer with each test.
    """
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[[int], WorkerPool]]:
    """Yield ``workers``: ``workers(2).run(function, …)`` runs a function on two ranks."""
    pools: dict[int, WorkerPool] = {}

    def pool(world_size: int) -> WorkerPool:
        return pools.setdefault(world_size, WorkerPool(world_size))

    yield pool
    for started in pools.values():
        started.stop()
