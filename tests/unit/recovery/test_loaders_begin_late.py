"""A loader of torchdata's is not asked for its state between its restore and its iteration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash.save_sweep import alone
from tests.unit.tracked_model import batch, make_model
from torchrec_checknrun import Checkpointer, Images

BATCHES = 5


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    with alone():
        yield


class Loader:
    """A loader with worker processes: asked for its state, it begins the epoch set by then."""

    def __init__(self) -> None:
        self.epoch, self.at, self.order = 0, 0, list[int]()

    def _begin(self) -> None:
        if not self.order:
            self.order = [10 * self.epoch + number for number in range(BATCHES)]

    def __iter__(self) -> Iterator[int]:
        self._begin()
        while self.at < BATCHES:
            self.at += 1
            yield self.order[self.at - 1]
        self.at, self.order = 0, []

    def state_dict(self) -> dict[str, Any]:
        self._begin()
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.order = state["at"], []


Loader.__module__ = "torchdata.stateful_dataloader.stateful_dataloader"


class Holder:
    """A team's object around its loader."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)


def train(folder: Path, held: bool, images: bool, steps: int, killed: bool) -> list[int]:
    """Train until a step, and leave everything as a killed process does."""
    model, loader = make_model(), Loader()
    survive = Images(folder=str(folder)) if images else None
    state = {"loader": Holder(loader) if held else loader}
    options: dict[str, Any] = {"every_steps": 3, "when_busy": "wait", "survive": survive}
    saver = Checkpointer(folder / "root", model=model, state=state, **options)
    saver.restore()
    seen: list[int] = []
    while saver.steps < steps:
        loader.epoch = saver.steps // BATCHES
        for number in loader:
            model(batch(a=[[number % 30]], shared=[[1]])).sum().backward()
            seen.append(number)
            saver.step()
            if saver.steps >= steps:
                break
    saver.wait()
    if killed:
        saver.__exit__(KeyError, KeyError(), None)
    else:
        saver.close()
    return seen


@pytest.mark.parametrize("images", [False, True], ids=["heap", "images"])
@pytest.mark.parametrize("held", [False, True], ids=["itself", "held"])
def test_the_epoch_goes_on_as_the_program_sets_it(tmp_path: Path, held: bool, images: bool) -> None:
    first = train(tmp_path, held, images, 8, killed=True)
    second = train(tmp_path, held, images, 12, killed=False)
    whole = [0, 1, 2, 3, 4, 10, 11, 12, 13, 14, 20, 21]
    assert first == whole[:8]
    assert second == whole[8 if images else 6 :]


def test_a_restore_from_a_checkpoint_begins_images_at_the_next_step(tmp_path: Path) -> None:
    train(tmp_path, False, False, 7, killed=True)
    assert train(tmp_path, False, True, 9, killed=True) == [11, 12, 13]
    assert train(tmp_path, False, True, 11, killed=False) == [14, 20]
