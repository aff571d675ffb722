"""State that several column shards had comes to the same bits in whatever order they are read."""

from __future__ import annotations

from itertools import permutations
from types import SimpleNamespace
from typing import Any

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
