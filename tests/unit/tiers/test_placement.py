"""Copies lie on another machine, where there is one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchrec_checknrun.tiers.placement import holders


def test_by_hand() -> None:
    assert holders(["a", "a", "a"]) == [1, 2, 0]
    assert holders(["a", "a", "b", "b"]) == [2, 3, 0, 1]
    assert holders(["a", "a", "b"]) == [2, 2, 0]
    assert holders(["a", "b", "c"]) == [1, 2, 0]


@given(st.lists(st.integers(0, 4), min_size=2, max_size=24))
def test_never_on_the_machine_that_may_be_lost(machines: list[int]) -> None:
    found = holders(machines)
    assert all(holder != rank for rank, holder in enumerate(found))
    if len(set(machines)) > 1:
        for rank, holder in enumerate(found):
            assert machines[rank] != machines[holder]


@given(st.integers(2, 5), st.integers(1, 4))
def test_of_alike_machines_each_rank_holds_one(machines: int, each: int) -> None:
    found = holders([rank // each for rank in range(machines * each)])
    assert sorted(found) == list(range(machines * each))
