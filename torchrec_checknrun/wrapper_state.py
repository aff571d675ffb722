"""What optimizer wrappers hold themselves: counters of warm-up, clipping and users' own wrappers.

TorchRec's state dicts leave it out, or its ``load_state_dict`` sets it back. All of a wrapper's
attributes that are plain values count, what its constructor was given among them: as with torch's
schedulers and parameter groups, the saved values win over those that a new process was built with
(a warning names the constructor's), and whoever wants other ones sets them after the restore.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.optim import Optimizer

from torchrec_checknrun.errors import UnsupportedState
from torchrec_checknrun.optimizer_tree import Node, own_parameters
from torchrec_checknrun.state import encode_state

logger = logging.getLogger(__name__)

WRAPPERS = "wrappers"
"""What is stored of all wrappers of an optimizer, beside its state."""
_ATTRIBUTES, _STATE, _DEFAULTS = "attributes", "state", "defaults"
_ELSEWHERE = frozenset({"params", "state", "param_groups", "defaults", "step"})
"""Attributes that are stored otherwise, or are no state."""
_OF_STEPS = frozenset({"_opt_called"})
"""The only attribute stored of an optimizer that keeps parameters' state: all else is in that."""
_OF_PROCESS = re.compile(r"(^|_)(rank|world)(_|$)")
"""Attributes that describe the process rather than the run."""
_HOOKS = re.compile(r"^_optimizer_.*_hooks$")
_SETTING = "_save_param_groups"
"""Says what state dicts show; no state of the run."""
_told: set[tuple[type, str]] = set()


def held(node: Node, elsewhere: set[int]) -> dict[str, Any]:
    """Return what a wrapper holds itself, in the form that is stored; empty if nothing.

    Args:
        elsewhere: memory (``untyped_storage().data_ptr()``) of what is stored otherwise.

    Returns:
        ``attributes`` and ``defaults`` by name, and ``state`` by the names of the parameters that
        the wrapper made for itself; with the live tensors.
    """
    optimizer = node.optimizer
    attributes = {}
    for name, value in vars(optimizer).items():
        if not _is_state(node, name):
            continue
        if _can_store(value, elsewhere):
            attributes[name] = _plain(value)
        elif not _refers(value, elsewhere):
            _warn_of(optimizer, name, value)
    defaults = {} if node.steps or node.fused else getattr(optimizer, _DEFAULTS, None) or {}
    kept = {k: v for k, v in defaults.items() if k != _SETTING and _can_store(v, elsewhere)}
    state = {
        name: dict(optimizer.state[parameter])
        for name, parameter in _own(node).items()
        if parameter in optimizer.state
    }
    found = {_ATTRIBUTES: attributes, _DEFAULTS: kept, _STATE: state}
    return {part: content for part, content in found.items() if content}


def give_back(node: Node, saved: Mapping[str, Any], elsewhere: set[int]) -> list[str]:
    """Write what ``held`` returned into a live wrapper.

    Call it after ``load_state_dict``, which may set some of it back.

    Args:
        elsewhere: as of ``held``. A live value that refers to it stays: an empty list may have been
            saved where parameters are now.

    Returns:
        Those of the constructor's arguments that have come back with another value.
    """
    optimizer = node.optimizer
    device = next((p.device for p in _tensors(optimizer)), None)
    changed = []
    arguments = _arguments(type(optimizer))
    attributes = saved.get(_ATTRIBUTES, {})
    for name in _OF_STEPS & vars(optimizer).keys() - attributes.keys():
        delattr(optimizer, name)  # it hadn't stepped under a scheduler
    for name, value in attributes.items():
        live = vars(optimizer).get(name)
        if not _can_store(live, elsewhere):
            continue
        if name.lstrip("_") in arguments and _differ(_plain(live), value):
            changed.append(f"{name} = {value!r} (not {live!r})")
        put = _put(live, value, device)
        if put is not live:
            setattr(optimizer, name, put)
    for name, value in saved.get(_DEFAULTS, {}).items():
        optimizer.defaults[name] = value
    state, stored = optimizer.state, saved.get(_STATE, {})
    for name, parameter in _own(node).items():
        if name in stored:
            state[parameter] = dict(stored[name])
        else:
            state.pop(parameter, None)
    return changed


def memory(tensors: Iterable[object]) -> Iterator[int]:
    """Yield the addresses of plain tensors' memory."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, ShardedTensor):
            try:
                yield tensor.untyped_storage().data_ptr()
            except (NotImplementedError, RuntimeError):  # of subclasses without memory of their own
                continue


def _own(node: Node) -> dict[str, torch.Tensor]:
    if node.fused or node.steps or not isinstance(node.optimizer.state, MutableMapping):
        return {}
    return own_parameters(node)


def _is_state(node: Node, name: str) -> bool:
    if node.steps:
        return name in _OF_STEPS
    return not (name in _ELSEWHERE or _HOOKS.search(name) or _OF_PROCESS.search(name))


def _can_store(value: object, elsewhere: set[int]) -> bool:
    """Tell whether a value is plain, and no reference to what is stored otherwise."""
    if _refers(value, elsewhere):
        return False
    try:
        encode_state(_plain(value), "")
    except UnsupportedState:
        return False
    return True


def _refers(value: object, elsewhere: set[int]) -> bool:
    """Tell whether a value is, or holds, what is stored otherwise, or code."""
    if isinstance(value, torch.Tensor):
        return type(value) is not torch.Tensor or bool(elsewhere.intersection(memory([value])))
    if isinstance(value, Mapping):
        return any(_refers(v, elsewhere) for v in value.values())
    if isinstance(value, (list, tuple, deque)):
        return any(_refers(v, elsewhere) for v in value)
    return isinstance(value, (Optimizer, nn.Module)) or callable(value)


def _plain(value: Any) -> Any:
    """Make dicts and lists of the like of them; what is live keeps its own type in ``_put``."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, deque)):
        return [_plain(item) for item in value]
    return value


def _warn_of(optimizer: Optimizer, name: str, value: object) -> None:
    """Tell once of a user's wrapper that an attribute can't be stored."""
    kind = type(optimizer)
    if kind.__module__.partition(".")[0] in ("torch", "torchrec") or (kind, name) in _told:
        return
    _told.add((kind, name))
    logger.warning(
        "%s.%s, a %s, is not saved with the optimizer: make it numbers, texts, tensors, or lists "
        "and dicts of them, or give what holds it to the Checkpointer as a state object",
        kind.__name__,
        name,
        type(value).__name__,
    )


def _put(live: Any, saved: Any, device: torch.device | None) -> Any:
    """Put a value into a live one's place: tensors, lists and dicts keep their identity."""
    if isinstance(saved, torch.Tensor):
        if isinstance(live, torch.Tensor) and (live.shape, live.dtype) == (
            saved.shape,
            saved.dtype,
        ):
            with torch.no_grad():
                return live.copy_(saved)
        where = live.device if isinstance(live, torch.Tensor) else device
        return saved.to(where) if where is not None else saved
    if isinstance(saved, dict):
        content = {k: _put(_item(live, k), v, device) for k, v in saved.items()}
        if not isinstance(live, dict):
            return content
        live.clear()
        live.update(content)
        return live
    if isinstance(saved, (list, tuple)):
        items = [_put(_item(live, i), v, device) for i, v in enumerate(saved)]
        if not isinstance(live, (list, deque)) or not isinstance(saved, list):
            return type(saved)(items)
        live.clear()
        live.extend(items)
        return live
    return saved


def _item(live: Any, key: Any) -> Any:
    if isinstance(live, dict):
        return live.get(key)
    return live[key] if isinstance(live, (list, tuple, deque)) and key < len(live) else None


def _tensors(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, torch.Tensor) and not isinstance(parameter, ShardedTensor):
                yield parameter


def _arguments(kind: type) -> set[str]:
    return {
        name
        for ancestor in kind.__mro__[:-1]
        if "__init__" in vars(ancestor)
        for name in inspect.signature(vars(ancestor)["__init__"]).parameters
    }


def _differ(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return not torch.equal(one.cpu(), other.cpu())
    return type(one) is not type(other) or bool(one != other)
