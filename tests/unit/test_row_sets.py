"""Hold the same rows as plain NumPy finds, across the edges of blocks, too."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from torchrec_checknrun import row_sets
from torchrec_checknrun.marks.layers import add_rows
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.row_sets import DoneRows, RowSet


@settings(max_examples=examples(250), deadline=None)
@given(
    st.integers(0, 50).flatmap(lambda rows: st.binary(min_size=rows, max_size=rows)).map(list),
    st.sampled_from([1, 2, 128, 255]),
    st.sampled_from([1, 2, 3, 20]),
    st.sampled_from([8, 16, 1 << 20]),
    st.booleans(),
    st.data(),
)
def test_it_holds_what_the_marks_say(
    marks: list[int],
    bits: int,
    size: int,
    block: int,
    compiled: bool,
    data: st.DataObject,
) -> None:
    wanted = np.flatnonzero(np.array(marks, np.uint8) & bits)
    compiled = compiled and has_extension()
    with (
        patch.object(row_sets, "_BLOCK", block),
        patch.object(row_sets, "has_extension", lambda: compiled),
    ):
        live = torch.tensor(marks, dtype=torch.uint8)
        rows = RowSet(live, bits)
        assert live.tolist() == marks
        assert len(rows) == len(wanted)
        masks = [mask for _, mask in rows.masks()]
        assert np.flatnonzero(np.concatenate([[], *masks])).tolist() == wanted.tolist()
        start = data.draw(st.integers(0, len(marks)))
        stop = data.draw(st.integers(start, len(marks)))
        found = rows.positions(start, stop)
        assert found.dtype == np.int64
        assert found.tolist() == [i for i in wanted if start <= i < stop]
        spans = list(rows.spans(size))
        parts = [rows.positions(start, stop).tolist() for start, stop, _ in spans]
        assert [len(part) for part in parts] == [count for _, _, count in spans]
        part = rows.part(start, stop)
        others = torch.full((len(marks),), 4, dtype=torch.uint8)
        add_rows(others, rows, 2)
    assert (others - 4).nonzero()[:, 0].tolist() == wanted.tolist()
    assert set(others.tolist()) <= {4, 6}
    assert [i for part in parts for i in part] == wanted.tolist()
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert all(1 <= len(part) <= size for part in parts)
    assert [stop for _, stop, _ in spans[:-1]] == [start for start, _, _ in spans[1:]]
    here = np.concatenate([np.empty(0, np.bool_), *(mask for _, mask in part.masks())])
    assert len(here) == stop - start
    assert (np.flatnonzero(here) + start).tolist() == found.tolist()


@pytest.mark.parametrize("marked", [True, False])
def test_bool_marks_make_a_set(marked: bool) -> None:
    rows = RowSet(torch.full((13,), marked))
    assert len(rows) == (13 if marked else 0)
    assert list(rows.spans(5)) == ([(0, 5, 5), (5, 10, 5), (10, 13, 3)] if marked else [])


def test_it_takes_a_bit_for_a_row() -> None:
    assert RowSet(torch.ones(8001, dtype=torch.uint8))._bits.nbytes == 1001


@given(rows=st.integers(1, 50), one=st.sets(st.integers(0, 49)), other=st.sets(st.integers(0, 49)))
def test_members_and_parts_of_other_sets(rows: int, one: set[int], other: set[int]) -> None:
    one, other = ({row for row in each if row < rows} for each in (one, other))
    sets = [DoneRows(rows), DoneRows(rows)]
    for held, ids in zip(sets, (one, other), strict=True):
        held.add(np.array(sorted(ids), dtype=np.int64))
    every = np.arange(rows)
    assert sets[0].contains(every).tolist() == [row in one for row in range(rows)]
    assert sets[0].is_within(sets[1]) == (one <= other)
