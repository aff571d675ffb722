"""Notice learning rate schedulers, gradient scalers, averaged models and random number generators
that no state object is or holds, and content that only this process finds again: they begin anew at
a restore.

To look for all that follows an optimizer takes as long as a garbage collection. So it is done when
a Checkpointer is made and at its first step or save, and later only where rates have moved that no
scheduler among the state objects has set: a program may make one after the Checkpointer, or put one
in another's place.
"""

from __future__ import annotations

import gc
import logging
import random
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from torchrec_checknrun.dense.optimizers import held_objects, unsaved_schedules
from torchrec_checknrun.dense.tree import all_nodes
from torchrec_checknrun.ranks import listed

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

_MOST_ITEMS = 1000
"""The longest list that is searched for generators' states: longer ones are data."""
_SHOWN_BY: dict[type, tuple[str, str]] = {
    GradScaler: ("a gradient scaler", "growth_factor"),
    AveragedModel: ("an average", "n_averaged"),
}
"""The name of a kind's objects, and a key that only their state dicts have."""


class Schedules:
    """The schedulers of torch's that follow an optimizer among state objects.

    Args:
        states: state objects by name.
    """

    def __init__(self, states: Mapping[str, object]) -> None:
        self._states = states
        self._told: set[tuple[str, str]] = set()
        self._rates: dict[int, list[float]] | None = None
        """As of the last save; None before the first."""
        self.tell()

    def tell(self) -> None:
        """Warn, once for each, of schedulers that are not among the state objects."""
        for schedule, optimizer in sorted(unsaved_schedules(self._states.values()) - self._told):
            self._told.add((schedule, optimizer))
            logger.warning(
                "a learning rate scheduler, a %s, follows the %s, and no state object is or holds "
                "it: unless another one saves it, a restored run begins the schedule anew, and "
                'sets other rates. Give it: state={"schedule": scheduler}',
                schedule,
                optimizer,
            )

    def look(self) -> None:
        """Warn, at a save, of schedulers that have moved rates since the last look."""
        before, self._rates = self._rates, self._present()
        if before is None:
            return
        moved = [rates for key, rates in self._rates.items() if rates != before.get(key)]
        if not {rate for rates in moved for rate in rates} <= self._set():
            self.tell()

    def _present(self) -> dict[int, list[float]]:
        """Return the rates of the optimizers' groups, by the optimizers' ``id``."""
        return {
            id(node.optimizer): list(_numbers(g.get("lr") for g in node.optimizer.param_groups))
            for state in self._states.values()
            for node in (all_nodes(state) if isinstance(state, Optimizer) else ())
        }

    def _set(self) -> set[float]:
        """Return the rates that schedulers among the state objects have set."""
        held = held_objects(self._states.values(), LRScheduler)
        return {rate for each in held for rate in _numbers(getattr(each, "_last_lr", ()))}


class Beside:
    """The gradient scalers and averaged models of torch's in this process.

    Args:
        model: the model, in which averages may be.
        states: state objects by name.
    """

    _alive: ClassVar[weakref.WeakSet[Beside]] = weakref.WeakSet()

    def __init__(self, model: nn.Module, states: Mapping[str, object]) -> None:
        self._model, self._states = model, states
        self._found: list[weakref.ref[object]] = []
        self._told: set[type] = set()
        self._alive.add(self)  # others may hold them

    def find(self) -> None:
        """Look for scalers and averages that no state object holds; call it once."""
        kinds = [kind for base in (GradScaler, AveragedModel) for kind in _kinds(base)]
        held = {id(each) for beside in self._alive for each in beside._held()}
        self._found = [
            weakref.ref(value)
            for value in gc.get_referrers(*kinds)
            if type(value) in kinds and id(value) not in held
        ]
        if self._found:
            gc.collect()  # those that the program has dropped

    def look(self, saved: Mapping[str, object]) -> None:
        """Warn, once for each kind, of those in use, unless a state shows what theirs would.

        Args:
            saved: the states that are saved, by name.
        """
        used = {_kind_in_use(value()) for value in self._found}
        for kind in [kind for kind in _SHOWN_BY if kind in used - self._told]:
            self._told.add(kind)
            name, key = _SHOWN_BY[kind]
            if not _has_key(saved, key):
                logger.warning(
                    "the program has %s (%s), and no state object is, holds or shows it: where "
                    "this training uses it, a restored run begins with a new one. Give it: "
                    'state={"%s": …}',
                    name,
                    kind.__name__,
                    name.rpartition(" ")[2],
                )

    def _held(self) -> Iterator[object]:
        states = self._states.values()
        yield from held_objects(states, GradScaler, AveragedModel)
        modules = [self._model, *held_objects(states, nn.Module)]
        for module in modules:
            yield from (each for each in module.modules() if isinstance(each, AveragedModel))


class Draws:
    """The global random number generators, as of the end of the first step."""

    def __init__(self) -> None:
        self._first: dict[str, _Generator] = {}

    def begin(self) -> None:
        """Note the generators' states, once training has begun."""
        self._first = _generators()

    def look(self, saved: Mapping[str, object]) -> None:
        """Warn, once for each, of generators that have moved and that no state shows.

        Args:
            saved: the states that are saved, by name.
        """
        present = _generators()
        moved = [name for name, first in self._first.items() if not present[name].is_at(first)]
        for name in moved:
            del self._first[name]
        shown = list(_vectors(saved, {len(present[name].words) for name in moved}))
        if lost := [name for name in moved if not present[name].is_among(shown)]:
            logger.warning(
                "the program draws from global random number generators (%s) that no state object "
                "holds: a run that is restored from a checkpoint draws other numbers, unless it "
                'seeds them by the step. Where that matters, give them: state={"rng": RngState()}',
                listed(lost),
            )


class _Generator(NamedTuple):
    """The state of a generator: its words, and its place in them where that is apart."""

    words: np.ndarray
    place: int = 0

    def is_at(self, other: _Generator) -> bool:
        return self.place == other.place and np.array_equal(self.words, other.words)

    def is_among(self, vectors: Iterable[np.ndarray]) -> bool:
        return any(np.array_equal(self.words, each) for each in vectors)


def _generators() -> dict[str, _Generator]:
    numpy = np.random.get_state(legacy=False)["state"]
    return {
        "PyTorch's": _Generator(torch.get_rng_state().numpy()),
        "NumPy's": _Generator(numpy["key"], numpy["pos"]),
        "Python's": _Generator(np.array(random.getstate()[1], dtype=np.int64)),
    }


def _vectors(value: object, lengths: Collection[int]) -> Iterator[np.ndarray]:
    """Yield what a state has as vectors of some lengths; larger lists are data."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (torch.Tensor, np.ndarray, list, tuple)):
        of_one_dimension = isinstance(value, (list, tuple)) or value.ndim == 1
        if of_one_dimension and len(value) in lengths:
            with suppress(TypeError, ValueError, RuntimeError):  # of anything
                yield np.asarray(value)
    if isinstance(value, (list, tuple)) and len(value) <= _MOST_ITEMS:
        for item in value:
            yield from _vectors(item, lengths)


def _kinds(base: type) -> Iterator[type]:
    yield base
    below: list[type] = base.__subclasses__()
    for kind in below:
        yield from _kinds(kind)


def _kind_in_use(value: object) -> type | None:
    if isinstance(value, GradScaler):
        return GradScaler if value.is_enabled() and value._scale is not None else None
    return AveragedModel if isinstance(value, AveragedModel) and value.n_averaged > 0 else None


def _has_key(value: object, key: str) -> bool:
    """Tell whether a state has a value under a key, or under a name that ends in it."""
    if isinstance(value, Mapping):
        if any(str(name).rpartition(".")[2] == key for name in value):
            return True
        value = list(value.values())
    return type(value) is list and any(_has_key(item, key) for item in value)


def _numbers(rates: Iterable[object]) -> Iterator[float]:
    """Yield rates as numbers, but for those of optimizers that choose one themselves (None)."""
    for rate in rates:
        if isinstance(rate, (int, float)) or (isinstance(rate, torch.Tensor) and rate.numel() == 1):
            yield float(rate)


class KeyedByIds:
    """State objects that keep something by the ids of parameters, which another process has not.

    Args:
        model: the model; its parameters count.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._told: set[str] = set()

    def look(self, saved: Mapping[str, object]) -> None:
        """Warn, once for each, of states whose dicts have such keys, at a save."""
        ids = {id(parameter) for parameter in self._model.parameters()}
        new = [name for name, state in saved.items() if not ids.isdisjoint(_numbered(state))]
        if new := [name for name in new if name not in self._told]:
            self._told.update(new)
            logger.warning(
                "%s keeps something by id(parameter): a restored run, whose parameters have other "
                "ids, does not find it again. Let state_dict() give it by the parameters' names",
                listed([f"state {name!r}" for name in new]),
            )


def _numbered(state: object) -> Iterator[int]:
    """Yield the whole numbers that are keys of a state's dicts."""
    if isinstance(state, Mapping):
        yield from (key for key in state if type(key) is int)
        state = state.values()
    elif not isinstance(state, (list, tuple)) or len(state) > _MOST_ITEMS:
        return
    for item in state:
        yield from _numbered(item)
