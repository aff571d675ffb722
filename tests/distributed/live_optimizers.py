"""Collect all that optimizers, wrappers, schedulers and kernels hold, apart from state dicts.

``live`` walks through attributes, private ones too, down to plain values and tensors.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.nn.parallel import DistributedDataParallel

Live = dict[str, str]

_PLAIN = (type(None), bool, int, float, str, Enum, torch.dtype)
_SKIPPED = ("_stages", "_emb_module", "_pg", "_optimizer_step_post_hooks")
"""Constructor dataclasses; kernels, which are visited separately; process groups; hooks (one is the
Checkpointer's)."""


def live(model: Any, **objects: Any) -> Live:
    """Return the content of the model's parameters and kernels and of named objects, by path."""
    names = {id(p): name for name, p in model.named_parameters()}
    found: Live = {name: _digest(p) for name, p in model.named_parameters()}
    for number, kernel in enumerate(kernels(model)):
        for i, weight in enumerate(kernel.split_embedding_weights()):
            found[f"kernel{number}.weight{i}"] = _digest(weight)
        if not hasattr(kernel, "optimizer_args"):
            continue
        for i, states in enumerate(kernel.split_optimizer_states()):
            found |= {f"kernel{number}.state{i}.{n}": _digest(s) for n, s in enumerate(states)}
        beside = (kernel.get_learning_rate(), int(kernel.iter), int(kernel.iter_cpu))
        found[f"kernel{number}"] = f"{beside} {kernel.optimizer_args}"
    seen: dict[int, str] = {}
    for name, value in objects.items():
        _visit(name, value, names, seen, found)
    return found


def differences(one: Live, other: Live) -> list[str]:
    """Describe each difference, with both values."""
    return [
        f"{path}: {one.get(path)} instead of {other.get(path)}"
        for path in sorted(one.keys() | other.keys())
        if one.get(path) != other.get(path)
    ]


def kernels(model: Any) -> list[Any]:
    """Return the table-batched modules of this rank."""
    found = []
    for module in model.modules():
        for lookup in getattr(module, "_lookups", []):
            while isinstance(lookup, DistributedDataParallel):
                lookup = lookup.module
            found += [kernel._emb_module for kernel in lookup._emb_modules]
    return found


def _visit(path: str, value: Any, names: dict[int, str], seen: dict[int, str], found: Live) -> None:
    if isinstance(value, _PLAIN):
        found[path] = _key(value, names) if type(value) is int else repr(value)
    elif isinstance(value, (set, frozenset)):
        found[path] = repr(sorted(_key(member, names) for member in value))
    elif isinstance(value, ShardedTensor):
        for i, shard in enumerate(value.local_shards()):
            found[f"{path}[{i}]"] = _digest(shard.tensor)
    elif isinstance(value, torch.Tensor):
        found[path] = names.get(id(value)) or _digest(value)
    elif id(value) in seen and isinstance(value, dict):
        found[path] = f"is {seen[id(value)]}"
    elif isinstance(value, (Mapping, list, tuple, deque)):
        seen[id(value)] = path
        found[path] = f"{len(value)} items"
        for step, item in _items(value, names):
            _visit(f"{path}{step}", item, names, seen, found)
    elif hasattr(value, "__dict__") and not callable(value) and id(value) not in seen:
        seen[id(value)] = path
        found[path] = type(value).__name__
        for name, item in vars(value).items():
            if name not in _SKIPPED:
                _visit(f"{path}.{name}", item, names, seen, found)


def _items(value: Any, names: dict[int, str]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield f".{_key(key, names)}", item
    else:
        for i, item in enumerate(value):
            yield f"[{i}]", item


def _key(key: Any, names: dict[int, str]) -> str:
    if isinstance(key, torch.Tensor):
        return names.get(id(key)) or f"tensor {list(key.shape)}"
    return f"id of {names[key]}" if type(key) is int and key in names else str(key)


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1)
    shown = f" {data.tolist()}" if len(data) < 4 else ""
    kind = f"{tensor.dtype}{list(tensor.shape)}"
    return (
        f"{kind} {hashlib.sha256(data.view(torch.uint8).numpy().tobytes()).hexdigest()[:12]}{shown}"
    )
