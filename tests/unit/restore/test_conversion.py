"""State that several column shards had comes to the same bits in whatever order they are read."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from torchrec_checknrun.restore.conversion import Conversion
from torchrec_checknrun.shards import LocalShard, Rectangle, Rows, TableShape

ROWS = 20_000
SHARDS = ((0, 4), (4, 8), (8, 12))


def joined(order: tuple[int, ...], states: list[torch.Tensor]) -> torch.Tensor:
    """Return the state of rows that three column shards had, which come in some order."""
    whole = Rectangle(0, ROWS, 0, 12)
    state = torch.zeros(ROWS)
    shard = LocalShard("t", TableShape(ROWS, 12), whole, torch.zeros(ROWS, 12), {"sum": state})
    conversion = Conversion(shard)
    for i in order:
        header: Any = SimpleNamespace(rectangle=Rectangle(0, ROWS, *SHARDS[i]))
        rows = Rows(torch.arange(ROWS), torch.zeros(ROWS, 4), {"sum": states[i]})
        conversion.scatter(header, rows)
    conversion.finish()
    return state


@pytest.mark.parametrize("pointwise", [False, True])
def test_shards_come_in_any_order(pointwise: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    size = (ROWS, 4) if pointwise else (ROWS,)
    states = [torch.rand(size, generator=draw) * 3 for _ in SHARDS]
    # Many of these means lie in the middle of two fp32 numbers.
    first, *others = [joined(order, states) for order in permutations(range(3))]
    assert all(torch.equal(first, other) for other in others)
    if not pointwise:
        assert torch.equal(first, (torch.stack(states).double().sum(0) / 3).float())


@pytest.mark.usefixtures("small_operations")
@pytest.mark.parametrize("together", [True, False])
def test_chunks_of_the_same_columns_come_at_once(together: bool) -> None:
    """Each thread has other rows; no value is lost to another thread's first one."""
    rows, threads = 240, 4
    whole = Rectangle(0, rows, 0, 12)
    for _ in range(200):
        state, weight = torch.zeros(rows), torch.zeros(rows, 12)
        shard = LocalShard("t", TableShape(rows, 12), whole, weight, {"sum": state})
        conversion, start = Conversion(shard), threading.Barrier(threads)

        def put(number: int, into: Conversion, begin: threading.Barrier) -> None:
            own = np.array_split(np.arange(rows), threads)[number]
            if not together:  # rows that don't follow each other
                own = np.arange(number, rows, threads)
            ids = torch.from_numpy(own)
            begin.wait(30)
            for columns in SHARDS:
                header: Any = SimpleNamespace(rectangle=Rectangle(0, rows, *columns))
                values = ids[:, None] + torch.arange(*columns)
                into.scatter(header, Rows(ids, values.float(), {"sum": ids.float() + 1}))

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(put, range(threads), [conversion] * threads, [start] * threads))
        conversion.finish()
        assert torch.equal(state, torch.arange(rows) + 1.0)
        assert torch.equal(weight, torch.arange(rows)[:, None] + torch.arange(12.0))
