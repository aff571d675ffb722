"""Find gradients that FSDP2 keeps to itself until it reduces them.

With ``set_requires_gradient_sync(False)``, as in gradient accumulation, they are no gradients of
the sharded parameters yet, and run no hooks of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def unreduced(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the sharded parameters whose gradients wait to be reduced."""
    for module in modules:
        if isinstance(module, FSDPModule):
            for group in _groups(module._get_fsdp_state()):
                partly = getattr(group, "_partial_reduce_output", None) is not None
                for parameter in group.fsdp_params:
                    if partly or _accumulated(parameter):
                        yield parameter.sharded_param


def _groups(state: Any) -> list[Any]:
    """Return the state's groups of parameters; older versions of torch have one, or None."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def _accumulated(parameter: Any) -> bool:
    if getattr(parameter, "unsharded_accumulated_grad", None) is not None:
        return True
    whole = getattr(parameter, "_unsharded_param", None)  # made at the first forward pass
    return whole is not None and whole.grad is not None
