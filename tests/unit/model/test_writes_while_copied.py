"""Races between training and the background that copies a cut's rows, each at its worst moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.tracked_model import TALL, make_model, only, train
from torchrec_checknrun import Quantization
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.marks.row_copies import KernelCopies
from torchrec_checknrun.model.hand_written import WriteWatch
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.run.by_hand import WrittenByHand
from torchrec_checknrun.snapshot.cut_rows import CopyOnWriteMemory, CutRows
from torchrec_checknrun.snapshot.snapshot import take_rows
from torchrec_checknrun.snapshot.staged import StagedRows, rows_size
from torchrec_checknrun.tracking import TrackedModel, track


class Cut:
    """A cut of a small model, whose rows are copied on write."""

    def __init__(self) -> None:
        self.model = make_model()
        self.tracked: TrackedModel = track(self.model)
        snapshots, self.cut = take_rows(self.tracked, None)
        memory = CopyOnWriteMemory(1 << 20, self.tracked.shards)
        self.rows = CutRows(memory, snapshots, 5.0)
        self.rows.protect()
        self.watches = WriteWatch.of(shard.kernel_module for shard in self.tracked.shards)
        assert all(watch.copies is not None for watch in self.watches)

    def copy_all(self) -> None:
        """Copy all rows, as the background does."""
        for snapshot in self.rows.snapshots:
            shard = snapshot.shard
            encoding = Quantization().for_table(shard.table, shard.shape.rows)
            staged = StagedRows.plan(shard, snapshot.count, encoding, 0)
            memory = torch.zeros(rows_size(shard, snapshot.count), dtype=torch.uint8)
            positions = snapshot.positions(0, shard.rectangle.rows)
            staged.copy(shard, positions, memory, snapshot.copies)

    def write_outside(self) -> None:
        """Write a row by hand, unannounced."""
        with torch.no_grad():
            dict(self.model.named_parameters())[f"{TALL}.weight"][3] += 1


@pytest.fixture
def cut(group: None) -> Iterator[Cut]:
    if not has_extension():
        pytest.skip("the compiled extension was not built: rows are copied at the cut")
    made = Cut()
    yield made
    made.rows.close()
    made.tracked.close()


class Ending(WriteWatch):
    """A watch whose copies are gone right after they were looked at, once."""

    left: Any = None

    @property
    def copies(self) -> KernelCopies | None:
        found, self.left = self.left, None
        return found

    @copies.setter
    def copies(self, copies: KernelCopies | None) -> None:
        self.left = copies


def write_rows(cut: Cut) -> None:
    shard = only(cut.tracked, TALL)
    shard.write_rows([1], shard.read_rows([1]).weight)


def write_outside(cut: Cut) -> None:
    cut.write_outside()
    cut.tracked.check_writes()


def overwrite(cut: Cut) -> None:
    for shard in cut.tracked.shards:
        shard.mark_all(everywhere=True)


ACTIONS: dict[str, Callable[[Cut], None]] = {
    "write_rows": write_rows,
    "train": lambda cut: train(cut.model, a=[[1, 2]], shared=[[3]], b=[[4, 4]]),
    "check": write_outside,
    "overwrite": overwrite,
}


@pytest.mark.parametrize("action", sorted(ACTIONS))
def test_copies_may_end_at_any_moment(cut: Cut, action: str) -> None:
    cut.copy_all()
    cut.rows.finish()
    for watch in cut.watches:
        copies = watch.copies
        watch.__class__ = Ending
        vars(watch)["left"] = copies
    ACTIONS[action](cut)
    assert any(vars(watch)["left"] is None for watch in cut.watches)  # it was looked at


def test_a_write_outside_is_told_before_it_is_taken_as_seen(
    cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut.copy_all()
    told = WriteWatch.written_outside

    def background_comes_first(watch: WriteWatch) -> SaveFailed:
        with monkeypatch.context() as patch, suppress(SaveFailed):
            patch.setattr(WriteWatch, "written_outside", told)
            cut.rows.finish()
        return told(watch)

    monkeypatch.setattr(WriteWatch, "written_outside", background_comes_first)
    cut.write_outside()
    cut.tracked.check_writes()
    assert isinstance(cut.rows.copies.failure, SaveFailed)


def test_an_announced_write_is_no_write_outside_at_any_moment(
    cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []
    for watch in cut.watches:
        own = watch._look

        def look(watch: WriteWatch = watch, own: Callable[[], Any] = own) -> Any:
            with monkeypatch.context() as patch:
                patch.setattr(watch, "_look", own)
                found.append(watch.is_written())  # as the background may ask just now
            return own()

        monkeypatch.setattr(watch, "_look", look)
    shard = only(cut.tracked, TALL)
    with cut.tracked.writing(TALL, [2]):
        shard.local.weight[2] += 1
    shard.write_rows([4], shard.read_rows([4]).weight + 1)
    assert found
    assert not any(found)


def test_a_sample_of_given_up_rows_names_the_reason(cut: Cut) -> None:
    (snapshot,) = [s for s in cut.rows.snapshots if s.shard.table == TALL]
    assert len(snapshot.sampled(5).weight) == 5
    cut.write_outside()
    cut.tracked.check_writes()
    with pytest.raises(SaveFailed, match="written outside of training"):
        snapshot.sampled(9)


class ByHand(WrittenByHand):
    """The part of a Checkpointer that marks rows, of a cut's model."""

    def __init__(self, cut: Cut) -> None:
        self._target: Any = SimpleNamespace(tracked=cut.tracked)
        self._survival: Any = SimpleNamespace(missed=lambda _: None)


MARKS: dict[str, Callable[[WrittenByHand], None]] = {
    "mark": lambda by_hand: by_hand.mark(TALL, [3]),
    "all": lambda by_hand: by_hand.mark_all(TALL),
}


@pytest.mark.parametrize("how", sorted(MARKS))
def test_marks_that_may_come_too_late_are_told_of(
    cut: Cut, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    by_hand = ByHand(cut)
    for _ in range(2):
        MARKS[how](by_hand)
    told = [line for line in caplog.messages if "marked while a checkpoint was still" in line]
    assert len(told) == 1
    assert TALL in told[0]


@pytest.mark.parametrize("how", sorted(MARKS))
def test_marks_of_rows_that_are_copied_are_not_told_of(
    cut: Cut, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    cut.copy_all()
    cut.rows.finish()
    MARKS[how](ByHand(cut))
    assert "marked while" not in caplog.text


def test_writes_that_are_announced_are_not_told_of(
    cut: Cut, caplog: pytest.LogCaptureFixture
) -> None:
    with ByHand(cut).writing(TALL, [3]):
        cut.write_outside()
    assert "marked while" not in caplog.text
