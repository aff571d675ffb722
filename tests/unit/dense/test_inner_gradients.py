"""Wait for gradients until the optimizer that owns them steps, anywhere in a nest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torchrec.optim.keyed import KeyedOptimizer

from tests.unit.inner_nests import NESTS, adam, model, train
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.dense.gradients import PendingGradients
from torchrec_checknrun.errors import SaveDeferred


class Keyed(KeyedOptimizer):
    """A keyed optimizer that steps parameters itself, without torch's hooks."""

    def __init__(self, layers: nn.Module) -> None:
        params = dict(layers.named_parameters())
        super().__init__(params, {}, [{"params": list(params.values()), "lr": 0.1}])

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for p in self.params.values():
                p.sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize("name", [*NESTS, "keyed"])
def test_waits_for_the_step(name: str) -> None:
    layers = model()
    nest: Any = {**NESTS, "keyed": Keyed}[name](layers)
    pending = PendingGradients([nest])
    layers(torch.ones(1, 4)).sum().backward()
    found = [pending.waiting]
    if name.startswith("sam"):
        base = getattr(nest, "_optimizer", nest)
        base.first_step()
        layers(torch.ones(1, 4)).sum().backward()
        found.append(pending.waiting)
        base.second_step()
    else:
        found.append(pending.waiting)
        nest.step()
    found.append(pending.waiting)
    layers(torch.ones(1, 4)).sum().backward()
    found.append(pending.waiting)
    pending.close()
    assert found == [True, True, False, True]


def test_an_outer_step_that_steps_nothing_inside_clears_nothing() -> None:
    class Every(Optimizer):
        def __init__(self, base: Optimizer) -> None:
            super().__init__(base.param_groups, {})
            self.base, self.count = base, 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded
            self.count += 1
            if self.count % 2 == 0:
                self.base.step()

    layers = model()
    nest = Every(adam(layers))
    pending = PendingGradients([nest])
    found = []
    for _ in range(4):
        layers(torch.ones(1, 4)).sum().backward()
        nest.step()
        found.append(pending.waiting)
    pending.close()
    assert found == [True, False, True, False]


@pytest.mark.parametrize("how", ["unfreeze", "group", "attribute"])
def test_parameters_that_come_later(tmp_path: Path, how: str) -> None:
    layers = model()
    late = layers[1]  # type: ignore[index]  # Sequential
    nest: Any
    if how == "unfreeze":
        late.requires_grad_(False)
        nest = torch.optim.Adam(layers.parameters(), lr=0.1)
    else:
        nest = torch.optim.Adam(layers[0].parameters(), lr=0.1)  # type: ignore[index]  # Sequential
    with Checkpointer(tmp_path, model=layers, state={"optimizer": nest}) as saver:
        train(layers, nest)
        saver.save()
        if how == "unfreeze":
            late.requires_grad_(True)
        elif how == "group":
            nest.add_param_group({"params": list(late.parameters())})
        else:
            nest.other = torch.optim.SGD(late.parameters(), lr=0.1)
        layers(torch.ones(1, 4)).sum().backward()
        layers[0].zero_grad()  # type: ignore[index]  # Sequential
        with pytest.raises(SaveDeferred):
            saver.save()
        nest.step()
        if how == "attribute":
            nest.other.step()
        saver.save()


def test_an_unfrozen_parameter_that_was_stepped_does_not_wait() -> None:
    layers = model().requires_grad_(False)
    nest = adam(layers)
    pending = PendingGradients([nest])
    layers.requires_grad_(True)
    layers(torch.ones(1, 4)).sum().backward()
    nest.step()
    assert not pending.waiting
    pending.close()
