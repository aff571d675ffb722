"""Test triggers alone, and the schedule made from them on one rank and on several."""

from __future__ import annotations

import math
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.schedule import preemption
from torchrec_checknrun.schedule.preemption import EXIT_CODE, Preemption, Sigterm
from torchrec_checknrun.schedule.schedule import LEAD, Schedule
from torchrec_checknrun.schedule.triggers import (
    AtEnd,
    EverySeconds,
    EverySteps,
    Moment,
    OnSigterm,
    Trigger,
)

T = TypeVar("T")


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class WhenAsked:
    """A user's trigger that looks at a file, and says yes just once."""

    path: Path
    by_step: bool = False

    def due(self, now: Moment) -> bool:
        there = self.path.exists()
        self.path.unlink(missing_ok=True)
        return there


class ThreadRanks(Ranks):
    """A group of ranks that are threads of this process."""

    def __init__(self, rank: int, world_size: int, shared: dist.Store) -> None:
        self._rank, self._world_size, self._shared = rank, world_size, shared
        self.stores: list[dist.Store] = []

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    def from_rank_0(self, decide: Callable[[], T]) -> T:
        raise AssertionError("no collective after the start")

    def store(self) -> dist.Store:
        self.stores.append(dist.PrefixStore(str(len(self.stores)), self._shared))
        return self.stores[-1]


ALONE = Ranks.of(None)


@settings(max_examples=examples(30), deadline=None)
@given(every=st.integers(1, 7), start=st.integers(0, 20))
def test_every_steps_is_due_at_multiples(every: int, start: int) -> None:
    schedule = Schedule([EverySteps(every)], ALONE)
    due = [step for step in range(start, start + 30) if schedule.due(step)]
    assert due == [step for step in range(start, start + 30) if step % every == 0]


def test_every_seconds_since_the_last_one_began() -> None:
    clock = Clock()
    schedule = Schedule([EverySeconds(10), EverySteps(100)], ALONE, clock)
    clock.now = 9.9
    assert not schedule.due(1)
    clock.now = 10.0
    assert schedule.due(2)
    assert schedule.due(3)  # no save was begun
    schedule.saved()
    assert not schedule.due(4)
    clock.now = 15.0
    schedule.saved()  # due to another trigger
    clock.now = 24.0
    assert not schedule.due(5)
    clock.now = 25.0
    assert schedule.due(6)


def test_a_trigger_of_ones_own_is_remembered(tmp_path: Path) -> None:
    wanted = tmp_path / "save"
    schedule = Schedule([WhenAsked(wanted)], ALONE)
    assert not schedule.due(1)
    wanted.touch()
    assert schedule.due(2)
    assert not wanted.exists()
    assert schedule.due(3)  # nothing was begun at step 2
    schedule.saved()
    assert not schedule.due(4)


@pytest.mark.parametrize(("triggers", "at_end"), [([AtEnd()], True), ([EverySteps(1)], False)])
def test_at_end_is_known(triggers: list[Trigger], at_end: bool) -> None:
    schedule = Schedule(triggers, ALONE)
    assert schedule.at_end is at_end
    schedule.close()


@pytest.mark.parametrize("wrong", [0, -1, True, math.inf, math.nan, "600", None])
@pytest.mark.parametrize("trigger", [EverySteps, EverySeconds, OnSigterm])
def test_what_makes_no_sense(trigger: Callable[[Any], Trigger], wrong: Any) -> None:
    with pytest.raises(ValueError, match=trigger.__name__):
        trigger(wrong)


@pytest.mark.parametrize("trigger", [EverySeconds, OnSigterm])
def test_no_clock_counts_as_far(trigger: Callable[[Any], Trigger]) -> None:
    with pytest.raises(ValueError, match=trigger.__name__):
        trigger(10**400)


def test_steps_are_whole() -> None:
    with pytest.raises(ValueError, match=r"a whole number as 1000, not 2\.5"):
        EverySteps(2.5)  # type: ignore[arg-type]  # mypy sees it, too


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_save_together_though_only_rank_0_has_the_time(ranks: int) -> None:
    """Agree also on steps known without asking; measure time from those as well."""
    store, barrier = dist.HashStore(), threading.Barrier(ranks, timeout=20)
    due: list[list[int]] = [[] for _ in range(ranks)]

    def train(rank: int) -> None:
        clock = Clock()
        triggers: list[Trigger] = [EverySteps(50), EverySeconds(20)]
        schedule = Schedule(triggers, ThreadRanks(rank, ranks, store), clock)
        for step in range(1, 101):
            barrier.wait()
            clock.now += 1.0 if rank == 0 else 100.0  # no other clock counts
            if schedule.due(step):
                due[rank].append(step)
                schedule.saved()
        schedule.close()

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert due[0] == [20 + LEAD, 40 + 2 * LEAD, 50, 70 + LEAD, 90 + 2 * LEAD, 100]
    assert all(steps == due[0] for steps in due)


def test_steps_alone_need_no_store() -> None:
    ranks = ThreadRanks(1, 2, dist.HashStore())
    schedule = Schedule([EverySteps(2), AtEnd()], ranks)
    assert [schedule.due(step) for step in range(1, 5)] == [False, True, False, True]
    assert not ranks.stores


@pytest.fixture
def terminated() -> Iterator[list[int]]:
    """Install a handler before the test's; yield the signals that it received, and restore it."""
    calls: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    yield calls
    signal.signal(signal.SIGTERM, before)


def _send_sigterm(heard: Callable[[], bool]) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    deadline = time.monotonic() + 60
    while not heard():
        assert time.monotonic() < deadline, "SIGTERM was not heard"
        time.sleep(0.001)


def test_sigterm_makes_the_next_step_the_last(terminated: list[int]) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    schedule = Schedule([OnSigterm(grace_seconds=60)], ALONE)
    assert not schedule.due(1)
    assert schedule.remaining_seconds == float("inf")
    _send_sigterm(lambda: schedule.remaining_seconds < 60)
    assert schedule.due(2)
    assert schedule.ending
    assert 50 < schedule.remaining_seconds < 60
    assert schedule.due(3)  # no save was possible at step 2
    assert not terminated
    schedule.end()
    assert terminated == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is handler
    # The handler has returned: the process continues normally.
    assert (schedule.due(4), schedule.ending) == (False, False)
    schedule.close()
    assert terminated == [signal.SIGTERM]


def test_without_a_handler_the_process_exits_as_after_sigterm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """End the process after the grace time should an exception keep it from exiting."""
    ended: list[str] = []

    def end(reason: str) -> NoReturn:
        ended.append(reason)
        raise SystemExit  # ends this thread alone

    monkeypatch.setattr(preemption, "_exit", end)
    schedule = Schedule([OnSigterm(grace_seconds=3)], ALONE)
    _send_sigterm(lambda: schedule.due(1))
    with pytest.raises(SystemExit) as exit_info:
        schedule.end()
    assert exit_info.value.code == EXIT_CODE == 143
    schedule.close(failed=True)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    deadline = time.monotonic() + 30
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended == ["SIGTERM was 3 seconds ago"]


def test_in_a_process_with_many_open_files(terminated: list[int]) -> None:
    """Hear the signal with descriptors beyond 1,023, as of many readers or memory-mapped files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 2048), before[1]))
    try:
        with ExitStack() as stack:
            while stack.enter_context(open(os.devnull)).fileno() < 1024:
                pass
            schedule = Schedule([OnSigterm()], ALONE)
            _send_sigterm(lambda: schedule.remaining_seconds < 60)
            schedule.close()
        assert terminated == [signal.SIGTERM]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_where_the_system_gives_no_more_threads(
    terminated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """End the process after the grace time all the same."""
    ended, start = threading.Event(), threading.Thread.start

    def no_more(thread: threading.Thread) -> None:
        if thread.name == "checknrun-log":
            raise RuntimeError("can't start new thread")
        start(thread)

    def end(reason: str) -> NoReturn:
        ended.set()
        raise SystemExit  # ends this thread alone

    monkeypatch.setattr(threading.Thread, "start", no_more)
    monkeypatch.setattr(preemption, "_exit", end)
    schedule = Schedule([OnSigterm(grace_seconds=0.2)], ALONE)
    _send_sigterm(lambda: schedule.remaining_seconds < 60)
    assert ended.wait(20)
    schedule.close()


def test_closed_before_the_next_step(terminated: list[int]) -> None:
    schedule = Schedule([AtEnd(), OnSigterm()], ALONE)
    _send_sigterm(lambda: schedule.remaining_seconds < 60)
    schedule.close()
    assert terminated == [signal.SIGTERM]


def test_closed_without_any_sigterm(terminated: list[int]) -> None:
    handler, threads = signal.getsignal(signal.SIGTERM), threading.active_count()
    with socket.socket() as before:
        before.setblocking(False)
        original = signal.set_wakeup_fd(before.fileno())
        try:
            schedule = Schedule([OnSigterm()], ThreadRanks(0, 2, dist.HashStore()))
            assert signal.getsignal(signal.SIGTERM) is not handler
            schedule.close()
            assert signal.getsignal(signal.SIGTERM) is handler
            assert signal.set_wakeup_fd(before.fileno()) == before.fileno()
        finally:
            signal.set_wakeup_fd(original)
    os.kill(os.getpid(), signal.SIGTERM)
    assert terminated == [signal.SIGTERM]
    deadline = time.monotonic() + 60
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= threads


def test_one_upon_the_other_in_any_order(terminated: list[int]) -> None:
    """Leave the other's handler when closed out of order, and pass the signal on."""
    first, second = Sigterm(), Sigterm()
    first.restore()
    os.kill(os.getpid(), signal.SIGTERM)
    assert second.wait(60)
    assert not terminated
    second.act()
    assert terminated == [signal.SIGTERM]
    second.restore()


def test_another_wakeup_descriptor(terminated: list[int]) -> None:
    """Keep another wakeup descriptor, such as asyncio's, which replaces any previous one."""
    sigterm = Sigterm()
    reader, other = socket.socketpair()
    with reader, other:
        other.setblocking(False)
        original = signal.set_wakeup_fd(other.fileno())
        os.kill(os.getpid(), signal.SIGTERM)
        assert sigterm.wait(60)
        sigterm.restore()
        assert signal.set_wakeup_fd(-1) == other.fileno()
    assert original >= 0


def test_elsewhere_than_in_the_main_thread(
    terminated: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Schedule] = []
    thread = threading.Thread(target=lambda: made.append(Schedule([OnSigterm()], ALONE)))
    thread.start()
    thread.join()
    assert "main thread only" in caplog.text
    os.kill(os.getpid(), signal.SIGTERM)
    assert terminated == [signal.SIGTERM]
    assert not made[0].due(1)
    made[0].close()


def test_a_forked_child_has_its_own_end(terminated: list[int]) -> None:
    """Ignore SIGTERM in a data loader's workers, which does not mean the trainer."""
    sigterm = Sigterm()
    child = os.fork()
    if child == 0:
        for _ in range(1000):
            if terminated:
                os._exit(EXIT_CODE)
            time.sleep(0.01)
        os._exit(1)
    time.sleep(0.1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == EXIT_CODE
    assert not sigterm.wait(0.1)
    sigterm.restore()


def test_a_rank_that_closed_is_not_lost(
    terminated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preemption, "PATIENCE_SECONDS", 0.2)
    store = dist.HashStore()
    closed = Preemption(store, 2, 60.0)
    closed.close()
    goes_on = Preemption(store, 2, 60.0)
    _send_sigterm(lambda: goes_on.all_here)
    time.sleep(1.0)  # a signal passed on wrongly would have ended this process
    goes_on.close()
    assert terminated == [signal.SIGTERM]
