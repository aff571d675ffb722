"""Training waits for overflow memory with an end in sight: space, the save's end, or a limit."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import pytest
import torch

from tests.unit.marks.row_copy_cases import Kernel, Shard, one_shard, overflow
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.marks.row_copies import PAGE_BYTES, RowCopies
from torchrec_checknrun.native import has_extension

pytestmark = pytest.mark.skipif(
    not has_extension(), reason="the compiled extension was not built: there was no C++ compiler"
)
SLACK = 10.0
"""Seconds that a busy machine may take."""


@contextmanager
def other_thread(act: Callable[[], object]) -> Iterator[threading.Thread]:
    """Run a function in a thread, whose error the block raises at its end."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield thread
    thread.join(SLACK)
    assert not thread.is_alive(), "it hangs"
    for error in errors:
        raise error


def full(wait_seconds: float = SLACK) -> tuple[RowCopies, Shard, Kernel, list[int]]:
    """Make a shard and fill overflow memory; return ids for which there is none left."""
    copies = RowCopies(overflow(1), wait_seconds)
    shard, kernel = one_shard(copies, 4000, width=16)
    held = PAGE_BYTES // (32 + 64)
    kernel.update([list(range(held))])
    assert copies.overflow.native.free() == 0
    assert copies.protection.memory_seconds == 0
    return copies, shard, kernel, list(range(held, held + 300))


def test_a_hook_goes_on_when_there_is_memory() -> None:
    copies, shard, kernel, ids = full()
    with other_thread(lambda: kernel.update([ids])) as hook:
        time.sleep(0.3)
        assert hook.is_alive()
        shard.stage(0, 2000)
        copies.memory_freed()
    shard.stage(2000, 4000)
    copies.complete()
    assert copies.failure is None
    counted = copies.count()
    assert 0.2 < counted.memory_seconds <= counted.longest_seconds <= counted.seconds
    assert counted.rows == PAGE_BYTES // 96


def test_the_background_copies_the_rows_that_a_hook_waits_for() -> None:
    """Free no page, but copy the rows: the hook needs no memory then."""
    _, shard, kernel, ids = full()
    with other_thread(lambda: kernel.update([ids])) as hook:
        time.sleep(0.1)
        assert hook.is_alive()
        shard.stage(ids[0], 4000)
    assert shard.copies.native.held() == ids[0]
    shard.stage(0, ids[0])


def test_a_row_larger_than_what_is_left_of_a_page() -> None:
    copies = RowCopies(overflow(1), SLACK)
    shard, kernel = one_shard(copies, 9, width=12_000)
    with other_thread(lambda: kernel.update([list(range(9))])):
        for row in range(9):  # one row at a time has room
            time.sleep(0.01)
            shard.stage(row, row + 1)
    assert not shard.left


def test_a_sample_needs_none() -> None:
    copies, shard, kernel, ids = full()
    shard.sample([0, 5, *ids])
    kernel.update([ids])  # which are copied by now
    shard.stage(0, 4000)
    assert copies.overflow.native.free() == copies.overflow.native.total()


def test_a_hook_gives_up() -> None:
    copies, _, kernel, ids = full(wait_seconds=0.3)
    started = time.monotonic()
    kernel.update([ids])
    assert 0.25 < time.monotonic() - started < SLACK
    assert copies.over
    assert isinstance(copies.failure, SaveFailed)
    assert "larger memory_budget" in str(copies.failure)
    before = copies.count().rows
    kernel.update([list(range(2000, 3000))])
    kernel.write(0, [3001])
    assert copies.count().rows == before


@pytest.mark.parametrize("ends", ["fail", "complete"])
def test_the_end_of_protection_wakes_it(ends: str) -> None:
    copies, _, kernel, ids = full()
    with other_thread(lambda: kernel.update([ids])):
        time.sleep(0.05)
        started = time.monotonic()
        copies.fail(SaveFailed("given up")) if ends == "fail" else copies.complete()
    assert time.monotonic() - started < SLACK / 2  # else it waits for all of it


def test_a_signal_gets_through() -> None:
    _, _, kernel, ids = full(wait_seconds=60.0)

    def ring(*_: object) -> NoReturn:
        raise TimeoutError("rings")

    before = signal.signal(signal.SIGALRM, ring)
    started = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(TimeoutError, match="rings"):
            kernel.update([ids])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - started < SLACK


def test_a_handler_that_returns() -> None:
    copies, shard, kernel, ids = full(wait_seconds=60.0)
    heard: list[int] = []

    def hear(number: int, _: object) -> None:
        heard.append(number)
        shard.stage(0, 4000)
        copies.memory_freed()  # under a lock that the interrupted wait may hold

    before = signal.signal(signal.SIGALRM, hear)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        kernel.update([ids])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert heard == [signal.SIGALRM]
    assert copies.failure is None
    assert not shard.left


@pytest.mark.usefixtures("control_c")
def test_control_c() -> None:
    """Leave the copies whole: the update has not taken place."""
    copies, shard, kernel, ids = full(wait_seconds=60.0)
    timer = threading.Timer(0.2, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        kernel.update([ids])
    timer.join()
    assert copies.failure is None
    shard.stage(0, 4000)
    copies.complete()
    assert copies.failure is None


@pytest.mark.parametrize("ends", ["complete", "fail", "nothing"])
def test_a_write_to_all_rows_waits(ends: str) -> None:
    copies = RowCopies(overflow(1), 0.6)
    one_shard(copies, 10)
    started = time.monotonic()
    with other_thread(copies.wait_until_over) as writer:
        time.sleep(0.2)
        assert writer.is_alive()
        if ends == "complete":
            copies.complete()
        elif ends == "fail":
            copies.fail(SaveFailed("given up"))
    assert copies.over
    assert (copies.failure is None) == (ends == "complete")
    assert time.monotonic() - started < SLACK
    if ends == "nothing":
        assert "were about to be written as a whole" in str(copies.failure)


def test_an_error_in_a_hook_is_not_raised() -> None:
    """Fail the save, not the training."""
    copies = RowCopies(overflow(1), SLACK)
    _, kernel = one_shard(copies, 10)
    kernel.copies.before_update(torch.tensor([1, 2]), [0, 5], [0])  # an offset beyond the ids
    assert copies.over
    assert "could not be copied before their update" in str(copies.failure)


@pytest.mark.parametrize("first", ["complete", "fail"])
def test_who_comes_first_decides(first: str) -> None:
    copies = RowCopies(overflow(1), SLACK)
    ends = [copies.complete, lambda: copies.fail(SaveFailed("given up"))]
    for end in ends if first == "complete" else ends[::-1]:
        end()
    copies.fail(SaveFailed("too late"))
    assert copies.over
    assert (str(copies.failure) if copies.failure else None) == {"fail": "given up"}.get(first)


def test_both_at_once() -> None:
    """Never be complete and failed: the outcome stands once it is known."""
    for _ in range(200):
        copies = RowCopies(overflow(1), SLACK)
        barrier, outcomes = threading.Barrier(2), []

        def fail(copies: RowCopies = copies, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            copies.fail(SaveFailed("given up"))

        with other_thread(fail):
            barrier.wait()
            copies.complete()
            outcomes.append(copies.failure)
        outcomes.append(copies.failure)
        assert outcomes[0] is outcomes[1]
        assert copies._complete == (outcomes[0] is None)


def test_training_keeps_the_interpreter_free() -> None:
    """Copy rows, in hook and background, without Python's lock."""
    copies = RowCopies(overflow(4000), SLACK)
    shard, kernel = one_shard(copies, 300_000, width=64)
    stop, turns = threading.Event(), [0]

    def count() -> None:
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0)

    with other_thread(count):
        ids = torch.arange(0, 300_000, 2)
        before, started = turns[0], time.perf_counter()
        kernel.copies.before_update(ids, [0, len(ids)], [0])
        memory = torch.zeros(300_000 * 264 + 64, dtype=torch.uint8)
        shard.copies.stage(torch.arange(300_000), 0, memory, [0, 2_400_000])
        seconds, during = time.perf_counter() - started, turns[0] - before
        stop.set()
    assert during > 20 * seconds, "no other thread ran"


def test_random_ids_leave_memory_for_others() -> None:
    """Free memory chunk by chunk, though each step's rows lie all over the table."""
    copies = RowCopies(overflow(8), SLACK)
    shard, kernel = one_shard(copies, 40_000, width=16)
    chance = torch.Generator().manual_seed(0)
    ids = torch.randperm(40_000, generator=chance)[: 8 * (PAGE_BYTES // 96)].tolist()
    kernel.update([ids])
    assert copies.overflow.native.free() == 0
    shard.stage(0, 20_000)
    more = sorted(set(range(20_000, 40_000)) - set(ids))[:1500]
    started = time.monotonic()
    kernel.update([more])
    assert time.monotonic() - started < SLACK / 2  # else it waits for all of it
    assert copies.failure is None
    shard.stage(20_000, 40_000)
