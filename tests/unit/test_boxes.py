"""Compare parts of a whole with a count of every value, and cut pieces of a part."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.boxes import tilings
from torchrec_checknrun.boxes import MOST_SPLIT, Box, overlap, tiles


@st.composite
def parts_within(draw: st.DrawFn) -> tuple[Box, list[Box]]:
    """Cut a whole into parts, some of them lost, doubled or moved."""
    whole = Box(tuple(draw(st.lists(st.sampled_from([(0, 1), (3, 7), (2, 4)]), max_size=4))))
    parts = draw(tilings(whole))
    for _ in range(draw(st.integers(0, 2))):
        i = draw(st.integers(0, len(parts) - 1))
        spans = [sorted(draw(st.tuples(*[st.integers(*span)] * 2))) for span in whole.spans]
        parts[i] = Box(tuple((start, stop) for start, stop in spans))
    return whole, draw(st.permutations(parts))


@settings(max_examples=examples(400), deadline=None)
@given(parts_within())
def test_like_a_count_of_every_value(case: tuple[Box, list[Box]]) -> None:
    whole, parts = case
    counts = np.zeros(whole.shape, dtype=int)
    for part in parts:
        counts[part.slices(whole)] += 1
    assert tiles(whole, parts) == bool((counts == 1).all())
    assert (overlap((part, i) for i, part in enumerate(parts)) is not None) == bool(
        (counts > 1).any()
    )


def test_an_overlap_as_large_as_the_gap() -> None:
    whole = Box(((3, 7), (2, 6)))
    assert not tiles(whole, [Box(((3, 5), (2, 6))), Box(((4, 6), (2, 6)))])


def test_more_cuts_than_can_be_looked_at() -> None:
    """Compare blocks from an untrusted checkpoint in seconds, not hours."""
    halves = [((0, 1), (1, 2))] * (MOST_SPLIT + 1)
    parts: Any = [Box(spans) for spans in product(*halves)]
    assert not tiles(Box.whole([2] * (MOST_SPLIT + 1)), parts)
    assert tiles(Box.whole([2] * MOST_SPLIT), [Box(spans) for spans in product(*halves[1:])])


@settings(max_examples=examples(200), deadline=None)
@given(parts_within(), st.integers(1, 30))
def test_pieces_are_small_and_lie_behind_each_other(case: tuple[Box, list[Box]], most: int) -> None:
    whole, parts = case
    places = np.arange(whole.volume).reshape(whole.shape)
    for part in parts:
        pieces = list(part.pieces(most))
        assert all(piece.volume <= most for piece in pieces)
        values = [places[piece.slices(whole)].reshape(-1) for piece in pieces]
        assert np.array_equal(np.concatenate(values), places[part.slices(whole)].reshape(-1))
