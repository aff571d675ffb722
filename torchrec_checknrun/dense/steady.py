"""Tell whether an optimizer is made of the same objects as when it was last stored.

A step changes the values of an optimizer's tensors and now and then a rate; to walk through the
optimizer for that, by its state dict, would take longer than to copy the tensors. So the objects
that the walk has found are compared instead. That does for PyTorch's own optimizers, alone or in
TorchRec's ``KeyedOptimizerWrapper``, beside fused ones in a ``CombinedOptimizer``: all that is
stored of them is state, groups and plain attributes. Any other one may keep what it likes, and is
asked each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import is_
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from torchrec_checknrun.dense.param_groups import options_of
from torchrec_checknrun.dense.tree import HOOKS, is_fused
from torchrec_checknrun.native import TensorPlaces

_LOOKED_INTO = frozenset({"state", "param_groups", "defaults", "params", "_optimizer", "_optims"})
"""Attributes whose content is compared as well."""
_TENSORS = (torch.Tensor, nn.Parameter)
_CONSTANTS = (type(None), bool, int, float, str)
"""Types of values that don't change: another value is another object."""
_METHODS = (FunctionType, MethodType)
_OF_STATE_DICT = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")


class SteadyOptimizer:
    """One optimizer's objects, compared from one time that it is stored to the next.

    Around each look at the stored form: ``begin``, and ``note`` right after.
    """

    def __init__(self, optimizer: object) -> None:
        self._optimizer = optimizer
        self._nest = _nest(optimizer)
        self._seen: object = None
        """The values compared when the optimizer was last stored; None: nothing that would do."""
        self._kept: list[object] = []
        """An id is an object's only while the object lives."""
        self._places = TensorPlaces(())
        self._options: list[object] = []
        self._keys: list[object] = []
        self._renewed = False

    @property
    def is_known(self) -> bool:
        """Return whether the optimizer is of a kind whose objects can be compared."""
        return bool(self._nest)

    def holds(self) -> bool:
        """Return whether what was stored is the present content, but for values in the same memory
        and for ``renewed_groups``.
        """
        if self._seen is None or self._seen != self._found() or not self._places.same():
            self._seen = None
            return False
        options = [*self._live_options()]
        if len(options) != len(self._options) or not all(map(is_, options, self._options)):
            if not (all(map(_is_constant, options)) and len(self._groups) == len(self._keys)):
                self._seen = None
                return False
            self._options, self._renewed = options, True
        return True

    def renewed_groups(self) -> list[dict[Any, Any]] | None:
        """Return the groups in the stored form; None if they are as when they were last asked for:
        a scheduler changes rates often.
        """
        if not self._renewed:
            return None
        self._renewed = False
        return [
            {"params": keys, **options_of(group)}
            for keys, group in zip(self._keys, self._groups, strict=True)
        ]

    def begin(self) -> bool:
        """Prepare for a look at the stored form; return whether ``note`` makes sense after it."""
        self._seen, self._renewed = None, False
        self._nest = _nest(self._optimizer)  # another one may be inside now
        if not self._nest:
            return False
        self._options = [*self._live_options()]
        return all(map(_is_plain, self._nest)) and all(map(_is_constant, self._options))

    def note(self, groups: Sequence[dict[Any, Any]], tensors: Iterable[torch.Tensor]) -> bool:
        """Note the objects that the stored form was made of; return whether to compare them will
        do.

        Args:
            groups: the groups in the stored form.
            tensors: of the stored form.
        """
        own = [options_of(group) for group in self._groups]
        if [options_of(group) for group in groups] != own:
            return False
        self._keys = [group["params"] for group in groups]
        self._kept = [*self._objects()]
        kept = [each for each in self._kept if isinstance(each, torch.Tensor)]
        known = {id(tensor) for tensor in kept}
        if all(id(tensor) in known for tensor in tensors) and all(
            type(tensor) in _TENSORS for tensor in kept
        ):
            self._places = TensorPlaces(kept)
            self._seen = self._found()
        return self._seen is not None

    @property
    def _groups(self) -> list[dict[Any, Any]]:
        return self._nest[-1].param_groups

    def _live_options(self) -> Iterator[object]:
        for group in self._groups:
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
            *(chain.from_iterable(_parts(each)) for each in self._nest),
            inner.state,
            *states,
            *(state.values() for state in states),
            *(group["params"] for group in inner.param_groups),
        )


def _nest(optimizer: object) -> list[Optimizer]:
    """Return the optimizer, and those within it down to PyTorch's own; nothing if it may hold
    anything else.
    """
    if not isinstance(optimizer, Optimizer):
        return []
    kind = type(optimizer)
    within: object = None
    if kind is KeyedOptimizerWrapper:
        within = vars(optimizer).get("_optimizer")
    elif kind is CombinedOptimizer:
        dense = [part for _, part in vars(optimizer)["_optims"] if not is_fused(part)]
        within = dense[0] if len(dense) == 1 else None
    else:
        of_torch = kind.__module__.startswith("torch.optim.")
        return [optimizer] if of_torch and kind.state_dict is Optimizer.state_dict else []
    inner = _nest(within)
    return [optimizer, *inner] if inner else []


def _parts(optimizer: object) -> Iterator[tuple[str, object]]:
    """Yield the parts of a combined optimizer with their names, and those of parts of this kind."""
    if isinstance(optimizer, CombinedOptimizer):
        for name, part in optimizer.optimizers:
            yield name, part
            yield from _parts(part)


def _is_plain(optimizer: Optimizer) -> bool:
    """Return whether an optimizer keeps nothing but state, groups, parts and constants."""
    own = vars(optimizer)
    if any(own.get(name) for name in _OF_STATE_DICT) or "state_dict" in own:
        return False
    plain = all(
        name in _LOOKED_INTO
        or HOOKS.search(name) is not None
        or _is_constant(value)
        or type(value) in _METHODS
        for name, value in own.items()
    ) and all(map(_is_constant, own.get("defaults", {}).values()))
    if isinstance(optimizer, CombinedOptimizer):  # makes dicts of its parts' state when asked
        return plain
    inner = own.get("_optimizer", optimizer)
    return (
        plain
        and optimizer.state is inner.state
        and optimizer.param_groups is inner.param_groups
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
