"""A lookup marks the rows that its tables' marks would, one by one."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from torchrec_checknrun.marks import lookups
from torchrec_checknrun.marks.layers import Consumer
from torchrec_checknrun.marks.lookups import mark_lookup
from torchrec_checknrun.marks.marks import Marks
from torchrec_checknrun.native import has_extension

CPU = torch.device("cpu")
compiled = pytest.mark.skipif(
    not has_extension(), reason="the compiled extension was not built: make env builds it"
)


class Kept:
    """Marks that are kept elsewhere as well."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def mark(self, ids: torch.Tensor) -> None:
        self.ids += ids.tolist()


def lists(tables: list[int], features: list[tuple[int, list[int]]]) -> list[set[int]]:
    """Return the rows that count as modified, by table, in plain Python."""
    found: list[set[int]] = [set() for _ in tables]
    for place, ids in features:
        rows = tables[place]
        found[place] |= {id if 0 <= id < rows else 0 for id in ids if id != -1 and rows}
    return found


def mark(marks: list[Marks], features: list[tuple[int, list[int]]], dtype: Any, keep: bool) -> None:
    offsets = [0]
    for _, ids in features:
        offsets.append(offsets[-1] + len(ids))
    every = torch.tensor([id for _, ids in features for id in ids], dtype=dtype)
    mark_lookup(marks, every, offsets, [place for place, _ in features], keep)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, list[int]]]]:
    tables = draw(st.lists(st.integers(0, 12), min_size=1, max_size=4))
    place = st.integers(0, len(tables) - 1)
    ids = st.lists(st.integers(-3, 14), max_size=8)
    return tables, draw(st.lists(st.tuples(place, ids), max_size=6))


@settings(max_examples=examples(200), deadline=None)
@given(cases(), st.sampled_from([torch.int64, torch.int32]), st.booleans(), st.booleans())
def test_rows_are_those_of_plain_sets(
    case: tuple[list[int], list[tuple[int, list[int]]]], dtype: Any, alone: bool, keep: bool
) -> None:
    tables, features = case
    if dtype == torch.int64 and not (alone and has_extension()):
        # PyTorch's own operation takes what FBGEMM has corrected.
        features = [
            (place, [id for id in ids if -1 <= id < max(1, tables[place])])
            for place, ids in features
        ]
    marks = [Marks(rows, CPU) for rows in tables]
    kept, noted = [Kept() for _ in tables], [set[int]() for _ in tables]
    if not alone:
        for each, other, seen in zip(marks, kept, noted, strict=True):
            each.kept = other  # type: ignore[assignment]  # the part of KeptMarks that is called

            def note(ids: torch.Tensor, seen: set[int] = seen) -> None:
                seen.update(ids.tolist())

            each.noted = note
    mark(marks, features, dtype, keep)
    wanted = lists(tables, features)
    for each, other, seen, rows in zip(marks, kept, noted, wanted, strict=True):
        assert set(each.modified(Consumer.LAST).nonzero().flatten().tolist()) == rows
        assert set(each.modified(Consumer.BASELINE).nonzero().flatten().tolist()) == rows
        if not alone:
            assert seen == rows
            assert bool(other.ids) <= keep
            if keep:
                assert {id for id in other.ids if 0 <= id < each.rows} == rows


@compiled
def test_one_operation_marks_all_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Marks, "mark", lambda *_: pytest.fail("table by table"))
    marks = [Marks(5, CPU) for _ in range(3)]
    mark(marks, [(0, [1, 1, 4]), (2, [0]), (0, [2])], torch.int64, keep=True)
    assert [each.modified(Consumer.LAST).nonzero().flatten().tolist() for each in marks] == [
        [1, 2, 4],
        [],
        [0],
    ]


def test_without_the_extension_rows_are_marked_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookups, "has_extension", functools.partial(bool, 0))
    marks = [Marks(5, CPU)]
    mark(marks, [(0, [3, 1])], torch.int64, keep=True)
    assert marks[0].modified(Consumer.LAST).nonzero().flatten().tolist() == [1, 3]


@compiled
@pytest.mark.parametrize(
    ("offsets", "places"),
    [([0, 2], [0]), ([0, 1], [1]), ([0, 1], [-1]), ([1, 0], [0]), ([-1, 1], [0]), ([0], [0])],
)
def test_places_outside_are_refused(offsets: list[int], places: list[int]) -> None:
    marks = [Marks(5, CPU)]
    with pytest.raises((IndexError, ValueError)):
        mark_lookup(marks, torch.tensor([1]), offsets, places, True)
    assert not marks[0].any(Consumer.LAST)
