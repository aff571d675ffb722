"""Check which rows each priority takes, against plain references."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_checknrun.marks.priorities import (
    LargestChange,
    LargestGrowth,
    MostUpdated,
    Priority,
    SubSampled,
)

ROWS = 30
STEPS = st.lists(st.lists(st.integers(0, ROWS - 1), max_size=20), min_size=1, max_size=6)
CAPACITY = st.integers(1, ROWS + 5)


def taken(priority: Priority) -> set[int]:
    rows = priority.take().tolist()
    assert len(rows) == len(set(rows)) <= priority.capacity
    return set(rows)


@given(STEPS, CAPACITY)
def test_the_most_updated(steps: list[list[int]], capacity: int) -> None:
    priority = MostUpdated(capacity, torch.zeros(ROWS, 2))
    expected: Counter[int] = Counter()
    for rows in steps:
        priority.note(torch.tensor(rows, dtype=torch.int64))
        expected.update(rows)
    found = taken(priority)
    assert sorted(expected[row] for row in found) == sorted(
        count for _, count in expected.most_common(capacity)
    )
    # Those that were left keep their counts.
    for row in found:
        del expected[row]
    again = taken(priority)
    assert sorted(expected[row] for row in again) == sorted(
        count for _, count in expected.most_common(capacity)
    )


@given(STEPS, CAPACITY)
def test_a_sub_sample(steps: list[list[int]], capacity: int) -> None:
    priority = SubSampled(capacity, torch.zeros(ROWS, 2))
    updates: list[int] = []
    for rows in steps:
        priority.note(torch.tensor(rows, dtype=torch.int64))
        updates += rows
    every_second = set(updates[::2])
    found = taken(priority)
    assert found <= every_second
    if len(every_second) <= capacity:
        assert found == every_second
    else:
        assert len(found) == capacity
    assert taken(priority) == set()
    priority.note(torch.tensor([7, 7], dtype=torch.int64))  # enters again after it was taken
    assert taken(priority) == {7}


def test_a_sub_sample_prefers_rows_that_come_often() -> None:
    """Expect the ten popular rows in the list far more often than the others."""
    source = torch.Generator().manual_seed(0)
    popular = 0
    for seed in range(50):
        priority = SubSampled(10, torch.zeros(1000, 1), seed)
        for _ in range(20):
            rare = torch.randint(10, 1000, (4,), generator=source)
            often = torch.randint(0, 10, (16,), generator=source)
            priority.note(torch.cat([rare, often])[torch.randperm(20, generator=source)])
        popular += sum(row < 10 for row in taken(priority))
    # At random they would be 1 % of 500.
    assert popular > 100


@given(
    st.lists(st.floats(-5, 5, width=32), min_size=ROWS, max_size=ROWS),
    st.lists(st.floats(-5, 5, width=32), min_size=ROWS, max_size=ROWS),
    CAPACITY,
)
def test_the_largest_change(first: list[float], then: list[float], capacity: int) -> None:
    weight = torch.zeros(ROWS, 2)
    priority = LargestChange(capacity, weight)
    saved = torch.zeros(ROWS, 2)
    for values in (first, then):
        weight[:, 0] = torch.tensor(values)
        change = (weight - saved).square().sum(1)
        found = taken(priority)
        left = change[[row for row in range(ROWS) if row not in found]]
        assert all(change[row] > 0 for row in found)
        if len(found) < min(capacity, ROWS):
            assert not left.any()
        elif len(left):
            assert min(change[row] for row in found) >= left.max()
        rows = sorted(found)
        saved[rows] = weight[rows]


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 1)])
def test_the_largest_growth(shape: tuple[int, ...]) -> None:
    sums = torch.zeros(shape)
    priority = LargestGrowth(3, sums)
    assert taken(priority) == set()
    sums.view(-1)[:5] = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0])
    assert taken(priority) == {0, 1, 2}
    sums.view(-1)[2] += 1.5
    sums.view(-1)[9] += 9.0
    assert taken(priority) == {9, 3, 2}  # grown by 9, 2 and 1.5; row 4 by 1
    assert taken(priority) == {4}


def test_a_row_that_diverged_is_taken() -> None:
    weight = torch.zeros(4, 2)
    by_change, by_growth = LargestChange(1, weight), LargestGrowth(1, sums := torch.zeros(4))
    weight[1], weight[2, 0] = 100.0, torch.nan
    sums[1], sums[3] = 100.0, torch.nan
    assert taken(by_change) == {2}
    assert taken(by_growth) == {3}


def test_sums_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="not one number a row"):
        LargestGrowth(1, torch.zeros(4, 2))
    with pytest.raises(ValueError, match="at least one row"):
        MostUpdated(0, torch.zeros(4, 2))
