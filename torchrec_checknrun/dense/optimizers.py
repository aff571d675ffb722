"""Find the dense optimizers that step parameters and tables, and tables' state in them.

A fused kernel contains its tables' optimizer; a data-parallel table is a dense parameter, and a
dense optimizer keeps its state, under other names.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_checknrun.dense.tree import (
    all_nodes,
    attributes,
    fused_keys,
    inner_optimizers,
    is_partitioned,
    names_table,
)
from torchrec_checknrun.format.entries import ROWS_DTYPES

T = TypeVar("T")
_DEEPEST = 5
"""Levels of objects, attributes and containers that are searched for schedulers."""
_MOST_ITEMS = 1000
"""The largest container that is searched for schedulers: larger ones are data."""
_COUNTER = "last_epoch"
"""An attribute of each of torch's schedulers. Other dicts that refer to an optimizer are passed
over: a look at what refers to them takes as long as a garbage collection.
"""
_NOT_SEARCHED = (nn.Module, torch.Tensor, ModuleType, type)
"""Types of values that are not searched for schedulers and the like."""


def is_known(state: object) -> TypeGuard[Optimizer]:
    """Return whether a state object is an optimizer with torch's or TorchRec's state dict."""
    if isinstance(state, KeyedOptimizer) or is_partitioned(state):
        return True
    return isinstance(state, Optimizer) and type(state).state_dict is Optimizer.state_dict


def handed_on(state: object) -> object:
    """Return the optimizer inside a wrapper that gives that one's state dict as its own, as
    accelerate's and Fabric's do; any other object itself.

    That state dict leaves out TorchRec's rates, and needs state that a first step makes.
    """
    if isinstance(state, Optimizer) and not is_known(state):
        for _, inner in inner_optimizers(state):
            with suppress(Exception):  # a user's state_dict may raise anything; told of later
                if _is_same(state.state_dict(), inner.state_dict()):
                    return handed_on(inner)
    return state


def _is_same(one: object, other: object) -> bool:
    """Return whether two state dicts have the same tensors and equal values."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(v, other[k]) for k, v in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return one is other or (not isinstance(one, torch.Tensor) and bool(one == other))


def torch_optimizers(states: Iterable[object]) -> Iterator[Optimizer]:
    """Yield the optimizers that may step dense parameters, each once, the innermost first.

    TorchRec's wrappers are left out, since they only call the optimizers inside.
    """
    seen: set[int] = set()
    for state in states:
        for node in all_nodes(state) if isinstance(state, Optimizer) else ():
            wrapper = isinstance(node.optimizer, KeyedOptimizer) and not node.steps
            if not (node.fused or wrapper or id(node.optimizer) in seen):
                seen.add(id(node.optimizer))
                yield node.optimizer


def stepped_memory(states: Collection[object]) -> set[int]:
    """Return the addresses of plain parameters that take gradients and that optimizers step, of
    those that state objects are or hold.
    """
    held = (inner for state in states for _, inner in inner_optimizers(state))
    return {
        parameter.data_ptr()
        for optimizer in torch_optimizers([*states, *held])
        for group in optimizer.param_groups
        for parameter in group["params"]
        if type(parameter) in (nn.Parameter, torch.Tensor)
        and parameter.requires_grad
        and parameter.layout is torch.strided
    }


class DenseOptimizers:
    """The optimizers that may step dense parameters, among state objects.

    Args:
        states: state objects, see ``torch_optimizers``.
    """

    def __init__(self, states: Iterable[object]) -> None:
        self._states = tuple(states)
        self.find()

    def find(self) -> None:
        """Look for the optimizers: one may be replaced inside a container at any time."""
        self._found = tuple(torch_optimizers(self._states))

    def __iter__(self) -> Iterator[Optimizer]:
        """Iterate over the optimizers as last found."""
        return iter(self._found)


def left_to_others(states: Mapping[str, object]) -> dict[str, bool]:
    """Describe TorchRec's optimizers inside state objects that have state dicts of their own.

    Such an object stores an optimizer by TorchRec's state dict, which leaves out rates and what
    wrappers hold. Left out here are optimizers that are, or are part of, a state object as well,
    and fused ones, whose rates go with the tables.

    Returns:
        By description, whether the state dict leaves out parameters' state as well; see ``_hides``.
    """
    found = {name: handed_on(state) for name, state in states.items()}
    optimizers = {name: state for name, state in found.items() if is_known(state)}
    kept = {id(node.optimizer) for state in optimizers.values() for node in all_nodes(state)}
    return {
        f"state {name!r} holds a {type(inner).__name__} in {place}": _hides(inner)
        for name in states.keys() - optimizers.keys()
        for place, inner in inner_optimizers(states[name])
        if isinstance(inner, KeyedOptimizer) and _loses(inner, kept)
    }


def tables_of_others(
    states: Mapping[str, object],
    tables: Collection[str],
    is_table: Callable[[torch.Tensor], bool],
) -> dict[str, list[str]]:
    """Find fused optimizers among state objects whose tables are not the model's.

    Args:
        tables: names of the model's tables: an optimizer from before a reshard has the names, and
            other memory.
        is_table: tells whether a fused optimizer's parameter is a table of the model.

    Returns:
        The keys of such tables, by name of the state.
    """
    found = {}
    for name, state in states.items():
        nest = all_nodes(state) if isinstance(state, Optimizer) else []
        ours = set(fused_keys(nest, is_table))
        others = {*fused_keys(nest, lambda _: True)} - ours
        if others := {key for key in others if not names_table(key, tables)}:
            found[name] = sorted(map(str, others))
    return found


def partitioned(states: Mapping[str, object]) -> Iterator[tuple[str, bool]]:
    """Find the optimizers of which each rank has a part of the state: those of ZeRO.

    Returns:
        Names of the state objects with one, and whether it can be stored: the object is an
        optimizer, or the one it holds is, or is inside, another state object.
    """
    optimizers = [state for state in states.values() if isinstance(state, Optimizer)]
    kept = {id(node.optimizer) for state in optimizers for node in all_nodes(state)}
    for name, state in states.items():
        inner = [each for _, each in inner_optimizers(state)]
        found = [
            node.optimizer
            for each in ([state] if isinstance(state, Optimizer) else inner)
            for node in all_nodes(each)
            if is_partitioned(node.optimizer)
        ]
        if isinstance(state, Optimizer) and any(each.world_size > 1 for each in found):
            yield name, True
        elif any(id(each) not in kept for each in found):
            yield name, False


def unsaved_hooks(model: nn.Module, states: Iterable[object]) -> set[str]:
    """Return the kinds of state that DistributedDataParallel's communication hooks keep (errors to
    feed back, steps until local ones begin), of which no state object is or holds the one there.
    """
    kept = {id(each) for state in states for each in (state, *attributes(state).values())}
    return {
        type(held).__name__
        for module in model.modules()
        for _, held in getattr(module, "_comm_hooks", ())
        if attributes(held)
        and not isinstance(held, dist.ProcessGroup)
        and id(held) not in kept
        and not type(held).__name__.startswith("_")  # torch's own, of one step
    }


def unsaved_schedules(states: Iterable[object]) -> set[tuple[str, str]]:
    """Return the kinds of learning rate schedulers of torch's that follow an optimizer among state
    objects, each with the optimizer's kind, and that no state object is or holds.

    An optimizer doesn't know what follows it, so what refers to it is looked for.
    """
    objects = tuple(states)
    optimizers = [
        node.optimizer
        for state in objects
        for node in (all_nodes(state) if isinstance(state, Optimizer) else ())
    ]
    followed = {id(optimizer): type(optimizer).__name__ for optimizer in optimizers}
    held = list(held_objects(objects, LRScheduler))
    kept = set(map(id, held))
    known = {id(vars(schedule)) for schedule in held}

    def others() -> list[Any]:
        # A list of all objects would refer to the tuples that other threads are just making, which
        # Python then refuses to finish ("bad argument to internal function").
        found = gc.get_referrers(*optimizers)
        dicts = [value for value in found if type(value) is dict and _COUNTER in value]
        if attributes := [each for each in dicts if id(each) not in known]:
            found += gc.get_referrers(*attributes)
        return [
            value
            for value in found
            if issubclass(type(value), LRScheduler)
            and id(value) not in kept
            and id(getattr(value, "optimizer", None)) in followed
        ]

    if not (optimizers and others()):  # most times; a collection takes longer
        return set()
    gc.collect()  # of one that the program has dropped
    lost = others()
    parts = {id(part) for value in lost for part in getattr(value, "_schedulers", ())}
    return {
        (type(value).__name__, followed[id(value.optimizer)])
        for value in lost
        if id(value) not in parts
    }


def held_objects(objects: Iterable[object], *kinds: type[T]) -> Iterator[T]:
    """Yield what is of some kinds that objects are or hold, in attributes and containers of these.

    Modules are not looked into.
    """
    seen: set[int] = set()
    found = [value for each in objects for value in (each, *attributes(each).values())]
    for _ in range(_DEEPEST):
        new = {id(value): value for value in found if id(value) not in seen}
        seen |= new.keys()
        yield from (value for value in new.values() if isinstance(value, kinds))
        found = [item for value in new.values() for item in _parts_of(value)]


def _parts_of(value: object) -> Iterable[object]:
    if isinstance(value, _NOT_SEARCHED):
        return ()
    items = _items(value)
    return (*attributes(value).values(), *(items if len(items) <= _MOST_ITEMS else ()))


def _items(value: object) -> Collection[object]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


def _loses(optimizer: KeyedOptimizer, kept: Collection[int]) -> bool:
    """Return whether a part of an optimizer that has rates or counters is not kept."""
    return any(
        not (node.fused or isinstance(node.optimizer, CombinedOptimizer))
        and id(node.optimizer) not in kept
        for node in all_nodes(optimizer)
    )


def _hides(optimizer: KeyedOptimizer) -> bool:
    """Return whether a combined optimizer has a wrapper around another combined one as a part.

    That wrapper keeps the state of the time when it was made, and TorchRec saves it.
    """
    parts = (
        part
        for node in all_nodes(optimizer)
        if isinstance(node.optimizer, CombinedOptimizer)
        for _, part in node.optimizer.optimizers
    )
    return any(
        isinstance(node.optimizer, CombinedOptimizer) and not node.fused
        for part in parts
        if not isinstance(part, CombinedOptimizer)
        for node in all_nodes(part)
    )


def wraps_another(optimizer: Optimizer) -> bool:
    """Return whether a TorchRec optimizer leaves all stepping to the optimizers inside.

    Other optimizers with one inside (Lookahead) may well modify parameters themselves.
    """
    if isinstance(optimizer, CombinedOptimizer):
        return True
    inner = getattr(optimizer, "_optimizer", None)
    return isinstance(optimizer, KeyedOptimizer) and isinstance(inner, Optimizer)


def state_of(optimizers: Iterable[Optimizer], weight: torch.Tensor) -> dict[str, Any]:
    """Return the state that dense optimizers keep of a table, by their own names.

    Empty before the first step of optimizers that make their state then.
    """
    found: dict[str, Any] = {}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if is_same_memory(parameter, weight):
                found.update(state)
    return found


def row_states(state: Mapping[str, Any], weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the row-by-row part of a table's dense optimizer state, under fused names.

    Returns:
        Views by name: ``(rows, dim)`` or, for row-wise state, ``(rows,)``. Counters and the like
        are left out; they stay in the optimizer's state dict.
    """
    found = {fused: state[own].detach() for own, fused in row_names(state, weight).items()}
    return {n: v if v.shape == weight.shape else v[:, 0] for n, v in found.items()}


def row_names(state: Mapping[str, Any], weight: torch.Tensor) -> dict[str, str]:
    """Return the names of the row-by-row part of a table's dense optimizer state, each with its
    fused name. Codes and masks (an optimizer of 8 bits) are no rows: they stay with the optimizer.
    """
    fused_names = _fused_names(state)
    shapes = (weight.shape, (weight.shape[0], 1))
    return {
        name: fused_names.get(name, name)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
        and value.shape in shapes
        and value.dtype in ROWS_DTYPES.values()
    }


def _fused_names(state: Collection[str]) -> dict[str, str]:
    """Map a dense optimizer's state names to those of the fused optimizer of the same kind.

    TorchRec calls any fused optimizer's first state ``momentum1``: Adagrad's sum as well as Adam's
    first moment. Other states (momentum of SGD, AMSGrad's maximum, RMSprop's average …) have no
    fused counterpart and keep their names, lest they be confused with one.
    """
    if {"exp_avg", "exp_avg_sq"} <= set(state):
        return {"exp_avg": "momentum1"}
    return {"sum": "momentum1"}


def touches_other_rows(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether a step may change rows without a gradient; True for unknown optimizers."""
    if group.get("weight_decay", 0):
        return True
    if type(optimizer) is optim.SGD:
        return bool(group["momentum"])
    return type(optimizer) not in (optim.Adagrad, RowWiseAdagrad)


def is_same_memory(parameter: object, weight: torch.Tensor) -> bool:
    """Return whether a parameter is a view of exactly this table's memory."""
    return (
        isinstance(parameter, torch.Tensor)
        and not isinstance(parameter, (ShardedTensor, DTensor))
        and parameter.shape == weight.shape
        and parameter.data_ptr() == weight.data_ptr()
    )
