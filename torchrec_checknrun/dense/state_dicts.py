"""Take optimizers' state dicts, without what is stored with the tables, and load them in place.

TorchRec's usual optimizer combines those of all fused tables, of which nothing is stored here, with
one for the dense part. To list hundreds of tables in a state dict, only to drop them again, would
take most of a cut's time.

Wrappers and schedulers hold an optimizer's ``state`` and ``param_groups``. torch's
``load_state_dict`` makes new ones, and TorchRec's wrappers copy the old ones: the rates that a
scheduler sets afterwards would have no effect. So the dicts stay the same objects.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from operator import methodcaller
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper

from torchrec_checknrun.dense.checks import form_of
from torchrec_checknrun.dense.references import References
from torchrec_checknrun.dense.tree import (
    WEIGHT,
    Key,
    Node,
    Parameter,
    fused_keys,
    is_partitioned,
    is_semisync,
    names_table,
    parameters_of,
)
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.format.state_tree import leaves
from torchrec_checknrun.values.state import SHARDED

logger = logging.getLogger(__name__)

_told: dict[int, weakref.ref[Optimizer]] = {}
"""Wrappers, by ``id``, that a warning has named."""


def own_state_dict(state: Stateful) -> Any:
    """Return a state object's state dict; a ``ZeroRedundancyOptimizer``'s without state.

    Its own is that of all ranks, as it was when last gathered, or an error. Each rank's part is in
    the optimizer inside, which is stored as any hidden one.
    """
    if is_partitioned(state):
        return {**Optimizer.state_dict(state), "state": {}}
    return state.state_dict()


def load_own(optimizer: Optimizer, content: Any) -> None:
    """Load what ``own_state_dict`` returned."""
    if is_partitioned(optimizer):
        Optimizer.load_state_dict(optimizer, content)
    else:
        optimizer.load_state_dict(content)


def state_dict_of(optimizer: Optimizer, tables: Collection[str]) -> Any:
    """Return an optimizer's state dict; that of TorchRec's ``CombinedOptimizer`` without parts that
    hold nothing but the sharded state of fused tables.

    Args:
        tables: names of the model's tables in fused kernels.
    """
    if type(optimizer) is not CombinedOptimizer or "state_dict" in vars(optimizer):
        return own_state_dict(optimizer)
    parts = list(_parts(optimizer, ""))
    left = [part for part in parts if not _is_of_tables(*part, tables)]
    if len(left) == len(parts):
        return optimizer.state_dict()
    names = {
        parameter: _key(name, prefix)
        for prefix, part in left
        for name, parameter in part.params.items()
    }
    return {
        "state": {
            names[parameter]: KeyedOptimizer._extract_state_dict_content(state)
            for _, part in left
            for parameter, state in part.state.items()
        }
    }


def stored_elsewhere(
    state: Mapping[Key, Any], nest: Iterable[Node], is_table: Callable[[torch.Tensor], bool]
) -> set[Key]:
    """Return the keys of a state dict's content that are stored elsewhere: with the tables' rows,
    or in the form of an optimizer inside a ``SemisyncOptimizer``.

    Args:
        state: content of the state dict, by key.
        nest: the optimizers in the nest.
        is_table: tells whether a fused optimizer's parameter is a table of the model.
    """
    found: set[Key] = {
        node.key(name)
        for node in nest
        if is_semisync(node.optimizer) and node.keyed is not None
        for name in node.keyed.params
    }
    if any(map(_is_of_shards, state.values())):
        found |= {key for key in fused_keys(nest, is_table) if _is_of_shards(state.get(key))}
    return found


def _is_of_shards(state: object) -> bool:
    """Return whether a state is nothing but parts of sharded tensors, or empty."""
    return isinstance(state, dict) and all(isinstance(v, SHARDED) for v in state.values())


def _parts(optimizer: CombinedOptimizer, prefix: str) -> Iterator[tuple[str, KeyedOptimizer]]:
    """Yield the parts that are not combined themselves, each with the prefix of its names."""
    for key, part in optimizer.optimizers:
        within = _key(key, prefix)
        if type(part) is CombinedOptimizer:
            yield from _parts(part, within)
        else:
            yield within, part


def _is_of_tables(prefix: str, part: KeyedOptimizer, tables: Collection[str]) -> bool:
    """Return whether a part's state is nothing but sharded state of these tables."""
    if not isinstance(part, FusedOptimizer):
        return False
    values = chain.from_iterable(map(methodcaller("values"), part.state.values()))
    if not all(issubclass(kind, SHARDED) for kind in set(map(type, values))):
        return False
    start = f"{prefix}." if prefix else ""
    weights = {f"{table}{WEIGHT}" for table in tables}
    return {f"{start}{name}" for name in part.params} <= weights or all(
        names_table(_key(name, prefix), tables) for name in part.params
    )


def _key(name: str, prefix: str) -> str:
    return CombinedOptimizer.prepend_opt_key(name, prefix)


def present_state(
    found: Iterable[Node], listed: Mapping[Key, Any]
) -> dict[Key, dict[str, Any] | None]:
    """Find the state that optimizers keep where their wrapper's state dict shows an earlier one.

    torch's ``load_state_dict``, called on the optimizer inside a TorchRec wrapper, gives that one
    new dicts; the wrapper keeps the old ones, and TorchRec would save what training uses no more.

    Args:
        found: the optimizers whose state the outermost one's state dict shows.
        listed: the state that it shows, by key.

    Returns:
        By key, the state of the parameters that differ, in the form of ``listed``; None for one
        whose state is still to be made.

    Raises:
        SaveFailed: a user's wrapper shows state of its own, and hides that of the one inside.
    """
    present: dict[Key, dict[str, Any] | None] = {}
    for node in found:
        inner, keyed = node.optimizer, node.keyed
        if not node.steps or keyed is None or keyed is inner or keyed.state is inner.state:
            continue
        stepped = set(map(id, parameters_of(inner)))
        for name, parameter in keyed.params.items():
            shown, own = keyed.state.get(parameter), inner.state.get(parameter)
            if shown is own or id(parameter) not in stepped or _is_of(shown, own):
                continue
            if isinstance(keyed, KeyedOptimizerWrapper):
                _warn_of_earlier(keyed, inner)
            if (key := node.key(name)) not in listed or _is_of(listed[key], own):
                continue
            if not (isinstance(keyed, KeyedOptimizerWrapper) and _is_of(listed[key], shown)):
                raise SaveFailed(_undecided(keyed, inner, name))
            present[key] = KeyedOptimizer._extract_state_dict_content(own) if own else None
    return present


def _is_of(listed: object, state: Mapping[str, Any] | None) -> bool:
    """Return whether a listed state has just the tensors and numbers of a parameter's state."""
    if not isinstance(listed, dict) or state is None or listed.keys() != state.keys():
        return False
    return all(
        value is state[name] if isinstance(value, torch.Tensor) else value == state[name]
        for name, value in listed.items()
        if isinstance(value, (torch.Tensor, float, int, str))
    )


def _warn_of_earlier(keyed: Optimizer, inner: Optimizer) -> None:
    """Warn, once for each wrapper, of one that shows an earlier state than that inside."""
    of = _told.get(id(keyed))
    if of is not None and of() is keyed:
        return
    _told[id(keyed)] = weakref.ref(keyed)
    logger.warning(
        "%s no longer shows the state of the %s inside, as if that one's load_state_dict had been "
        "called: checkpoints hold the inner one's state and rates, with which training goes on; "
        "rates set on the wrapper have no effect. Load the wrapper instead, or set its state and "
        "param_groups to the inner ones",
        type(keyed).__name__,
        type(inner).__name__,
    )


def _undecided(keyed: Optimizer, inner: Optimizer, name: str) -> str:
    outside, inside = type(keyed).__name__, type(inner).__name__
    return (
        f"the state of {name!r} that {outside} shows is not that of the {inside} in its attribute "
        f"_optimizer, and TorchRec's form has room for one of them: set the state and param_groups "
        f"of the {outside} to those of the {inside}, or, if both keep state, hold the inner one "
        "in an attribute of another name"
    )


def shared(parameters: Iterable[Parameter]) -> list[list[list[Any]]]:
    """Return the places, each a key and a name, of the tensors that are the state of several
    parameters.
    """
    places: dict[int, dict[int, list[Any]]] = {}
    for parameter in parameters:
        for name, value in (parameter.state or {}).items() if not parameter.sharded else ():
            if isinstance(value, torch.Tensor):
                of_tensor = places.setdefault(id(value), {})
                of_tensor.setdefault(id(parameter.parameter), [parameter.key, name])
    return [list(of_tensor.values()) for of_tensor in places.values() if len(of_tensor) > 1]


def without_arrays(state: Any) -> Any:
    """Return a parameter's state with None for NumPy arrays and what holds them, of which torch's
    ``load_state_dict`` tries to make others of a generator; ``put_rest`` writes them.
    """
    if not isinstance(state, dict):
        return state
    return {k: None if any(leaves(v, (np.ndarray,))) else v for k, v in state.items()}


def with_present_dicts(state: Any, present: Any) -> Any:
    """Return a parameter's state with the present dicts in the place of those of other content,
    which TorchRec's ``load_state_dict`` refuses; ``put_rest`` writes them.
    """
    if not (isinstance(state, dict) and isinstance(present, dict)):
        return state
    return {
        name: present[name] if name in present and _is_other_dict(value, present[name]) else value
        for name, value in state.items()
    }


def _is_other_dict(value: object, present: object) -> bool:
    return isinstance(present, dict) and form_of(value) != form_of(present)


def put_rest(
    parameters: Iterable[Parameter],
    restored: Mapping[Key, Any],
    places: Iterable[Sequence[Sequence[Any]]],
) -> None:
    """Write what torch's ``load_state_dict`` has changed: text, which becomes that of a generator,
    arrays, dicts that TorchRec's does not take, and tensors that are the state of several
    parameters, as ``shared`` found them.
    """
    states = {p.key: p.state or {} for p in parameters}
    for key, state in states.items():
        saved = restored.get(key)
        for name, value in saved.items() if isinstance(saved, dict) else ():
            kept = any(leaves(value, (torch.Tensor,))) and not any(leaves(value, (np.ndarray,)))
            if name in state and (not kept or _is_other_dict(value, state[name])):
                state[name] = value
    for of_tensor in places:
        (first, first_name), *others = of_tensor
        for key, name in others:
            if name in states.get(key, {}) and first_name in states.get(first, {}):
                states[key][name] = states[first][first_name]


def is_shown(state: Mapping[str, Any], form: References) -> bool:
    """Return whether all tensors of a parameter's state are in a user's own form."""
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    return bool(tensors) and all(tensor in form for tensor in tensors)


@contextmanager
def same_objects(nest: Sequence[Node]) -> Iterator[None]:
    """Put each optimizer's own dicts back after the block, with the loaded content.

    State keeps its dtype as well: torch casts it to the parameter's, and an fp32 moment loses bits.

    Inner optimizers get their own dicts back as well: SAM's ``load_state_dict`` gives its base
    optimizer the parameter groups that torch has just made.

    Args:
        nest: all optimizers, innermost first.
    """
    with ExitStack() as stack:
        for node in reversed(nest):  # they are put back in the nest's order
            same = _same_dicts if _makes_dicts(node) else _same_attributes
            stack.enter_context(same(node.optimizer))
            if is_semisync(node.optimizer):
                stack.enter_context(_as_it_is(node.optimizer))
        yield


def _makes_dicts(node: Node) -> bool:
    """Return whether an optimizer loads into its own dicts, not into an inner optimizer's."""
    plain = not isinstance(node.optimizer, KeyedOptimizer)
    return node.steps or (plain and {"state", "param_groups"} <= vars(node.optimizer).keys())


@contextmanager
def _as_it_is(optimizer: Any) -> Iterator[None]:
    """Let TorchRec's ``SemisyncOptimizer`` load its own state, that of the two inside, which is
    restored by itself: it would refuse that before the first global step.
    """
    optimizer.post_load_state_dict = lambda: None
    try:
        yield
    finally:
        del optimizer.post_load_state_dict


@contextmanager
def _same_attributes(optimizer: Optimizer) -> Iterator[None]:
    """Put back the dicts that a wrapper shares with the optimizer inside."""
    held = vars(optimizer)
    kept = {name: held[name] for name in ("state", "param_groups") if name in held}
    yield
    for name, value in kept.items():
        setattr(optimizer, name, value)


@contextmanager
def _same_dicts(optimizer: Optimizer) -> Iterator[None]:
    """Put back the dicts of an optimizer that keeps parameters' state, with the loaded content."""
    groups: Any = optimizer.param_groups
    state: Any = optimizer.state
    contents = list(groups)
    before = {key: dict(values) for key, values in state.items() if isinstance(values, dict)}
    yield
    if len(optimizer.param_groups) != len(contents):
        return  # a user's load_state_dict made other groups
    for content, loaded in zip(contents, optimizer.param_groups, strict=True):
        if content is not loaded:
            content.clear()
            content.update(loaded)
    if optimizer.param_groups is not groups:  # a property may show those of the one inside
        optimizer.param_groups = groups
    if optimizer.state is state:
        return
    found = dict(optimizer.state)
    for parameter, values in found.items():
        for name, live in before.get(parameter, {}).items():
            value = values.get(name)
            both = isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor)
            if both and value.dtype != live.dtype:
                values[name] = live  # already restored in place
    state.clear()
    state.update(found)
    optimizer.state = state
