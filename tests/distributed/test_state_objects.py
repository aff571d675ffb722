"""State objects that grow, shrink and change their types, and saves in which only those changed."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.models import local_bytes
from tests.distributed.normalized import NormalizedJob
from tests.distributed.small_job import Note, Workers, build, checkpointer, where
from torchrec_checknrun import AtEnd, CheckpointReport, PerRank, Replicated
from torchrec_checknrun.errors import (
    IncompatibleCheckpoint,
    ModelPartlyRestored,
    SaveDeferred,
    SaveFailed,
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
    """Saved with some samples, restored into an object with more or fewer, also per rank."""
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
    assert before.equal(kept), "what an object held before is its own"


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("saved", "live"), [(5, 0), (0, 5), (3, 7), (7, 3)])
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
    """Anything after anything else."""
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
    """Two of these hold one tensor."""

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
    """A module that would refuse its content is found before anything is changed."""
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
        with pytest.raises(ModelPartlyRestored, match="not this"):
            saver.restore()
        with pytest.raises(ModelPartlyRestored):
            saver.step()


def test_modules_as_state_objects(workers: Workers, tmp_path: Path) -> None:
    workers(1).run(modules, **where(tmp_path, ranks=1))


# Explicit saves


class Everything:
    """A job with all kinds of state, and what can change in it without a row being marked."""

    def __init__(self, seed: int = 0) -> None:
        self.job = NormalizedJob(seed)
        self.note, self.own = Note(0), Note(dist.get_rank())
        self.state = {"note": self.note, "own": PerRank(self.own)}

    @torch.no_grad()
    def change(self, what: str) -> None:
        job, last = self.job, dist.get_rank() == dist.get_world_size() - 1
        if what == "parameter":
            job.model.state_dict()["out.bias"].add_(1)
        elif what == "buffer":
            job.model.train()
            job.model(job.features())  # no backward: BatchNorm's statistics move
        elif what == "group":
            job.optimizer.param_groups[0]["lr"] *= 0.5
        elif what == "object":
            self.note.value += 1
        elif what == "per rank":
            self.own.value += 10 * last  # on one rank only
        elif what == "fused rate":
            for group in job.model.fused_optimizer.param_groups:
                group["lr"] *= 0.5
            job.model.fused_optimizer.step()


WHAT = ["parameter", "buffer", "group", "object", "per rank", "fused rate"]


def dense_of(job: NormalizedJob) -> dict[str, list[float]]:
    content = job.model.state_dict().items()
    return {name: v.tolist() for name, v in content if name.startswith(("norm", "out"))}


def only_dense(root: str) -> list[Any]:
    """Each change alone is saved; nothing at all is not saved again, and says so."""
    every = Everything()
    with every.job.checkpointer(root, state=every.state, retention=None) as saver:
        every.job.train()
        saver.step()
        ids = [saver.save().id]
        for what in WHAT:
            every.change(what)
            report = saver.save()
            assert not report.unchanged, what
            assert (report.modified_rows, report.kind) == (0, "differential"), what
            ids.append(report.id)
            again = saver.save()
            assert again.unchanged
            assert again.id == report.id
            assert saver.save(wait=False) is None
            assert saver.wait() is None
            fresh = Everything(seed=5)
            with fresh.job.checkpointer(root, state=fresh.state, retention=None) as reading:
                reading.restore()
                if dist.get_rank() == 0:  # whose buffers count
                    assert dense_of(fresh.job) == dense_of(every.job), what
                assert (fresh.note.value, fresh.own.value) == (every.note.value, every.own.value)
                lr = every.job.optimizer.param_groups[0]["lr"]
                assert fresh.job.optimizer.param_groups[0]["lr"] == lr
    return ids


def test_a_save_of_dense_changes(workers: Workers, tmp_path: Path) -> None:
    zero, one = workers(2).run(only_dense, root=str(tmp_path / "root"))
    assert zero == one
    assert len(set(zero)) == 1 + len(WHAT)


def at_end(root: str) -> list[Any]:
    """The last checkpoint is made again if anything has changed, and only then."""
    every = Everything()
    reports: list[CheckpointReport] = []
    options: dict[str, Any] = {
        "state": every.state,
        "triggers": [AtEnd()],
        "callbacks": [reports.append],
    }
    with every.job.checkpointer(root, **options) as saver:
        every.job.train()
        saver.step()
        saver.save()
    first = len(reports)
    for change in ("nothing", "per rank", "nothing"):
        with every.job.checkpointer(root, **options) as saver:
            saver.restore()
            every.change(change)
    return [first, len(reports), reports[-1].step]


def test_a_last_save_of_dense_changes(workers: Workers, tmp_path: Path) -> None:
    assert workers(2).run(at_end, root=str(tmp_path / "root")) == [[1, 2, 1]] * 2


def outcomes(root: str) -> list[str]:
    """A report or an error, whatever happens."""
    every, told = Everything(), []
    job = every.job
    with job.checkpointer(root, state=every.state, max_failures=5) as saver:
        job.train()
        saver.step()
        job.model(job.features()).sum().backward()
        with pytest.raises(SaveDeferred, match=r"zero_grad\(\)"):
            saver.save()
        assert saver.save(wait=False) is None
        job.optimizer.step()
        assert saver.step() is None  # begins the one put off
        report = saver.wait()
        assert isinstance(report, CheckpointReport)
        every.note.value = random.Random()  # nothing that can be stored
        with pytest.raises(Exception, match=r"note\.value") as refused:
            saver.save()
        told.append(type(refused.value).__name__)
        every.note.value = 3
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == dist.get_world_size() - 1:
                patch.setattr(every.note, "state_dict", lambda: 1 / 0)
            with pytest.raises(SaveFailed, match="note"):
                saver.save()
        assert not saver.save().unchanged
    return told


def test_a_save_returns_a_report_or_raises(workers: Workers, tmp_path: Path) -> None:
    assert workers(2).run(outcomes, root=str(tmp_path / "root")) == [["UnsupportedState"]] * 2


def after_a_part(root: str, spec: dict[str, Any], plan: Any) -> list[str]:
    """What was restored in part is saved again: the checkpoint doesn't hold the rest."""
    job = build(spec, plan)
    with checkpointer(root, job) as saver:
        job.train()
        saver.step()
        saver.save()
    with checkpointer(root, job, state={"note": Note(5)}) as saver:
        report = saver.restore(strict=False)
        assert report is not None
        assert not saver.save().unchanged
    note = Note(0)
    with checkpointer(root, job, state={"note": note}) as saver:
        saver.restore()
        assert saver.save().unchanged
    assert note.value == 5
    return list(report.skipped)


def test_a_save_after_a_restore_in_part(workers: Workers, tmp_path: Path) -> None:
    (skipped,) = workers(1).run(after_a_part, **where(tmp_path, ranks=1))
    assert skipped == ["state 'note': not in the checkpoint"]
