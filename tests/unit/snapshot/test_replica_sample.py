"""Compare samples of data-parallel tables bit by bit, as of the instant of their copies."""

from __future__ import annotations

import pytest
import torch

from torchrec_checknrun.shards import LocalShard, Rectangle, TableShape
from torchrec_checknrun.snapshot.replica_sample import SAMPLED_ROWS, ReplicaSample


def shard(rows: int, dtype: torch.dtype = torch.float32) -> LocalShard:
    weight = torch.arange(rows * 4).reshape(rows, 4).to(dtype)
    states = {"sum": torch.zeros(rows), "moment": torch.ones(rows, 4)}
    return LocalShard("t", TableShape(rows, 4), Rectangle(0, rows, 0, 4), weight, states, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, SAMPLED_ROWS])
def test_each_row_of_a_small_table_counts(rows: int, dtype: torch.dtype) -> None:
    known = {ReplicaSample(shard(rows, dtype)).digest()}
    assert ReplicaSample(shard(rows, dtype)).digest() in known
    for row in {0, rows // 2, rows - 1}:
        for name in ("weight", "sum", "moment"):
            changed = shard(rows, dtype)
            of = changed.weight if name == "weight" else changed.optimizer[name]
            of[row] = -9
            digest = ReplicaSample(changed).digest()
            assert digest not in known
            known.add(digest)


def test_a_large_table_is_sampled_evenly() -> None:
    for rows in (SAMPLED_ROWS + 1, 10 * SAMPLED_ROWS, 10 * SAMPLED_ROWS + 7):
        weight, *states = ReplicaSample(shard(rows)).live
        first = weight[:, 0] / 4
        assert SAMPLED_ROWS / 2 < len(first) <= SAMPLED_ROWS
        assert len({int(step) for step in first.diff()}) == 1
        assert first[-1] > 0.99 * rows
        assert {len(state) for state in states} == {len(first)}


def test_the_order_of_states_makes_no_difference() -> None:
    one, other = shard(9), shard(9)
    other.optimizer = dict(reversed(list(other.optimizer.items())))
    assert ReplicaSample(one).digest() == ReplicaSample(other).digest()


def test_copies_are_digested_once_kept() -> None:
    live = shard(50)
    before = ReplicaSample(live).digest()
    sample = ReplicaSample(live)
    for copy, rows in zip(sample.keep(), sample.live, strict=True):
        copy.copy_(rows)
    live.weight.zero_()
    assert sample.digest() == before
    assert ReplicaSample(live).digest() != before


def test_a_table_without_rows() -> None:
    assert ReplicaSample(shard(0)).digest() == ReplicaSample(shard(0)).digest()
