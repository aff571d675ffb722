"""Check which ranks are lost, the cost of that, and when all ranks must go back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_checknrun import PartialRecovery, PeerCopies, PrioritySaves
from torchrec_checknrun.format.losses import MOST, Loss, merged, portion
from torchrec_checknrun.memory.agreement import Found, Newest
from torchrec_checknrun.memory.partial import decide_partial, lost_ranks

HERE = Found(incarnation="x", done=8, steps=(8, 7), heads=("old", "new"))
GONE = Found(missing="there is none")
NEWEST = Newest("new", 5)
ALL = PartialRecovery(max_pls=1, total_steps=1000)


def test_only_ranks_without_an_image_are_lost() -> None:
    behind = replace(HERE, done=7, steps=(7, 6))
    decision = decide_partial([HERE, GONE, behind, GONE], NEWEST, ALL, ())
    assert (decision.step, decision.lost) == (7, (1, 3))
    assert decision.losses == (Loss(1, 5, 7, 4, 1000), Loss(3, 5, 7, 4, 1000))
    assert portion(decision.losses) == pytest.approx(2 * 2 / (1000 * 4))


def test_where_no_image_is_gone_nothing_is_lost() -> None:
    known = Loss(0, 1, 2, 4, 10)
    decision = decide_partial(
        [HERE, replace(HERE, losses=(known,))], NEWEST, ALL, ["a state has no rule"]
    )
    assert (decision.step, decision.lost, decision.losses) == (8, (), (known,))


def test_only_ranks_with_rows_count() -> None:
    found = [HERE, replace(GONE, holds_rows=False), replace(HERE, holds_rows=False), GONE]
    decision = decide_partial(found, NEWEST, ALL, ())
    assert (decision.lost, decision.losses) == ((1, 3), (Loss(3, 5, 8, 2, 1000),))


@pytest.mark.parametrize(
    "left_behind",
    [
        replace(HERE, incarnation="y"),
        replace(HERE, done=4, steps=(4, 3)),
        replace(HERE, heads=("old",)),
    ],
)
def test_images_that_were_left_behind_count_as_gone(left_behind: Found) -> None:
    assert lost_ranks([HERE, left_behind, HERE], NEWEST) == [1]
    assert decide_partial([HERE, left_behind, HERE], NEWEST, ALL, ()).lost == (1,)


@pytest.mark.parametrize(
    ("found", "newest", "unruled", "reason"),
    [
        ([GONE, GONE], NEWEST, (), "ranks 0, 1: there is none"),
        ([HERE, GONE], Newest("other", 5), (), "rank 0: its image of step 8 was left behind"),
        ([HERE, replace(HERE, incarnation="y")], NEWEST, (), "not begun together"),
        ([HERE, replace(HERE, done=6, steps=(6,)), GONE], NEWEST, (), "the ranks need 6"),
        ([replace(HERE, heads=(None,)), GONE], Newest(), (), "no checkpoint is there"),
        ([HERE, GONE], NEWEST, ["state 'reader'"], "all ranks must go back: state 'reader'"),
    ],
)
def test_each_reason_is_told(
    found: list[Found], newest: Newest, unruled: list[str], reason: str
) -> None:
    decision = decide_partial(found, newest, ALL, unruled)
    assert (decision.step, decision.lost) == (None, ())
    assert any(reason in each for each in decision.reasons), decision.reasons


def test_the_budget_is_of_all_failures() -> None:
    before = (Loss(0, 100, 104, 2, 1000),)
    survivor = replace(HERE, losses=before)
    new = 3 / (1000 * 2)
    enough = PartialRecovery(portion(before) + new, 1000)
    assert decide_partial([survivor, GONE], NEWEST, enough, ()).step == 8
    for known, image in ((before, HERE), ((), survivor)):
        less = replace(enough, max_pls=portion(before) + new - 1e-9)
        decision = decide_partial([image, GONE], NEWEST, less, (), known)
        assert decision.step is None
        assert "portion of lost samples would be 0.0035, and before it was 0.002" in str(decision)


def test_a_ledger_has_an_end() -> None:
    many = tuple(Loss(0, step, step, 2, 1000) for step in range(100, 100 + MOST))
    decision = decide_partial([HERE, GONE], NEWEST, ALL, (), many)
    assert decision.step is None
    assert f"there were {MOST} losses before" in str(decision)


def test_a_repeated_recovery_counts_once() -> None:
    once = decide_partial([HERE, GONE], NEWEST, ALL, ()).losses
    again = decide_partial([replace(HERE, losses=once), GONE], NEWEST, ALL, ()).losses
    assert again == once
    other = decide_partial([GONE, replace(HERE, losses=once)], NEWEST, ALL, ()).losses
    assert [loss.rank for loss in other] == [0, 1]


LEDGERS = st.lists(
    st.builds(
        Loss,
        rank=st.integers(0, 3),
        since=st.integers(0, 9),
        step=st.integers(0, 9),
        ranks=st.just(4),
        total_steps=st.just(100),
    ),
    max_size=8,
)


@given(LEDGERS, LEDGERS)
def test_ledgers_unite(first: list[Loss], second: list[Loss]) -> None:
    both = merged(first, second)
    assert merged(both, both) == both
    assert {(loss.step, loss.rank) for loss in both} == {
        (loss.step, loss.rank) for loss in (*first, *second)
    }
    assert set(second) >= {loss for loss in both if loss not in first}
    assert portion(both) == pytest.approx(sum(loss.portion for loss in both))


@pytest.mark.parametrize("most", [-0.1, 1.5, "0.1", True, float("nan")])
def test_a_budget_is_a_portion(most: object) -> None:
    with pytest.raises(ValueError, match="max_pls must be a portion from 0 to 1"):
        PartialRecovery(most, 100)  # type: ignore[arg-type]  # what users may give


@pytest.mark.parametrize("steps", [0, -1, 10.0, None, True])
def test_the_runs_steps_are_needed(steps: object) -> None:
    with pytest.raises(ValueError, match="total_steps must be the number of steps"):
        PartialRecovery(0.1, steps)  # type: ignore[arg-type]  # what users may give


@pytest.mark.parametrize("most", [0, -1, 1.5, True, "8 GB"])
def test_a_budget_of_copies_is_a_number_of_bytes(most: object) -> None:
    with pytest.raises(ValueError, match="most_bytes must be a number of bytes such as"):
        PeerCopies(most)  # type: ignore[arg-type]  # what users may give


def test_peers_are_peer_copies() -> None:
    with pytest.raises(ValueError, match=r"peers must be PeerCopies\(\) or None, not True"):
        PartialRecovery(0.1, 10, True)  # type: ignore[arg-type]  # what users may give


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_steps": 0}, "every_steps must be a number of steps"),
        ({"every_steps": 3, "fraction": 0}, "fraction must be a part of the rows"),
        ({"every_steps": 3, "fraction": True}, "fraction must be a part of the rows"),
        ({"every_steps": 3, "by": "luck"}, "by must be one of"),
    ],
)
def test_priority_saves_that_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrioritySaves(**arguments)


def test_a_priority_is_priority_saves() -> None:
    with pytest.raises(ValueError, match="priority must be PrioritySaves"):
        PartialRecovery(0.1, 10, priority=7)  # type: ignore[arg-type]  # what users may give
