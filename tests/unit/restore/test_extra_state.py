"""Save and restore what modules show by ``get_extra_state``, of any form that can be stored."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.crash.save_sweep import alone
from tests.distributed.models import Job
from tests.unit.run.jobs import make_job
from tests.unit.run.lives import Lives
from tests.unit.tracked_model import make_model
from torchrec_checknrun import Checkpointer, Consecutive
from torchrec_checknrun.errors import IncompatibleCheckpoint, UnsupportedState
from torchrec_checknrun.tools.verify import verify


class Odd(nn.Linear):
    """A layer with anything as its extra state, shown as the very object.

    Args:
        extra: the object at first.
    """

    def __init__(self, extra: Any = None) -> None:
        super().__init__(2, 2)
        self.extra, self.loads = extra, 0

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra, self.loads = state, self.loads + 1


class Forgetful(Odd):
    """A layer that doesn't take its extra state back."""

    def set_extra_state(self, state: Any) -> None: ...


def content() -> dict[str, Any]:
    return {
        "count": 7,
        "names": ["a", "b"],
        "of": {"mean": torch.arange(3.0), 5: (1, 2.5, None)},
        "bytes": b"\0\1",
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    return type(one) is type(other) and bool(one == other)


def model(part: nn.Module, parallel: bool) -> nn.Module:
    if not parallel:
        return nn.Sequential(part)
    whole: Any = make_model()
    whole.module.part = part
    return whole


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(
    ("extra", "before"),
    [
        (content(), {"gone": 1, "count": 0}),
        (content(), None),
        (None, content()),
        (None, None),
        ({}, {"gone": torch.ones(2)}),
        (torch.arange(4), None),
        ({"count": 3}, torch.arange(4)),
        ("text", 5),
    ],
    ids=["dict", "first", "none", "nones", "empty", "tensor", "of-tensor", "text"],
)
def test_extra_state_comes_back_whole(
    tmp_path: Path, extra: Any, before: Any, parallel: bool
) -> None:
    extra, before = copy.deepcopy(extra), copy.deepcopy(before)
    part, other = Odd(extra), Odd(before)
    with alone():
        with Checkpointer(tmp_path, model=model(part, parallel), policy=Consecutive()) as saver:
            saver.save()
        assert not any(checked.problems for checked in verify(tmp_path))
        with Checkpointer(tmp_path, model=model(other, parallel)) as saver:
            saver.restore()
    assert same(part.extra, other.extra)
    assert other.loads > 0
    assert torch.equal(part.weight, other.weight)


@pytest.mark.usefixtures("one_rank")
def test_each_checkpoint_has_the_extra_state_of_its_instant(tmp_path: Path) -> None:
    part = Odd({"count": 0, "seen": torch.zeros(2)})
    whole = model(part, parallel=True)
    with Checkpointer(tmp_path, model=whole, policy=Consecutive()) as saver:
        for number in range(1, 4):
            part.extra["count"] = number
            part.extra["seen"] += 1
            saver.save()
            part.extra["seen"] += 100  # in place, while the checkpoint is on its way
            saver.wait()
            part.extra["seen"] -= 100
            part.weight.data += 1
    for number, checkpoint in enumerate(sorted(tmp_path.glob("seq-*")), start=1):
        other = Odd()
        with Checkpointer(tmp_path, model=model(other, parallel=True)) as reader:
            reader.restore(checkpoint.name)
        assert other.extra["count"] == number
        assert other.extra["seen"].tolist() == [number, number]


def test_a_restore_with_less_leaves_the_extra_state_of_others(tmp_path: Path) -> None:
    saved, live = nn.Sequential(Odd({"count": 1}), Odd({"count": 2})), nn.Sequential(Odd())
    with alone():
        with Checkpointer(tmp_path, model=saved) as saver:
            saver.save()
        with Checkpointer(tmp_path, model=live) as saver:
            saver.restore(strict=False)
    first: Any = live[0]
    assert first.extra == {"count": 1}


def test_missing_extra_state_is_refused(tmp_path: Path) -> None:
    with alone():
        with Checkpointer(tmp_path, model=nn.Sequential(nn.Linear(2, 2))) as saver:
            saver.save()
        with (
            Checkpointer(tmp_path, model=nn.Sequential(Odd({"count": 1}))) as saver,
            pytest.raises(IncompatibleCheckpoint, match=r"_extra_state is not in the checkpoint"),
        ):
            saver.restore()


def test_what_can_not_be_stored_is_refused_at_the_start(tmp_path: Path) -> None:
    broken = nn.Sequential(Odd({"of": object()}))
    expected = r"model\.0\._extra_state\.of is a builtins\.object, which can't be stored"
    with alone(), pytest.raises(UnsupportedState, match=expected):
        Checkpointer(tmp_path, model=broken)


def test_a_module_that_does_not_take_it_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with alone():
        with Checkpointer(tmp_path, model=nn.Sequential(Forgetful({"count": 1}))) as saver:
            saver.save()
        with Checkpointer(tmp_path, model=nn.Sequential(Forgetful({"count": 2}))) as saver:
            saver.restore()
    assert "show other extra state than was restored: 0._extra_state" in caplog.text


@pytest.mark.usefixtures("one_rank")
def test_images_hold_it(tmp_path: Path) -> None:
    lives = Lives(tmp_path)

    def make(seed: int) -> Job:
        job = make_job(seed)
        job.model.module.part = Odd({"count": 0, "seen": [torch.zeros(1)]})
        return job

    lives.make = make
    try:
        job, saver = lives.begin()
        saver.restore()
        for number in range(3):
            job.train(1)
            job.model.module.part.extra["count"] = number + 1
            job.model.module.part.extra["seen"].append(torch.full((1,), float(number)))
            saver.step()
        lives.die()
        job, saver = lives.begin()
        report = saver.restore()
        assert report is not None
        assert (report.source, report.step) == ("images", 3), report.without_images
        found = job.model.module.part.extra
        assert found["count"] == 3
        assert [int(seen) for seen in found["seen"]] == [0, 0, 1, 2]
    finally:
        lives.end()
