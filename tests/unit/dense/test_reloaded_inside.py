"""Load the optimizer inside a TorchRec wrapper directly, which leaves old dicts to the wrapper."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, Optimizer
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper

from tests.distributed.live_optimizers import differences, live
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.errors import SaveFailed

pytestmark = pytest.mark.usefixtures("one_rank")

Wrap = Callable[[KeyedOptimizer], KeyedOptimizer]
WRAPS: dict[str, Wrap] = {
    "alone": lambda keyed: keyed,
    "combined": lambda keyed: CombinedOptimizer([("dense", keyed)]),
    "clipped": lambda keyed: GradientClippingOptimizer(keyed, max_gradient=1e9),
    "nested": lambda keyed: CombinedOptimizer(
        [("d", GradientClippingOptimizer(CombinedOptimizer([("e", keyed)]), max_gradient=1e9))]
    ),
}


class Run:
    """A model, Adam in a TorchRec wrapper, and what is around that one."""

    def __init__(self, wrap: str = "alone", seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        named = dict(self.model.named_parameters())
        self.keyed: Any = KeyedOptimizerWrapper(named, lambda ps: Adam(ps, lr=0.1))
        self.optimizer: Any = WRAPS[wrap](self.keyed)

    @property
    def inner(self) -> Optimizer:
        found: Optimizer = self.keyed._optimizer
        return found

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.model(torch.arange(6.0).view(2, 3)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def reload(self, rate: float = 0.3) -> None:
        """Load another run's state into the inner optimizer, and not into its wrapper."""
        other = Run()
        other.train(3)
        state = other.inner.state_dict()
        state["param_groups"][0]["lr"] = rate
        self.inner.load_state_dict(state)

    def saver(self, root: Path) -> Checkpointer:
        state = {"optimizer": self.optimizer}
        return Checkpointer(root, model=self.model, state=state, retention=None)

    def live(self) -> Any:
        return live(self.model, inner=self.inner.state, groups=self.inner.param_groups)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "no longer shows" in r.getMessage()]


@pytest.fixture(params=sorted(WRAPS))
def wrap(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("before", [0, 1])
def test_the_state_is_what_training_uses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wrap: str, before: int
) -> None:
    caplog.set_level(logging.WARNING)
    run = Run(wrap)
    with run.saver(tmp_path) as saver:
        run.train(before)
        saver.save()
        run.reload()
        run.train()
        saver.steps += 1
        saver.save()
        saver.steps += 1
        run.train()
        saver.save()
    assert len(warnings(caplog)) == 1
    again = Run(wrap, seed=5)
    with again.saver(tmp_path) as saver:
        assert saver.restore() is not None
        assert differences(again.live(), run.live()) == []
        run.train()
        again.train()
    assert differences(again.live(), run.live()) == []


def test_a_restore_reaches_the_optimizer_inside(tmp_path: Path, wrap: str) -> None:
    """Restore into the nest that was taken apart, whose next step must use what was saved."""
    run, wanted = Run(wrap), Run(wrap)
    with run.saver(tmp_path) as saver:
        run.train(2)
        wanted.train(2)
        saver.save()
        run.reload()
        run.train()
        assert saver.restore() is not None
        assert differences(run.live(), wanted.live()) == []
        run.train()
        wanted.train()
    assert differences(run.live(), wanted.live()) == []


def test_state_that_the_optimizer_inside_has_lost_is_not_saved(tmp_path: Path, wrap: str) -> None:
    run = Run(wrap)
    with run.saver(tmp_path) as saver:
        run.train(2)
        run.inner.load_state_dict(Run().inner.state_dict())
        saver.save()
    again = Run(wrap, seed=5)
    with again.saver(tmp_path) as saver:
        assert saver.restore() is not None
        assert differences(again.live(), run.live()) == []
        run.train()
        again.train()
    assert differences(again.live(), run.live()) == []


class TwoStates(KeyedOptimizer):
    """A user's optimizer with state of its own beside that of one in ``_optimizer``."""

    def __init__(self, params: dict[str, Any]) -> None:
        self._optimizer = Adam(params.values(), lr=0.1)
        super().__init__(params, {}, self._optimizer.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self._optimizer.step(closure)
        for p in self.params.values():
            self.state.setdefault(p, {"slow": torch.zeros_like(p)})


def test_a_users_wrapper_that_hides_state_is_refused(tmp_path: Path) -> None:
    run = Run()
    run.optimizer = TwoStates(dict(run.model.named_parameters()))
    with run.saver(tmp_path) as saver:
        run.train()
        with pytest.raises(SaveFailed, match=r"TwoStates.*_optimizer.*another name"):
            saver.save()
