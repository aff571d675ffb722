"""All ranks hear of a save's outcome after the same step, however their training proceeds."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from unittest import mock

import pytest

from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.run.waiting import await_save, finish_at_exit
from torchrec_checknrun.save import common_step
from torchrec_checknrun.save.common_step import CommonStep
from torchrec_checknrun.save.save import Save
from torchrec_checknrun.store.deadlines import Patience
from torchrec_checknrun.threads import end_all, end_at_exit


class Meeting:
    """Ranks of threads, of which each reduction takes some time."""

    def __init__(self, world_size: int, pause: Callable[[], float]) -> None:
        self.values = [0] * world_size
        self.barrier = threading.Barrier(world_size)
        self.pause = pause

    def rank(self, number: int) -> Ranks:
        ranks = Ranks.of(None)
        vars(ranks).update(rank=number, world_size=len(self.values))
        vars(ranks)["largest"] = lambda value: self.largest(number, value)
        return ranks

    def largest(self, number: int, value: int) -> int:
        time.sleep(self.pause())
        self.values[number] = value
        self.barrier.wait(10.0)
        found = max(self.values)
        self.barrier.wait(10.0)
        return found


def heard(common: CommonStep, pause: Callable[[], float]) -> int:
    """Return the step at which a training loop hears of the outcome."""
    step = 1
    while not common.reached():
        time.sleep(pause())
        step += 1
    return step


@pytest.mark.parametrize("seed", range(12))
def test_all_ranks_hear_after_the_same_step(seed: int) -> None:
    draws = random.Random(seed)
    longest_step, longest_reduction = draws.choice([(0.0, 0.002), (0.002, 0.0), (0.002, 0.002)])
    meeting = Meeting(4, lambda: draws.random() * longest_reduction)
    common = [CommonStep() for _ in range(4)]
    with ThreadPoolExecutor(8) as threads:
        steps = [
            threads.submit(heard, one, lambda: draws.random() * longest_step) for one in common
        ]
        time.sleep(draws.random() * 0.01)
        for number, one in enumerate(common):
            threads.submit(one.agree, meeting.rank(number))
        assert len({step.result(20.0) for step in steps}) == 1


def test_an_outcome_is_told_at_the_next_step() -> None:
    meeting = Meeting(2, lambda: 0.0)
    common = [CommonStep(), CommonStep()]
    assert not any(one.reached() for one in common)  # there is no outcome yet
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(CommonStep.agree, common, map(meeting.rank, range(2))))
    assert all(one.reached() for one in common)


def test_one_rank_hears_at_once() -> None:
    common = CommonStep()
    assert not common.reached()
    common.agree(Ranks.of(None))
    assert common.reached()


def test_a_lost_rank_holds_no_other_up() -> None:
    meeting = Meeting(2, lambda: 0.0)
    common = CommonStep()
    meeting.barrier.abort()
    common.agree(meeting.rank(0))
    assert common.reached()


def make_save(common: CommonStep, error: Exception | None) -> tuple[Save, threading.Event]:
    """Return a save whose outcome is known, and the event that ends its thread."""
    end = threading.Event()
    save = Save(mock.Mock(), None, 0.0, Patience(60.0))
    save.common_step = common
    save.thread = threading.Thread(target=lambda: end.wait(60.0), daemon=True)
    save.thread.start()
    save.finish(mock.Mock(), error)
    return save, end


@pytest.mark.parametrize("error", [None, SaveFailed("says the test")])
def test_a_process_ends_after_its_ranks_have_agreed(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common_step, "_MOMENT_SECONDS", 0.01)
    save, end = make_save(CommonStep(), error)
    with ThreadPoolExecutor(1) as threads:
        left = threads.submit(finish_at_exit, save)
        assert not wait([left], 0.05).done
        end.set()
        left.result(10.0)


def test_a_save_that_was_given_up_is_not_waited_for() -> None:
    save, end = make_save(CommonStep(), None)
    assert save.thread is not None
    end_at_exit(save.thread)
    assert save.give_up(SaveFailed("says the test"))
    await_save(save)
    save.result()
    save.leave()
    end_all()
    assert save.thread.is_alive()
    end.set()
