"""Restore optimizers that keep the moments of all parameters in one flat buffer, as views.

The moments of a data-parallel table, which are stored with its rows, are in that buffer, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from tests.distributed.optimizer_nests import FACTORIES, goes_on, layout


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


@pytest.fixture
def factory() -> Iterator[str]:
    FACTORIES["flat"] = Flat
    yield "flat"
    del FACTORIES["flat"]


@pytest.mark.parametrize("sharding", ["data_parallel", "row_wise"])
def test_all_moments_come_back(tmp_path: Path, group: None, factory: str, sharding: str) -> None:
    both = layout(sharding, "row_wise", ranks=1)
    assert goes_on(str(tmp_path), [{"layout": both, "nest": "combined", "factory": factory}]) == []
