"""Learning rate schedulers that follow a given optimizer, and that no state object is or holds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, ReduceLROnPlateau, StepLR

from tests.crash.save_sweep import alone
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.snapshot import unheld


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    with alone():
        yield


@pytest.fixture
def told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """Return the warnings of a Checkpointer with these state objects about schedulers."""

    def of(**states: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            Checkpointer(tmp_path, model=nn.Linear(1, 1), state=states).close()
        return [line for line in caplog.messages if "learning rate scheduler" in line]

    return of


def sgd() -> optim.SGD:
    return optim.SGD(nn.Linear(2, 2).parameters(), lr=0.03)


def test_a_schedule_that_is_not_given_is_told(told: Callable[..., list[str]]) -> None:
    optimizer = sgd()
    assert told(mine=optimizer) == []
    schedule = StepLR(optimizer, 1)
    assert len(told(mine=optimizer)) == 1
    assert "a StepLR, follows the SGD" in told(mine=optimizer)[0]
    assert told(mine=optimizer, schedule=schedule) == []
    assert told(mine=optimizer, schedules=Held([schedule])) == []
    assert told(mine=optimizer, trainer=Held([Held([schedule])])) == []


@pytest.mark.parametrize(
    "make", [lambda o: ExponentialLR(o, 0.9), ReduceLROnPlateau], ids=["chainable", "plateau"]
)
def test_another_schedule_that_is_given_hides_none(
    make: Callable[[optim.Optimizer], LRScheduler], told: Callable[..., list[str]]
) -> None:
    optimizer, other = sgd(), sgd()
    given, left = StepLR(optimizer, 1), make(optimizer)
    assert [type(left).__name__ in line for line in told(mine=optimizer, given=given)] == [True]
    assert told(mine=optimizer, given=given, left=left) == []
    left = make(other)
    assert len(told(mine=optimizer, other=other, given=given)) == 1
    assert told(mine=optimizer, given=given) == []  # whoever gives no optimizer saves it elsewhere


def test_parts_of_a_schedule_go_with_it(told: Callable[..., list[str]]) -> None:
    optimizer = sgd()
    parts = [lr_scheduler.LinearLR(optimizer), StepLR(optimizer, 2)]
    schedule = lr_scheduler.SequentialLR(optimizer, parts, [3])
    assert ["SequentialLR" in line for line in told(mine=optimizer)] == [True]
    assert told(mine=optimizer, schedule=schedule) == []


@pytest.mark.parametrize("given", [True, False], ids=["in another's place", "the first"])
def test_a_schedule_that_is_made_later_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: bool
) -> None:
    optimizer = sgd()
    schedule: LRScheduler = StepLR(optimizer, 1)
    states: dict[str, Any] = {"mine": optimizer, **({"schedule": schedule} if given else {})}
    if not given:
        del schedule
    with Checkpointer(tmp_path, model=nn.Linear(1, 1), state=states) as saver:

        def lines() -> list[str]:
            for _ in range(4):
                optimizer.step()
                schedule.step()
                saver.step()
                saver.save()
            return [line for line in caplog.messages if "learning rate scheduler" in line]

        if given:
            assert lines() == []
        schedule = ExponentialLR(optimizer, 0.7)
        assert ["a ExponentialLR, follows the SGD" in line for line in lines()] == [True]


@pytest.mark.parametrize("when", [Checkpointer.step, Checkpointer.save], ids=["step", "save"])
def test_a_schedule_that_has_moved_no_rate_is_told_at_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, when: Callable[[Checkpointer], object]
) -> None:
    def lines() -> list[str]:
        return [line for line in caplog.messages if "learning rate scheduler" in line]

    model, optimizer = nn.Linear(2, 2), sgd()
    early = StepLR(optimizer, 1)
    with (
        caplog.at_level(logging.WARNING),
        Checkpointer(tmp_path, model=model, state={"mine": optimizer}) as saver,
    ):
        assert len(lines()) == 1
        late = ReduceLROnPlateau(optimizer)
        when(saver)
        assert ["StepLR" in line for line in lines()] == [True, False]
        assert "a ReduceLROnPlateau, follows the SGD" in lines()[1]
        saver.save()
        assert len(lines()) == 2, (early, late)


def test_the_first_save_need_not_look_where_a_step_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[object] = []

    def look(states: object) -> set[tuple[str, str]]:
        looks.append(states)
        return set()

    monkeypatch.setattr(unheld, "unsaved_schedules", look)
    with Checkpointer(tmp_path, model=nn.Linear(2, 2), state={"mine": sgd()}) as saver:
        assert len(looks) == 1
        for _ in range(3):
            saver.step()
            saver.save()
        assert len(looks) == 2


def test_tuples_that_other_threads_are_making(told: Callable[..., list[str]]) -> None:
    """Let a thread finish its tuple while schedules are looked for: Python refuses to grow or
    shrink a new tuple that something else refers to.
    """
    optimizer = sgd()
    begun, goes_on, made = threading.Event(), threading.Event(), list[object]()

    def numbers() -> Iterator[int]:
        yield 1
        begun.set()
        goes_on.wait(60)
        yield 2

    def make() -> None:
        try:
            made.append(tuple(numbers()))
        except SystemError as error:
            made.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    assert begun.wait(60)

    def look() -> None:
        goes_on.set()
        thread.join(60)

    left = Watched(optimizer, look)
    assert ["Watched" in line for line in told(mine=optimizer)] == [True]
    assert made == [(1, 2)], left


class Watched(StepLR):
    """A schedule that tells when its optimizer is looked at."""

    def __init__(self, optimizer: optim.Optimizer, look: Callable[[], None]) -> None:
        self.look: Callable[[], None] = lambda: None
        super().__init__(optimizer, 1)
        self.look = look

    @property
    def optimizer(self) -> optim.Optimizer:
        self.look()
        return self._optimizer

    @optimizer.setter
    def optimizer(self, value: optim.Optimizer) -> None:
        self._optimizer = value


class Held:
    """An object that holds schedules, as accelerate's and ignite's do."""

    def __init__(self, schedules: list[Any]) -> None:
        self.schedules = schedules

    def state_dict(self) -> dict[str, Any]:
        return {"all": [schedule.state_dict() for schedule in self.schedules]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for schedule, content in zip(self.schedules, state["all"], strict=True):
            schedule.load_state_dict(content)
