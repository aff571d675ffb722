"""Restore TorchRec's optimizer of local steps and global ones, with both optimizers inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.optim.semi_sync import SemisyncOptimizer

from tests.unit.chains import one_thread
from tests.unit.inner_nests import keyed, keyed_adam, model, train, warm
from torchrec_checknrun import Checkpointer, Images


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with one_thread():
        yield


class Outer(Optimizer):
    """A global optimizer, as DiLoCo's: slow weights, and a momentum of what local steps change."""

    def __init__(self, parameters: Any, early: bool) -> None:
        super().__init__(parameters, {"lr": 0.7})
        if early:
            self.begin()

    def begin(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            if not self.state[parameter]:
                slow, moment = parameter.detach().clone(), torch.zeros_like(parameter)
                self.state[parameter] |= {"slow": slow, "moment": moment}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded
        raise AssertionError("only global steps")

    @torch.no_grad()
    def global_step(self, steps: torch.Tensor, closure: Any = None) -> None:
        self.begin()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["moment"].mul_(0.9).add_(state["slow"] - parameter)
            state["slow"].sub_(state["moment"], alpha=self.param_groups[0]["lr"])
            parameter.copy_(state["slow"])


def semisync(
    layers: nn.Module, early: bool = True, local: Callable[[Any], Any] = keyed_adam
) -> KeyedOptimizer:
    return SemisyncOptimizer(
        global_params=list(layers.parameters()),
        optimizer=local(layers),
        global_optimizer=keyed(layers, lambda ps: Outer(ps, early)),
        num_local_steps=4,
    )


NESTS: dict[str, Callable[[nn.Module], KeyedOptimizer]] = {
    "alone": semisync,
    "late": lambda m: semisync(m, early=False),
    "a part": lambda m: CombinedOptimizer([("dense", semisync(m, early=False))]),
    "warmed up": lambda m: warm(semisync(m)),
    "of a warmed up one": lambda m: semisync(m, local=lambda layers: warm(keyed_adam(layers))),
}


@pytest.mark.parametrize("survive", [None, Images()])
@pytest.mark.parametrize("turns", [0, 1, 2])
@pytest.mark.parametrize("name", NESTS)
def test_both_come_back(tmp_path: Path, name: str, turns: int, survive: Images | None) -> None:
    torch.manual_seed(0)
    layers = model()
    optimizer = NESTS[name](layers)
    for _ in range(turns):
        train(layers, optimizer)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    with Checkpointer(
        tmp_path, model=layers, state={"optimizer": optimizer}, survive=survive
    ) as saver:
        saver.save()
    again = model()
    other = NESTS[name](again)
    with Checkpointer(tmp_path, model=again, state={"optimizer": other}) as saver:
        assert saver.restore() is not None
    for seed in range(3):
        train(layers, optimizer, seed)
        train(again, other, seed)
        for key, value in layers.state_dict().items():
            assert torch.equal(again.state_dict()[key], value)
