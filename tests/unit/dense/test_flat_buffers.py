"""Restore optimizers that keep the moments of all parameters in one flat buffer, as views.

The moments of a data-parallel table, which are stored with its rows, are in that buffer, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import MultiplicativeLR

from tests.distributed.optimizer_nests import FACTORIES, goes_on, layout
from torchrec_checknrun import Checkpointer, Images


class Flat(Optimizer):
    """Momentum in one buffer, with room at its end for a norm that no parameter's state shows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.03})
        self.held = [p for group in self.param_groups for p in group["params"]]
        sizes = [p.numel() for p in self.held]
        self.flat = torch.zeros(sum(sizes) + 3)
        self.norm = self.flat[-1:]
        for parameter, moment in zip(self.held, self.flat[:-3].split(sizes), strict=True):
            self.state[parameter]["moment"] = moment.view_as(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded
        """Step all parameters by the whole buffer."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.held]
        self.flat[:-3].lerp_(torch.cat([g.reshape(-1) for g in gradients]), 0.3)
        self.norm.add_(self.flat[:-3].norm())
        for parameter in self.held:
            moment = self.state[parameter]["moment"]
            parameter.sub_(moment / (1 + self.norm), alpha=self.param_groups[0]["lr"])


class Holding:
    """A user's state object that holds the optimizer, and saves something else."""

    def __init__(self, optimizer: Optimizer, _: object) -> None:
        self.optimizer = optimizer
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


@pytest.fixture
def factory() -> Iterator[str]:
    FACTORIES["flat"] = Flat
    yield "flat"
    del FACTORIES["flat"]


@pytest.mark.parametrize("sharding", ["data_parallel", "row_wise"])
def test_all_moments_come_back(tmp_path: Path, group: None, factory: str, sharding: str) -> None:
    both = layout(sharding, "row_wise", ranks=1)
    assert goes_on(str(tmp_path), [{"layout": both, "nest": "combined", "factory": factory}]) == []


@pytest.mark.parametrize("survive", [None, Images()], ids=["checkpoint", "images"])
@pytest.mark.parametrize("holder", [None, MultiplicativeLR, Holding], ids=str)
def test_views_stay_beside_another_order_in_memory(
    tmp_path: Path, group: None, holder: Any, survive: Images | None
) -> None:
    """Leave moments that are rows of the buffer, under a weight that lies by columns, in place,
    though a scheduler, or another state object, holds the optimizer.
    """

    def made(seed: int) -> tuple[nn.Linear, Flat, dict[str, Any]]:
        torch.manual_seed(seed)
        layers = nn.Linear(3, 4)
        layers.weight = nn.Parameter(torch.randn(3, 4).t())
        optimizer = Flat(layers.parameters())
        state: dict[str, Any] = {"optimizer": optimizer}
        if holder is not None:
            state["holder"] = holder(optimizer, lambda _: 0.9)
        return layers, optimizer, state

    def train(layers: nn.Linear, optimizer: Flat, saver: Checkpointer) -> None:
        optimizer.zero_grad()
        layers(torch.arange(6.0).reshape(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        saver.step()

    layers, optimizer, state = made(0)
    saver = Checkpointer(tmp_path, model=layers, state=state, survive=survive)
    saver.restore()
    for _ in range(3):
        train(layers, optimizer, saver)
    if survive is None:
        saver.save()
        saver.close()
    else:
        saver.__exit__(RuntimeError, RuntimeError("killed, says the test"), None)
    again, restored, state = made(1)
    with Checkpointer(tmp_path, model=again, state=state, survive=survive) as saver:
        assert saver.restore() is not None
        moment = restored.state[again.weight]["moment"]
        assert moment.untyped_storage().data_ptr() == restored.flat.untyped_storage().data_ptr()
        assert torch.equal(restored.flat, optimizer.flat)
        train(again, restored, saver)
    with Checkpointer(tmp_path / "other", model=layers, state={}) as saver:
        train(layers, optimizer, saver)
    assert torch.equal(again.weight, layers.weight)
    assert torch.equal(restored.flat, optimizer.flat)
