"""The state that an optimizer's first step would make, without taking that step."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchrec_checknrun.placements import zeros_placed_as

_DEVICE_STEP = ("capturable", "fused")
"""Options with which an optimizer keeps its step counter beside the parameter, not on the CPU."""


def first_state(
    optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> dict[str, Any] | None:
    """The state, all zeros, that an optimizer's first step would make for a parameter.

    A copy of the optimizer, without its hooks, takes the step on a stand-in, which has no data (on
    the meta device) where the optimizer can do without; the parameter isn't touched.

    Returns:
        None if the optimizer can't be asked so; empty if it keeps no state.
    """
    for device in (torch.device("meta"), parameter.device):
        stand_in = nn.Parameter(zeros_placed_as(parameter, device))
        stand_in.grad = torch.zeros_like(stand_in)
        twin: Any = object.__new__(type(optimizer))
        twin.__dict__.update(vars(optimizer))
        twin.__dict__.pop("step", None)  # a scheduler's, bound to the optimizer itself
        twin.state = defaultdict(dict)
        twin._optimizer_step_pre_hooks = OrderedDict()
        twin._optimizer_step_post_hooks = OrderedDict()
        plain = dict.fromkeys(("foreach", "differentiable", *_DEVICE_STEP), False)
        options = {**group, **{k: v for k, v in plain.items() if k in group}, "lr": 0.0}
        twin.param_groups = [{**options, "params": [stand_in]}]
        try:
            type(twin).step(twin)
        except Exception:  # whatever an optimizer raises that can't step so
            continue
        made: dict[str, Any] = twin.state.get(stand_in, {})
        beside = any(group.get(option) for option in _DEVICE_STEP)
        return {name: _zeros(value, parameter.device, beside) for name, value in made.items()}
    return None


def _zeros(value: Any, device: torch.device, beside: bool) -> Any:
    """As before any step: zeros, where the optimizer would have them."""

    def zeros(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor, device=device if beside or tensor.is_meta else None)

    return 0 if type(value) is int else _map(value, zeros)


def to_device(device: torch.device, value: Any) -> Any:
    """A parameter's state with its tensors on a device, but for counters."""
    return _map(value, lambda tensor: tensor.to(device) if tensor.dim() else tensor)


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _map(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, change) for item in value)
    return value
