"""Agree on a step through the store: all ranks act at it or none, whichever is early or late."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from torchrec_checknrun.errors import StoreUnreachable
from torchrec_checknrun.schedule import schedule
from torchrec_checknrun.schedule.schedule import LEAD, Appointments

WORDS = ["save", "end"]


class Turns:
    """A scheduler that lets one thread at a time continue to its next store operation."""

    def __init__(self, ranks: int) -> None:
        self._condition = threading.Condition()
        self._waiting: set[int] = set()
        self._running = set(range(ranks))
        self._turn: int | None = None

    def take(self, rank: int) -> None:
        with self._condition:
            self._running.discard(rank)
            self._waiting.add(rank)
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._turn == rank)
            self._turn = None

    def finish(self, rank: int) -> None:
        with self._condition:
            self._running.discard(rank)
            self._condition.notify_all()

    def give(self, choice: int) -> bool:
        """Let one of the waiting ranks do one operation; return False when all have finished."""
        with self._condition:
            assert self._condition.wait_for(lambda: not self._running, timeout=20)
            if not self._waiting:
                return False
            rank = sorted(self._waiting)[choice % len(self._waiting)]
            self._waiting.discard(rank)
            self._running.add(rank)
            self._turn = rank
            self._condition.notify_all()
        return True


class StoreInTurns:
    """A store whose every operation waits for its turn."""

    def __init__(self, store: dist.Store, turns: Turns, rank: int) -> None:
        self._store, self._turns, self._rank = store, turns, rank

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def operation(*arguments: object) -> Any:
            self._turns.take(self._rank)
            return getattr(self._store, name)(*arguments)

        return operation


@contextmanager
def virtual_time() -> Iterator[None]:
    """Make sleeping take no time."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    with mock.patch.object(schedule, "time", clock):
        yield


def run_in_turns(
    order: Sequence[int],
    steps: Sequence[Sequence[int]],
    wishes: Sequence[str | None],
    patience: float,
    urgent: bool,
) -> list[dict[int, str]]:
    """Return each rank's words, by the number of steps done before.

    Args:
        order: the next rank for each store operation; afterwards all take turns.
        steps: each rank's, by number; ranks meet where the numbers jump, as for a restore.
        wishes: rank 0's, by step.
    """
    ranks = len(steps)
    turns, shared = Turns(ranks), dist.HashStore()
    restoring = Counter[int]()
    words: list[dict[int, str]] = [{} for _ in range(ranks)]
    errors: list[BaseException] = []

    def train(rank: int) -> None:
        try:
            store: Any = StoreInTurns(shared, turns, rank)
            mine = Appointments(store, rank, ranks, patience=patience, urgent_patience=patience)
            for i, step in enumerate(steps[rank]):
                if i and step != steps[rank][i - 1] + 1:
                    restoring[i] += 1
                    while restoring[i] < ranks:
                        turns.take(rank)
                turns.take(rank)  # the step itself
                wish = wishes[step % len(wishes)]
                if (word := mine.agreed(step, wish, urgent)) is not None:
                    words[rank][i] = word
            mine.close()
        except BaseException as error:
            errors.append(error)
        finally:
            turns.finish(rank)

    with virtual_time():
        threads = [threading.Thread(target=train, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        choices = [*order, *range(20_000)]
        finished = any(not turns.give(choice) for choice in choices)
        assert finished, "the ranks wait for each other"
        for thread in threads:
            thread.join()
    assert not errors, errors
    return words


@settings(max_examples=examples(150), deadline=None)
@given(
    order=st.lists(st.integers(0, 5), max_size=150),
    lengths=st.lists(st.integers(0, 12), min_size=2, max_size=3),
    wishes=st.lists(st.sampled_from([None, *WORDS]), min_size=1, max_size=5),
    patience=st.sampled_from([0.0, 0.002, 1.0, 60.0]),
    urgent=st.booleans(),
    first=st.integers(0, 2),
)
@example(  # rank 0 reaches the step between a late rank's look and its word
    order=[1] * 12 + [0] * 2 + [1] * 4 + [0] * 5,
    lengths=[12, 12],
    wishes=["save"],
    patience=60.0,
    urgent=False,
    first=0,
)
def test_all_act_or_none(
    order: list[int],
    lengths: list[int],
    wishes: list[str | None],
    patience: float,
    urgent: bool,
    first: int,
) -> None:
    """Act on all ranks or none although ranks drift, end early, start late or give up waiting."""
    starts = [1 if rank else 1 + first for rank in range(len(lengths))]
    steps = [range(start, last + 1) for start, last in zip(starts, lengths, strict=True)]
    words = run_in_turns(order, steps, wishes, patience, urgent)
    for step in range(max(lengths) + 1):
        there = [rank for rank in range(len(lengths)) if step in steps[rank]]
        assert len({words[rank].get(step - starts[rank]) for rank in there}) <= 1


@settings(max_examples=examples(30), deadline=None)
@given(
    order=st.lists(st.integers(0, 5), max_size=60),
    ranks=st.integers(2, 3),
    drift=st.integers(0, 12),
    ahead=st.booleans(),
)
@example(order=[0] * 60, ranks=2, drift=12, ahead=False)
@example(order=[1] * 60, ranks=2, drift=12, ahead=True)
def test_agree_in_the_end(order: list[int], ranks: int, drift: int, ahead: bool) -> None:
    """Find a step far enough ahead of all ranks, however far ranks run ahead or stay behind."""
    offset = drift if ahead else -drift
    starts = [1 + drift, *([1 + drift + offset] * (ranks - 1))]
    words = run_in_turns(order, [range(start, 151) for start in starts], ["save"], 60.0, False)
    at_steps = [
        {start + i: word for i, word in of_rank.items()}
        for start, of_rank in zip(starts, words, strict=True)
    ]
    assert at_steps[0]
    assert all(of_rank == at_steps[0] for of_rank in at_steps)


class Visible(dist.PrefixStore):
    """A store whose values are visible at once: a TCPStore's set doesn't wait for the server."""

    def set(self, key: str, value: str) -> None:
        super().set(key, value)
        self.check([key])


@pytest.fixture(params=["hash", "tcp"])
def stores(request: pytest.FixtureRequest) -> list[dist.Store]:
    """Connect three ranks to one store."""
    if request.param == "hash":
        return [dist.HashStore()] * 3
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ports = [dist.TCPStore("127.0.0.1", master.port, is_master=False) for _ in range(2)]
    return [Visible("job", store) for store in (master, *ports)]


def test_ranks_in_step_act_together(stores: list[dist.Store]) -> None:
    """Act on wishes ``LEAD`` steps later, in threads with a collective in every step."""
    barrier = threading.Barrier(3, timeout=20)
    words: list[dict[int, str | None]] = [{} for _ in stores]

    def train(rank: int) -> None:
        mine = Appointments(stores[rank], rank, 3)
        for step in range(1, 101):
            barrier.wait()
            wish = "save" if rank == 0 and step % 10 in range(4) else None
            words[rank][step] = mine.agreed(step, wish)

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert words[0] == words[1] == words[2]
    done = [step for step, word in words[0].items() if word]
    assert done == [step + LEAD for step in range(10, 91, 10)]


def test_the_next_step_if_urgent(stores: list[dist.Store]) -> None:
    leader, follower = (Appointments(stores[rank], rank, 2) for rank in range(2))
    assert leader.agreed(5, "end", urgent=True) is None
    assert follower.agreed(5, None) is None
    waits = threading.Thread(target=lambda: heard.append(follower.agreed(6, None)))
    heard: list[str | None] = []
    waits.start()
    assert leader.agreed(6, "end", urgent=True) == "end"
    waits.join(10)
    assert heard == ["end"]


def test_a_late_rank_ignores_it_and_all_meet_further_ahead(stores: list[dist.Store]) -> None:
    leader, follower = (Appointments(stores[rank], rank, 2) for rank in range(2))
    assert leader.agreed(10, "save") is None
    assert follower.agreed(10 + LEAD + 1, None) is None
    # Cancelled, and announced again twice as far ahead
    assert leader.agreed(10 + LEAD, "save") is None
    then = 10 + LEAD + 2 * LEAD
    assert follower.agreed(then - 1, None) is None
    assert leader.agreed(then, "save") == "save"
    assert follower.agreed(then, None) == "save"


def test_off_when_no_longer_wished(stores: list[dist.Store]) -> None:
    leader, follower = (Appointments(stores[rank], rank, 2) for rank in range(2))
    assert leader.agreed(10, "save") is None
    assert follower.agreed(11, None) is None
    assert leader.agreed(10 + LEAD, None) is None
    assert follower.agreed(10 + LEAD, None) is None
    assert leader.agreed(20, "save") is None
    assert follower.agreed(20, None) is None
    assert leader.agreed(20 + LEAD, "save") == "save"
    assert follower.agreed(20 + LEAD, None) == "save"


def test_after_a_restore_of_an_older_step_others_are_announced(stores: list[dist.Store]) -> None:
    """Announce new appointments, whether or not a rank has heard of the first one."""
    ranks = [Appointments(store, rank, 3) for rank, store in enumerate(stores)]
    for step in (99, 100):
        assert [mine.agreed(step, "save") for mine in ranks[:2]] == [None, None]
    for step in range(50, 50 + LEAD):
        assert [mine.agreed(step, "end") for mine in ranks] == [None] * 3
    assert [mine.agreed(50 + LEAD, "end") for mine in ranks] == ["end"] * 3
    # No rank keeps the first appointment when its step comes round
    for step in range(51 + LEAD, 110):
        assert [mine.agreed(step, None) for mine in ranks] == [None] * 3


def test_an_appointment_ahead_of_a_restored_step_is_kept(stores: list[dist.Store]) -> None:
    leader, follower = (Appointments(stores[rank], rank, 2) for rank in range(2))
    for step in (10, 11, 12, 11, 12):
        assert leader.agreed(step, "save") is None
        assert follower.agreed(step, None) is None
    assert leader.agreed(13, "save") == "save"
    assert follower.agreed(13, None) == "save"


@settings(max_examples=examples(100, quick=12), deadline=None)
@given(
    order=st.lists(st.integers(0, 5), max_size=60),
    ranks=st.integers(2, 3),
    wishes=st.lists(st.sampled_from([None, *WORDS]), min_size=1, max_size=5),
    restores=st.lists(st.tuples(st.integers(1, 9), st.integers(-12, 12)), max_size=2),
    patience=st.sampled_from([0.0, 1.0, 60.0]),
    urgent=st.booleans(),
)
def test_all_act_or_none_over_restores(
    order: list[int],
    ranks: int,
    wishes: list[str | None],
    restores: list[tuple[int, int]],
    patience: float,
    urgent: bool,
) -> None:
    """Take all ranks to another step by restores, after the same number of steps.

    Each of the two restores can make all ranks miss a step, and so can ``order`` four times (three
    steps ahead, six, twelve, twenty-four): the next step is 64 leads ahead.
    """
    steps: list[int] = []
    for length, jump in [*restores, (80 * LEAD, 0)]:
        first = max(1, steps[-1] + 1 + jump) if steps else 20
        steps += range(first, first + length)
    words = run_in_turns(order, [steps] * ranks, wishes, patience, urgent)
    assert all(of_rank == words[0] for of_rank in words)
    if None not in wishes and patience:
        assert words[0]


def test_who_has_waited_too_long_calls_it_off(stores: list[dist.Store]) -> None:
    leader = Appointments(stores[0], 0, 2)
    follower = Appointments(stores[1], 1, 2, patience=0.01)
    assert leader.agreed(10, "save") is None
    assert follower.agreed(10 + LEAD, None) is None
    assert leader.agreed(10 + LEAD, "save") is None


def test_whom_nobody_needs_to_wait_for(stores: list[dist.Store]) -> None:
    leader, follower = (Appointments(stores[rank], rank, 2) for rank in range(2))
    assert leader.agreed(10, "save") is None
    assert follower.agreed(10, None) is None
    leader.close()
    assert follower.agreed(10 + LEAD, None) is None


def test_a_store_that_is_gone() -> None:
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", master.port, is_master=False, timeout=timedelta(seconds=2))
    mine = Appointments(store, 1, 2)
    assert mine.agreed(1, None) is None
    del master
    with pytest.raises(StoreUnreachable, match="rank 0 or torchrun's agent"):
        mine.agreed(2, None)
    mine.close()
