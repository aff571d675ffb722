"""State objects of a user that hold optimizers, such as a trainer with its own ``state_dict``.

TorchRec's state dicts leave out rates and what wrappers hold, so such an object loses them unless
its optimizers are state objects as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from tests.crash.save_sweep import alone
from tests.distributed.live_optimizers import differences, live
from tests.distributed.optimizer_nests import warm
from torchrec_checknrun import Checkpointer, PerRank
from torchrec_checknrun.errors import ModelPartlyRestored

Make = Callable[[nn.Module], Any]


class Trainer:
    """A user's trainer: an optimizer, a schedule and a counter, saved as their state dicts.

    Args:
        whole: whether the optimizer's is among them.
    """

    def __init__(self, model: nn.Module, make: Make, whole: bool = True) -> None:
        self.model, self.parts, self.steps = model, {"optimizer": make(model)}, 0
        self.whole = whole
        self.schedule = StepLR(self.parts["optimizer"], 2, 0.5)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.parts["optimizer"].zero_grad()
            self.model(torch.ones(2, 4)).sum().backward()
            self.parts["optimizer"].step()
            self.schedule.step()
            self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        parts = {name: part.state_dict() for name, part in self.parts.items() if self.whole}
        return {"steps": self.steps, "schedule": self.schedule.state_dict(), **parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self.schedule.load_state_dict(state["schedule"])
        for name in state.keys() & self.parts.keys():
            self.parts[name].load_state_dict(state[name])


def torchrec(model: nn.Module, kind: Any = optim.Adagrad) -> CombinedOptimizer:
    """Return a warm-up and a combined optimizer, as TorchRec's programs nest them."""
    named = dict(model.named_parameters())
    return CombinedOptimizer(
        [("dense", warm(KeyedOptimizerWrapper(named, lambda p: kind(p, lr=0.1))))]
    )


def plain(model: nn.Module) -> optim.Optimizer:
    return optim.Adagrad(model.parameters(), lr=0.1)


def made(make: Make, seed: int = 0, whole: bool = True) -> Trainer:
    torch.manual_seed(seed)
    return Trainer(nn.Linear(4, 2), make, whole)


def checkpointer(root: Path, trainer: Trainer, declare: Any = None, **states: Any) -> Checkpointer:
    state = {"trainer": declare(trainer) if declare else trainer, **states}
    return Checkpointer(str(root), model=trainer.model, state=state, retention=None)


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    with alone():
        yield


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "optimizer" in line and "trainer" in line]


@pytest.mark.parametrize("declare", [None, PerRank])
def test_rates_that_would_be_lost_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, declare: Any
) -> None:
    trainer = made(torchrec)
    with (
        caplog.at_level(logging.WARNING),
        checkpointer(tmp_path, trainer, declare),
    ):
        (line,) = told(caplog)
    assert "state 'trainer' holds a CombinedOptimizer in parts['optimizer']" in line
    assert 'state={"optimizer": ' in line


@pytest.mark.parametrize("deep", [False, True])
def test_moments_that_would_be_lost_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, deep: bool
) -> None:
    """TorchRec's wrapper around a combined optimizer shows the state of the time it was made."""

    def nested(model: nn.Module) -> CombinedOptimizer:
        inner = torchrec(model, optim.Adam)
        return CombinedOptimizer([("all", warm(inner) if deep else inner)])

    with caplog.at_level(logging.WARNING), checkpointer(tmp_path, made(nested)):
        (line,) = told(caplog)
    assert ("Adam's moments" in line) == deep


def test_given_as_well_all_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, again = made(torchrec, whole=False), made(torchrec, seed=1, whole=False)
    trainer.train(5)
    with checkpointer(tmp_path, trainer, optimizer=trainer.parts["optimizer"]) as saver:
        assert saver.save() is not None
    with checkpointer(tmp_path, again, optimizer=again.parts["optimizer"]) as saver:
        assert saver.restore() is not None
    trainer.train(4)
    again.train(4)
    found, wanted = live(again.model, trainer=again), live(trainer.model, trainer=trainer)
    assert differences(found, wanted) == []
    assert not told(caplog)


def test_torchs_optimizers_lose_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, again = made(plain), made(plain, seed=1)
    trainer.train(5)
    with checkpointer(tmp_path, trainer) as saver:
        assert saver.save() is not None
    with checkpointer(tmp_path, again) as saver:
        assert saver.restore() is not None
    trainer.train(4)
    again.train(4)
    found, wanted = live(again.model, trainer=again), live(trainer.model, trainer=trainer)
    assert differences(found, wanted) == []
    assert not told(caplog)


def test_a_refused_state_is_named(tmp_path: Path) -> None:
    trainer = made(torchrec)
    trainer.train(2)
    with checkpointer(tmp_path, trainer) as saver:
        assert saver.save() is not None
    other = made(lambda model: torchrec(model, optim.Adam))
    refused = pytest.raises(ModelPartlyRestored, match=r"state 'trainer' refused .*Different state")
    with checkpointer(tmp_path, other) as saver, refused:
        saver.restore()


def others_told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "is another one" in r.getMessage()]


def test_an_optimizer_that_is_no_state_object_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = made(plain)
    with checkpointer(tmp_path, trainer, optimizer=trainer.parts["optimizer"]) as saver:
        trainer.train(1)
        saver.save()
        assert others_told(caplog) == []
        trainer.parts["optimizer"] = optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        trainer.parts["optimizer"].step()  # of other parameters
        saver.save()
        assert others_told(caplog) == []
        mine = optim.Adam(trainer.model.parameters(), lr=0.1)
        for _ in range(2):
            trainer.model(torch.ones(2, 4)).sum().backward()
            mine.step()
            mine.zero_grad()
            saver.save()
    (told,) = others_told(caplog)
    assert "Adam" in told
    assert "weight" in told


@pytest.mark.parametrize("how", ["held", "replaced in the state object", "around"])
def test_an_optimizer_that_a_state_object_holds_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Tell of no optimizer that is stored, nor of a container of stored ones."""
    trainer = made(plain)
    named = dict(trainer.model.named_parameters())
    dense = KeyedOptimizerWrapper(named, lambda p: optim.Adagrad(p, lr=0.1))
    with checkpointer(tmp_path, trainer, optimizer=dense) as saver:
        if how == "replaced in the state object":
            inner = optim.Adam(named.values(), lr=0.1)
            dense._optimizer = inner
            dense.state, dense.param_groups = inner.state, inner.param_groups
            trainer.parts["optimizer"] = inner
        elif how == "around":
            trainer.parts["optimizer"] = CombinedOptimizer([("dense", dense)])
        trainer.train(1)
        saver.save()
    assert others_told(caplog) == []
