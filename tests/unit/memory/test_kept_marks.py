"""Marks kept in an image against sets of rows: what a recovered rank marks is what it must."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_checknrun.marks.layers import Consumer
from torchrec_checknrun.marks.marks import Marks
from torchrec_checknrun.memory.descent import KeptDescent
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.shared_memory.areas import Descent
from torchrec_checknrun.shared_memory.header import Record

pytestmark = pytest.mark.skipif(not has_extension(), reason="the extension was not built")

ROWS = 12


@dataclass
class Plain:
    """The rows that the next checkpoints must hold, as sets."""

    head: str | None = None
    last: set[int] = field(default_factory=set)
    baseline: set[int] = field(default_factory=set)
    taken: dict[str, tuple[set[int], set[int], bool]] = field(default_factory=dict)

    def mark(self, rows: list[int]) -> None:
        self.last |= set(rows)
        self.baseline |= set(rows)
        for last, baseline, _ in self.taken.values():
            last |= set(rows)
            baseline |= set(rows)

    def begin(self, id: str, full: bool) -> None:
        """Remember what is to be marked if this checkpoint turns out to be committed."""
        self.taken[id] = (set(), set() if full else set(self.baseline), full)

    def commit(self, id: str) -> None:
        self.last, self.baseline, _ = self.taken[id]
        self.head, self.taken = id, {}


def kept(marks: Marks, memory: torch.Tensor, record: torch.Tensor) -> KeptDescent:
    return KeptDescent(Record(record, Descent), memory, [marks])


def rows_of(marks: Marks, consumer: Consumer) -> set[int]:
    return set(marks.modified(consumer).nonzero().reshape(-1).tolist())


ACTS = st.lists(
    st.one_of(
        st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=4),
        st.sampled_from(["full", "differential", "commit", "renumber"]),
    ),
    max_size=25,
)


@given(ACTS, st.data())
def test_recovered_marks_are_those_of_the_newest_checkpoint(
    acts: list[list[int] | str], data: st.DataObject
) -> None:
    memory = torch.zeros(ROWS + 1, dtype=torch.uint8)
    record = torch.zeros(1 << 15, dtype=torch.uint8)
    plain, marks = Plain(), Marks(ROWS, torch.device("cpu"))
    descent = kept(marks, memory, record)
    descent.start("line", None, 0, False)
    begun = 0
    for act in acts:
        if isinstance(act, list):
            descent.kept[0].mark(torch.tensor(act))
            plain.mark(act)
        elif act == "renumber":
            descent.renumber()
            plain.taken.clear()
        elif act == "commit":
            if plain.taken:
                newest = list(plain.taken)[-1]
                descent.committed(newest, "line", 0)
                plain.commit(newest)
        else:
            begun += 1
            descent.begin(f"c{begun}", act == "full")
            plain.begin(f"c{begun}", act == "full")
    heads = [plain.head, *plain.taken]
    assert list(descent.heads) == heads
    head = data.draw(st.sampled_from(heads))
    if head != plain.head:
        assert head is not None
        plain.commit(head)
    again = Marks(ROWS, torch.device("cpu"))
    recovered = kept(again, memory, record)
    recovered.read()
    recovered.recover(head)
    assert rows_of(again, Consumer.LAST) == plain.last
    assert rows_of(again, Consumer.BASELINE) == plain.baseline
    assert recovered.heads == (head,)


def test_it_begins_with_what_is_marked() -> None:
    marks = Marks(ROWS, torch.device("cpu"))
    marks.mark(torch.tensor([1, 2]))
    marks.clear(Consumer.LAST)
    marks.mark(torch.tensor([5]))
    descent = kept(marks, torch.zeros(ROWS + 1, dtype=torch.uint8), torch.zeros(4096).byte())
    descent.start("line", "head", 2, True)
    assert (descent.known.head, descent.known.lossy_restores) == ("head", 2)
    descent.recover("head")
    assert rows_of(marks, Consumer.LAST) == {5}
    assert rows_of(marks, Consumer.BASELINE) == {1, 2, 5}
    assert descent.known.must_be_full


def test_all_ways_to_mark_are_kept() -> None:
    marks = Marks(ROWS, torch.device("cpu"))
    descent = kept(marks, torch.zeros(ROWS + 1, dtype=torch.uint8), torch.zeros(4096).byte())
    descent.start("line", None, 0, False)
    marks.kept = descent.kept[0]
    marks.mark(torch.tensor([1]))
    marks.mark(torch.tensor([2], dtype=torch.int32))
    marks.mark(torch.tensor([3]), keep=False)
    marks.add(torch.tensor([4]), Consumer.BASELINE)
    assert descent.kept[0].rows.nonzero().reshape(-1).tolist() == [1, 2, 4]
    marks.mark_all()
    assert bool(descent.kept[0].rows.all())
