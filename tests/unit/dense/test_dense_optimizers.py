"""Name and shape a dense optimizer's state alike before and after its first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import LambdaLR
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_checknrun.dense.first_state import first_state
from torchrec_checknrun.dense.optimizers import row_states, state_of

Factory = Callable[[list[nn.Parameter]], optim.Optimizer]

LATE: dict[str, Factory] = {
    "adam": optim.Adam,
    "amsgrad": lambda p: optim.Adam(p, amsgrad=True),
    "adamw": lambda p: optim.AdamW(p, lr=torch.tensor(0.1), weight_decay=0.5),
    "fused": lambda p: optim.Adam(p, fused=True),
    "foreach": lambda p: optim.Adam(p, foreach=True),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "rmsprop": lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "adamax": optim.Adamax,
    "adadelta": optim.Adadelta,
    "asgd": optim.ASGD,
    "rprop": optim.Rprop,
    "adafactor": optim.Adafactor,
}


def parameter(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.full((4, 3), float("nan"), dtype=dtype))


def describe(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: (value.shape, value.dtype, value.device) if torch.is_tensor(value) else type(value)
        for name, value in state.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(LATE))
def test_first_state_is_that_of_a_step(name: str, dtype: torch.dtype) -> None:
    weight, twin = parameter(dtype), parameter(dtype)
    optimizer, stepping = LATE[name]([weight]), LATE[name]([twin])
    calls: list[object] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(_))
    optimizer.register_step_pre_hook(lambda *_: calls.append(_))
    LambdaLR(optimizer, lambda _: 1.0)  # wraps the step of its optimizer
    weight.grad = torch.ones_like(weight)
    before = weight.detach().clone()

    made = first_state(optimizer, optimizer.param_groups[0], weight)

    twin.grad = torch.ones_like(twin)
    stepping.step()
    assert made is not None
    assert describe(made) == describe(stepping.state.get(twin, {}))
    assert not any(value.any() for value in made.values() if torch.is_tensor(value))
    assert calls == []
    assert not optimizer.state
    assert torch.equal(weight.view(torch.int16), before.view(torch.int16))
    assert torch.equal(weight.grad, torch.ones_like(weight))


@pytest.mark.parametrize("name", sorted(LATE))
def test_first_state_has_the_layout_of_a_steps(name: str) -> None:
    """Fused kernels walk through memory: parameter and state must lie in one order."""
    weight, twin = (nn.Parameter(torch.zeros(4, 3).t()) for _ in range(2))
    optimizer, stepping = LATE[name]([weight]), LATE[name]([twin])
    made = first_state(optimizer, optimizer.param_groups[0], weight)
    twin.grad = torch.ones_like(twin)
    stepping.step()
    assert made is not None
    wanted = stepping.state.get(twin, {})
    assert {k: v.stride() for k, v in made.items() if torch.is_tensor(v)} == {
        k: v.stride() for k, v in wanted.items() if torch.is_tensor(v)
    }


@pytest.mark.parametrize("make", [RowWiseAdagrad, optim.LBFGS, optim.SparseAdam])
def test_some_can_not_be_asked(make: Factory) -> None:
    weight = parameter()
    optimizer = make([weight])
    assert first_state(optimizer, optimizer.param_groups[0], weight) is None
    assert weight.grad is None


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (LATE["adam"], {"momentum1", "exp_avg_sq"}),
        (LATE["amsgrad"], {"momentum1", "exp_avg_sq", "max_exp_avg_sq"}),
        (optim.Adagrad, {"momentum1"}),
        (RowWiseAdagrad, {"momentum1"}),
        (LATE["sgd"], set()),
        # Distinguish these states from Adagrad's sum, which a fused optimizer also calls momentum1:
        (LATE["momentum"], {"momentum_buffer"}),
        (LATE["rmsprop"], {"square_avg", "momentum_buffer", "grad_avg"}),
        (LATE["adamax"], {"exp_avg", "exp_inf"}),
    ],
)
def test_names_are_those_of_fused_optimizers(make: Factory, names: set[str]) -> None:
    weight = nn.Parameter(torch.rand(4, 3))
    optimizer = make([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    states = row_states(state_of([optimizer], weight), weight)
    assert states.keys() == names
    rows = (4,) if make is RowWiseAdagrad else (4, 3)
    assert all(state.shape == rows for state in states.values())
