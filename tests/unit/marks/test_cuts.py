"""Cut marks without a pass over rows, lose none to interrupts and failures, and reuse memory."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from torchrec_checknrun import marks as room
from torchrec_checknrun.marks import layers
from torchrec_checknrun.marks.cuts import Cut, Cuts
from torchrec_checknrun.marks.layers import Consumer, Share
from torchrec_checknrun.marks.marks import Marks

CPU = torch.device("cpu")
ROWS = 30
CONSUMERS = (Consumer.LAST, Consumer.BASELINE, Consumer.USER)
BOTH = Consumer.LAST | Consumer.BASELINE


def marked(*rows: int) -> Marks:
    marks = Marks(ROWS, CPU)
    marks.mark(torch.tensor(rows))
    return marks


def found(marks: Marks, consumer: Consumer = Consumer.LAST) -> list[int]:
    rows: list[int] = marks.modified(consumer).nonzero()[:, 0].tolist()
    return rows


def test_a_cut_makes_no_pass_over_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    marks, cuts = marked(1, 2), Cuts()
    marks.keep_spare()
    spare, live = marks._spare, marks.live
    assert spare is not None

    def never(*_: object) -> None:
        raise AssertionError("a pass over rows")

    with monkeypatch.context() as patch:
        patch.setattr(layers, "RowSet", never)
        patch.setattr(torch, "zeros", never)
        cut = cuts.take([marks], Consumer.LAST)
        cut.selected(marks, Consumer.LAST)
        cuts.merge(cut)
    assert marks.live.data_ptr() == spare.data_ptr()
    frozen = marks.layers[0].hold()
    assert frozen is not None
    assert frozen.data_ptr() == live.data_ptr()
    assert found(marks) == [1, 2]


@pytest.mark.parametrize("failed", [(), (0,), (1,), (0, 1), (1, 0)])
@pytest.mark.parametrize("small", [False, True])
def test_two_cuts_are_open_at_once(failed: tuple[int, ...], small: bool) -> None:
    marks, cuts = marked(1), Cuts()
    first = cuts.take([marks], Consumer.LAST)
    marks.mark(torch.tensor([2]))
    both = [first, cuts.take([marks], BOTH)]
    marks.mark(torch.tensor([3]))
    if small:
        marks.consolidate()
    for number in failed:
        cuts.merge(both[number])
    for number in {0, 1}.difference(failed):
        cuts.forget(both[number])
    if small:
        marks.consolidate()
    assert found(marks) == sorted([*(number + 1 for number in failed), 3])
    assert found(marks, Consumer.BASELINE) == ([1, 2, 3] if 1 in failed else [3])
    assert found(marks, Consumer.USER) == [1, 2, 3]


def test_two_buffers_take_turns() -> None:
    marks, cuts = marked(), Cuts()
    marks.keep_spare()
    seen = set()
    for row in range(10):
        marks.mark(torch.tensor([row]))
        cut = cuts.take([marks], BOTH)
        cut.consolidate()
        cuts.forget(cut)
        seen.add(marks.live.data_ptr())
        assert not marks.live.any()
    assert len(seen) == 2
    assert found(marks, Consumer.USER) == list(range(10))


def test_bytes_that_are_held_are_not_used_again() -> None:
    marks, cuts = marked(4), Cuts()
    cut = cuts.take([marks], Consumer.LAST)
    layer = marks.layers[0]
    frozen = layer.hold()
    assert frozen is not None
    cut.consolidate()
    assert frozen.nonzero()[:, 0].tolist() == [4]
    layer.release()
    cut.consolidate()
    assert layer.hold() is None
    assert layer.rows(Consumer.LAST).positions(0, ROWS).tolist() == [4]


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("durable", [1, 5, 1000])
def test_layers_do_not_pile_up(consolidated: bool, durable: int) -> None:
    marks, cuts = marked(), Cuts()
    for row in range(100):
        marks.mark(torch.tensor([row % ROWS]))
        cut = cuts.take([marks], Consumer.LAST)
        if consolidated:
            cut.consolidate()
        if row % durable == 0:
            cuts.forget(cut)
        else:
            cuts.merge(cut)
        assert len(marks.layers) <= (3 if consolidated else 17)
    assert found(marks, Consumer.BASELINE) == list(range(ROWS))
    marks.clear(Consumer.EVERY)
    marks.consolidate()
    assert marks.layers == ()


def test_rows_marked_alike_are_packed_once() -> None:
    marks, cuts = marked(1, 9), Cuts()
    cut = cuts.take([marks], Consumer.LAST)
    cut.consolidate()
    layer = marks.layers[0]
    assert len({id(layer.rows(one)) for one in CONSUMERS}) == 1


def test_a_cut_moves_to_other_shards() -> None:
    marks, cuts = marked(1, 2), Cuts()
    cut = cuts.take([marks], BOTH)
    marks.mark(torch.tensor([3]))
    taken = cut.bytes(marks)
    assert taken.nonzero()[:, 0].tolist() == [1, 2]
    new = Marks(ROWS, CPU)
    cut.move([marks], {new: taken.clone()})
    new.consolidate()
    assert torch.equal(cut.bytes(new), taken)
    assert not cut.bytes(marks).any()
    assert found(new) == []
    cuts.merge(cut)
    assert found(marks) == [3]
    assert [found(new, one) for one in CONSUMERS] == [[1, 2], [1, 2], []]


def test_marks_that_change_while_layers_are_united(monkeypatch: pytest.MonkeyPatch) -> None:
    """Discard what was united, if a consumer's marks are cleared or taken meanwhile."""
    marks, cuts = marked(1), Cuts()
    for row in (2, 3):
        cuts.forget(cuts.take([marks], Consumer.LAST))
        marks.mark(torch.tensor([row]))
    cuts.forget(cuts.take([marks], Consumer.LAST))
    union = layers.RowSet.union

    def clear(*args: Any) -> layers.RowSet:
        marks.clear(Consumer.USER)
        return union(*args)

    marks.layers[0].pack()
    with monkeypatch.context() as patch:
        patch.setattr(layers.RowSet, "union", clear)
        marks.consolidate()
    assert (found(marks, Consumer.USER), found(marks, Consumer.BASELINE)) == ([], [1, 2, 3])
    marks.consolidate()
    assert (found(marks, Consumer.USER), found(marks, Consumer.BASELINE)) == ([], [1, 2, 3])
    assert len(marks.layers) == 1


def take_into(taken: list[Cut], cuts: Cuts, shards: list[Marks]) -> None:
    taken.append(cuts.take(shards, BOTH))


class Interrupter:
    """Raise KeyboardInterrupt before the n-th line that the room of marks runs.

    Not where a lock is taken or let go of: there Python looks for no signals.
    """

    def __init__(self, at: int) -> None:
        self._left = at
        self._folder = str(Path(str(room.__file__)).parent)
        self.came = False

    def run(self, act: Callable[[], object]) -> None:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            act()
        except KeyboardInterrupt:
            self.came = True
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(self._folder):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not line.lstrip().startswith("with self."):
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt
        return self._trace


def points(most: int) -> list[int]:
    return list(range(1, most))


def state(shards: list[Marks]) -> list[list[list[int]]]:
    return [[found(marks, one) for one in CONSUMERS] for marks in shards]


@pytest.mark.parametrize("spare", [False, True])
def test_an_interrupted_cut_takes_nothing(spare: bool) -> None:
    came = 0
    for at in points(200):
        shards, cuts = [marked(1, 2), marked(3)], Cuts()
        failed = cuts.take(shards, Consumer.LAST)
        shards[0].mark(torch.tensor([5]))
        for marks in shards if spare else ():
            marks.keep_spare()
        cuts.merge(failed)
        before = state(shards)
        interrupter = Interrupter(at)
        taken: list[Cut] = []
        interrupter.run(partial(take_into, taken, cuts, shards))
        if not interrupter.came:
            break
        came += 1
        assert state(shards) == before
        assert len({marks.live.data_ptr() for marks in shards}) == 2
        # Live bytes are nobody's frozen ones.
        again = cuts.take(shards, BOTH)
        shards[0].mark(torch.tensor([7]))
        assert found(shards[0]) == [7]
        for marks in shards:
            marks.consolidate()
        cuts.merge(again)
        shards[0].clear(Consumer.USER)
        assert found(shards[0]) == [1, 2, 5, 7]
        assert found(shards[1]) == [3]
    assert 20 < came < 199


@pytest.mark.parametrize("name", ["merge", "forget"])
def test_an_interrupted_outcome_is_noted_again(name: str) -> None:
    """Note the outcome once more, after an interruption, as the Checkpointer does."""
    came = 0
    for at in points(100):
        shards, cuts = [marked(1, 2), marked(3)], Cuts()
        cut = cuts.take(shards, BOTH)
        interrupter = Interrupter(at)
        note: Callable[[Cut], None] = getattr(cuts, name)
        interrupter.run(partial(note, cut))
        if not interrupter.came:
            break
        came += 1
        for marks in shards:
            marks.consolidate()
        note(cut)
        assert state(shards)[0] == ([[1, 2]] * 3 if name == "merge" else [[], [], [1, 2]])
    assert 5 < came < 99


def test_no_rows() -> None:
    marks, cuts = Marks(0, CPU), Cuts()
    for _ in range(3):
        marks.mark(torch.tensor([1]))
        cut = cuts.take([marks], BOTH)
        cut.consolidate()
        cuts.merge(cut)
    assert found(marks) == []
    assert not marks.any(Consumer.LAST)


def test_an_empty_share_gives_nothing_back() -> None:
    marks = marked(1)
    marks.give_back(Share(BOTH))
    marks.settle(Share(BOTH))
    assert found(marks) == [1]
