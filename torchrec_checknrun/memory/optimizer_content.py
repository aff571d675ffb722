"""Encode a dense optimizer at every step, as long as nothing was replaced only once.

A step changes the values of an optimizer's tensors and now and then a rate; to walk through the
optimizer for that, as for a checkpoint, would take longer than to copy the tensors. So the objects
that the walk has found are compared instead. That does for PyTorch's own optimizers, alone or in
TorchRec's ``KeyedOptimizerWrapper``: all that is stored of them is state, groups and plain
attributes. Any other one may keep what it likes, and is asked each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from operator import is_
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper

from torchrec_checknrun.dense.param_groups import GROUPS, options_of
from torchrec_checknrun.dense.tree import HOOKS
from torchrec_checknrun.memory.model_content import STATES, sealed
from torchrec_checknrun.native import TensorPlaces
from torchrec_checknrun.shared_memory.header import Piece
from torchrec_checknrun.values.state import Tree, encode_state, tree_items
from torchrec_checknrun.values.tensor_bytes import RawViews, raw_bytes, shows_memory

_LOOKED_INTO = frozenset({"state", "param_groups", "defaults", "params", "_optimizer"})
"""Attributes whose content is compared as well."""
_TENSORS = (torch.Tensor, nn.Parameter)
_CONSTANTS = (type(None), bool, int, float, str)
"""Types of values that don't change: another value is another object."""
_METHODS = (FunctionType, MethodType)
_OF_STATE_DICT = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")


class _Shown(RawViews):
    """The bytes of tensors, row-major: live memory, or copies where that has another order (of
    parameters whose channels come last, for instance).
    """

    def __init__(self) -> None:
        super().__init__()
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def of(self, tensor: torch.Tensor) -> memoryview:
        if shows_memory(tensor):
            return raw_bytes(tensor)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        self._copies.append((tensor.detach(), copy))
        return raw_bytes(copy)

    def renew(self) -> None:
        """Copy the present values."""
        for live, copy in self._copies:
            copy.copy_(live)


class OptimizerContent:
    """One optimizer's part of a rank's state, encoded; its tensors are live memory.

    Args:
        name: the state object's.
        store: returns its content, in the stored form and without tables.
    """

    def __init__(self, name: str, optimizer: object, store: Callable[[], Any]) -> None:
        self._name, self._store = name, store
        self._optimizer = optimizer
        self._nest = _nest(optimizer)
        self._seen: object = None
        """The values compared when the optimizer was last asked; None: nothing that would do."""
        self._kept: list[object] = []
        """An id is an object's only while the object lives."""
        self._places = TensorPlaces(())
        self._options: list[object] = []
        self._keys: list[object] = []
        self._tree: Tree = {}
        self._payload: list[bytes | memoryview] = []
        self._pieces: list[Piece] = []
        self._shown = _Shown()

    def pieces(self) -> list[Piece] | None:
        """Return the content as a section; None if the optimizer must be asked each time.

        Raises:
            UnsupportedState, SaveFailed: it can't be stored.
        """
        if not self._nest:
            return None
        if self._seen is None or self._seen != self._found() or not self._places.same():
            self._seen = None
            if not self._look():
                return None
        options = list(self._live_options())
        if len(options) != len(self._options) or not all(map(is_, options, self._options)):
            self._renew_options(options)
        self._shown.renew()
        return self._pieces

    def _look(self) -> bool:
        """Ask the optimizer; return whether later looks at its objects will do."""
        self._nest = _nest(self._optimizer)  # another one may be inside now
        if not self._nest:
            return False
        options = list(self._live_options())
        if not (all(map(_is_plain, self._nest)) and all(map(_is_constant, options))):
            return False
        content = self._store()
        self._shown = _Shown()
        encoded = encode_state({STATES: {self._name: content}}, "image", self._shown)
        self._tree, self._payload = encoded
        self._pieces = sealed(self._tree, self._payload)
        self._keys = [group["params"] for group in content[GROUPS]]
        self._options = options
        self._kept = list(self._objects())
        tensors = [kept for kept in self._kept if isinstance(kept, torch.Tensor)]
        self._places = TensorPlaces(tensors)
        if all(type(tensor) in _TENSORS for tensor in tensors):
            self._seen = self._found()
        return self._seen is not None

    def _renew_options(self, options: list[object]) -> None:
        """Encode the groups' options again, and nothing else: a scheduler changes rates often."""
        groups = self._nest[-1].param_groups
        if not all(map(_is_constant, options)) or len(groups) != len(self._keys):
            self._seen = None
            self._pieces = sealed(*encode_state({STATES: {self._name: self._store()}}, "image"))
            return
        renewed = [
            {"params": keys, **options_of(group)}
            for keys, group in zip(self._keys, groups, strict=True)
        ]
        stored = tree_items(tree_items(tree_items(self._tree)[STATES])[self._name])
        node, _ = encode_state(renewed, GROUPS)  # constants have no payload
        stored[GROUPS].clear()
        stored[GROUPS].update(node)
        self._pieces = sealed(self._tree, self._payload)
        self._options = options

    def _live_options(self) -> Iterator[object]:
        for group in self._nest[-1].param_groups:
            yield from chain.from_iterable(options_of(group).items())

    def _found(self) -> object:
        inner = self._nest[-1]
        hooks = (vars(inner).get(name, ()) for name in _OF_STATE_DICT)
        groups = (group["params"] for group in inner.param_groups)
        sizes = [[*map(len, each)] for each in (inner.state.values(), groups, hooks)]
        return [*map(id, self._objects())], sizes

    def _objects(self) -> Iterator[object]:
        """Iterate over all objects, but options, whose identity decides on the content."""
        inner = self._nest[-1]
        states = inner.state.values()
        return chain(
            *(chain(own := vars(each), own.values()) for each in self._nest),
            *(vars(each).get("defaults", {}).values() for each in self._nest),
            *(vars(each).get("params", {}).values() for each in self._nest),
            inner.state,
            *states,
            *(state.values() for state in states),
            *(group["params"] for group in inner.param_groups),
        )


def _nest(optimizer: object) -> list[Optimizer]:
    """Return the optimizer, and the one that it wraps; nothing if it may hold anything else."""
    if not isinstance(optimizer, Optimizer):
        return []
    kind = type(optimizer)
    if kind is KeyedOptimizerWrapper:
        inner = _nest(vars(optimizer).get("_optimizer"))
        return [optimizer, *inner] if inner else []
    of_torch = kind.__module__.startswith("torch.optim.")
    return [optimizer] if of_torch and kind.state_dict is Optimizer.state_dict else []


def _is_plain(optimizer: Optimizer) -> bool:
    """Return whether an optimizer keeps nothing but state, groups and constants."""
    own = vars(optimizer)
    if any(own.get(name) for name in _OF_STATE_DICT) or "state_dict" in own:
        return False
    inner = own.get("_optimizer", optimizer)
    return (
        optimizer.state is inner.state
        and optimizer.param_groups is inner.param_groups
        and all(
            name in _LOOKED_INTO
            or HOOKS.search(name) is not None
            or _is_constant(value)
            or type(value) in _METHODS
            for name, value in own.items()
        )
        and all(map(_is_constant, own.get("defaults", {}).values()))
        and all(
            type(value) in _TENSORS or _is_constant(value)
            for state in optimizer.state.values()
            for value in state.values()
        )
    )


def _is_constant(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return type(value) in _CONSTANTS
