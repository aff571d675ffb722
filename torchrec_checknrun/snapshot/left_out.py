"""Notice values that modules count and keep outside of their state dicts: no checkpoint holds them.

A step counter in a plain attribute, a window of losses, a buffer with ``persistent=False`` that is
written to, parameters that are frozen or thawed, parameters beside the model that an optimizer
steps: a restored run begins with what the program makes of these.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim import Optimizer

from torchrec_checknrun.dense.tree import Node, all_nodes, attributes, inner_optimizers
from torchrec_checknrun.ranks import listed
from torchrec_checknrun.snapshot.read_ahead import warn_of_read_ahead
from torchrec_checknrun.snapshot.schedules import Schedules
from torchrec_checknrun.values.dense import is_dense
from torchrec_checknrun.values.own_loading import plain_path
from torchrec_checknrun.values.tensor_bytes import raw_bytes

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

_FRAMEWORKS = frozenset({"torch", "torchrec", "fbgemm_gpu", "torchrec_checknrun"})
"""Packages whose modules count for themselves, and keep in their state dicts what matters."""
_LAYERS = "torch.nn.modules."
"""PyTorch's layers, of which only rates are looked at: programs move a dropout's, say."""
_METRICS = "torchrec.metrics."
"""TorchRec's metrics, which have windows of batches in no state dict."""
_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
_MOST_VALUES = 1 << 14
"""The largest tensor that is looked at: larger ones are masks and tables. About as many values of a
larger parameter are compared.
"""
_NUMBERS = frozenset({int, float})
_SEQUENCES = frozenset({list, deque})

Mark = tuple[Any, ...]
"""The mark of a value at a look: a number, the ends of a sequence, a reference to a tensor, its
version and shape.
"""


class LeftOut:
    """The values of a user's modules that training moves and that no state dict shows.

    Args:
        model: the model, with all modules inside.
        states: state objects; those that are modules are looked into, and modules that they hold.
    """

    def __init__(self, model: nn.Module, states: Mapping[str, object]) -> None:
        self._modules: list[tuple[str, nn.Module]] = []
        self._first: dict[tuple[int, str], Mark] = {}
        self._copies: dict[tuple[int, str], bytes] = {}
        self._saves = 0
        self._begun = False
        self._model = model
        self._states, self._trained = states, _trained(model)
        self._told: set[str] = set()
        self._schedules: Schedules | None = None
        with self._harmless():
            self._schedules = Schedules(states)
            self._modules = list(_users_modules(model, states))
            self._first = self._marks()
            self._copies = {
                key: bytes(raw_bytes(_value(self._modules[key[0]][1], key[1])))
                for key, mark in self._first.items()
                if mark[0] is torch.Tensor and mark[3].numel() <= _MOST_VALUES
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
            if self._modules:
                self._look(saved)
            self._look_at_parameters()
            self._look_beside(saved)
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
        leaves = (leaf for state in saved.values() for leaf in _all_leaves(state))
        shapes: set[tuple[int, ...]] = {tensor.shape for tensor in new.values()}
        rows = {shape[:1] for shape in shapes}
        shown = {_content(leaf) for leaf in leaves if _may_show(leaf, shapes, rows)} - {None}
        lost = [name for name, tensor in new.items() if _content(tensor) not in shown]
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
            self._modules, self._schedules = [], None
            logger.warning("values outside of state dicts are not looked at", exc_info=True)

    def _look(self, saved: Mapping[str, object]) -> None:
        moved = [key for key, mark in self._marks().items() if self._has_moved(key, mark)]
        lost = []
        if moved:
            shown = _Shown(saved)
            values = ((key, _value(self._modules[key[0]][1], key[1])) for key in moved)
            lost = [key for key, value in values if not shown.holds(key[1], value)]
        for key in moved:
            del self._first[key]
        if lost:
            logger.warning(
                "training changes values of modules that are in no state dict: %s. A restored run "
                "begins with what the program makes of them. Where they matter, register them as "
                "persistent buffers, or give them under their names in a state object: "
                'state={"counts": …}',
                listed([f"{self._modules[at][0]}.{name}" for at, name in lost]),
            )

    def _marks(self) -> dict[tuple[int, str], Mark]:
        """Return the marks of all values, by the number of the module and the value's name."""
        return {
            (at, name): mark
            for at, (_, module) in enumerate(self._modules)
            for name, mark in _marks_of(module)
        }

    def _has_moved(self, key: tuple[int, str], mark: Mark) -> bool:
        first = self._first.get(key)
        if first is None or first[0] is not mark[0]:  # made later, or of another type
            return False
        if mark[0] is not torch.Tensor:
            return mark[1:] != first[1:]
        module, name = self._modules[key[0]][1], key[1]
        # Another attribute in its place may be a mere cache; one of another size is no count.
        written = mark[1] is first[1] and mark[2] != first[2]
        replaced = mark[1] is not first[1] and name in module._buffers
        return (
            (written or replaced)
            and mark[3] == first[3]
            and key in self._copies  # DistributedDataParallel writes the same values again
            and self._copies[key] != bytes(raw_bytes(_value(module, name)))
        )


class _Shown:
    """The values that states show, by name: a large model has thousands, of which many may move."""

    def __init__(self, saved: Mapping[str, object]) -> None:
        self._named: dict[str, list[object]] = {}
        self._extra: list[object] = []
        for path, leaf in chain.from_iterable(map(_leaves, saved.values())):
            self._named.setdefault(path[-1].rpartition(".")[2], []).append(leaf)
            if any(part.endswith(_EXTRA_STATE_KEY_SUFFIX) for part in path):
                self._extra.append(leaf)

    def holds(self, name: str, value: object) -> bool:
        """Return whether a state has a value under its name, or a module's extra state has it."""
        named = self._named.get(name.rpartition(".")[2], ())
        if named and type(value) not in _NUMBERS:
            return True
        return any(_equals(leaf, value) for leaf in chain(named, self._extra))


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
    held = [(f"{n}.{a}", v) for n, state in states.items() for a, v in attributes(state).items()]
    seen: set[int] = set()
    for name, root in (("model", model), *states.items(), *held):
        for within, module in root.named_modules() if isinstance(root, nn.Module) else ():
            if id(module) not in seen and (_is_users(type(module)) or _is_layer(module)):
                yield ".".join(filter(None, (name, plain_path(within)))), module
            seen.add(id(module))


def _is_users(kind: type) -> bool:
    name = f"{kind.__module__}."
    return name.startswith(_METRICS) or name.partition(".")[0] not in _FRAMEWORKS


def _is_layer(module: nn.Module) -> bool:
    return type(module).__module__.startswith(_LAYERS)


def _marks_of(module: nn.Module) -> Iterator[tuple[str, Mark]]:
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


def _own_values(item: object) -> Iterable[tuple[str, Any]]:
    return vars(item).items() if hasattr(item, "__dict__") and _is_users(type(item)) else ()


def _value(module: nn.Module, name: str) -> Any:
    if name in module._buffers:
        return module._buffers[name]
    if name in vars(module):
        return vars(module)[name]
    attribute, _, rest = name.partition(".")
    for key, item in vars(module)[attribute].items():
        own, last = dict(_own_values(item)), rest.removeprefix(f"{key}.")
        if last != rest and last in own:  # keys may have dots as well
            return own[last]
    raise KeyError(name)


def _equals(leaf: object, value: object) -> bool:
    if isinstance(leaf, torch.Tensor):
        if isinstance(value, torch.Tensor):
            return leaf.data_ptr() == value.data_ptr()
        return type(value) in _NUMBERS and leaf.numel() == 1 and bool(leaf.item() == value)
    return type(leaf) in _NUMBERS and type(value) in _NUMBERS and leaf == value


def _all_leaves(value: object) -> Iterator[object]:
    """Yield the numbers, tensors, arrays and lists in a state."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        yield value
        for item in value:
            yield from _all_leaves(item)
    elif isinstance(value, (torch.Tensor, np.ndarray, float)):
        yield value


def _may_show(leaf: Any, shapes: set[tuple[int, ...]], rows: set[tuple[int, ...]]) -> bool:
    """Return whether a value of a state may be one of some tensors, by their shapes and rows."""
    if isinstance(leaf, (list, tuple)):
        return (len(leaf),) in rows and isinstance(leaf[0], (float, list))
    return isinstance(leaf, float) or np.shape(leaf) in shapes


def _content(value: Any) -> tuple[int, bytes] | None:
    """Return what is the same of equal values, whatever their form; None if it is unknown.

    Of large ones a sample decides: training waits meanwhile.
    """
    with suppress(Exception):  # tensors may be of any class, lists of anything
        values = torch.as_tensor(value).detach()
        values = torch.view_as_real(values) if values.is_complex() else values
        flat = values.reshape(-1)
        some = flat[:: max(1, len(flat) // _MOST_VALUES)].cpu().to(torch.float64) + 0.0
        return len(flat), xxhash.xxh3_128_digest(some.numpy().data)  # of both zeros one
    return None


def _leaves(value: object, path: tuple[str, ...] = ("",)) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the keys under which a state has values, lists among them, each with the value."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, (*path, str(name)))
        return
    yield path, value
    for item in value if isinstance(value, (list, tuple, deque)) else ():
        if isinstance(item, (Mapping, list, tuple, deque)):
            yield from _leaves(item, path)
