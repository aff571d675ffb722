"""A user's object that holds TorchRec's optimizers restores them before their first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper

from tests.distributed.dense_jobs import (
    APART,
    MIXED,
    ROWS,
    checkpointer,
    differences,
    everything,
    make,
    save,
)
from tests.distributed.layouts import LayoutJob
from tests.distributed.worker_pool import WorkerPool
from torchrec_checknrun.dense.first_state import LateStates
from torchrec_checknrun.values.state import encode_state

Workers = Callable[[int], WorkerPool]


class Trainer:
    """An object that hands all on to the optimizer that it holds."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        content: dict[str, Any] = self.inner.state_dict()
        return content

    def load_state_dict(self, content: dict[str, Any]) -> None:
        self.inner.load_state_dict(content)


class Nested(Trainer):
    """A trainer whose state dict has the optimizer's at a key of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [{"optimizer": self.inner.state_dict()}]}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        self.inner.load_state_dict(content["parts"][0]["optimizer"])


class Wrapper(Trainer, torch.optim.Optimizer):  # type: ignore[misc]  # as users write it
    """A wrapper of torch's interface around TorchRec's optimizer."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, {}


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "trainer": Trainer,
    "nested": Nested,
    "wrapper": Wrapper,
}


def held(
    layout: dict[str, Any],
    dense: str,
    holder: str,
    seed: int = 0,
    wrapper: str = "combined",
    fused: str = "adagrad",
) -> LayoutJob:
    job = make(layout, dense, wrapper, seed, fused)
    return replace(job, optimizer=HOLDERS[holder](job.optimizer))


def resumes(
    root: str, layout: dict[str, Any], dense: str, holder: str, trained: int, **options: Any
) -> list[str]:
    job = held(layout, dense, holder, **options)
    with checkpointer(root, job) as saver:
        job.train(trained)
        save(saver)
    again = held(layout, dense, holder, seed=9, **options)
    with checkpointer(root, again) as saver:
        assert saver.restore() is not None
    for either in (job, again):
        either.train(2)
    return differences(everything(again), everything(job))


@pytest.mark.parametrize(
    ("layout", "dense", "holder", "trained"),
    [
        (ROWS, "adam", "trainer", 2),
        (ROWS, "momentum", "nested", 2),
        (ROWS, "asgd", "wrapper", 2),
        (ROWS, "adam", "nested", 0),
        (MIXED, "adam", "wrapper", 2),
    ],
)
def test_the_run_goes_on(
    workers: Workers, tmp_path: Path, layout: Any, dense: str, holder: str, trained: int
) -> None:
    arguments = {"layout": layout, "dense": dense, "holder": holder, "trained": trained}
    for problems in workers(2).run(resumes, root=str(tmp_path), **arguments):
        assert problems == []


@pytest.mark.parametrize("layout", [APART, ROWS])
@pytest.mark.parametrize("holder", ["trainer", "nested"])
def test_fused_optimizers_without_state(
    workers: Workers, tmp_path: Path, layout: Any, holder: str
) -> None:
    arguments: dict[str, Any] = {"layout": layout, "dense": "adam", "holder": holder, "trained": 2}
    for problems in workers(2).run(resumes, root=str(tmp_path), fused="sgd", **arguments):
        assert problems == []


@pytest.mark.parametrize("holder", ["trainer", "nested"])
def test_counters_of_a_warm_up(workers: Workers, tmp_path: Path, holder: str) -> None:
    arguments: dict[str, Any] = {"layout": ROWS, "dense": "adam", "holder": holder, "trained": 2}
    for problems in workers(2).run(resumes, root=str(tmp_path), wrapper="warm_up", **arguments):
        assert problems == []


def keyed() -> KeyedOptimizerWrapper:
    parameters = {name: torch.nn.Parameter(torch.ones(2)) for name in ("a", "b")}
    return KeyedOptimizerWrapper(parameters, lambda p: torch.optim.Adam(p, lr=0.1))


def test_a_failed_restore_takes_the_state_away_again() -> None:
    trained, fresh = keyed(), keyed()
    trained.params["a"].grad = torch.ones(2)
    trained.step()
    late = LateStates(Nested(fresh), {}, ())
    assert late.make(encode_state(Nested(trained).state_dict(), "trainer")[0])
    assert list(fresh.state) == [fresh.params["a"]]
    late.undo()
    assert list(fresh.state) == []
