"""Notice gradients of parameters whose content or object was exchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from torchrec_checknrun.dense.gradients import PendingGradients


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def by_hand(layer: nn.Linear) -> None:
    for parameter in layer.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))


KEPT: list[nn.Parameter] = []
"""The tensors that others were swapped with."""


def kept(layer: nn.Linear) -> None:
    for parameter in layer.parameters():
        KEPT.append(nn.Parameter(parameter.detach().clone()))
        torch.utils.swap_tensors(parameter, KEPT[-1])


def back_and_forth(layer: nn.Linear) -> None:
    layer.double()
    layer.float()


def loaded(layer: nn.Linear) -> None:
    layer.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()})


SWAPS = [by_hand, kept, back_and_forth, loaded]


def train(layer: nn.Module, pending: PendingGradients, optimizer: Optimizer) -> list[bool]:
    """Train two batches; return whether gradients waited after each part of the step."""
    found = []
    for _ in range(2):
        layer(torch.ones(1, 3)).sum().backward()
        found.append(pending.waiting)
    optimizer.step()
    found.append(pending.waiting)
    optimizer.zero_grad()
    return found


def train_unseen(layer: nn.Module, pending: PendingGradients, optimizer: Optimizer) -> bool:
    """Train a batch; return whether gradients wait at its end."""
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    found = pending.waiting
    optimizer.zero_grad()
    return found


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("swap", SWAPS)
def test_gradients_after_a_swap_wait(swap: Callable[[nn.Linear], None]) -> None:
    """Hooks of a parameter stay with the tensor that it was swapped with."""
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    pending = PendingGradients([optimizer], layer)
    for _ in range(3):
        swap(layer)
        assert train(layer, pending, optimizer) == [True, True, False]
        swap(layer)
        assert not train_unseen(layer, pending, optimizer)
    hooks: Any = layer.weight._post_accumulate_grad_hooks
    assert len(hooks) == 1
    pending.close()
    assert not hooks


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_a_step_applies_gradients_of_replaced_parameters(make: Callable[[Any], Any]) -> None:
    """The optimizer has as many parameters as before."""

    def replace() -> None:
        layer.weight = nn.Parameter(layer.weight.detach() * 0.9)
        optimizer.param_groups[0]["params"][0] = layer.weight

    layer = nn.Linear(3, 2)
    optimizer = make(layer.parameters())
    pending = PendingGradients([optimizer], layer)
    for _ in range(3):
        replace()
        assert train(layer, pending, optimizer) == [True, True, False]
        replace()
        assert not train_unseen(layer, pending, optimizer)
    pending.close()
