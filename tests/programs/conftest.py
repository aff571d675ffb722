"""Torchrun's ranks that run programs in forks of theirs, for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.worker_pool import WorkerPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[WorkerPool]:
    """Two ranks; ``run`` gives each one's ``value``, ``error`` or ``signal``."""
    pool = WorkerPool(2, "tests.programs.worker")
    yield pool
    pool.stop()
