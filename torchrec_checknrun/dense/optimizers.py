"""Dense optimizers among a run's state objects: which step, on what, and their state by rows.

The tables of a fused kernel have their optimizer inside the kernel; a data-parallel table is a
dense parameter, and its optimizer state is here, under other names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import optim
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_checknrun.dense.tree import all_nodes


def torch_optimizers(states: Iterable[object]) -> Iterator[Optimizer]:
    """Yield the optimizers that may step dense parameters, inside what wraps them and each once.

    The innermost come first. TorchRec's wrappers leave the stepping to others and are left out.
    """
    seen: set[int] = set()
    for state in states:
        for node in all_nodes(state) if isinstance(state, Optimizer) else ():
            wrapper = isinstance(node.optimizer, KeyedOptimizer) and not node.steps
            if not (node.fused or wrapper or id(node.optimizer) in seen):
                seen.add(id(node.optimizer))
                yield node.optimizer


def wraps_another(optimizer: Optimizer) -> bool:
    """Tell whether a TorchRec optimizer leaves all stepping to others inside.

    Others with an optimizer inside (Lookahead) may well modify parameters themselves.
    """
    if isinstance(optimizer, CombinedOptimizer):
        return True
    inner = getattr(optimizer, "_optimizer", None)
    return isinstance(optimizer, KeyedOptimizer) and isinstance(inner, Optimizer)


def group_of(optimizer: Optimizer, weight: torch.Tensor) -> dict[str, Any] | None:
    """The parameter group that steps a table, found by the table's memory; None if none does."""
    for group in optimizer.param_groups:
        if any(is_same_memory(parameter, weight) for parameter in group["params"]):
            return group
    return None


def state_of(optimizers: Iterable[Optimizer], weight: torch.Tensor) -> dict[str, Any]:
    """All that dense optimizers keep of a table, by their own names; empty before the first step of
    those that make it then.
    """
    found: dict[str, Any] = {}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if is_same_memory(parameter, weight):
                found.update(state)
    return found


def row_states(state: Mapping[str, Any], weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """What of a table's dense optimizer state is by rows, as views, under the fused optimizers'
    names.

    Returns:
        By name ``(rows, dim)`` or, where it is kept per row, ``(rows,)``. Counters and the like are
        left out; they stay in the optimizer's state dict.
    """
    fused_names = _fused_names(state)
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        if value.shape == weight.shape:
            found[fused_names.get(name, name)] = value.detach()
        elif value.shape == (weight.shape[0], 1):
            found[fused_names.get(name, name)] = value.detach()[:, 0]
    return found


def _fused_names(state: Collection[str]) -> dict[str, str]:
    """What TorchRec's fused optimizers call a dense one's states that are the same.

    TorchRec calls any fused optimizer's first state ``momentum1``: Adagrad's sum as well as Adam's
    first moment. Other states (momentum of SGD, AMSGrad's maximum, RMSprop's average …) have no
    fused counterpart and keep their names, so that they are not taken for one.
    """
    if {"exp_avg", "exp_avg_sq"} <= set(state):
        return {"exp_avg": "momentum1"}
    return {"sum": "momentum1"}


def touches_other_rows(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a step may change rows without a gradient; true of whatever isn't known not to."""
    if group.get("weight_decay", 0):
        return True
    if type(optimizer) is optim.SGD:
        return bool(group["momentum"])
    return type(optimizer) not in (optim.Adagrad, RowWiseAdagrad)


def is_same_memory(parameter: object, weight: torch.Tensor) -> bool:
    """Whether a parameter is this table, of any number of views of the same memory."""
    return (
        isinstance(parameter, torch.Tensor)
        and not isinstance(parameter, (ShardedTensor, DTensor))
        and parameter.shape == weight.shape
        and parameter.data_ptr() == weight.data_ptr()
    )
