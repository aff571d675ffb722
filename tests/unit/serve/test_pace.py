"""A follower's thread works while nobody predicts; while predictions follow one another, it uses
its share of a core, a block of rows at a time, and nobody waits for its rests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.serve.served import Job, Net, differences, quantized, restored
from torchrec_checknrun import Follower
from torchrec_checknrun.native import BLOCK_BYTES
from torchrec_checknrun.serve.pace import _PAUSE_SECONDS, Pace

pytestmark = pytest.mark.usefixtures("one_rank")
BLOCK_SECONDS = 0.001
"""Seconds of processor time that a block of rows takes."""
BARELY = 1e-9
"""A share with which the first rest lasts for weeks."""


class Clock:
    """A clock, and the processor time of the one thread that there is."""

    def __init__(self) -> None:
        self.now = 0.0
        self.worked = 0.0
        self.rests: list[float] = []
        """Long ones in pieces, between which the pace looks who predicts."""
        self.within: Callable[[], None] = lambda: None
        """Called within each rest."""

    def pace(self, share: float) -> Pace:
        return Pace(share, now=lambda: self.now, worked=lambda: self.worked, wait=self._wait)

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.worked += seconds

    def _wait(self, event: threading.Event, seconds: float) -> None:
        assert not event.is_set()
        self.within()
        self.rests.append(seconds)
        self.now += seconds


class Working(Pace):
    """A pace for which every call of ``rest`` comes after a block of rows, and somebody predicts
    all the time.
    """

    calls = 0

    def __init__(self, share: float, clock: Clock) -> None:
        self._clock = clock
        super().__init__(
            share, now=lambda: clock.now, worked=lambda: clock.worked, wait=clock._wait
        )
        self._predicting = 1

    def rest(self) -> None:
        self.calls += 1
        self._clock.work(BLOCK_SECONDS)
        super().rest()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def job(root: Path) -> Job:
    job = Job(root)
    job.train(0)
    job.save()
    return job


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("step", [0.0001, 0.0015, 0.004, 0.1])
def test_a_share_of_the_time_is_work_while_somebody_predicts(share: float, step: float) -> None:
    clock = Clock()
    pace = clock.pace(share)
    with pace.predicting():
        for _ in range(500):
            clock.work(step)
            pace.rest()
    assert clock.worked / clock.now == pytest.approx(share, rel=0.05)
    assert max(clock.rests) <= step * (1 / share - 1) * 1.001


def test_no_rest_while_nobody_predicts() -> None:
    clock = Clock()
    pace = clock.pace(0.1)
    for _ in range(3):
        clock.work(10.0)
        pace.rest()
        with pace.predicting(), pace.predicting():
            pass
    assert clock.rests == []
    with pace.predicting():  # the work before is not made up for
        clock.work(0.001)
        pace.rest()
    assert sum(clock.rests) == pytest.approx(0.009)


@pytest.mark.parametrize("between", [0.1, 0.9])
def test_predictions_that_follow_one_another_count_as_one(between: float) -> None:
    clock = Clock()
    pace = clock.pace(0.25)
    for _ in range(500):
        with pace.predicting():
            clock.now += 0.001
        next_one = clock.now + between * _PAUSE_SECONDS
        while clock.now < next_one:
            clock.work(0.0001)
            pace.rest()
    assert clock.worked <= 0.25 * clock.now
    assert clock.worked >= 0.25 * (clock.now - 500 * 0.001) * 0.95


@pytest.mark.parametrize("predicted_since", [0.5, 1.001])
def test_a_pause_between_predictions_is_free(predicted_since: float) -> None:
    clock = Clock()
    pace = clock.pace(0.1)
    with pace.predicting():
        clock.now += 1.0
    clock.now += predicted_since * _PAUSE_SECONDS
    pace.begin()
    for _ in range(100):
        clock.work(0.01)
        pace.rest()
    assert sum(clock.rests) <= _PAUSE_SECONDS * max(0.0, 1 - predicted_since)


def test_no_rest_with_a_whole_core() -> None:
    clock = Clock()
    pace = clock.pace(1.0)
    with pace.predicting():
        clock.work(10.0)
        pace.rest()
    assert clock.rests == []


def test_a_rest_ends_soon_after_the_last_prediction() -> None:
    resting, rested = threading.Event(), threading.Event()

    def wait(event: threading.Event, seconds: float) -> None:
        resting.set()
        assert seconds < 1.001 * _PAUSE_SECONDS
        assert not event.wait(seconds)

    pace = Pace(BARELY, wait=wait)

    def rest() -> None:
        pace.begin()
        sum(range(1000))  # some processor time
        pace.rest()
        rested.set()

    first, second = pace.predicting(), pace.predicting()
    first.__enter__()
    second.__enter__()
    thread = threading.Thread(target=rest, daemon=True)
    thread.start()
    assert resting.wait(60)
    first.__exit__(None, None, None)
    assert not rested.wait(5 * _PAUSE_SECONDS)
    second.__exit__(None, None, None)
    assert rested.wait(60)
    thread.join(60)


def test_a_failed_prediction_is_over() -> None:
    clock = Clock()
    pace = clock.pace(0.1)
    with pytest.raises(KeyError), pace.predicting():
        raise KeyError
    clock.work(1.0)
    pace.rest()
    assert clock.rests == []


def test_time_in_which_the_thread_waits_is_rest() -> None:
    clock = Clock()
    pace = clock.pace(0.25)
    with pace.predicting():
        clock.work(0.010)
        clock.now += 0.020  # of storage, or of predictions that come first
        pace.rest()
        assert sum(clock.rests) == pytest.approx(0.010)
        clock.work(0.010)
        clock.now += 5.0
        pace.rest()
        assert sum(clock.rests) == pytest.approx(0.010)
        clock.work(0.010)  # what was waited for too long is no work in advance
        pace.rest()
    assert sum(clock.rests) == pytest.approx(0.040)


def test_a_new_beginning_owes_nothing() -> None:
    clock = Clock()
    pace = clock.pace(0.5)
    with pace.predicting():
        clock.work(10.0)
        pace.begin()
        pace.rest()
    assert clock.rests == []


def test_what_is_done_in_a_hurry_is_not_made_up_for() -> None:
    clock = Clock()
    pace = clock.pace(0.5)
    with pace.predicting():
        with pace.hurried(), pace.hurried():
            clock.work(10.0)
            pace.rest()
        assert clock.rests == []
        clock.work(0.010)
        pace.rest()
    assert sum(clock.rests) == pytest.approx(0.010)


@pytest.mark.parametrize("copies", [1, 2])
def test_rests_hold_no_lock_that_predictions_need(root: Path, job: Job, copies: int) -> None:
    clock = Clock()
    follower = Follower(root, quantized(Net(), 8), copies=copies)
    pace = follower._pace = Working(0.25, clock)

    def predict() -> None:
        def enter() -> None:
            with follower.read():
                entered.set()

        entered = threading.Event()
        threading.Thread(target=enter, daemon=True).start()
        assert entered.wait(60)

    clock.within = predict
    for seed in (1, 2):
        version = follower.poll(paced=True)
        assert version is not None
        assert version.error is None
        assert differences(follower, quantized(restored(root), 8)) == []
        job.train(seed)
        job.save()
    assert pace.calls
    assert sum(clock.rests) == pytest.approx(3 * BLOCK_SECONDS * pace.calls)  # after each block
    calls, rests = pace.calls, len(clock.rests)
    assert follower.poll() is not None  # not paced
    assert pace.calls > calls
    assert len(clock.rests) == rests


def test_blocks_are_small(tmp_path: Path) -> None:
    """However large a chunk is: both copies are written block by block."""
    rows = 60_000
    job = Job(tmp_path, rows=rows, chunk_bytes=64 << 20)
    job.save()
    follower = Follower(tmp_path, quantized(Net(rows=rows), 8))
    pace = follower._pace = Working(0.5, Clock())
    follower.poll(paced=True)
    sizes = [rows * table.form.stride for table in follower._copies.replica.tables.values()]
    assert pace.calls > 2 * sum(size / BLOCK_BYTES for size in sizes)
    job.saver.close()


@pytest.mark.parametrize("by", ["read", "serving"])
def test_the_share_of_a_thread(tmp_path: Path, by: str) -> None:
    """Processor time against the clock: a loaded machine can only lower the share."""
    rows, share = 200_000, 0.2
    job = Job(tmp_path, rows=rows, chunk_bytes=1 << 20)
    job.save()
    job.saver.close()
    follower = Follower(tmp_path, quantized(Net(rows=rows), 8), share=share)
    found = []

    def look() -> None:
        began, worked = time.perf_counter(), time.thread_time()
        follower.look()
        found.append((time.thread_time() - worked) / (time.perf_counter() - began))

    with getattr(follower, by)():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join(60)
    assert follower.version is not None
    assert found[0] < 1.5 * share


def test_nobody_waits_for_a_rest(root: Path, job: Job) -> None:
    """``close`` ends the rests of the version on its way, and so does who polls meanwhile."""
    for act in (Follower.close, Follower.poll):
        resting = threading.Event()

        def wait(
            event: threading.Event, seconds: float, resting: threading.Event = resting
        ) -> None:
            resting.set()
            event.wait(seconds)

        follower = Follower(root, quantized(Net(), 8), interval_seconds=0.01)
        # Every call of rest() comes after some processor time.
        follower._pace = Pace(BARELY, wait=wait)
        with follower.serving():
            follower.start()
            assert resting.wait(60)
            before = follower.version
            act(follower)
            assert before is None
            assert follower.version is not before
            follower.close()
        assert follower._thread is None


def test_a_share_out_of_range(root: Path) -> None:
    for share in (0.0, -0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="share must be above 0 and at most 1"):
            Follower(root, Net(), share=share)
