"""The step that all ranks can go back to, and the reasons why there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_checknrun.memory.agreement import Found, Newest, decide

HERE = Found(incarnation="x", done=8, steps=(8, 7), heads=("old", "new"))
AHEAD = replace(HERE, ahead=(("old", -1), ("new", 8)))
"""An image of a run that began its last checkpoint after more than the end of step 8."""


def test_the_newest_step_of_all_is_the_oldest_newest_of_one() -> None:
    behind = replace(HERE, done=7, steps=(7, 6))
    assert decide([HERE, behind], Newest("new", 5)).step == 7
    assert decide([HERE, HERE], Newest("old", 5)).step == 8


@pytest.mark.parametrize(
    ("other", "newest", "reason"),
    [
        (Found(missing="there is none"), Newest("old"), "rank 1: there is none"),
        (replace(HERE, incarnation="y"), Newest("old"), "not begun together"),
        (replace(HERE, done=6, steps=(6, 5)), Newest("old"), "rank 0: it can go back to steps"),
        (replace(HERE, steps=(7,)), Newest("old"), "rank 1: it can go back to steps [7]"),
        (HERE, Newest("foreign", 3), "ranks 0, 1: foreign is the newest, from which it does not"),
        (HERE, Newest(), "ranks 0, 1: no checkpoint is there, from which it does not descend"),
        (HERE, Newest("new", 9), "it is of step 8, older than new of step 9"),
        (replace(HERE, heads=("old",)), Newest("new", 5), "rank 1: new is the newest"),
        (AHEAD, Newest("new", 8), "rank 1: new holds what was changed after the end of step 8"),
    ],
)
def test_each_reason_is_told(other: Found, newest: Newest, reason: str) -> None:
    decision = decide([HERE, other], newest)
    assert decision.step is None
    assert any(reason in each for each in decision.reasons), decision.reasons


def test_a_checkpoint_of_more_than_a_step_counts_once_it_is_committed() -> None:
    assert decide([AHEAD, HERE], Newest("old", 5)).step == 8
    after = replace(AHEAD, done=9, steps=(9, 8))
    assert decide([after, after], Newest("new", 8)).step == 9
    assert decide([after, AHEAD], Newest("new", 8)).step is None


def test_without_any_checkpoint_images_begun_without_one_count() -> None:
    fresh = replace(HERE, heads=(None, "begun"))
    assert decide([fresh, fresh], Newest()).step == 8


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=4))
def test_the_step_is_one_that_every_rank_has(steps: list[tuple[int, int]]) -> None:
    found = [
        Found(incarnation="x", done=max(two), steps=tuple(set(two)), heads=(None,)) for two in steps
    ]
    decision = decide(found, Newest())
    if decision.step is None:
        assert decision.reasons
    else:
        assert all(decision.step in image.steps for image in found)
        assert decision.step == min(image.done for image in found)
