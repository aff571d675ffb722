"""Save and restore the attributes of optimizer wrappers: warm-up, clipping, users' own counters.

TorchRec's state dicts omit them, or its ``load_state_dict`` resets them. All attributes with plain
values are saved, constructor arguments among them: as with torch's schedulers and parameter groups,
saved values win over the values that a new process was built with. A warning names the
constructor's arguments that change; set other values after the restore if needed.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.optim import Optimizer

from torchrec_checknrun.dense.live_values import LIVE, is_state, pack, put, same, why_not
from torchrec_checknrun.dense.references import References
from torchrec_checknrun.dense.tree import (
    HOOKS,
    Node,
    Parameter,
    attributes,
    is_torchs,
    own_parameters,
    parameters_of,
)
from torchrec_checknrun.values.state import Tree, tree_items

logger = logging.getLogger(__name__)

WRAPPERS = "wrappers"
"""Key of the wrappers' values, beside an optimizer's state."""
_ATTRIBUTES, _STATE, _DEFAULTS = "attributes", "state", "defaults"
_PARAMETERS = "parameters"
_ELSEWHERE = frozenset({"params", "state", "param_groups", "defaults", "step", "_optims"})
"""Attributes that are stored elsewhere, or are no state."""
_OF_STEPS = frozenset({"_opt_called"})
"""The only attribute stored of torch's optimizers, whose parameters' state holds the rest."""
_OF_PROCESS = re.compile(r"(^|_)(rank|world)(_|$)")
"""Names of attributes that, as whole numbers, describe the process rather than the run."""
_PLACES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
"""Environment variables with values of such attributes."""
OF_EACH_RANK = "_last_total_grad_norm"
"""Attribute of TorchRec's clipping: the norm of a rank's own gradients at its last step."""
_SETTING = "_save_param_groups"
"""A default that only controls the content of state dicts."""
_REMEDY = (
    "use numbers, strings, tensors, or lists and dicts of them (keys: strings or integers), give "
    "it state_dict and load_state_dict, or pass its owner to the Checkpointer as a state object"
)
_warned: set[tuple[type, str, str]] = set()
"""Warnings already logged: class, attribute, problem."""


def held(node: Node, references: References) -> dict[str, Any]:
    """Return the values that a wrapper holds, in the stored form with the live tensors.

    Returns:
        ``attributes`` and ``defaults`` by name, as ``pack`` makes them; non-empty ``parameters``
        that the wrapper made for itself, and their ``state``, by the parameters' names. Empty parts
        are left out.
    """
    optimizer = node.optimizer
    attributes = {}
    for name, value in _attributes(node):
        lost: dict[str, object] = {}
        packed = pack(value, references, name, lost)
        if packed is not LIVE:
            attributes[name] = packed
        for path, what in lost.items():
            _warn(optimizer, name, f"{path}, a {type(what).__name__}, is not saved", _REMEDY)
    defaults = {} if node.steps or node.fused else getattr(optimizer, _DEFAULTS, None) or {}
    kept = {k: pack(v, references, k, {}) for k, v in defaults.items() if k != _SETTING}
    kept = {k: v for k, v in kept.items() if v is not LIVE}
    own = _own(node)
    state = {
        name: dict(optimizer.state[parameter])
        for name, parameter in own.items()
        if parameter in optimizer.state
    }
    own = {name: parameter for name, parameter in own.items() if parameter.numel()}
    found = {_ATTRIBUTES: attributes, _DEFAULTS: kept, _STATE: state, _PARAMETERS: own}
    return {part: content for part, content in found.items() if content}


def tell_twins(parameters: Iterable[Parameter]) -> None:
    """Warn, once for each, of tensors that are a parameter's state, and an option of its group or
    an attribute of its optimizer besides: a restore makes two of each.
    """
    stepping: dict[int, tuple[Optimizer, set[int]]] = {}
    for each in parameters:
        optimizer = each.optimizer
        if not (each.sharded or is_torchs(type(optimizer))):
            own = stepping.setdefault(id(optimizer), (optimizer, set()))[1]
            own.update(id(v) for v in (each.state or {}).values() if isinstance(v, torch.Tensor))
    for optimizer, own in stepping.values():
        options = [
            (f"param_groups[…][{name!r}]", value)
            for group in optimizer.param_groups
            for name, value in group.items()
        ]
        for name, value in (*attributes(optimizer).items(), *options):
            if isinstance(value, torch.Tensor) and id(value) in own:
                what = f"{name} is state of parameters as well, and will not be the same tensor"
                remedy = "let load_state_dict() or step() put the one in the other's place again"
                _warn(optimizer, name, f"{what} after a restore", remedy)


def give_back(
    node: Node, saved: Mapping[str, Any], references: References, resized: bool = False
) -> list[str]:
    """Write the values that ``held`` returned into a live wrapper.

    Call it after ``load_state_dict``, which may reset some of them. A live reference to a value
    stored elsewhere is kept: an empty list may have been saved where parameters are now. A value
    that can't be put back keeps its live one, with a warning.

    Args:
        saved: the result of ``held``.
        references: values that are stored elsewhere.
        resized: the number of ranks has changed, and values may have been derived from it.

    Returns:
        Descriptions of the constructor arguments whose value has changed; of all changed attributes
        if ``resized``.
    """
    optimizer = node.optimizer
    whole = (p for p in parameters_of(optimizer) if not isinstance(p, ShardedTensor))
    device = next((p.device for p in whole if isinstance(p, torch.Tensor)), None)
    attributes = saved.get(_ATTRIBUTES, {})
    live_ones = dict(_attributes(node))
    for name in _OF_STEPS & live_ones.keys() - attributes.keys():
        delattr(optimizer, name)  # saved before a first step under a scheduler
    arguments = _arguments(type(optimizer))
    changed = []
    for name, value in attributes.items():
        live = live_ones.get(name)
        packed = pack(live, references, name, {})
        if live in references or (packed is LIVE and _is_filled(live)):
            if value is not LIVE and not _is_empty(value):
                reason = f"it refers to a {type(live).__name__} now, and did not when saved"
                _warn_kept(optimizer, name, reason)
            continue
        if same(packed, value):
            continue
        try:
            why = why_not(live, value, references)
            if why is None:
                foreign = name.lstrip("_") in arguments or _is_shared(type(optimizer), live)
                new = put(live, value, references, device, fresh=foreign)
                if new is not live:
                    setattr(optimizer, name, new)
        except Exception as error:  # a user's load_state_dict or setter may raise anything
            why = f"{type(error).__name__}: {error}"
        if why is not None:
            _warn_kept(optimizer, name, why)
        elif name in _OF_STEPS or is_state(value):
            continue  # no setting of the program's
        elif resized or name.lstrip("_") in arguments:
            changed.append(f"{name} = {_shown(value)} (not {_shown(packed)})")
    _warn_of_new(node, live_ones, attributes, references)
    _give_back_rest(node, saved, references, device)
    return changed


def own_tensors(live: Iterable[Node], saved: Mapping[str, Any]) -> set[int]:
    """Return the ids of tensors that wrappers hold in attributes with a saved value.

    Args:
        saved: results of ``held``, by the wrappers' identities.
    """
    found: set[int] = set()
    for node in live:
        names = saved.get(node.identity, {}).get(_ATTRIBUTES, {})
        values = [value for name, value in _attributes(node) if name in names]
        while values:
            value = values.pop()
            if isinstance(value, torch.Tensor):
                found.add(id(value))
            elif isinstance(value, dict):
                values += value.values()
            elif isinstance(value, (list, tuple, deque)):
                values += value
    return found


def without_takers(saved: Mapping[str | int, Tree], live: Collection[Node]) -> dict[str, list[str]]:
    """Find the wrappers of a checkpoint that have no live counterpart.

    Args:
        saved: results of ``held`` as trees, by the wrappers' identities.

    Returns:
        The missing wrappers' attributes, by identity.
    """
    takers = {node.identity for node in live}
    found = {}
    for identity, of_node in saved.items():
        names = {str(name) for name in tree_items(tree_items(of_node).get(_ATTRIBUTES))}
        if identity not in takers and names - _OF_STEPS:
            found[str(identity)] = sorted(names - _OF_STEPS)
    return found


def _attributes(node: Node) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that may be state."""
    optimizer = node.optimizer
    for name, value in attributes(optimizer).items():
        if node.fused and isinstance(value, nn.Module):
            continue  # the kernel
        if _is_state(node, name) and not _is_of_process(optimizer, name, value):
            yield name, value


def _give_back_rest(
    node: Node, saved: Mapping[str, Any], references: References, device: torch.device | None
) -> None:
    """Write a wrapper's defaults, and its own parameters with their state."""
    optimizer = node.optimizer
    for name, value in saved.get(_DEFAULTS, {}).items():
        live = optimizer.defaults.get(name)
        if why := why_not(live, value, references):
            _warn_kept(optimizer, f"{_DEFAULTS}[{name!r}]", why)
        else:
            optimizer.defaults[name] = put(live, value, references, device, fresh=True)
    state, stored = optimizer.state, saved.get(_STATE, {})
    values = saved.get(_PARAMETERS, {})
    for name, parameter in _own(node).items():
        if name in values and values[name].shape == parameter.shape:
            with torch.no_grad():
                parameter.copy_(values[name])
        elif name in values or parameter.numel():
            _warn_kept(optimizer, name, "the checkpoint has no such parameter, or of another shape")
        if name in stored:
            live = state.get(parameter, {})
            state[parameter] = {
                key: put(live.get(key), value, references, parameter.device)
                for key, value in stored[name].items()
            }
        else:
            state.pop(parameter, None)


def _own(node: Node) -> dict[str, torch.Tensor]:
    """Return a wrapper's own parameters, if their state is stored with the wrapper."""
    if node.fused or node.steps:
        return {}
    own = own_parameters(node)
    return own if own and isinstance(node.optimizer.state, MutableMapping) else {}


def _is_state(node: Node, name: str) -> bool:
    if node.steps and not node.wraps and is_torchs(type(node.optimizer)):
        return name in _OF_STEPS
    return not (name in _ELSEWHERE or HOOKS.search(name))


def _is_of_process(optimizer: Optimizer, name: str, value: object) -> bool:
    """Return whether an attribute is this process's rank or the like; warn of an odd value."""
    if not (value is None or isinstance(value, int)) or not _OF_PROCESS.search(name):
        return False
    places = {int(text) for place in _PLACES if (text := os.environ.get(place, "")).isdigit()}
    if dist.is_initialized():
        places |= {dist.get_rank(), dist.get_world_size()}
    if type(value) is int and value not in {*places, 0, 1}:
        what = f"{name} = {value} is taken for the process's rank or world size, and is not saved"
        _warn(optimizer, name, what, "if it is state, rename it without rank or world")
    return True


def _is_filled(value: object) -> bool:
    """Return whether a value packed as a reference is a container of references."""
    return isinstance(value, (Mapping, list, tuple, deque)) and bool(value)


def _is_empty(value: object) -> bool:
    return isinstance(value, (dict, list, tuple)) and not value


def _warn_of_new(
    node: Node, live: Mapping[str, Any], saved: Mapping[str, Any], references: References
) -> None:
    """Warn of attributes that the checkpoint lacks: made later, or by newer code."""
    for name in live.keys() - saved.keys() - _OF_STEPS:
        packed = pack(live[name], references, name, {})
        if packed is not LIVE:
            _warn_kept(node.optimizer, name, "the checkpoint has no such attribute")


def _warn_kept(optimizer: Optimizer, name: str, why: str) -> None:
    what = f"{name} keeps its present value and is not restored ({why})"
    _warn(optimizer, name, what, "set it after the restore if that is wrong")


def _warn(optimizer: Optimizer, name: str, what: str, remedy: str) -> None:
    """Warn once of an attribute of a user's wrapper."""
    kind = type(optimizer)
    if is_torchs(kind) or (kind, name, what) in _warned:
        return
    _warned.add((kind, name, what))
    logger.warning("%s.%s: %s", kind.__name__, what, remedy)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _is_shared(kind: type, value: object) -> bool:
    """Return whether a value belongs to a module of the wrapper's class, not to the wrapper."""
    modules = {ancestor.__module__ for ancestor in kind.__mro__} & sys.modules.keys()
    return any(value is found for name in modules for found in vars(sys.modules[name]).values())


def _arguments(kind: type) -> set[str]:
    """Return the names of the constructor arguments of a class and its ancestors."""
    return {
        name
        for ancestor in kind.__mro__[:-1]
        if "__init__" in vars(ancestor)
        for name in inspect.signature(vars(ancestor)["__init__"]).parameters
    }
