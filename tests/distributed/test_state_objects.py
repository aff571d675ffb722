"""State objects may grow, shrink and change their types between save and restore."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.small_job import Note, Workers, build, checkpointer, where
from tests.distributed.states import local_bytes
from tests.examples import some_of
from torchrec_checknrun import PerRank, Replicated
from torchrec_checknrun.errors import (
    IncompatibleCheckpoint,
    ModelPartlyRestored,
)


class Replay:
    """A replay buffer: a tensor that grows, keys that come and go, a value that was None."""

    def __init__(self) -> None:
        self.samples = torch.zeros(0, 3)
        self.best: torch.Tensor | None = None
        self.labels: dict[str, Any] = {}
        self.history: list[Any] = []
        self.handed: Any = None

    def fill(self, count: int) -> None:
        self.samples = torch.arange(count * 3, dtype=torch.float64).view(count, 3)
        self.best = self.samples.sum()
        self.labels = {f"label {i}": i for i in range(count)}
        self.history = [torch.ones(i) for i in range(count)]

    def state_dict(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "best": self.best,
            "labels": dict(self.labels),
            "history": list(self.history),
        }

    def load_state_dict(self, content: dict[str, Any]) -> None:
        self.handed = copy.deepcopy(content)
        self.samples, self.best = content["samples"], content["best"]
        self.labels, self.history = content["labels"], content["history"]


class Whole:
    """A state object whose state dict is no dict."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def state_dict(self) -> Any:
        return self.content

    def load_state_dict(self, content: Any) -> None:
        self.content = content


def is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.equal(other)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and (one == other).all()
    if isinstance(one, dict):
        same = type(other) is dict and list(one) == list(other)
        return same and all(is_alike(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        same = type(one) is type(other) and len(one) == len(other)
        return same and all(map(is_alike, one, other))
    return type(one) is type(other) and bool(one == other)


def grow(root: str, spec: dict[str, Any], plan: Any, saved: int, live: int, strict: bool) -> None:
    """Save with some samples, restore into an object with more or fewer, also per rank."""
    job, replay, own = build(spec, plan), Replay(), Replay()
    replay.fill(saved)
    own.fill(saved + dist.get_rank())
    state: dict[str, Any] = {"replay": replay, "own": PerRank(own), "zero": Replicated(own)}
    with checkpointer(root, job, state=state) as saver:
        saver.save()
    now, mine, first = Replay(), Replay(), Replay()
    now.fill(live)
    before, kept = now.samples, now.samples.clone()
    state = {"replay": now, "own": PerRank(mine), "zero": Replicated(first)}
    with checkpointer(root, build(spec, plan, seed=5), state=state) as saver:
        report = saver.restore(strict=strict)
    assert report is not None
    assert not report.skipped
    assert is_alike(now.handed, replay.state_dict())
    assert is_alike(mine.handed, own.state_dict())
    assert first.samples.shape[0] == saved
    assert before.equal(kept), "the object's previous content was written to"


SIZES = [(5, 0), (0, 5), (3, 7), (7, 3)]


@pytest.mark.parametrize(
    ("saved", "live", "strict"),
    some_of([(*s, strict) for s in SIZES for strict in (True, False)], 0, 2, 5),
)
def test_content_of_any_shape(
    workers: Workers, tmp_path: Path, saved: int, live: int, strict: bool
) -> None:
    workers(2).run(grow, **where(tmp_path), saved=saved, live=live, strict=strict)


CONTENTS: list[Any] = [
    [1, torch.ones(2), [2.5]],
    (1, 2),
    torch.arange(3),
    np.arange(4.0),
    "text",
    None,
    {"a": torch.zeros(2), "b": None},
    {"a": {"deep": torch.zeros(3, 1)}, 3: "x"},
    {},
]


def whole(root: str, spec: dict[str, Any], plan: Any) -> None:
    """Restore each content into an object with any other content."""
    job = build(spec, plan)
    saved = {f"whole {i}": Whole(content) for i, content in enumerate(CONTENTS)}
    with checkpointer(root, job, state=saved) as saver:
        saver.save()
    for shift in range(0, len(CONTENTS), 2):
        others = copy.deepcopy(CONTENTS[shift:] + CONTENTS[:shift])
        live = {name: Whole(other) for name, other in zip(saved, others, strict=True)}
        with checkpointer(root, job, state=live) as saver:
            saver.restore()
        for name, one in saved.items():
            assert is_alike(live[name].content, one.content), (shift, name, live[name].content)


def test_state_dicts_of_any_kind(workers: Workers, tmp_path: Path) -> None:
    workers(1).run(whole, **where(tmp_path, ranks=1))


def add_up(states: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "samples": torch.cat([state["samples"] for state in states]),
        "best": None,
        "labels": {},
        "history": [],
    }


def save_own(root: str, spec: dict[str, Any], plan: Any) -> None:
    own = Replay()
    own.fill(2 + dist.get_rank())
    with checkpointer(root, build(spec, plan), state={"own": PerRank(own)}) as saver:
        saver.save()


def merge_own(root: str, spec: dict[str, Any], plan: Any, strict: bool) -> list[int]:
    own = Replay()
    with checkpointer(root, build(spec, plan), state={"own": PerRank(own, add_up)}) as saver:
        saver.restore(strict=strict)
    return list(own.samples.shape)


def test_merged_content_of_another_shape(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(save_own, **where(tmp_path))
    for strict in (True, False):
        found = workers(1).run(merge_own, **where(tmp_path, ranks=1), strict=strict)
        assert found == [[5, 3]]


class Shares:
    """A state object that shares its tensor with another one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        if content["tensor"].shape == self.tensor.shape:
            self.tensor.copy_(content["tensor"])
        else:
            self.tensor = content["tensor"]


class Positions(dict[str, int]):
    """A dict of the user's own type."""


class Typed(Whole):
    def load_state_dict(self, content: Any) -> None:
        assert type(content) is Positions
        super().load_state_dict(content)


def shared(root: str, spec: dict[str, Any], plan: Any) -> None:
    job, tensor = build(spec, plan), torch.arange(4.0)
    a, b, typed = Shares(tensor), Shares(tensor), Typed(Positions(x=1))
    with checkpointer(root, job, state={"a": a, "b": b, "typed": typed}) as saver:
        saver.save()
        tensor.fill_(0)
        saver.restore()
    assert tensor.tolist() == [0, 1, 2, 3]
    assert a.tensor is b.tensor is tensor
    assert typed.content == {"x": 1}


def test_objects_that_share_a_tensor(workers: Workers, tmp_path: Path) -> None:
    workers(1).run(shared, **where(tmp_path, ranks=1))


class Strict(Note):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("not this")


def modules(root: str, spec: dict[str, Any], plan: Any) -> None:
    """Refuse content that a module would refuse, before anything is changed."""
    job = build(spec, plan)
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with checkpointer(root, job, state={"module": module}) as saver:
        saver.save()
    other = build(spec, plan, seed=5)
    for wrong, named in (
        (nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)), r"module\.0\.weight.*\[2, 3\].*\[2, 4"),
        (nn.Sequential(nn.Linear(3, 2), nn.ReLU()), r"module\.1\.\w+ is in the checkpoint only"),
        (nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.PReLU()), r"module\.2\.weight is in"),
    ):
        other.train(1)
        before = local_bytes(other)
        with checkpointer(root, other, state={"module": wrong}) as saver:
            with pytest.raises(IncompatibleCheckpoint, match=named):
                saver.restore()
            assert local_bytes(other) == before
            report = saver.restore(strict=False)
            assert report is not None
            assert any("module" in line for line in report.skipped)
            assert is_alike(wrong.state_dict()["0.bias"], module.state_dict()["0.bias"])
    fits = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
    with checkpointer(root, other, state={"module": fits}) as saver:
        saver.restore()
    assert is_alike(fits.state_dict()["0.weight"], module.state_dict()["0.weight"].double())
    with checkpointer(root, other, state={"module": Strict(1)}) as saver:
        with pytest.raises(ModelPartlyRestored, match=r"not this.*leave the object out"):
            saver.restore()
        with pytest.raises(ModelPartlyRestored):
            saver.step()


def test_modules_as_state_objects(workers: Workers, tmp_path: Path) -> None:
    workers(1).run(modules, **where(tmp_path, ranks=1))
