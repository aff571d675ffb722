"""Follow with models that compute values from those that they load, or show one many times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.serve.served import CPU, Job, Net
from torchrec_checknrun import Follower
from torchrec_checknrun.errors import IncompatibleCheckpoint

pytestmark = pytest.mark.usefixtures("one_rank")


class Norm(Net):
    """A model that keeps a value of its dense weight in no state dict."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.compute()

    def compute(self, *_: Any) -> None:
        self.norm = float(self.over.weight.detach().norm())


class InLoading(Norm):
    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.compute()


class ByAHook(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(self.compute)


class ItsOwnWay(Norm):
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().load_state_dict(*args, **kwargs)
        self.compute()
        return found


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("kind", [InLoading, ByAHook, ItsOwnWay])
def test_what_is_computed_from_loaded_values_follows(
    tmp_path: Path, kind: Any, copies: int
) -> None:
    job = Job(tmp_path)
    follower = Follower(tmp_path, kind(), copies=copies)
    for seed in range(3):
        job.train(seed)
        job.save()
        follower.poll()
        with follower.read() as (found, _):
            model: Any = found
            trained: Any = job.model
            assert torch.equal(model.over.weight, trained.module.over.weight)
            assert model.norm == float(model.over.weight.detach().norm())
    job.saver.close()


@pytest.mark.parametrize("copies", [1, 2])
def test_a_refusal_is_told(tmp_path: Path, copies: int) -> None:
    def refuse(*_: object) -> None:
        raise KeyError("vocabulary")

    job = Job(tmp_path)
    job.save()
    net = Net(CPU)
    net.over.register_load_state_dict_post_hook(refuse)
    follower = Follower(tmp_path, net, copies=copies)
    with pytest.raises(IncompatibleCheckpoint, match="vocabulary"):
        follower.poll()
    assert follower.version is None
    job.saver.close()


@pytest.mark.parametrize("copies", [1, 2])
def test_an_expanded_buffer_follows(tmp_path: Path, copies: int) -> None:
    job, net = Job(tmp_path), Net(CPU)
    net.seen = torch.zeros(1).expand(3)
    follower = Follower(tmp_path, net, copies=copies)
    for seed in range(3):
        job.train(seed)
        job.save()
        follower.poll()
        with follower.read() as (found, _):
            model: Any = found
            assert model.seen.tolist() == [0.25 * (seed + 1)] * 3
            assert model.seen.stride() == (0,)
    job.saver.close()
