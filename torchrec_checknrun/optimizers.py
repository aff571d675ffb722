"""Dense optimizers among a run's state objects: which step, on what, and their state by rows.

The tables of a fused kernel have their optimizer inside the kernel; a data-parallel table is a
dense parameter, and its optimizer state is here, under other names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import optim
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.optim import Optimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

# A dense optimizer's names for what TorchRec's fused optimizers call so.
_FUSED_NAMES = {"sum": "momentum1", "exp_avg": "momentum1", "exp_avg_sq": "exp_avg_sq"}


def torch_optimizers(states: Iterable[object]) -> Iterator[Optimizer]:
    """The optimizers that step dense parameters, inside whatever wraps them, each once."""
    seen: set[int] = set()
    for state in states:
        for optimizer in _unwrap(state):
            if id(optimizer) not in seen:
                seen.add(id(optimizer))
                yield optimizer


def _unwrap(state: object) -> Iterator[Optimizer]:
    if isinstance(state, CombinedOptimizer):
        for _, combined in state.optimizers:
            yield from _unwrap(combined)
    elif isinstance(inner := getattr(state, "_optimizer", None), Optimizer):
        yield from _unwrap(inner)  # TorchRec's KeyedOptimizerWrapper, warm-up, clipping
    elif isinstance(state, Optimizer) and not isinstance(state, KeyedOptimizer):
        yield state


def is_keyed(state: object) -> bool:
    """Whether it is one of TorchRec's optimizers, which load only what they have state for."""
    return isinstance(state, KeyedOptimizer)


@contextmanager
def complete_state(states: Iterable[object]) -> Iterator[None]:
    """Gives TorchRec's wrappers the dense state that is created at an optimizer's first step only
    (Adam's moments), so that it can be restored; parameters stay as they are. Should the block
    fail, that state is taken away again.
    """
    created = []
    for optimizer in torch_optimizers(state for state in states if is_keyed(state)):
        if not optimizer.state and _step_without_effect(optimizer):
            created.append(optimizer)
    try:
        yield
    except BaseException:
        for optimizer in created:
            optimizer.state.clear()
        raise


def _step_without_effect(optimizer: Optimizer) -> bool:
    """A step with gradients and learning rates of zero; not where gradients wait."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(parameter.grad is not None for parameter in parameters):
        return False
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for parameter in parameters:
            parameter.grad = None
    return True


def wraps_another(optimizer: Optimizer) -> bool:
    """Whether another optimizer inside does the stepping."""
    return any(inner is not optimizer for inner in _unwrap(optimizer))


def group_of(optimizer: Optimizer, weight: torch.Tensor) -> dict[str, Any] | None:
    """The parameter group that steps a table, found by the table's memory; None if none does."""
    for group in optimizer.param_groups:
        if any(_is(parameter, weight) for parameter in group["params"]):
            return group
    return None


def row_states(optimizers: Iterable[Optimizer], weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A table's optimizer state by rows, as views, under the fused optimizers' names.

    Returns:
        By name ``(rows, dim)`` or, where it is kept per row, ``(rows,)``. Counters and the like are
        left out; they stay in the optimizer's state dict.
    """
    found: dict[str, torch.Tensor] = {}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if not _is(parameter, weight):
                continue
            for name, value in state.items():
                if not isinstance(value, torch.Tensor):
                    continue
                if value.shape == weight.shape:
                    found[_FUSED_NAMES.get(name, name)] = value.detach()
                elif value.shape == (weight.shape[0], 1):
                    found[_FUSED_NAMES.get(name, name)] = value.detach()[:, 0]
    return found


def touches_other_rows(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a step may change rows without a gradient; true of whatever isn't known not to."""
    if group.get("weight_decay", 0):
        return True
    if type(optimizer) is optim.SGD:
        return bool(group["momentum"])
    return type(optimizer) not in (optim.Adagrad, RowWiseAdagrad)


def _is(parameter: object, weight: torch.Tensor) -> bool:
    return (
        isinstance(parameter, torch.Tensor)
        and not isinstance(parameter, ShardedTensor)
        and parameter.shape == weight.shape
        and parameter.data_ptr() == weight.data_ptr()
    )
