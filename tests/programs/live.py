"""Hash every live object of a run, not the state dicts that the objects return.

State dicts omit exactly the values that get lost (a warm-up's own step, learning rates under
TorchRec's wrappers, a kernel's rate), so nothing here calls ``state_dict``. Objects are walked
through their attributes, private ones included, down to numbers and tensors. An object met again is
noted as such: a wrapper whose ``param_groups`` are no longer those of its inner optimizer differs.
"""

from __future__ import annotations

import hashlib
import logging
import random
import threading
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, OptimizerWrapper

Live = dict[str, str]
"""Values of objects, or hashes of tensors' values, by path."""

SKIPPED_TYPES: dict[type, str] = {
    types.FunctionType: "code",
    types.MethodType: "code",
    types.BuiltinFunctionType: "code",
    partial: "code",
    types.ModuleType: "code",
    torch._ops.OpOverloadPacket: "code",
    torch._ops.OpOverload: "code",
    torch.jit.ScriptFunction: "code",
    RemovableHandle: "a hook's handle; hooks are code",
    weakref.ReferenceType: "what it refers to is walked where it is held",
    dist.ProcessGroup: "of this process",
    logging.Logger: "of this process",
    type(threading.Lock()): "of this process",
    threading.Event: "of this process",
}
"""Types that can't be compared between two processes, with the reasons."""

SKIPPED_OF_KERNELS: dict[str, str] = {
    "uuid": "random for each kernel",
    "step": "a kernel's, of its forwards: says only which of them are reported",
    "timestep": "a kernel's: the age of rows in a GPU's cache, which a new process has empty",
}
"""Attributes of FBGEMM's kernels that are no state of the run, with the reasons."""

SKIPPED_ATTRIBUTES: dict[tuple[type, str], str] = {
    (torch.amp.GradScaler, "_init_scale"): "where its load_state_dict puts the scale as well",
    (torch.amp.GradScaler, "_init_growth_tracker"): "where that puts the tracker as well",
}
"""Attributes of others that are no state of the run, with the reasons."""

SCALARS: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes, Enum, Path, type)
SCALARS += (torch.dtype, torch.device, torch.Size, np.generic, range, slice)


def live(objects: Mapping[str, object]) -> Live:
    """Return the hashes of everything that the named objects hold.

    Modules among the objects contribute their parameters, gradients, buffers, plain attributes and
    embedding kernels; parameters are known by their modules' names everywhere else.

    Raises:
        TypeError: a value's type is neither comparable nor in ``SKIPPED_TYPES``.
    """
    walk = _Walk()
    modules = {name: o for name, o in objects.items() if isinstance(o, nn.Module)}
    for name, module in modules.items():
        walk.name_parameters(name, module)
    for name, value in {**modules, **objects}.items():
        if name not in modules or value is modules[name]:
            walk.visit(name, value)
    return walk.found


def differences(found: Live, wanted: Live) -> list[str]:
    """Return a line for every path whose values differ or that only one side has.

    Plain values come first: a lost rate appears there, and in tensors only its consequences.
    """
    lines = [
        f"{path}: {found.get(path, '(missing)')} instead of {wanted.get(path, '(nothing)')}"
        for path in sorted(found.keys() | wanted.keys())
        if found.get(path) != wanted.get(path)
    ]
    return sorted(lines, key=lambda line: "float32" in line)


def generators() -> dict[str, Any]:
    """Return the state of the process's own random number generators, to be compared."""
    return {
        "torch": torch.get_rng_state(),
        "numpy": _hash(repr(np.random.get_state()).encode()),
        "python": _hash(repr(random.getstate()).encode()),
    }


def kernels(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the model's embedding kernels (fused and dense), each with a name of its place.

    TorchRec keeps them in plain lists, so that ``model.modules()`` doesn't have them.
    """
    seen: set[int] = set()
    for path, module in model.named_modules():
        for number, lookup in enumerate(getattr(module, "_lookups", [])):
            while isinstance(lookup, DistributedDataParallel):
                lookup = lookup.module
            if id(lookup) in seen:
                continue
            seen.add(id(lookup))
            for index, kernel in enumerate(lookup._emb_modules):
                yield f"{path}.kernel{number}.{index}", kernel._emb_module


class _Walk:
    def __init__(self) -> None:
        self.found: Live = {}
        self._names: dict[int, str] = {}
        self._seen: dict[int, str] = {}
        self._kept: list[object] = []  # keeps ids from being reused during the walk

    def name_parameters(self, name: str, module: nn.Module) -> None:
        for path, parameter in module.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), f"{name}.{path}")

    def visit(self, path: str, value: Any) -> None:
        if isinstance(value, tuple(SKIPPED_TYPES)):
            return
        if isinstance(value, SCALARS):
            self.found[path] = repr(value)
        elif isinstance(value, (torch.Tensor, np.ndarray)):
            self._visit_tensor(path, value)
        elif isinstance(value, torch.Generator):
            self._visit_tensor(path, value.get_state())
        elif self._is_new(path, value):
            self._visit_object(path, value)

    def _visit_tensor(self, path: str, value: Any) -> None:
        if id(value) in self._names:
            self.found[path] = f"parameter {self._names[id(value)]}"
        elif isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                self._visit_tensor(f"{path}{shard.metadata.shard_offsets}", shard.tensor)
        else:
            self.found[path] = _digest(value)

    def _visit_object(self, path: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            self._visit_module(path, value)
        elif isinstance(value, Mapping):
            items = {self._key(key): item for key, item in value.items()}
            assert len(items) == len(value), f"{path} has several keys of the same name"
            self._visit_items(path, items)
        elif isinstance(value, (list, tuple, deque)):
            self._visit_items(path, {f"{index:03}": item for index, item in enumerate(value)})
        elif isinstance(value, (set, frozenset)):
            self.found[path] = str(sorted(map(self._key, value)))
        elif isinstance(value, random.Random):
            self.found[path] = _hash(repr(value.getstate()).encode())
        elif isinstance(value, (np.random.Generator, np.random.RandomState)):
            bits = (
                value.bit_generator.state if hasattr(value, "bit_generator") else value.get_state()
            )
            self.found[path] = _hash(repr(bits).encode())
        elif hasattr(value, "__dict__"):
            self.found[path] = type(value).__qualname__
            # Refers by names to tables and to the wrappers' additions
            if isinstance(value, KeyedOptimizer):
                for name, parameter in value.params.items():
                    self._names.setdefault(id(parameter), name)
            self._visit_items(path, _attributes(value))
        else:
            raise TypeError(f"{path} is of {type(value)}: compare it, or say why that can't be")

    def _visit_items(self, path: str, items: Mapping[str, Any]) -> None:
        if not items:
            self.found.setdefault(path, "empty")
        for name in sorted(items):
            self.visit(f"{path}.{name}", items[name])

    def _visit_module(self, path: str, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            self.found[f"{path}.{name}"] = _digest(parameter)
            self.visit(f"{path}.{name}.grad", parameter.grad)
        for name, buffer in module.named_buffers():  # buffers that are not persistent as well
            self.visit(f"{path}.{name}", buffer)
        for name, child in module.named_modules(prefix=path):
            self._visit_plain(name, child)
        for name, kernel in kernels(module):
            self._visit_kernel(f"{path}.{name}", kernel)

    def _visit_plain(self, path: str, module: nn.Module, skipped: Collection[str] = ()) -> None:
        for name, value in sorted(vars(module).items()):
            if isinstance(value, SCALARS) and name not in skipped:
                self.visit(f"{path}.{name}", value)

    def _visit_kernel(self, path: str, kernel: Any) -> None:
        self._is_new(path, kernel)
        self._visit_plain(path, kernel, SKIPPED_OF_KERNELS)
        for index, weight in enumerate(kernel.split_embedding_weights()):
            self.found[f"{path}.weights.{index}"] = _digest(weight)
        for name, buffer in kernel.named_buffers():
            self.found[f"{path}.{name}"] = _digest(buffer)
        if isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen):
            for index, states in enumerate(kernel.split_optimizer_states()):
                for number, state in enumerate(states):
                    self.found[f"{path}.states.{index}.{number}"] = _digest(state)
            self.found[f"{path}.rate"] = repr(float(kernel.get_learning_rate()))
            self.visit(f"{path}.optimizer_args", kernel.optimizer_args._asdict())
            self.visit(f"{path}.iter_cpu", kernel.iter_cpu)

    def _is_new(self, path: str, value: Any) -> bool:
        """Note a mutable object that was met before as that one."""
        if id(value) in self._seen and not isinstance(value, (tuple, frozenset)):
            self.found[path] = f"is {self._seen[id(value)]}"
            return False
        self._seen[id(value)] = path
        self._kept.append(value)
        return True

    def _key(self, key: Any) -> str:
        if isinstance(key, torch.Tensor):
            return f"[{self._names.get(id(key), 'tensor')}]"
        return key if isinstance(key, str) else repr(key)


def _attributes(value: Any) -> dict[str, Any]:
    """Return an object's attributes, except those that are no state of the run.

    A wrapper around a CombinedOptimizer has a *copy* of the inner state, taken when the wrapper was
    made or loaded; only the wrapper's own additions are used.
    """
    skipped = [name for kind, name in SKIPPED_ATTRIBUTES if isinstance(value, kind)]
    found = {name: item for name, item in vars(value).items() if name not in skipped}
    if isinstance(value, OptimizerWrapper) and isinstance(value._optimizer, CombinedOptimizer):
        inner = value._optimizer.state
        found["state"] = {p: item for p, item in value.state.items() if p not in inner}
    return found


def _digest(value: Any) -> str:
    """Name a tensor's or an array's kind and shape, with the hash of its bytes."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        data = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    else:
        data = value.tobytes()
    first = f" {value.item()!r}" if value.shape == () else ""
    kind = str(value.dtype).removeprefix("torch.")
    return f"{kind}{list(value.shape)}{first} {_hash(data)}"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
