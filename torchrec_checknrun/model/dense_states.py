"""Save and restore dense optimizers by parameter names, with just the state that they had made.

Many optimizers make a parameter's state at its first step (Adam's moments), but TorchRec's wrappers
load only what they already have state for, and rows of data-parallel tables need a place to be
restored to. Plain torch optimizers number their parameters, and the numbers shift when a table
becomes data parallel. So state is stored by name. Before a restore the live optimizers get the
state that the checkpoint has, and lose the state that had not been made when it was saved; no step
is taken on the parameters for that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from torchrec_checknrun.dense.first_state import LateStates, Layouts
from torchrec_checknrun.dense.nested import NestedOptimizer
from torchrec_checknrun.dense.optimizer import DenseOptimizer
from torchrec_checknrun.dense.optimizers import handed_on, is_known, stepped_memory
from torchrec_checknrun.dense.param_groups import GROUPS
from torchrec_checknrun.dense.references import tensors_of
from torchrec_checknrun.dense.steady import SteadyOptimizer
from torchrec_checknrun.errors import CheckNRunError, SaveFailed, UnsupportedState
from torchrec_checknrun.format.row_chunk import RowForms
from torchrec_checknrun.format.state_tree import leaves
from torchrec_checknrun.model.blocks import Block
from torchrec_checknrun.model.dense_model import DensePart
from torchrec_checknrun.model.state_dict import StoredTables, split_states
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.values.state import Tree, encode_state
from torchrec_checknrun.values.tensor_bytes import shows_memory


class DenseStates:
    """The optimizers among a run's state objects.

    Args:
        model: names the parameters of plain torch optimizers.
        states: all state objects by name; of those that are no optimizers, the ones that hold
            TorchRec's optimizers get ready to load.
        tracked: knows the tables in fused kernels: a dense optimizer over all of a model's
            parameters includes these tables, but never steps them.
        names: returns the model's parameters' names, where they are known.
    """

    def __init__(
        self,
        model: nn.Module | None,
        states: Mapping[str, object],
        tracked: TrackedModel,
        names: Callable[[], dict[torch.Tensor, str]] | None = None,
    ) -> None:
        self._known_names = names
        self._model = model
        self._tracked = tracked
        found = {name: handed_on(state) for name, state in states.items()}
        self._states = {n: s for n, s in found.items() if is_known(s)}
        self._objects = list(states.values())
        self._holders: dict[str, Any] = {n: s for n, s in found.items() if not is_known(s)}
        self._fitted: dict[str, NestedOptimizer] = {}
        self._late: list[LateStates] = []
        self._loading: list[Layouts] = []

    def __contains__(self, name: object) -> bool:
        return name in self._states

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def stored(self, names: Collection[str] | None = None) -> dict[str, Any]:
        """Return the stored form of each optimizer's state by name, with the live tensors.

        Args:
            names: of the optimizers wanted; None: all.

        Raises:
            SaveFailed: names the optimizer whose state can't be read.
        """
        stored = {}
        elsewhere = _Later(self._elsewhere)
        wanted = self._states if names is None else names
        for name, optimizer in self._optimizers(wanted, elsewhere).items():
            try:
                stored[name] = optimizer.stored()
            except CheckNRunError:
                raise
            except Exception as error:
                raise SaveFailed(
                    f"state {name!r} can't be saved: a {type(self._states[name]).__name__}'s "
                    f"state raised {type(error).__name__}: {error}. Rows are kept for the next "
                    "checkpoint; let its state_dict() return the optimizer's state, and save again"
                ) from error
        return stored

    def fit(
        self,
        trees: Mapping[str, Tree],
        tables: Mapping[str, RowForms | None],
        skipped: list[str] | None,
        resized: bool = False,
    ) -> dict[str, Any]:
        """Make the live optimizers' state match a checkpoint's, to be restored in place.

        Args:
            trees: the stored trees, by name.
            tables: by each of the model's tables, the optimizer state stored with its rows; None
                for a table that isn't restored.
            skipped: receives a line for each part that is left out, or stays as it is; None: the
                optimizers must be the saved ones.
            resized: the checkpoint was saved by another number of ranks.

        Returns:
            The state dicts to restore into, in the stored form, with the live tensors; and those of
            other objects that have more state now.

        Raises:
            IncompatibleCheckpoint: parameters of one group had different options, or a wrapper
                with counters is missing; names them.
        """
        self.undo()
        self._fitted = self._optimizers(
            self._states.keys() & trees.keys(), list(self._elsewhere()), resized
        )
        fitted = {n: o.fit(trees[n], n, tables, skipped) for n, o in self._fitted.items()}
        for name in self._holders.keys() & trees.keys():
            self._late.append(LateStates(self._holders[name], self._names(), self._sharded()))
            if self._late[-1].make(trees[name]):
                fitted[name] = self._holders[name].state_dict()
            self._loading.append(Layouts(self._holders[name]))
        return fitted

    def load(self, name: str, content: dict[str, Any]) -> None:
        """Load the state dict that ``fit`` returned, once restored, into its optimizer."""
        if name in self._fitted:
            self._fitted[name].load(content)
        else:
            self._states[name].load_state_dict(content)

    def finish(self) -> None:
        """Write wrappers' values, rates and other group options into the live optimizers, and lay
        out the state that others have loaded.

        Call it after all state objects were loaded: some set rates when loaded.
        """
        for name, optimizer in self._fitted.items():
            optimizer.finish(name)
        for layouts in self._loading:
            layouts.restore()

    @contextmanager
    def fitted(self, undo: bool = False) -> Iterator[None]:
        """Undo ``fit`` after the block: if the block fails, or always if ``undo`` is set."""
        try:
            yield
        except BaseException:
            self.undo()
            raise
        if undo:
            self.undo()

    def undo(self) -> None:
        """Put the live optimizers' state back as it was before ``fit``."""
        for late in self._late:
            late.undo()
        for optimizer in self._fitted.values():
            optimizer.undo()
        self._fitted, self._late, self._loading = {}, [], []

    def _optimizers(
        self, which: Collection[str], elsewhere: Iterable[object], resized: bool = False
    ) -> dict[str, NestedOptimizer]:
        if not which:
            return {}
        dense = partial(
            DenseOptimizer,
            names=self._names(),
            sharded=self._sharded(),
            is_table=self._tracked.dense.stored().is_table,
            elsewhere=elsewhere,
            resized=resized,
        )
        return {name: NestedOptimizer(self._states[name], is_known, dense) for name in which}

    def _elsewhere(self) -> Iterator[object]:
        """Yield all objects that are stored with the model or as other state objects."""
        yield from self._objects
        for module in (self._model, *self._objects):
            if isinstance(module, nn.Module):
                yield from module.modules()
                yield from tensors_of(module)

    def _names(self) -> dict[torch.Tensor, str]:
        if self._known_names is not None:
            return self._known_names()
        if self._model is None:
            return {}
        return {parameter: name for name, parameter in self._model.named_parameters()}

    def _sharded(self) -> frozenset[str]:
        replicas = {s.table for s in self._tracked.shards if s.local.replicated}
        return frozenset(self._tracked.tables.keys() - replicas)


class _Later:
    """An iterable whose items are found at the first look, and kept."""

    def __init__(self, find: Callable[[], Iterable[object]]) -> None:
        self._find = find

    @cached_property
    def _found(self) -> list[object]:
        return list(self._find())

    def __iter__(self) -> Iterator[object]:
        return iter(self._found)


@dataclass
class OptimizerStates:
    """The part of a snapshot that dense optimizers make.

    Attributes:
        states: the stored forms by name, without table rows, with the live tensors.
        tensors: the plain tensors among them.
        blocks: local parts, to be written by this rank, of sharded tensors.
        encoded: by name what ``encode_state`` has made of a state; its pieces are live memory.
        unstepped: addresses of the model's parameters that none of the optimizers steps.
    """

    states: dict[str, Any]
    tensors: list[torch.Tensor]
    blocks: list[Block]
    encoded: dict[str, tuple[Tree, list[bytes | memoryview]]]
    unstepped: frozenset[int]


@dataclass
class _Kept:
    """One optimizer's stored form, for the next snapshot as well."""

    state: dict[str, Any]
    tensors: list[torch.Tensor]
    encoded: tuple[Tree, list[bytes | memoryview]]

    def renew(self, groups: list[dict[Any, Any]]) -> None:
        """Take other groups; what was handed out before stays as it is."""
        node, _ = encode_state(groups, GROUPS)  # constants have no payload
        tree, pieces = self.encoded
        items = [[key, node if key == GROUPS else value] for key, value in tree["d"]]
        self.state, self.encoded = {**self.state, GROUPS: groups}, ({**tree, "d": items}, pieces)


class SnapshotOptimizers:
    """Finds the optimizers' states at each snapshot; those in which no object was replaced since
    the last one are not asked again, see ``dense.steady``.

    Args:
        states: all state objects by name.
    """

    def __init__(self, model: nn.Module, states: Mapping[str, object]) -> None:
        self._model, self._states = model, states
        self._steady = {name: SteadyOptimizer(state) for name, state in states.items()}
        self._kept: dict[str, _Kept] = {}
        self._named: tuple[DensePart, StoredTables] | None = None
        self._unstepped: tuple[DensePart, frozenset[int]] | None = None

    def find(self, tracked: TrackedModel, part: DensePart) -> OptimizerStates:
        """Return the states as they are now.

        Args:
            part: the model's, which knows the parameters' names.

        Raises:
            SaveFailed: names the optimizer whose state can't be read.
            UnsupportedState: see ``split_states``.
        """
        tables = tracked.dense.stored()
        if self._named is None or self._named[0] is not part or self._named[1] is not tables:
            self._named = part, tables
            self._kept.clear()
        optimizers = DenseStates(self._model, self._states, tracked, lambda: part.names)
        for name in [name for name in self._kept if not self._steady[name].holds()]:
            del self._kept[name]
        asked = [name for name in optimizers if name not in self._kept]
        begun = [name for name in asked if self._steady[name].begin()]
        contents = optimizers.stored(asked)
        states, blocks, tensors = split_states(contents, tables, contents)
        found = OptimizerStates({}, tensors, blocks, {}, self._left_alone(part))
        for name in optimizers:
            if (kept := self._kept.get(name)) is None:
                found.states[name] = states[name]
                continue
            if (groups := self._steady[name].renewed_groups()) is not None:
                kept.renew(groups)
            found.states[name], found.encoded[name] = kept.state, kept.encoded
            found.tensors += kept.tensors
        for name in begun:
            self._keep(name, states[name])
        return found

    def _left_alone(self, part: DensePart) -> frozenset[int]:
        """Return the addresses of the model's parameters that no optimizer steps, of those that the
        states are or hold; as they were when the part was found.
        """
        if self._unstepped is None or self._unstepped[0] is not part:
            left = {tensor.data_ptr() for tensor in part.parameters} - stepped_memory(
                self._states.values()
            )
            self._unstepped = part, frozenset(left)
        return self._unstepped[1]

    def _keep(self, name: str, state: dict[str, Any]) -> None:
        """Keep a state for the next snapshot, if it is nothing but live memory and constants."""
        tensors = [tensor for _, tensor in leaves(state, (torch.Tensor,))]
        if all(map(shows_memory, tensors)) and self._steady[name].note(state[GROUPS], tensors):
            with suppress(UnsupportedState):  # told of where the snapshot is encoded
                self._kept[name] = _Kept(state, tensors, encode_state(state, name))
