"""A case that fails, hangs or dies in the worker pool fails alone."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tests.distributed.fork_server import server
from tests.distributed.small_job import Workers
from tests.distributed.worker_pool import CaseFailed, WorkerPool


def add(number: int) -> int:
    return number + dist.get_rank()


def go_wrong(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("rank 1 doesn't like it")
        if how == "die":
            os._exit(3)
        time.sleep(600)
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "message"),
    [("raise", "rank 1 doesn't like it"), ("die", "the worker died"), ("hang", "no answer")],
)
def test_a_case_that_goes_wrong_fails_alone(how: str, message: str) -> None:
    pool = WorkerPool(2)
    try:
        assert pool.run(add, number=3) == [3, 4]
        with pytest.raises(CaseFailed, match=message):
            pool.run(go_wrong, how=how, timeout=5.0)
        assert pool.run(add, number=5) == [5, 6]
    finally:
        pool.stop()


@pytest.mark.slow
def test_a_fork_server_that_dies_is_replaced() -> None:
    server.cache_clear()  # other pools keep theirs
    pool = WorkerPool(2)
    try:
        os.kill(server(0).pid, signal.SIGKILL)
        with pytest.raises(CaseFailed, match="the fork server doesn't answer"):
            pool.run(add, number=3)
        assert pool.run(add, number=5) == [5, 6]
    finally:
        pool.stop()


def ranks_differ() -> list[Any]:
    return [os.environ["RANK"], hash("a text"), np.random.random(), random.random()]


def test_ranks_are_as_different_as_processes(workers: Workers) -> None:
    for values in zip(*workers(2).run(ranks_differ), strict=True):
        assert values[0] != values[1]
