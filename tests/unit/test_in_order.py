"""Work in threads at their own pace, and take turns in order, step by step."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from torchrec_checknrun.in_order import Stage, Turn, run_in_order


def run(
    work: Callable[[int, Turn], object],
    count: int,
    threads: int,
    sizes: list[int] | None = None,
    most: int = 100,
    stages: Sequence[Stage] | None = None,
) -> None:
    """Run items of one part; without stages all turns are in order."""
    stages = [("lane", number) for number in range(count)] if stages is None else stages

    def one(number: int, turn: Callable[[int], Turn]) -> None:
        work(number, turn(0))

    run_in_order(one, sizes or [1] * count, [[stage] for stage in stages], most, threads)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_turns_come_in_order_and_one_at_a_time(threads: int) -> None:
    passed: list[int] = []
    busy = threading.Lock()

    def work(number: int, turn: Turn) -> None:
        time.sleep(random.random() / 500)
        if number % 7 == 3:
            return  # without a turn
        with turn:
            assert busy.acquire(blocking=False)
            passed.append(number)
            busy.release()
        time.sleep(random.random() / 500)

    run(work, 60, threads)
    assert passed == [number for number in range(60) if number % 7 != 3]


@settings(max_examples=examples(50), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.booleans()), max_size=40),
    st.sampled_from([1, 2, 5]),
)
def test_turns_of_a_lane_come_step_by_step(
    things: list[tuple[int, bool, bool]], threads: int
) -> None:
    """Each item has a lane, may begin a new step in it, and may skip its turn."""
    steps = [0, 0, 0]
    stages: list[tuple[int, int]] = []
    for lane, begins, _ in things:
        steps[lane] += begins
        stages.append((lane, steps[lane]))
    passed: list[tuple[int, int]] = []
    within: list[tuple[int, int]] = []

    def work(number: int, turn: Turn) -> None:
        if things[number][2]:
            return
        if number % 3:
            time.sleep(0.0005)
        lane, step = stages[number]
        with turn:
            within.append(stages[number])
            assert {other for of, other in list(within) if of == lane} == {step}
            passed.append(stages[number])
            within.remove(stages[number])

    run(work, len(things), threads, stages=stages)
    wanted = [stage for stage, thing in zip(stages, things, strict=True) if not thing[2]]
    assert Counter(passed) == Counter(wanted)
    for lane in range(3):
        of_lane = [step for each, step in passed if each == lane]
        assert of_lane == sorted(of_lane)


@pytest.mark.parametrize("stages", [[(0, 0), (1, 0)], [(0, 0), (0, 0)]])
def test_other_lanes_and_the_same_step_are_not_waited_for(stages: list[Stage]) -> None:
    second = threading.Event()

    def work(number: int, turn: Turn) -> None:
        if number == 0:
            assert second.wait(30)
        with turn:
            pass
        if number == 1:
            second.set()

    run(work, 2, 2, stages=stages)


def test_turns_of_one_step_may_come_together() -> None:
    """Two items of a step meet in their turns; the next step's turn comes after both."""
    meeting, passed = threading.Barrier(2), []

    def work(number: int, turn: Turn) -> None:
        with turn:
            if number < 2:
                meeting.wait(30)
                time.sleep(0.01)
            passed.append(number)

    stages = [(0, 0), (0, 0), (0, 1)]
    run(work, 3, 3, stages=stages)
    assert sorted(passed[:2]) == [0, 1]
    assert passed[2] == 2


def test_a_step_waits_for_the_one_before_the_last() -> None:
    """A step waits even if all items of the last step skipped their turns."""
    passed = []

    def work(number: int, turn: Turn) -> None:
        if number == 1:
            return
        if number == 0:
            time.sleep(0.05)
        with turn:
            passed.append(number)

    run(work, 3, 3)
    assert passed == [0, 2]


@settings(max_examples=examples(50), deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 3), max_size=5)), max_size=20),
    st.sampled_from([1, 2, 5]),
)
def test_each_part_of_an_item_has_its_own_turn(
    things: list[tuple[bool, list[int]]], threads: int
) -> None:
    """Each item has parts in some lanes, and may begin a new step in all of them."""
    step, stages = 0, []
    for begins, lanes in things:
        step += begins
        stages.append([(lane, step) for lane in lanes])
    passed: list[tuple[int, int]] = []

    def work(number: int, turn: Callable[[int], Turn]) -> None:
        for part, stage in enumerate(stages[number]):
            if (number + part) % 4 == 3:
                continue  # without a turn
            if number % 3:
                time.sleep(0.0005)
            with turn(part):
                passed.append(stage)

    run_in_order(work, [1] * len(stages), stages, 100, threads)
    wanted = [s for n, of in enumerate(stages) for p, s in enumerate(of) if (n + p) % 4 != 3]
    assert Counter(passed) == Counter(wanted)
    for lane in range(4):
        of_lane = [step for each, step in passed if each == lane]
        assert of_lane == sorted(of_lane)


def test_the_next_item_waits_for_one_part_alone() -> None:
    """The second item's turn comes while the first item is at work on its second part."""
    first, second = threading.Event(), threading.Event()

    def work(number: int, turn: Callable[[int], Turn]) -> None:
        with turn(0):
            (second if number else first).set()
        if number == 0:
            assert second.wait(30)
            with turn(1):
                pass

    run_in_order(work, [1, 1], [[("a", 0), ("b", 0)], [("a", 1)]], 2, 2)
    assert first.is_set()


def test_nothing_to_do() -> None:
    run(lambda number, turn: pytest.fail("called"), 0, 3)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("where", ["before", "in", "after"])
def test_the_first_failure_is_raised(threads: int, where: str) -> None:
    done, others = set(), set(threading.enumerate())

    def work(number: int, turn: Turn) -> None:
        fails = number in (6, 7, 8, 20)
        if fails and where == "before":
            time.sleep(0.01 / number)  # a later item fails sooner
            raise ValueError(number)
        with turn:
            if fails and where == "in":
                raise ValueError(number)
        if fails:
            time.sleep(0.01 / number)
            raise ValueError(number)
        done.add(number)

    with pytest.raises(ValueError, match=r"^6$"):
        run(work, 40, threads)
    assert done >= set(range(6))
    assert not {6, 7, 8, 20} & done
    assert len(done) < 20
    left = set(threading.enumerate()) - others
    assert not [thread for thread in left if thread.name.startswith("checknrun-restore-")]


def test_memory_is_bounded() -> None:
    lock, held, peak = threading.Lock(), 0, 0
    sizes = [random.randrange(1, 5) for _ in range(80)]
    sizes[40] = 50  # more than the limit: runs alone

    def work(number: int, turn: Turn) -> None:
        nonlocal held, peak
        with lock:
            held += sizes[number]
            peak = max(peak, held if held != sizes[40] else 0)
        time.sleep(0.001)
        with lock:
            held -= sizes[number]

    run(work, 80, 6, sizes, 10)
    assert 5 < peak <= 10


def test_operations_of_a_thread_do_not_use_others() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = set()
        run(lambda number, turn: found.add(torch.get_num_threads()), 20, 3)
        assert found == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_inference_mode_goes_along() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(30)

        def work(number: int, turn: Turn) -> None:
            time.sleep(0.001)
            tensor[number] += 1

        run(work, 30, 3)
    assert tensor.tolist() == [1] * 30
