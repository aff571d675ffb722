"""The undo journal against a plain model: whatever steps and kills, every row is as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from torchrec_checknrun.marks.intervals import IntervalClock, KeptMarks
from torchrec_checknrun.memory.step_journal import StepJournal
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.shards import LocalShard, Rectangle, TableShape
from torchrec_checknrun.shared_memory.areas import Areas, Layout
from torchrec_checknrun.shared_memory.header import Word

pytestmark = pytest.mark.skipif(not has_extension(), reason="the extension was not built")

ROWS = (7, 1, 30)


class Image:
    """An image of small shards, with a plain copy of their rows after each step."""

    def __init__(self, folder: Path) -> None:
        self.shards = [
            LocalShard(
                f"t{i}",
                TableShape(rows, 3),
                Rectangle(0, rows, 0, 3),
                torch.arange(rows * 3, dtype=torch.float32).reshape(rows, 3),
                {"momentum1": torch.zeros(rows)} if i else {},
            )
            for i, rows in enumerate(ROWS)
        ]
        self.areas = Areas.create(folder / "image", Layout("run", "shards", "x", {}))
        for place in range(2):
            self.areas.add(f"journal-{place}", 64)  # too small: it has to grow
            self.areas.words.publish(Word.JOURNAL_FROM + place, -1)
        self.clock = IntervalClock()
        self.kept = [KeptMarks(torch.zeros(n + 1, dtype=torch.uint8), self.clock) for n in ROWS]
        self.journal = StepJournal(self.areas, self.shards, self.kept, self.clock)
        self.done = 0
        self.states = {0: self.copy()}

    def copy(self) -> list[torch.Tensor]:
        return [tensor.clone() for shard in self.shards for tensor in shard.tensors]

    def change(self, shard: int, ids: list[int]) -> None:
        """Journal and change rows, as a backward pass does."""
        self.journal.append(torch.tensor(ids, dtype=torch.int64), [0, len(ids)], [shard])
        for i in ids:
            if i != -1:
                row = i if 0 <= i < ROWS[shard] else 0
                for tensor in self.shards[shard].tensors:
                    tensor[row] += 1

    def end_step(self) -> None:
        self.done += 1
        self.states = {self.done - 1: self.states[self.done - 1], self.done: self.copy()}
        self.areas.words.publish(Word.DONE, self.done)
        self.journal.end_step()

    def restarted(self) -> StepJournal:
        """Return a journal that knows nothing but the image, as in a new process."""
        return StepJournal(self.areas, self.shards, self.kept, self.clock)

    def is_at(self, step: int) -> bool:
        return all(map(torch.equal, self.copy(), self.states[step]))


CHANGES = st.tuples(
    st.integers(0, len(ROWS) - 1), st.lists(st.integers(-2, 35), min_size=1, max_size=40)
)
STEPS = st.lists(st.lists(CHANGES, max_size=4), min_size=1, max_size=5)


@settings(max_examples=examples(100), deadline=None)  # each example makes a file
@given(STEPS, st.lists(CHANGES, max_size=3), st.booleans(), st.integers(0, 2))
def test_any_steps_are_undone(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[list[tuple[int, list[int]]]],
    torn: list[tuple[int, list[int]]],
    one_further: bool,
    repeats: int,
) -> None:
    image = Image(tmp_path_factory.mktemp("journal"))
    for changes in steps:
        for change in changes:
            image.change(*change)
        image.end_step()
    for change in torn:
        image.change(*change)
    target = image.done - int(one_further)
    for _ in range(repeats + 1):  # a roll-back that is killed is repeated
        image.restarted().undo_to(target)
        assert image.is_at(target)
    image.areas.words.publish(Word.DONE, target)
    journal = image.restarted()
    journal.drop()
    journal.undo_to(0)
    assert image.is_at(target)
    image.areas.remove()


@settings(max_examples=examples(100), deadline=None)  # each example makes a file
@given(STEPS, st.lists(CHANGES, min_size=1, max_size=3))
def test_a_kill_while_journals_are_dropped(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[list[tuple[int, list[int]]]],
    torn: list[tuple[int, list[int]]],
) -> None:
    image = Image(tmp_path_factory.mktemp("journal"))
    for changes in steps:
        for change in changes:
            image.change(*change)
        image.end_step()
    for change in torn:
        image.change(*change)
    target = image.done - 1
    image.restarted().undo_to(target)
    image.areas.words.publish(Word.DONE, target)
    newest = max(range(2), key=lambda place: image.areas.words[Word.JOURNAL_FROM + place])
    image.areas.words.publish(Word.JOURNAL_FROM + newest, -1)  # and here it is killed
    image.restarted().undo_to(target)
    assert image.is_at(target)
    image.areas.remove()


def test_rows_are_marked_in_the_present_interval(tmp_path: Path) -> None:
    image = Image(tmp_path)
    image.change(2, [3, 4, 3])
    image.clock.interval += 1  # a cut between two changes of one step
    image.change(2, [4, 5])
    assert image.kept[2].rows[:7].tolist() == [0, 0, 0, 2, 3, 3, 0]
    image.clock.interval += 1
    image.restarted().undo_to(0)  # what is put back differs from what a checkpoint may hold
    assert image.kept[2].rows[:7].tolist() == [0, 0, 0, 4, 4, 4, 0]
    image.areas.remove()


def test_a_journal_grows_before_rows_change(tmp_path: Path) -> None:
    image = Image(tmp_path)
    image.change(2, list(range(30)))
    assert len(image.areas.get("journal-0")) > 64
    image.restarted().undo_to(0)
    assert image.is_at(0)
    image.areas.remove()


def test_many_steps_use_the_same_marks_of_journaled_rows(tmp_path: Path) -> None:
    image = Image(tmp_path)
    for step in range(600):  # a byte counts the steps
        image.change(2, [step % 30])
        image.end_step()
    image.change(2, [5])
    image.change(1, [0])
    image.restarted().undo_to(image.done)
    assert image.is_at(image.done)
    image.areas.remove()


def test_without_memory_the_steps_before_are_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = Image(tmp_path)
    image.change(0, [1])
    image.end_step()

    def refuse(*_: object) -> Any:
        raise OSError(28, "no space left, says the test")

    monkeypatch.setattr(Areas, "grow", refuse)
    image.change(2, list(range(30)))
    assert image.areas.words[Word.FLOOR] == image.done + 1
    monkeypatch.undo()
    image.end_step()
    image.change(2, list(range(30)))
    image.restarted().undo_to(image.done)
    assert image.is_at(image.done)
    image.areas.remove()


@settings(max_examples=examples(100), deadline=None)  # each example makes a file
@given(st.binary(max_size=200), st.integers(0, 200))
def test_other_bytes_are_no_journal(data: bytes, size: int) -> None:
    weight = torch.zeros(5, 3)
    native = torch.classes.checknrun.StepJournal([weight, torch.zeros(6, dtype=torch.uint8)], [1])
    area = torch.tensor(list(data.ljust(200, b"\xff")), dtype=torch.uint8)
    try:
        rows, _ = native.undo(area, size, 3)
    except ValueError:
        assert not weight.any()  # all rows or none
    else:
        assert rows >= 0


@settings(max_examples=examples(100), deadline=None)  # each example makes a file
@given(CHANGES, st.data())
def test_a_changed_bit_is_found_before_a_row_is_put_back(
    tmp_path_factory: pytest.TempPathFactory, change: tuple[int, list[int]], data: st.DataObject
) -> None:
    image = Image(tmp_path_factory.mktemp("journal"))
    image.change(*change)
    used = image.areas.words[Word.JOURNAL_USED]
    now = image.copy()
    if used:
        at = data.draw(st.integers(0, 8 * used - 1))
        image.areas.get("journal-0")[at // 8] ^= 1 << at % 8
        with pytest.raises(ValueError, match="segment"):
            image.restarted().undo_to(0)
        assert all(map(torch.equal, image.copy(), now))
    image.areas.remove()


def test_ids_of_any_integer_type_and_other_shards_alone(tmp_path: Path) -> None:
    image = Image(tmp_path)
    before = image.copy()
    image.journal.append(torch.tensor([1, 0, 6], dtype=torch.int32), [0, 1, 3], [0, 2])
    for tensor in image.copy():
        assert tensor.shape
    for shard in image.shards:
        for tensor in shard.tensors:
            tensor += 1
    image.restarted().undo_to(0)
    now = image.copy()
    assert torch.equal(now[0][1], before[0][1])
    assert torch.equal(now[3][[0, 6]], before[3][[0, 6]])
    assert torch.equal(now[0][0], before[0][0] + 1)
    image.areas.remove()


def test_marks_are_kept_of_rows_that_could_not_be_journaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = Image(tmp_path)

    def refuse(*_: object) -> Any:
        raise MemoryError("says the test")

    before = [kept.rows.clone() for kept in image.journal._kept]
    monkeypatch.setattr(StepJournal, "_begin", refuse)
    image.journal.append(torch.tensor([1]), [0, 1], [0])
    assert image.areas.words[Word.FLOOR] == image.done + 1
    rows = [kept.rows for kept in image.journal._kept]
    assert bool((rows[0] == image.journal._clock.interval).all())
    assert all(map(torch.equal, rows[1:], before[1:]))
    image.areas.remove()
