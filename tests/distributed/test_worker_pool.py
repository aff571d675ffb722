"""A case that fails, hangs or dies in the worker pool fails alone."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist

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
