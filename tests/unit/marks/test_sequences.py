"""Compare marks, cuts and layers with plain sets, through random sequences of what may happen."""

from __future__ import annotations

import copy
import random
import sys
import threading

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tests.examples import ALL, examples, some_of
from torchrec_checknrun.marks.cuts import Cut, Cuts
from torchrec_checknrun.marks.layers import Consumer, Layer, union
from torchrec_checknrun.marks.marks import Marks

ROWS = (21, 8)
CONSUMERS = (Consumer.LAST, Consumer.BASELINE, Consumer.USER)
Rows = dict[Consumer, set[int]]
consumer_sets = st.sampled_from(
    [Consumer.LAST, Consumer.BASELINE, Consumer.USER, Consumer.LAST | Consumer.BASELINE]
)


def found(marks: Marks, consumer: Consumer) -> set[int]:
    return set(marks.modified(consumer).nonzero()[:, 0].tolist())


class Expected:
    """A cut as plain sets: what was marked at the cut."""

    def __init__(self, cut: Cut, shards: list[Marks], marked: list[Rows]) -> None:
        self.cut: Cut | None = cut
        self.consumers = cut.consumers
        self.marked = [{one: set(rows) for one, rows in of_shard.items()} for of_shard in marked]
        self.selected = [{one: cut.selected(marks, one) for one in CONSUMERS} for marks in shards]


class Sequence(RuleBasedStateMachine):
    """Do the same to marks and to sets."""

    open_cuts = Bundle("open_cuts")
    all_cuts = Bundle("all_cuts")
    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.shards = [Marks(rows, torch.device("cpu")) for rows in ROWS]
        self.marked: list[Rows] = [{one: set() for one in CONSUMERS} for _ in ROWS]
        self.cuts = Cuts()

    @rule(which=st.integers(0, 1), rows=st.lists(st.integers(0, 20), max_size=5))
    def mark(self, which: int, rows: list[int]) -> None:
        rows = [row for row in rows if row < ROWS[which]]
        self.shards[which].mark(torch.tensor(rows, dtype=torch.int64))
        for one in CONSUMERS:
            self.marked[which][one] |= set(rows)

    @rule(which=st.integers(0, 1), consumer=st.sampled_from(CONSUMERS), row=st.integers(0, 7))
    def add(self, which: int, consumer: Consumer, row: int) -> None:
        self.shards[which].add(torch.tensor([row]), consumer)
        self.marked[which][consumer].add(row)

    @rule(which=st.integers(0, 1))
    def mark_all(self, which: int) -> None:
        self.shards[which].mark_all()
        for one in CONSUMERS:
            self.marked[which][one] = set(range(ROWS[which]))

    @rule(which=st.integers(0, 1), consumers=consumer_sets)
    def clear(self, which: int, consumers: Consumer) -> None:
        self.shards[which].clear(consumers)
        for one in CONSUMERS:
            if one & consumers:
                self.marked[which][one].clear()

    @rule(target=open_cuts, consumers=consumer_sets)
    def take(self, consumers: Consumer) -> Expected:
        cut = self.cuts.take(self.shards, consumers)
        expected = Expected(cut, self.shards, self.marked)
        for of_shard in self.marked:
            for one in CONSUMERS:
                if one & consumers:
                    of_shard[one].clear()
        return expected

    @rule(target=all_cuts, expected=consumes(open_cuts), twice=st.booleans())
    def merge(self, expected: Expected, twice: bool) -> Expected:
        assert expected.cut is not None
        for _ in range(1 + twice):
            self.cuts.merge(expected.cut)
        for of_shard, then in zip(self.marked, expected.marked, strict=True):
            for one in CONSUMERS:
                if one & expected.consumers:
                    of_shard[one] |= then[one]
        return expected

    @rule(target=all_cuts, expected=consumes(open_cuts))
    def forget(self, expected: Expected) -> Expected:
        assert expected.cut is not None
        self.cuts.forget(expected.cut)
        return expected

    @rule(target=all_cuts, expected=consumes(open_cuts))
    def drop(self, expected: Expected) -> Expected:
        expected.cut = None
        return expected

    @rule(expected=open_cuts)
    def consolidate_a_cut(self, expected: Expected) -> None:
        assert expected.cut is not None
        expected.cut.consolidate()

    @rule(which=st.integers(0, 1))
    def consolidate(self, which: int) -> None:
        marks = self.shards[which]
        marks.consolidate()
        assert len({layer.fate() for layer in marks.layers}) == len(marks.layers)

    @rule(which=st.integers(0, 1))
    def keep_spare(self, which: int) -> None:
        self.shards[which].keep_spare()

    @rule(target=held, which=st.integers(0, 1), number=st.integers(0, 3))
    def hold(self, which: int, number: int) -> tuple[Layer, torch.Tensor, torch.Tensor] | None:
        layers = self.shards[which].layers
        layer = layers[number % len(layers)] if layers else None
        if layer is None or (frozen := layer.hold()) is None:
            return None
        return layer, frozen, frozen.clone()

    @rule(held=consumes(held))
    def release(self, held: tuple[Layer, torch.Tensor, torch.Tensor] | None) -> None:
        if held is not None:
            layer, frozen, as_held = held
            assert torch.equal(frozen, as_held)
            layer.release()

    @rule(expected=st.one_of(open_cuts, all_cuts), which=st.integers(0, 1))
    def row_sets_stay(self, expected: Expected, which: int) -> None:
        for one, selected in expected.selected[which].items():
            rows = union(selected, ROWS[which])
            assert set(rows.positions(0, ROWS[which]).tolist()) == expected.marked[which][one]

    @rule(which=st.integers(0, 1))
    def copy(self, which: int) -> None:
        copied = copy.deepcopy(self.shards[which])
        assert torch.equal(copied.everything(), self.shards[which].everything())
        copied.mark_all()

    @invariant()
    def the_same_rows_are_marked(self) -> None:
        for marks, of_shard in zip(self.shards, self.marked, strict=True):
            for one in CONSUMERS:
                assert found(marks, one) == of_shard[one]
                assert marks.any(one) == bool(of_shard[one])
            everything = marks.everything()
            for row in range(marks.rows):
                assert int(everything[row]) & sum(CONSUMERS) == sum(
                    one for one in CONSUMERS if row in of_shard[one]
                )
            assert marks.all_marked() == all(len(rows) == marks.rows for rows in of_shard.values())


TestSequence = Sequence.TestCase
TestSequence.settings = settings(
    max_examples=examples(300, quick=40), deadline=None, stateful_step_count=40
)


class Trainer:
    """A training thread that marks, cuts, gives back, forgets and clears at random."""

    def __init__(self, seed: int, rows: int) -> None:
        self.random = random.Random(seed)
        self.marks, self.cuts = Marks(rows, torch.device("cpu")), Cuts()
        self.marked: Rows = {one: set() for one in CONSUMERS}
        self.open: list[tuple[Cut, Rows]] = []

    def train(self) -> None:
        ids = [self.random.randrange(self.marks.rows) for _ in range(20)]
        self.marks.mark(torch.tensor(ids))
        for one in CONSUMERS:
            self.marked[one] |= set(ids)

    def cut(self) -> None:
        consumers = self.random.choice([Consumer.LAST, Consumer.LAST | Consumer.BASELINE])
        cut = self.cuts.take([self.marks], consumers)
        taken = {one: set(self.marked[one]) for one in CONSUMERS if one & consumers}
        self.open.append((cut, taken))
        for one in taken:
            self.marked[one].clear()

    def note(self) -> None:
        cut, taken = self.open.pop(self.random.randrange(len(self.open)))
        if self.random.random() < 0.5:
            self.cuts.forget(cut)
            return
        self.cuts.merge(cut)
        for one, again in taken.items():
            self.marked[one] |= again

    def clear(self) -> None:
        self.marks.clear(Consumer.USER)
        self.marked[Consumer.USER].clear()

    def step(self, number: int) -> None:
        self.train()
        if number % 3 == 0:
            self.cut()
        if len(self.open) > self.random.randrange(4):
            self.note()
        if number % 50 == 49:
            self.clear()
        assert {one: found(self.marks, one) for one in CONSUMERS} == self.marked


@pytest.mark.parametrize("seed", some_of(range(3), 0))
def test_consolidation_beside_training(seed: int) -> None:
    """Consolidate all the time in two threads, while this one trains and saves."""
    trainer = Trainer(seed, rows=5000)
    ended, errors = threading.Event(), []

    def consolidate() -> None:
        try:
            while not ended.is_set():
                trainer.marks.consolidate()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=consolidate) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # seconds: threads meet often, and none is kept waiting
    for thread in threads:
        thread.start()
    try:
        for number in range(9000 if ALL else 3000):
            trainer.step(number)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert errors == []
    trainer.marks.consolidate()
    assert len(trainer.marks.layers) <= 1 + 2 ** len(trainer.open)
