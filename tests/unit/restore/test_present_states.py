"""Restore state objects without a look at their present state, which may change what they load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchrec_checknrun import Checkpointer, Images
from torchrec_checknrun.shared_memory import file as files

pytestmark = pytest.mark.usefixtures("one_rank")


class Loader:
    """A reader as torchdata's ``nodes.Loader``: asked for its state, it begins its next pass."""

    def __init__(self) -> None:
        self._next: int | None = None
        self._to_load: Any = None
        self._begun = False
        self.order = torch.arange(100)

    def __iter__(self) -> Iterator[int]:
        at = self._next
        if at is None or not self._begun:
            at = self._begin()
        self._begun = False
        for self._next in range(at + 1, 101):
            yield int(self.order[self._next - 1])

    def _begin(self) -> int:
        at, self._to_load = (self._to_load or {"next": 0})["next"], None
        self._next = at
        return int(at)

    def state_dict(self) -> dict[str, Any]:
        if self._next is None:
            self._begin()
            self._begun = True
        return {"next": self._next, "order": self.order, "of": ["a", (None, {"b": b"c"})]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._to_load, self.order = state, state["order"]


class Labels:
    """Counts whose type is the live one's."""

    def __init__(self) -> None:
        self.counts: Any = Counter()

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = state["counts"]


@pytest.fixture(params=["storage", "images"])
def survive(request: pytest.FixtureRequest, tmp_path: Path) -> Images | None:
    (tmp_path / "memory").mkdir()
    return Images(folder=str(tmp_path / "memory")) if request.param == "images" else None


def begin(folder: Path, survive: Images | None, **states: Any) -> Checkpointer:
    """Make a Checkpointer in what passes for a new process."""
    files._mapped.clear()
    return Checkpointer(str(folder / "root"), model=nn.Linear(2, 2), state=states, survive=survive)


def end(saver: Checkpointer) -> None:
    """Save and close it, or end as a killed process does."""
    if saver._survival._image is None:
        saver.save()
        saver.close()
    else:
        saver.step()
        saver._saver.settle(wait=True)
        saver._release(failed=True)


def test_a_reader_goes_on_where_it_was(tmp_path: Path, survive: Images | None) -> None:
    reader = Loader()
    reader.order = torch.randperm(100)
    saver = begin(tmp_path, survive, reader=reader)
    saver.restore()
    read = iter(reader)
    seen = [next(read) for _ in range(3)]
    end(saver)
    again = Loader()
    saver = begin(tmp_path, survive, reader=again)
    assert saver.restore() is not None
    assert torch.equal(again.order, reader.order)
    seen += [number for _, number in zip(range(3), again, strict=False)]
    assert seen == reader.order[:6].tolist()
    saver._release(failed=True)


def test_values_of_a_live_type_keep_it(tmp_path: Path, survive: Images | None) -> None:
    labels = Labels()
    saver = begin(tmp_path, survive, labels=labels)
    saver.restore()
    labels.counts.update("aab")
    end(saver)
    again = Labels()
    saver = begin(tmp_path, survive, labels=again)
    assert saver.restore() is not None
    again.counts.update("b")
    assert again.counts == Counter("aabb")
    saver._release(failed=True)


class Temperature:
    """A value that a program trains by itself (SAC's), and replaces by what it is given."""

    def __init__(self, value: float) -> None:
        self.value = torch.full((1,), value, requires_grad=True)

    def train(self) -> None:
        (self.value * 2).sum().backward()
        assert self.value.grad is not None
        self.value.data.sub_(self.value.grad)
        self.value.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_a_tensor_that_takes_gradients_goes_on_so(tmp_path: Path, survive: Images | None) -> None:
    saver = begin(tmp_path, survive, temperature=(trained := Temperature(9.0)))
    saver.restore()
    trained.train()
    end(saver)
    saver = begin(tmp_path, survive, temperature=(again := Temperature(0.0)))
    assert saver.restore() is not None
    again.train()
    assert again.value.item() == 5.0
    saver._release(failed=True)
