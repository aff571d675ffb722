"""Notice values that modules and state objects keep outside of their state dicts: no checkpoint
holds them.

A step counter in a plain attribute, a window of losses, a buffer with ``persistent=False`` that is
written to, parameters that are frozen or thawed, parameters beside the model that an optimizer
steps: a restored run begins with what the program makes of these.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchrec_checknrun.dense.tree import Node, all_nodes, attributes, inner_optimizers
from torchrec_checknrun.ranks import listed
from torchrec_checknrun.snapshot.read_ahead import warn_of_read_ahead
from torchrec_checknrun.snapshot.unheld import Beside, Draws, KeyedByIds, Schedules
from torchrec_checknrun.values.dense import is_dense
from torchrec_checknrun.values.own_loading import plain_path
from torchrec_checknrun.values.shown import MOST_VALUES, Shown, all_leaves, content, may_show, shows
from torchrec_checknrun.values.tensor_bytes import raw_bytes

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

_FRAMEWORKS = frozenset({"torch", "torchrec", "fbgemm_gpu", "torchdata", "torchrec_checknrun"})
"""Packages whose objects count for themselves, and keep in their state dicts what matters."""
_RATE = "learning_rate_tensor"
"""The rate of FBGEMM's kernels, in no state dict. A collection's go with its tables."""
_LAYERS = "torch.nn.modules."
"""PyTorch's layers, of which only rates are looked at: programs move a dropout's, say."""
_METRICS = "torchrec.metrics."
"""TorchRec's metrics, which have windows of batches in no state dict."""
_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
_SHOWN = " (metric.persistent(True) does for a metric of torchmetrics)"
_MOST_ITEMS = 256
"""The longest list or dict in which modules are looked for: longer ones are data."""
_NUMBERS = frozenset({int, float})
_COUNTS = frozenset({int, bool})
"""Types of a state object's attributes that are looked at: other numbers are mostly times."""
_SEQUENCES = frozenset({list, deque})

Mark = tuple[Any, ...]
"""The mark of a value at a look: a number, the ends of a sequence, a reference to a tensor, its
version and shape.
"""


class LeftOut:
    """The values of a user's modules and state objects that training moves and no state dict shows.

    Args:
        model: the model, with all modules inside.
        states: state objects; those that are modules are looked into, and modules that they hold.
    """

    def __init__(self, model: nn.Module, states: Mapping[str, object]) -> None:
        self._owners: list[tuple[str, Any]] = []
        self._first: dict[tuple[int, str], Mark] = {}
        self._copies: dict[tuple[int, str], bytes] = {}
        self._saves = 0
        self._begun = False
        self._model = model
        self._states, self._trained = states, _trained(model)
        self._told: set[str] = set()
        self._schedules: Schedules | None = None
        self._beside, self._draws = Beside(model, states), Draws()
        self._keyed = KeyedByIds(model)
        with self._harmless():
            self._schedules = Schedules(states)
            self._owners = [*_users_modules(model, states), *_users_objects(states)]
            self._first = self._marks()
            self._copies = {
                key: _sample(_value(self._owners[key[0]][1], key[1]))
                for key, mark in self._first.items()
                if mark[0] is torch.Tensor
            }

    def begin(self) -> None:
        """Look for schedulers and pipelines that were made since the start; call it at each step,
        of which only the first takes the time. The first save need not then.
        """
        if self._begun:
            return
        self._begun = True
        with self._harmless():
            if self._schedules is not None:
                self._schedules.tell()
            warn_of_read_ahead(self._states)
            self._beside.find()
            self._draws.begin()

    def look(self, saved: Mapping[str, object]) -> None:
        """Warn, once for each, of values that have moved since the start; call it at each save.

        Most saves are passed over: the first is looked at, the second, the fourth, the eighth …

        Args:
            saved: the states that are saved, by name.
        """
        self._saves += 1
        if self._saves & (self._saves - 1):
            return
        self.begin()  # where the program doesn't call ``step``
        with self._harmless():
            if self._owners:
                self._look(saved)
            self._look_at_parameters()
            self._look_beside(saved)
            self._beside.look(saved)
            self._keyed.look(saved)
            self._draws.look(saved)
            if self._schedules is not None:
                self._schedules.look()

    def _look_at_parameters(self) -> None:
        """Warn, once for each, of parameters that are trained now and were not at the start, or the
        reverse.
        """
        first = self._trained
        changed = [n for n, trained in _trained(self._model).items() if first.get(n) is not trained]
        if changed := [name for name in changed if first.pop(name, None) is not None]:
            logger.warning(
                "the program has changed requires_grad of %s, which is in no state dict: a "
                "restored run trains what the program makes so. Set it by the step, after "
                "restore() as well",
                listed(changed),
            )

    def _look_beside(self, saved: Mapping[str, object]) -> None:
        """Warn, once for each, of parameters that an optimizer among the state objects steps, and
        that no state has: of the optimizer's only their state is saved, not their values.
        """
        beside = dict(_stepped_beside(self._model, self._states))
        new = {name: tensor for name, tensor in beside.items() if name not in self._told}
        if not new:
            return
        leaves = (leaf for state in saved.values() for leaf in all_leaves(state))
        shapes: set[tuple[int, ...]] = {tensor.shape for tensor in new.values()}
        rows = {shape[:1] for shape in shapes}
        shown = {content(leaf) for leaf in leaves if may_show(leaf, shapes, rows)} - {None}
        lost = [name for name, tensor in new.items() if content(tensor) not in shown]
        self._told |= {*lost}
        if lost:
            logger.warning(
                "an optimizer trains parameters that neither the model nor a state object shows: "
                "%s. They are not saved, and a restored run begins with what the program makes of "
                'them. Make them part of the model, model=nn.ModuleDict({"net": …, "beside": …}), '
                "or give the module that has them: state={…}",
                listed(lost),
            )

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """Look no more after an error: users' objects may raise any, and no save needs the look."""
        try:
            yield
        except Exception:
            self._owners, self._schedules = [], None
            logger.warning("values outside of state dicts are not looked at", exc_info=True)

    def _look(self, saved: Mapping[str, object]) -> None:
        moved = [key for key, mark in self._marks().items() if self._has_moved(key, mark)]
        lost = []
        if moved:
            shown = Shown(saved.values())
            for key in moved:
                (name, owner), attribute = self._owners[key[0]], key[1]
                value = _value(owner, attribute)
                own = not isinstance(owner, nn.Module) and shows(saved.get(name), value)
                if not (own or shown.holds(attribute, value)):
                    lost.append(key)
        for key in moved:
            del self._first[key]
        if lost:
            logger.warning(
                "training changes values that are in no state dict: %s. A restored run "
                "begins with what the program makes of them. Where they matter, register them as "
                "persistent buffers%s, or give them under their names in a state object: "
                'state={"counts": …}',
                listed([f"{self._owners[at][0]}.{name}" for at, name in lost]),
                _SHOWN if any(_is_hidden(self._owners[at][1], name) for at, name in lost) else "",
            )

    def _marks(self) -> dict[tuple[int, str], Mark]:
        """Return the marks of all values, by the number of the module and the value's name."""
        return {
            (at, name): mark
            for at, (_, owner) in enumerate(self._owners)
            for name, mark in (_marks_of if isinstance(owner, nn.Module) else _counts_of)(owner)
        }

    def _has_moved(self, key: tuple[int, str], mark: Mark) -> bool:
        first = self._first.get(key)
        if first is None or first[0] is not mark[0]:  # made later, or of another type
            return False
        if mark[0] is not torch.Tensor:
            return mark[1:] != first[1:]
        module, name = self._owners[key[0]][1], key[1]
        # Another scalar in its place may be a mere cache; one of another size is no count.
        written = mark[1] is first[1] and mark[2] != first[2]
        replaced = mark[1] is not first[1] and (len(mark[3]) > 0 or name in module._buffers)
        return (
            (written or replaced)
            and mark[3] == first[3]
            # DistributedDataParallel writes the same values again
            and self._copies[key] != _sample(_value(module, name))
        )


def _trained(model: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


def _stepped_beside(
    model: nn.Module, states: Mapping[str, object]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the trained parameters of optimizers among state objects, or inside of these, that no
    module given has, each once, with a name.
    """
    modules = (model, *(state for state in states.values() if isinstance(state, nn.Module)))
    given = [parameter for module in modules for parameter in module.parameters()]
    known = {id(parameter) for parameter in given}
    beside: dict[int, tuple[str, Node, str, torch.Tensor]] = {}
    for of, node, place, parameter in _stepped(states):
        if id(parameter) not in known and _is_trained(parameter):
            beside.setdefault(id(parameter), (of, node, place, parameter))
    memory = {p.data_ptr() for p in given if is_dense(p)} if beside else set()
    for of, node, place, parameter in beside.values():
        if parameter.data_ptr() not in memory:
            keyed: Any = node.keyed
            names = {} if keyed is None else {id(p): name for name, p in keyed.params.items()}
            name = names.get(id(parameter), f"{place}, of shape {[*parameter.shape]},")
            yield f"{name} of state {of!r} ({type(node.optimizer).__name__})", parameter


def _stepped(states: Mapping[str, object]) -> Iterator[tuple[str, Node, str, torch.Tensor]]:
    """Yield the parameters of optimizers among state objects, or inside of these, the innermost
    optimizer's first, each with the state's name, its optimizer, and its place there.
    """
    for of, state in states.items():
        for outer in [state] if isinstance(state, Optimizer) else _inside(state):
            for node in all_nodes(outer):
                groups = [] if node.fused else node.optimizer.param_groups
                for at, group in enumerate(groups):
                    for number, parameter in enumerate(group["params"]):
                        yield of, node, f"parameter {number} of group {at}", parameter


def _inside(state: object) -> list[Optimizer]:
    return [inner for _, inner in inner_optimizers(state)]


def _is_trained(parameter: Any) -> bool:
    # A sharded table's parameter, or a part of one, is in the kernel.
    trained = type(parameter) is nn.Parameter or type(parameter) is torch.Tensor
    return trained and parameter.requires_grad and parameter.numel() > 0 and is_dense(parameter)


def _users_modules(
    model: nn.Module, states: Mapping[str, object]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are of no framework's class, or layers, each once, with a name."""
    roots: list[tuple[str, nn.Module]] = [("model", model)]
    for name, state in states.items():
        roots += _modules_of(name, state, 0)
        for attribute, value in attributes(state).items():
            roots += _modules_of(f"{name}.{attribute}", value, 2)
    seen: set[int] = set()
    for name, root in roots:
        for within, module in root.named_modules():
            looked_at = _is_users(type(module)) or _is_layer(module) or _RATE in vars(module)
            if id(module) not in seen and looked_at:
                yield ".".join(filter(None, (name, plain_path(within)))), module
            seen.add(id(module))


def _users_objects(states: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the state objects that are of no framework's class, each with its name."""
    for name, state in states.items():
        if not isinstance(state, (nn.Module, Optimizer)) and _is_users(type(state)):
            yield name, state


def _counts_of(state: object) -> Iterator[tuple[str, Mark]]:
    """Yield the whole numbers and flags of a state object that are not private."""
    for name, value in attributes(state).items():
        if type(value) in _COUNTS and not name.startswith("_"):
            yield name, (type(value), value)


def _modules_of(name: str, value: object, levels: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield a value that is a module, or those in a list or dict, of as many levels."""
    if isinstance(value, nn.Module):
        yield name, value
    elif levels and isinstance(value, (list, tuple, dict)) and len(value) <= _MOST_ITEMS:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(key, (str, int)):  # not an optimizer's state, by sharded tensors
                yield from _modules_of(f"{name}.{key}", item, levels - 1)


def _is_users(kind: type) -> bool:
    name = f"{kind.__module__}."
    return name.startswith(_METRICS) or name.partition(".")[0] not in _FRAMEWORKS


def _is_hidden(module: nn.Module, name: str) -> bool:
    """Tell whether a value is a state of a metric of torchmetrics that its state dict omits."""
    return name in getattr(module, "_persistent", ())


def _is_layer(module: nn.Module) -> bool:
    return type(module).__module__.startswith(_LAYERS)


def _marks_of(module: nn.Module) -> Iterator[tuple[str, Mark]]:
    if _RATE in vars(module) and not _is_users(type(module)):
        yield _RATE, _mark_of(vars(module)[_RATE])
        return
    for name, value in vars(module).items():
        if name in _OF_MODULES or (_is_layer(module) and type(value) is not float):
            continue
        if type(value) is dict:  # of windows, as TorchRec's metrics have them
            for key, item in value.items():
                yield from _plain_marks(f"{name}.{key}.", _own_values(item))
        else:
            yield from _plain_marks("", ((name, value),))
    for name in module._non_persistent_buffers_set:
        buffer = module._buffers.get(name)
        if type(buffer) is torch.Tensor and _is_read(buffer):
            yield name, _mark_of(buffer)


def _plain_marks(prefix: str, values: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Mark]]:
    for name, value in values:
        kind = type(value)
        if kind in _NUMBERS:
            yield f"{prefix}{name}", (kind, value)
        elif kind in _SEQUENCES:
            ends = (id(value[0]), id(value[-1])) if value else ()
            yield f"{prefix}{name}", (kind, len(value), *ends)
        elif kind is torch.Tensor and _is_read(value):
            yield f"{prefix}{name}", _mark_of(value)


def _is_read(tensor: torch.Tensor) -> bool:
    return is_dense(tensor) and not (tensor.is_meta or tensor.is_inference())


def _mark_of(tensor: torch.Tensor) -> Mark:
    # A reference, not an id: another tensor may take the place in memory of one that is gone.
    return torch.Tensor, weakref.ref(tensor), tensor._version, tensor.shape


def _sample(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's values; of a large one, of some from all over it."""
    apart = tensor.numel() // MOST_VALUES | 1  # odd: of different columns
    return bytes(raw_bytes(tensor.detach().reshape(-1)[::apart].contiguous()))


def _own_values(item: object) -> Iterable[tuple[str, Any]]:
    return vars(item).items() if hasattr(item, "__dict__") and _is_users(type(item)) else ()


def _value(owner: Any, name: str) -> Any:
    if not isinstance(owner, nn.Module):
        return getattr(owner, name)
    if name in owner._buffers:
        return owner._buffers[name]
    if name in vars(owner):
        return vars(owner)[name]
    attribute, _, rest = name.partition(".")
    for key, item in vars(owner)[attribute].items():
        own, last = dict(_own_values(item)), rest.removeprefix(f"{key}.")
        if last != rest and last in own:  # keys may have dots as well
            return own[last]
    raise KeyError(name)
