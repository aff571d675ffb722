"""Walk through optimizers that wrap or combine others, and through their parameters.

TorchRec nests optimizers freely, and its state dicts show only the innermost ones' state: warm-up
around a combined optimizer, say, leaves no trace. Users' own optimizers (Lookahead, SAM) hold
another one in any attribute, and torch's state dict shows only the outermost one's state.
"""

from __future__ import annotations

import copyreg
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.optim import Optimizer
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

_TORCHS = frozenset({"state", "param_groups", "params", "defaults"})
"""Attributes of every optimizer that are not searched for others."""
HOOKS = re.compile(r"^_optimizer_.*_hooks$")
"""Names of the attributes that hold an optimizer's hooks."""
_PLAIN = frozenset({type(None), bool, int, float, str, torch.Tensor})
"""Types of values that hold no optimizer."""
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple})
"""Types of values that hold none if they are empty, such as most optimizers' hooks."""
_DEEPEST = 3
"""Levels of lists and dicts that are searched for optimizers."""

WEIGHT = ".weight"
"""End of the name of a table's parameter, which the table's name lacks."""

Key = str | int
"""A parameter's name, or torch's number of it."""


@dataclass(frozen=True)
class Node:
    """One optimizer in a nest.

    Attributes:
        identity: the class with the keys of the combined optimizers around it, and a number if
            that is ambiguous. Adding or removing a wrapper around it doesn't change it.
        prefix: the prefix of its parameters' names in the outermost state dict.
        keyed: the ``KeyedOptimizer`` that names its parameters: itself, or the wrapper around it.
        fused: whether the optimizer updates only tables inside kernels.
        steps: whether the optimizer keeps parameters' state itself.
        wraps: whether the optimizer holds other optimizers.
        hidden: identity and attribute of the optimizer whose state dict shows this one's state, if
            the nest's outermost state dict doesn't; otherwise empty.
    """

    optimizer: Optimizer
    identity: str
    prefix: str
    keyed: KeyedOptimizer | None
    fused: bool
    steps: bool
    wraps: bool
    hidden: str

    def key(self, name: str) -> str:
        """Return the outermost state dict's key of a parameter's name."""
        return CombinedOptimizer.prepend_opt_key(name, self.prefix)


@dataclass
class Parameter:
    """One parameter of an optimizer.

    Attributes:
        key: the key that the state is stored under.
        name: the name in the model, or the key.
        optimizer: torch's optimizer, which keeps the state.
        group: the parameter group.
        sharded: whether the parameter is a sharded table, or this rank's part of one. Its optimizer
            is in the kernel: the parameter gets no gradient, each rank has other such parameters,
            and none of them is stored.
    """

    key: Key
    name: str
    parameter: torch.Tensor
    optimizer: Optimizer
    group: dict[str, Any]
    sharded: bool

    @property
    def state(self) -> dict[str, Any] | None:
        """Return the state made for the parameter; None if there is none.

        What a ``ZeroRedundancyOptimizer`` has itself is left from its ``load_state_dict``.
        """
        partitioned = is_partitioned(self.optimizer)
        return None if partitioned else state_at(self.optimizer, self.parameter) or None


class Parameters:
    """The parameters whose state one state dict shows, with their keys.

    Args:
        optimizer: the outermost optimizer.
        names: the model's parameters.
        sharded: names of the model's tables in fused kernels.

    Attributes:
        numbered: whether a plain optimizer's keys are torch's numbers in any case; otherwise only
            if the model doesn't know all parameters.
    """

    def __init__(
        self, optimizer: Optimizer, names: Mapping[torch.Tensor, str], sharded: Collection[str]
    ) -> None:
        self._optimizer = optimizer
        self._names = names
        self._sharded = sharded
        self.numbered = False

    def __iter__(self) -> Iterator[Parameter]:
        return self.of(nodes(self._optimizer))

    def of(self, found: Iterable[Node]) -> Iterator[Parameter]:
        """Iterate over the parameters, given the outermost optimizer's ``nodes``."""
        if not isinstance(self._optimizer, KeyedOptimizer):
            keys = self.keys()
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    yield self._parameter(keys[parameter], parameter, self._optimizer, group)
            return
        for node in found:
            if node.steps and node.keyed is not None:
                yield from self._of_node(node, node.keyed)

    def keys(self) -> dict[torch.Tensor, Key]:
        """Return a plain optimizer's parameters in torch's order, with their keys."""
        parameters = dict.fromkeys(parameters_of(self._optimizer))
        if self.numbered or not all(p in self._names for p in parameters):
            return {parameter: number for number, parameter in enumerate(parameters)}
        return {parameter: self._names[parameter] for parameter in parameters}

    def _of_node(self, node: Node, keyed: KeyedOptimizer) -> Iterator[Parameter]:
        groups = {p: group for group in node.optimizer.param_groups for p in group["params"]}
        for name, parameter in keyed.params.items():
            if parameter in groups:
                group = groups[parameter]
                yield self._parameter(node.key(name), parameter, node.optimizer, group)

    def _parameter(
        self, key: Key, parameter: torch.Tensor, optimizer: Optimizer, group: dict[str, Any]
    ) -> Parameter:
        name = self._names.get(parameter, str(key))
        sharded = name.removesuffix(WEIGHT) in self._sharded
        return Parameter(key, name, parameter, optimizer, group, sharded)


def nodes(optimizer: Optimizer) -> list[Node]:
    """List the optimizers whose state one state dict shows, the innermost first.

    Of fused optimizers only the outermost is listed; ``hidden_optimizers`` are left out.
    """
    return shown(all_nodes(optimizer))


def shown(nest: Iterable[Node]) -> list[Node]:
    """List those of ``all_nodes`` whose state the outermost one's state dict shows."""
    return [node for node in nest if not node.hidden]


def all_nodes(optimizer: Optimizer) -> list[Node]:
    """List all optimizers in a nest, the innermost first; of fused ones only the outermost."""
    return list(_walk(optimizer))[::-1]


def hidden_optimizers(nest: Sequence[Node]) -> dict[str, Optimizer]:
    """Find the optimizers in a nest whose state the outermost one's state dict doesn't show.

    SAM's and Lookahead's base optimizer, for instance. Fused ones are left out: their state goes
    with the tables.

    Args:
        nest: from ``all_nodes``.

    Returns:
        The optimizers by identity and attribute, ``SAM.base_optimizer``, the outer ones first.
    """
    found: dict[str, Optimizer] = {}
    for node in reversed(nest):
        if node.hidden and not node.fused:
            found.setdefault(node.hidden, node.optimizer)
    return found


def inner_optimizers(owner: object) -> list[tuple[str, Optimizer]]:
    """Return the optimizers that an object holds: parts, attributes, items of lists and dicts.

    Returns:
        Each attribute (``base``, ``parts[0]``), or key in a combined optimizer, with its optimizer.
        Parts that were given without a key all have the empty one.
    """
    if isinstance(owner, CombinedOptimizer):
        return list(owner.optimizers)
    found: dict[str, Optimizer] = {}
    for name, value in attributes(owner).items():
        kind = type(value)
        if not (name in _TORCHS or kind in _PLAIN or (kind in _CONTAINERS and not value)):
            found.update(_optimizers_in(value, name))
    return [(name, inner) for name, inner in found.items() if inner is not owner]


def attributes(owner: object) -> dict[str, Any]:
    """Return an object's attributes, those in slots among them."""
    found = dict(getattr(owner, "__dict__", {}))
    for name in copyreg._slotnames(type(owner)):  # type: ignore[attr-defined]  # as pickle does
        with suppress(AttributeError):
            found[name] = getattr(owner, name)
    return found


def state_at(optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    """Return a parameter's state, or an empty one: also where its id, its hash, is a key."""
    with suppress(RuntimeError):  # the id was compared with the parameter
        return optimizer.state.get(parameter, {})
    return {}


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Iterate over the parameters of an optimizer's groups."""
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def names_table(key: object, tables: Collection[str]) -> bool:
    """Return whether a key is a table's weight, under which its optimizer state is kept.

    A combined optimizer prefixes the key by the name of its part.
    """
    while isinstance(key, str) and key:
        if key.endswith(WEIGHT) and key.removesuffix(WEIGHT) in tables:
            return True
        key = key.partition(".")[2]
    return False


def is_torchs(kind: type) -> bool:
    """Return whether a class is torch's or TorchRec's own."""
    return kind.__module__.partition(".")[0] in ("torch", "torchrec")


def is_partitioned(value: object) -> TypeGuard[ZeroRedundancyOptimizer]:
    """Return whether a value is an optimizer of which each rank has a part of the state."""
    # Imported by those who have one: the module compiles scripts, which takes a fifth of a second.
    module = sys.modules.get("torch.distributed.optim")
    kind = getattr(module, "ZeroRedundancyOptimizer", None)  # None: some thread imports it just now
    return kind is not None and isinstance(value, kind)


def is_semisync(optimizer: object) -> bool:
    """Return whether an optimizer is TorchRec's of local and global steps, which has no own."""
    kind = getattr(sys.modules.get("torchrec.optim.semi_sync"), "SemisyncOptimizer", None)
    return kind is not None and isinstance(optimizer, kind)


def is_fused(optimizer: Optimizer) -> bool:
    """Return whether an optimizer updates only tables inside kernels."""
    if isinstance(optimizer, CombinedOptimizer):
        return all(is_fused(part) for _, part in optimizer.optimizers)
    return isinstance(optimizer, FusedOptimizer)


def fused_keys(nest: Iterable[Node], is_table: Callable[[torch.Tensor], bool]) -> Iterator[Key]:
    """Yield the keys of a model's tables in the outermost state dict.

    Each sharded collection and each DistributedModelParallel names its tables without the modules
    around it: in a larger model these names are no names of the model.

    Args:
        nest: from ``all_nodes``.
        is_table: tells whether a fused optimizer's parameter is a table of the model.
    """
    for node in nest:
        if node.fused and node.keyed is not None:
            yield from (node.key(name) for name, p in node.keyed.params.items() if is_table(p))


def own_parameters(node: Node) -> dict[str, torch.Tensor]:
    """Return the parameters that a wrapper made for itself, by name; no group has them.

    ``WarmupOptimizer`` keeps its counters as the state of such a parameter.
    """
    if isinstance(node.optimizer, CombinedOptimizer):
        return {}  # its parts have their own
    params = getattr(node.optimizer, "params", None)
    if not isinstance(params, Mapping):
        return {}
    stepped = set(map(id, parameters_of(node.optimizer)))
    return {name: p for name, p in params.items() if id(p) not in stepped}


def _walk(optimizer: Optimizer) -> Iterator[Node]:
    """Yield each optimizer in a nest once, outer ones first."""
    identities: Counter[str] = Counter()
    seen: set[int] = set()

    def walk(
        optimizer: Optimizer, prefix: str, keyed: KeyedOptimizer | None, hidden: str
    ) -> Iterator[Node]:
        if id(optimizer) in seen:
            return
        seen.add(id(optimizer))
        if isinstance(optimizer, KeyedOptimizer):
            keyed = optimizer
        kind = type(optimizer).__name__
        identity = ".".join(part for part in (hidden, prefix, kind) if part)
        identities[identity] += 1
        if identities[identity] > 1:
            identity = f"{identity}#{identities[identity]}"
        if is_fused(optimizer):
            yield Node(optimizer, identity, prefix, keyed, True, False, False, hidden)
            return
        combines = isinstance(optimizer, CombinedOptimizer)
        inner = inner_optimizers(optimizer)
        shown: set[str] = set()  # a combined optimizer's parts have prefixes of their own instead
        if not combines:
            shown = {name for name, each in inner if _shows(optimizer, name, each)}
        steps = not (combines or shown or is_semisync(optimizer))
        yield Node(optimizer, identity, prefix, keyed, False, steps, bool(inner), hidden)
        # Shown ones first: a shown optimizer may also be inside a hidden one.
        for name, each in sorted(inner, key=lambda item: item[0] not in shown):
            if combines:
                of_part = CombinedOptimizer.prepend_opt_key(name, prefix)
                yield from walk(each, of_part, None, hidden)
            elif name in shown:
                yield from walk(each, prefix, keyed, hidden)
            else:
                yield from walk(each, "", None, f"{identity}.{name}")

    yield from walk(optimizer, "", None, "")


def _shows(outer: Optimizer, name: str, inner: Optimizer) -> bool:
    """Return whether an optimizer's state dict shows the state of one that it holds."""
    if is_semisync(outer):
        return False  # under names of its own, and mixed with the other one's
    if name == "_optimizer" and isinstance(outer, KeyedOptimizer):  # TorchRec's wrappers
        return True
    return outer.state is inner.state or _hands_on(outer, inner)


def _hands_on(outer: Optimizer, inner: Optimizer) -> bool:
    """Return whether a user's wrapper has the parameters and state of the optimizer inside.

    ``CombinedOptimizer`` makes a new dict at each look at its state, so that a wrapper's is never
    the same object: either the wrapper asks for it each time, too, or has kept an earlier one.
    """
    if not (isinstance(outer, KeyedOptimizer) and isinstance(inner, KeyedOptimizer)):
        return False
    around, within = outer.params, inner.params
    if len(around) != len(within) or _identities(around) != _identities(within):
        return False
    shown, inside = _identities(outer.state), _identities(inner.state)
    if "state" in vars(outer):  # an empty dict of its own would fit any optimizer inside
        return bool(shown) and shown.items() <= inside.items()
    return shown == inside


def _identities(items: Mapping[Any, Any]) -> dict[int | str, int]:
    """Return a mapping's keys and values by identity, keys that are names as they are."""
    return {key if isinstance(key, str) else id(key): id(item) for key, item in items.items()}


def is_optimizer(value: Any) -> TypeGuard[Optimizer]:
    """Return whether a value is an optimizer, or has the interface of one, as some libraries'
    wrappers that are not of torch's class.
    """
    return isinstance(value, Optimizer) or (
        callable(getattr(type(value), "step", None))
        and isinstance(getattr(value, "param_groups", None), list)
        and isinstance(getattr(value, "state", None), Mapping)
    )


def _optimizers_in(value: object, name: str, depth: int = 0) -> Iterator[tuple[str, Optimizer]]:
    if type(value) in _PLAIN:  # most attributes; a look at an abstract class takes longer
        return
    if is_optimizer(value):
        yield name, value
    elif depth < _DEEPEST and isinstance(value, Mapping):
        for key, item in value.items():
            yield from _optimizers_in(item, f"{name}[{key!r}]", depth + 1)
    elif depth < _DEEPEST and isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _optimizers_in(item, f"{name}[{number}]", depth + 1)
