"""Recognize references in a wrapper's attributes: values stored elsewhere, or no state at all.

A wrapper keeps lists of parameters, other optimizers, functions, a logger. None of these is stored
with the wrapper, and all of them keep their live values when the rest is restored. Parameters that
are keys, and ids of parameters and their groups, are stored by name: each process has others.
"""

from __future__ import annotations

import functools
import logging
import threading
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchrec.distributed.shards_wrapper import LocalShardsWrapper

from torchrec_checknrun.dense.tree import (
    Key,
    Node,
    Parameter,
    is_optimizer,
    own_parameters,
    parameters_of,
)
from torchrec_checknrun.values.memory_spans import MemorySpans

_CODE = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.ModuleType,
    type,
    functools.partial,
)
_OF_PROCESS = (
    logging.Logger,
    logging.LoggerAdapter,
    threading.Thread,
    type(threading.Lock()),
    type(threading.RLock()),
    weakref.ReferenceType,
    torch.device,
    dist.ProcessGroup,
)

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_LEAST_ID = 1 << 20
"""Less than any object's id, and more than most numbers."""


class References:
    """The values that are stored elsewhere than with a wrapper, or are no state at all.

    Args:
        values: tensors and objects that are stored elsewhere; a tensor whose memory is all theirs
            is stored elsewhere as well. Read only once an answer depends on them, since most
            wrappers hold plain values: ask at once.
        named: parameters and parameter groups, each after its name; of several with one name the
            last counts. Read as ``values``.
    """

    def __init__(self, values: Iterable[object], named: Iterable[tuple[Key, object]] = ()) -> None:
        self._values = values
        self._pairs = named

    @functools.cached_property
    def _kept(self) -> list[object]:
        return [*self._values]  # an id is an object's only while the object lives

    @functools.cached_property
    def _ids(self) -> set[int]:
        return {id(value) for value in self._kept}

    @functools.cached_property
    def _memory(self) -> MemorySpans:
        return MemorySpans([tensor for value in self._kept for tensor in _with_memory(value)])

    @functools.cached_property
    def named(self) -> dict[Key, object]:
        """Return parameters and parameter groups by name."""
        return dict(self._pairs)

    @functools.cached_property
    def _names(self) -> dict[int, Key]:
        return {id(each): name for name, each in self.named.items()}

    def name(self, key: object) -> Key | None:
        """Return the name of a parameter, or of what has a number as its id; None for all else."""
        if type(key) is int:
            return self._names.get(key) if key >= _LEAST_ID else None
        return self._names.get(id(key)) if isinstance(key, torch.Tensor) else None

    def __contains__(self, value: object) -> bool:
        if isinstance(value, _PLAIN) and type(value) in _PLAIN:
            return False  # equal numbers may be the same object
        if isinstance(value, (Optimizer, *_CODE, *_OF_PROCESS)):  # first: ids need a long look
            return True
        if is_optimizer(value) or id(value) in self._ids:
            return True
        if isinstance(value, torch.Tensor):
            return any(self._memory.cover(tensor) for tensor in _with_memory(value))
        if isinstance(value, nn.Module):
            return all(tensor in self for tensor in tensors_of(value))
        return False


def references_of(
    nest: Iterable[Node],
    found: Iterable[Node],
    parameters: Iterable[Parameter],
    names: Mapping[torch.Tensor, str],
    elsewhere: Iterable[object],
) -> References:
    """Return all that is stored elsewhere than with an optimizer's wrappers.

    Args:
        nest, found: all optimizers in the nest, and those that its state dict shows.
        parameters: of the optimizer, whose keys are their names here.
        names: the model's parameters.
        elsewhere: what other objects have.
    """

    def kept() -> Iterator[object]:
        yield from elsewhere
        yield from names
        for node in nest:
            yield from (node.optimizer.state, node.optimizer.param_groups)
        for node in found:
            yield from own_parameters(node).values()
            yield from parameters_of(node.optimizer)
        for parameter in parameters:
            yield parameter.parameter
            yield from (parameter.state or {}).values()

    def named() -> Iterator[tuple[Key, object]]:
        yield from ((name, parameter) for parameter, name in names.items())
        yield from ((each.key, each.parameter) for each in parameters)
        for node in nest:
            for number, group in enumerate(node.optimizer.param_groups):
                yield f"{node.identity}.param_groups[{number}]", group

    return References(kept(), named())


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Return a module's parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


def local_tensors(value: object) -> list[torch.Tensor]:
    """List this rank's parts of a sharded tensor, a plain tensor itself, nothing of others."""
    if isinstance(value, ShardedTensor):
        return [part for shard in value.local_shards() for part in local_tensors(shard.tensor)]
    if isinstance(value, DTensor):
        return local_tensors(value._local_tensor)
    if isinstance(value, LocalShardsWrapper):
        return [part for tensor in value.local_shards() for part in local_tensors(tensor)]
    return [value] if isinstance(value, torch.Tensor) else []


def _with_memory(value: object) -> Iterator[torch.Tensor]:
    """Yield a tensor's parts on this rank that have memory; none for an empty tensor."""
    for tensor in local_tensors(value):
        try:
            plain = tensor.layout is torch.strided and not tensor.is_nested
            known = plain and tensor.untyped_storage().data_ptr()
        except (NotImplementedError, RuntimeError, ValueError):  # a subclass without memory
            continue
        if known and tensor.numel():
            yield tensor
