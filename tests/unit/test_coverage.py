"""Parts that make up a whole, beside a count of every value."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_checknrun.coverage import tiles
from torchrec_checknrun.shards import Rectangle

WHOLE = Rectangle(3, 7, 2, 6)


@st.composite
def parts_within(draw: st.DrawFn) -> list[Rectangle]:
    """Cuts of the whole, some of them then lost, doubled or moved."""
    rows = sorted(draw(st.sets(st.integers(3, 7))) | {3, 7})
    parts = []
    for top, bottom in pairwise(rows):
        cols = sorted(draw(st.sets(st.integers(2, 6))) | {2, 6})
        parts += [Rectangle(top, bottom, *c) for c in pairwise(cols)]
    for _ in range(draw(st.integers(0, 2))):
        i = draw(st.integers(0, len(parts) - 1))
        row, col = draw(st.integers(3, 7)), draw(st.integers(2, 6))
        parts[i] = Rectangle(row, min(7, row + parts[i].rows), col, min(6, col + parts[i].cols))
    return draw(st.permutations(parts))


@settings(max_examples=500, deadline=None)
@given(parts=parts_within())
def test_like_a_count_of_every_value(parts: list[Rectangle]) -> None:
    counts = np.zeros((7, 6), dtype=int)
    for part in parts:
        counts[part.row_start : part.row_stop, part.col_start : part.col_stop] += 1
    assert tiles(WHOLE, parts) == bool((counts[3:7, 2:6] == 1).all())


def test_an_overlap_as_large_as_the_gap() -> None:
    assert not tiles(WHOLE, [Rectangle(3, 5, 2, 6), Rectangle(4, 6, 2, 6)])
