"""Make the state that an optimizer's first step would make, without taking that step."""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_checknrun.dense.optimizers import torch_optimizers
from torchrec_checknrun.dense.tree import (
    HOOKS,
    Key,
    Parameter,
    Parameters,
    inner_optimizers,
    is_optimizer,
    nodes,
    own_parameters,
    parameters_of,
    state_at,
)
from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.format.row_chunk import RowForms
from torchrec_checknrun.placements import laid_out_as, zeros_placed_as
from torchrec_checknrun.values.state import (
    TORCH_DTYPES,
    Tree,
    empty_state,
    tree_items,
    tree_values,
)

_DEVICE_STEP = ("capturable", "fused")
"""Options that place an optimizer's step counter on the parameter's device, not on the CPU."""

_IMMUTABLE = (
    *(bool, int, float, complex, str, bytes, Enum, type, FunctionType, BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.Size, logging.Logger),
)


def first_state(
    optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> dict[str, Any] | None:
    """Return the state, all zeros, that an optimizer's first step would make for a parameter.

    A copy of the optimizer, without its hooks, steps a stand-in of the parameter, on the meta
    device if the optimizer works there. Neither the parameter nor anything that the optimizer holds
    is touched: in the copy, inner optimizers are replaced by ones that do nothing.

    Args:
        group: the parameter's group, for its options.

    Returns:
        The state by name; empty if the optimizer keeps none; None if the copy can't step.
    """
    for _, inner in inner_optimizers(optimizer):
        if inner.state is optimizer.state:
            return first_state(inner, group, parameter)
    for device in (torch.device("meta"), parameter.device):
        stand_in = nn.Parameter(zeros_placed_as(parameter, device))
        stand_in.grad = torch.zeros_like(stand_in)
        plain = dict.fromkeys(("foreach", "differentiable", *_DEVICE_STEP), False)
        try:
            options = {k: v for k, v in plain.items() if k in group}
            own: dict[str, Any] = {"params": [stand_in], **options, "lr": 0.0}
            copied = _Copied(optimizer, [own])
            own |= {k: copied(v) for k, v in group.items() if k not in own}
            twin: Any = object.__new__(type(optimizer))
            vars(twin).update(copied.attributes())
            vars(twin).update(state=defaultdict(dict), param_groups=[own])
            type(twin).step(twin)
        except Exception:  # a user's optimizer may raise anything
            continue
        made = state_at(twin, stand_in)
        on_device = any(group.get(option) for option in _DEVICE_STEP)
        return {name: _zeros(value, parameter.device, on_device) for name, value in made.items()}
    return None


class _Still(Optimizer):
    """A stand-in for an optimizer inside another one, whose steps do nothing."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        # torch's own __init__ would copy the groups and announce the steps to hooks.
        self.param_groups, self.state, self.defaults = groups, defaultdict(dict), {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded
        """Do nothing."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing."""


class _Copied:
    """A copier of an optimizer's attributes, so that the copy's step can't reach the original.

    Args:
        groups: the parameter groups for stand-ins of inner optimizers.

    Raises:
        TypeError: a value can't be copied safely: a parameter, a module, an unknown object.
    """

    def __init__(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
        self._optimizer = optimizer
        self._groups = groups
        self._parameters = set(map(id, parameters_of(optimizer)))

    def attributes(self) -> dict[str, Any]:
        """Copy all attributes but the state, the groups and a scheduler's ``step``."""
        return {
            name: OrderedDict() if HOOKS.search(name) else self(value)
            for name, value in vars(self._optimizer).items()
            if name not in ("state", "param_groups", "step")
        }

    def __call__(self, value: Any) -> Any:
        if is_optimizer(value):
            return _Still(self._groups)
        if id(value) in self._parameters:
            raise TypeError("an optimizer's own parameter")
        if type(value) is torch.Tensor:
            return value.detach().clone()
        if isinstance(value, dict):
            items = {self(k): self(v) for k, v in value.items()}
            return defaultdict(None, items) if isinstance(value, defaultdict) else items
        if type(value) in (list, tuple, set, frozenset, deque):
            return type(value)(map(self, value))
        if value is None or isinstance(value, _IMMUTABLE):
            return value
        if _is_plain_object(value):
            copied = object.__new__(type(value))
            vars(copied).update({name: self(item) for name, item in vars(value).items()})
            return copied
        raise TypeError(f"a {type(value).__name__}, which a step may change")


def _is_plain_object(value: object) -> bool:
    """Return whether an object's content is all in its ``__dict__``, as a dataclass's is."""
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (nn.Module, torch.Tensor))
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__basicsize__ == _Empty.__basicsize__
    )


class _Empty:
    """A plain object, for the size of one without slots."""


def _zeros(value: Any, device: torch.device, on_device: bool) -> Any:
    """Return a state value as before any step: zeros, on the device the optimizer would use."""

    def zeros(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor, device=device if on_device or tensor.is_meta else None)

    return 0 if type(value) is int else tree_map_only(torch.Tensor, zeros, value)


def state_to_make(
    parameter: Parameter, saved: Tree | None, rows: RowForms, same: bool
) -> dict[str, Any] | None:
    """Return the state to restore into where a parameter has none, all zeros, or not all that the
    same optimizer has saved; None if unknown.

    That is what a first step makes. Of the same optimizer it has the saved state's form: the first
    step may not make it all (Lookahead), or need what only training has (a mode, a closure), and
    an optimizer may make a part of it when it is made itself. If the checkpoint lacks state that
    was not merely late, it is made as well, so that the later comparison of both reports the
    difference.

    Args:
        saved: the state's stored tree.
        rows: the states that are stored with a table's rows, by the optimizer's own names.
        same: whether the optimizer is the one that has saved.
    """
    present = parameter.state
    if present is not None and not same:
        return present
    made = first_state(parameter.optimizer, parameter.group, parameter.parameter)
    if not (rows or tree_items(saved)):
        return made
    if present is not None:
        return {**_as_saved(parameter.parameter, made or {}, saved, rows), **present}
    if same or (made is None and saved is not None):
        return _as_saved(parameter.parameter, made or {}, saved, rows)
    return made


def first_state_of_own_form(parameter: Parameter, owner: Optimizer, path: str) -> dict[str, Any]:
    """Return the state that a user's own ``load_state_dict`` is about to load.

    TorchRec would refuse to load missing state, but only once the tables are restored.

    Args:
        owner: the outermost optimizer.
        path: its name in errors.

    Raises:
        IncompatibleCheckpoint: the state can't be made; names the parameter.
    """
    made = first_state(parameter.optimizer, parameter.group, parameter.parameter)
    if made is None:
        raise IncompatibleCheckpoint(
            f"{path}: {type(owner).__name__}.state_dict has a form of its own, and state "
            f"of {parameter.name} is still to be made by {type(parameter.optimizer).__name__}: "
            "make it before the restore (init_state() of a KeyedOptimizer), or let state_dict "
            "return TorchRec's form with further keys beside 'state'"
        )
    return made


def is_resized(parameter: Parameter, saved: Tree | None) -> bool:
    """Return whether a saved state is of a parameter of another shape: a state that has the
    parameter's shape now had another one. Not even a part of that can be restored into this one.
    """
    own = parameter.state
    if own is None:
        own = first_state(parameter.optimizer, parameter.group, parameter.parameter) or {}
    shape, nodes = parameter.parameter.shape, tree_items(saved)
    return any(
        isinstance(value, torch.Tensor)
        and value.shape == shape
        and nodes.get(name, {}).get("shape", list(shape)) != list(shape)
        for name, value in own.items()
    )


def _as_saved(
    parameter: torch.Tensor, made: Mapping[str, Any], saved: Tree | None, rows: RowForms
) -> dict[str, Any]:
    """Return a parameter's state in the saved form: what the first step makes where that has it."""
    form = empty_state(saved) if saved else {}
    for name, (dtype, rowwise) in rows.items():
        shape = (parameter.shape[0], 1) if rowwise else parameter.shape
        form[name] = torch.zeros(shape, dtype=dtype, device="cpu")
    placed = placed_with(parameter, form)
    return {
        name: made[name]
        if name in made and _is_alike(made[name], value, parameter.shape)
        else value
        for name, value in placed.items()
    }


def _is_alike(made: object, saved: object, of_parameter: torch.Size) -> bool:
    """Return whether a first step's value will do for a saved one; a tensor of another shape than
    the parameter's has to have the saved order in memory as well.
    """
    if isinstance(made, torch.Tensor) and isinstance(saved, torch.Tensor):
        same = made.shape == of_parameter or made.stride() == saved.stride()
        return made.shape == saved.shape and same
    return not isinstance(made, torch.Tensor) and not isinstance(saved, torch.Tensor)


def placed_with(parameter: torch.Tensor, value: Any) -> Any:
    """Move the tensors of a parameter's state, except for 0-d counters, to its device, and those of
    its shape into its order in memory.
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return laid_out_as(tensor.to(parameter.device), parameter) if tensor.dim() else tensor

    return tree_map_only(torch.Tensor, move, value)


class LateStates:
    """The first state of TorchRec's optimizers in a user's object, made before that loads its own.

    A trainer, or a wrapper with a ``state_dict`` of its own, hands its content on to the optimizers
    that it holds. TorchRec's refuse state of parameters that they have not stepped yet, and that
    only once the model was changed.

    Args:
        holder: a state object that is restored by its own ``load_state_dict``.
        names: the model's parameters.
        sharded: names of the model's tables in fused kernels.
    """

    def __init__(
        self, holder: object, names: Mapping[torch.Tensor, str], sharded: Collection[str]
    ) -> None:
        inner = inner_optimizers(holder)
        held = [each for _, each in inner if isinstance(each, KeyedOptimizer)]
        self._parameters = [p for each in held for p in Parameters(each, names, sharded)]
        self._own: list[tuple[Key, Any, torch.Tensor]] = [
            (node.key(name), node.optimizer.state, parameter)
            for each in held
            for node in nodes(each)
            if not node.fused
            for name, parameter in own_parameters(node).items()
        ]
        self._made: list[tuple[Any, torch.Tensor]] = []

    def make(self, tree: Tree) -> bool:
        """Make the missing state of all parameters that the object's stored tree has state of;
        return whether there were any.
        """
        missing = [p for p in self._parameters if not p.sharded and p.state is None]
        of_wrappers = [each for each in self._own if each[2] not in each[1]]
        saved = dict(_dicts(tree)) if missing or of_wrappers else {}
        for key, states, own in of_wrappers:
            if key in saved:
                states[own] = {str(name): _blank(node) for name, node in saved[key].items()}
                self._made.append((states, own))
        for parameter in missing:
            if parameter.key in saved:
                made = first_state(parameter.optimizer, parameter.group, parameter.parameter)
                if made is None:
                    made = {str(name): _blank(node) for name, node in saved[parameter.key].items()}
                if made:
                    parameter.optimizer.state[parameter.parameter] = made
                    self._made.append((parameter.optimizer.state, parameter.parameter))
        return bool(self._made)

    def undo(self) -> None:
        """Take the state away again."""
        for mapping, parameter in self._made:
            mapping.pop(parameter, None)
        self._made = []


def _dicts(tree: Tree | None) -> Iterator[tuple[str | int, dict[str | int, Tree]]]:
    """Yield the dicts with content in a tree, at any depth, each with its key."""
    for key, node in tree_items(tree).items():
        if items := tree_items(node):
            yield key, items
        yield from _dicts(node)
    for node in tree_values(tree):
        yield from _dicts(node)


def _blank(node: Tree) -> torch.Tensor | None:
    """Return a tensor to load a stored one into; None for any other value."""
    return torch.zeros(node["shape"], dtype=TORCH_DTYPES[node["dtype"]]) if "x" in node else None


class Layouts:
    """The order in memory of the state of the optimizers that an object is or holds, which is about
    to load some of it, perhaps.

    Fused kernels walk through the memory of a parameter and its state side by side.
    """

    def __init__(self, holder: object) -> None:
        self._holder = holder
        self._known = {
            (id(parameter), name): (weakref.ref(value), torch.empty_like(value, device="meta"))
            for parameter, _, name, value in self._state()
        }

    def restore(self) -> None:
        """Lay out tensors in the places of others as these were, or else as their parameter, which
        their first step would do. Those that are still there may be parts of a larger buffer.
        """
        for parameter, state, name, value in self._state():
            before, like = self._known.get((id(parameter), name), (lambda: None, parameter))
            if before() is not value:
                state[name] = laid_out_as(value, like)

    def _state(self) -> Iterator[tuple[torch.Tensor, dict[Any, Any], Any, torch.Tensor]]:
        holder = self._holder
        inner = [each for _, each in inner_optimizers(holder)]
        for optimizer in torch_optimizers([holder] if isinstance(holder, Optimizer) else inner):
            for parameter, state in optimizer.state.items():
                if isinstance(state, dict) and isinstance(parameter, torch.Tensor):
                    for name, value in [*state.items()]:
                        if type(value) is torch.Tensor and value.layout is torch.strided:
                            yield parameter, state, name, value
