"""Keep two ranks that run programs in forks of theirs, for all tests here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.worker_pool import WorkerPool
from tests.programs.resuming import Ranks, killed_and_resumed

Both = Callable[..., tuple[Ranks, Ranks]]


@pytest.fixture(scope="session")
def ranks() -> Iterator[WorkerPool]:
    """Return a pool of two ranks; ``run`` gives each one's ``value``, ``error`` or ``signal``."""
    pool = WorkerPool(2, "tests.programs.worker")
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def both(ranks: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Both:
    """Run a program killed and resumed, and as a whole; once for all tests that ask for it."""
    ends: dict[tuple[str, ...], tuple[Ranks, Ranks]] = {}

    def run(program: str, **options: str) -> tuple[Ranks, Ranks]:
        key = (program, *options.values())
        if key not in ends:
            folder = tmp_path_factory.mktemp("-".join(key))
            ends[key] = killed_and_resumed(ranks, folder, program, **options)
        return ends[key]

    return run
