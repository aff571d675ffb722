"""Threads that do things at their own pace and pass one point in order."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from torchrec_checknrun.in_order import Turn, Work, work_in_order


def run(
    work: Work, count: int, threads: int, sizes: list[int] | None = None, most: int = 100
) -> None:
    work_in_order(work, sizes or [1] * count, most, threads)


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


def test_nothing_to_do() -> None:
    run(lambda number, turn: pytest.fail("called"), 0, 3)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("where", ["before", "in", "after"])
def test_the_first_failure_is_raised(threads: int, where: str) -> None:
    done = set()

    def work(number: int, turn: Turn) -> None:
        fails = number in (6, 7, 8, 20)
        if fails and where == "before":
            time.sleep(0.01 / number)  # a later one fails sooner
            raise ValueError(number)
        with turn:
            if fails and where == "in":
                raise ValueError(number)
        if fails:
            time.sleep(0.01 / number)
            raise ValueError(number)
        done.add(number)

    before = threading.active_count()
    with pytest.raises(ValueError, match=r"^6$"):
        run(work, 40, threads)
    assert done >= set(range(6))
    assert not {6, 7, 8, 20} & done
    assert len(done) < 20
    assert threading.active_count() == before


def test_memory_is_bounded() -> None:
    lock, held, peak = threading.Lock(), 0, 0
    sizes = [random.randrange(1, 5) for _ in range(80)]
    sizes[40] = 50  # more than there is: alone

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
