"""Dense optimizers in a checkpoint: by parameter names, and with just the state they had made.

Many optimizers make a parameter's state at its first step (Adam's moments), but TorchRec's wrappers
load only what they have state for, and rows of data-parallel tables need a place to go. And plain
torch optimizers number their parameters, which shifts when a table becomes data parallel. So what
is stored is by name, and before a restore the live optimizers get the state that the checkpoint
has, and lose what they had not made by then. No step is taken on the parameters for that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.optim import Optimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.first_state import first_state, to_device
from torchrec_checknrun.optimizers import row_states, torch_optimizers
from torchrec_checknrun.state import Tree, decode_state, empty_state, tree_items, tree_values

_LATE = "late"
"""Beside ``state`` in what is stored: whose state was still to be made, and by which optimizer."""
_GROUPS = "param_groups"

Key = str | int


class DenseStates:
    """The optimizers among a run's state objects.

    Args:
        model: whose parameter names plain torch optimizers' state is stored under.
        states: all state objects by name; those that are no optimizers are left alone.
    """

    def __init__(self, model: nn.Module | None, states: Mapping[str, object]) -> None:
        self._model = model
        self._states = {n: s for n, s in states.items() if _is_known(s)}
        self._fitted: dict[str, DenseOptimizer] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._states

    def stored(self) -> dict[str, Any]:
        """What a checkpoint holds of each, with the live tensors."""
        names = self._names()
        return {name: DenseOptimizer(s, names).stored() for name, s in self._states.items()}

    def fit(
        self, trees: Mapping[str, Tree], tables: Mapping[str, Collection[str] | None], strict: bool
    ) -> dict[str, Any]:
        """Makes the live optimizers' state as much as a checkpoint's, for it to be restored into.

        Args:
            trees: what was stored, by name.
            tables: by each of the model's tables the names of the optimizer state that its rows
                were stored with; None for a table that isn't restored.
            strict: whether the optimizers must be those that were saved.

        Returns:
            The state dicts to restore into, in the stored form, with the live tensors.

        Raises:
            IncompatibleCheckpoint: parameters of one group had different options; names it.
        """
        self.undo()
        names = self._names()
        for name in self._states.keys() & trees.keys():
            self._fitted[name] = DenseOptimizer(self._states[name], names)
        return {n: o.fit(trees[n], n, tables, strict) for n, o in self._fitted.items()}

    def load(self, name: str, content: dict[str, Any]) -> None:
        """Gives an optimizer what ``fit`` returned, when it is restored."""
        if name in self._fitted:
            self._fitted[name].load(content)
        else:
            self._states[name].load_state_dict(content)

    @contextmanager
    def fitted(self, undo: bool = False) -> Iterator[None]:
        """Takes back what ``fit`` made of the live optimizers if the block fails, or always."""
        try:
            yield
        except BaseException:
            self.undo()
            raise
        if undo:
            self.undo()

    def undo(self) -> None:
        """Takes back what ``fit`` made of the live optimizers."""
        for optimizer in self._fitted.values():
            optimizer.undo()
        self._fitted = {}

    def _names(self) -> dict[torch.Tensor, str]:
        if self._model is None:
            return {}
        return {parameter: name for name, parameter in self._model.named_parameters()}


@dataclass
class _Parameter:
    """One parameter of an optimizer.

    Attributes:
        key: what its state is stored under.
        name: in the model, or the key.
        optimizer: torch's, which keeps its state.
        group: its parameter group; None for what a wrapper keeps for itself (warm-up).
    """

    key: Key
    name: str
    parameter: torch.Tensor
    optimizer: Optimizer
    group: dict[str, Any] | None

    @property
    def state(self) -> dict[str, Any] | None:
        """What has been made for it; None if nothing has."""
        return self.optimizer.state.get(self.parameter) or None

    def first_state(self) -> dict[str, Any] | None:
        """What the first step would make for it; None if that can't be told."""
        if self.group is None:
            return None
        return first_state(self.optimizer, self.group, self.parameter)


class DenseOptimizer:
    """One optimizer, torch's or TorchRec's, in the stored form: as TorchRec's state dicts are.

    That is ``{"state": {key: …}}`` with ``param_groups`` if its own state dict has them, and
    ``late`` if some state was still to be made. Keys are parameter names: those that a TorchRec
    optimizer goes by, or the model's; only if it doesn't know all parameters their numbers.
    """

    def __init__(self, state: Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        self._state = state
        self._names = names
        self._numbered = False
        self._changed: set[Key] = set()
        self._kept: set[Key] = set()
        self._before: list[tuple[MutableMapping[Any, Any], torch.Tensor, Any]] = []

    def stored(self) -> dict[str, Any]:
        """The state dict in the stored form."""
        content = self._by_key(self._state.state_dict())
        late = {p.key: type(p.optimizer).__name__ for p in self._parameters() if p.state is None}
        return {**content, _LATE: late} if late else content

    def fit(
        self, tree: Tree, path: str, tables: Mapping[str, Collection[str] | None], strict: bool
    ) -> dict[str, Any]:
        """See ``DenseStates.fit``; of this one optimizer."""
        stored = tree_items(tree)
        groups = [tree_items(group) for group in tree_values(stored.get(_GROUPS))]
        keys = [decode_state(k, b"") for g in groups for k in tree_values(g.get("params"))]
        self._numbered = bool(keys) and all(type(key) is int for key in keys)
        saved = tree_items(stored.get("state"))
        late = {k: decode_state(v, b"") for k, v in tree_items(stored.get(_LATE)).items()}
        for parameter in self._parameters():
            table = parameter.name.removesuffix(".weight")
            of_key = saved.get(parameter.key)
            wanted = tables[table] if table in tables else tree_items(of_key).keys()
            if wanted is None:
                continue
            if wanted and not strict:
                self._compare(parameter, set(map(str, wanted)), by_rows=table in tables)
            if parameter.key not in self._kept:
                was_late = late.get(parameter.key) == type(parameter.optimizer).__name__
                self._fit_parameter(parameter, of_key, bool(wanted), was_late, strict)
        self._check_groups(groups, path, strict)
        content = self._by_key(self._state.state_dict())
        live = {k: v for k, v in content["state"].items() if k not in self._kept}
        fitted = {**content, "state": live}
        # These are no tensors to restore in place: they come back as they were stored.
        fitted.pop(_GROUPS, None)
        return fitted | {name: None for name in (_GROUPS, _LATE) if name in stored}

    def load(self, content: dict[str, Any]) -> None:
        """Gives the optimizer its restored content."""
        restored = dict(content)
        restored.pop(_LATE, None)
        self._load_groups(restored.pop(_GROUPS, None) or [])
        own = self._by_key(self._state.state_dict())
        state = {k: restored["state"].get(k, value) for k, value in own["state"].items()}
        own |= {**restored, "state": state}
        self._state.load_state_dict(self._by_key(own, back=True))

    def undo(self) -> None:
        """Puts the live state back as it was before ``fit``."""
        for mapping, parameter, state in reversed(self._before):
            if state is None:
                mapping.pop(parameter, None)
            else:
                mapping[parameter] = state
        self._before = []
        self._changed, self._kept = set(), set()

    def _fit_parameter(
        self, parameter: _Parameter, saved: Tree | None, wanted: bool, was_late: bool, strict: bool
    ) -> None:
        """Makes a parameter's state, or takes it away.

        State that the checkpoint lacks though it was not just late is made, too: it doesn't fit,
        and whoever compares the two says so.
        """
        if parameter.state is None and (wanted or (strict and not was_late)):
            made = parameter.first_state()
            if made is None and wanted and saved is not None:
                made = to_device(parameter.parameter.device, empty_state(saved))
            if made:
                self._set(parameter, made)
        elif (
            parameter.state is not None
            and (was_late and not wanted)
            and (parameter.group is None or parameter.first_state())
        ):
            self._set(parameter, None)

    def _compare(self, parameter: _Parameter, saved: set[str], by_rows: bool) -> None:
        """Notes whether a parameter's saved state is that of another kind of optimizer: then its
        group's options are left alone, and its state if the two have none in common.
        """
        own = parameter.state if parameter.state is not None else parameter.first_state()
        if own is None:
            return
        names = set(row_states(own, parameter.parameter) if by_rows else own)
        if names != saved:
            self._changed.add(parameter.key)
            if not names & saved - {"step"}:
                self._kept.add(parameter.key)

    def _set(self, parameter: _Parameter, state: dict[str, Any] | None) -> None:
        mapping = parameter.optimizer.state
        self._before.append((mapping, parameter.parameter, parameter.state))
        if state is None:
            del mapping[parameter.parameter]
        else:
            mapping[parameter.parameter] = state

    def _check_groups(self, groups: list[dict[Key, Tree]], path: str, strict: bool) -> None:
        """Refuses groups whose parameters had different options, or leaves theirs alone."""
        for _, keys in self._groups():
            matching = [g for g in groups if keys & _keys_of(g)]
            options = [{k: v for k, v in g.items() if k not in _OF_GROUP} for g in matching]
            if not any(other != options[0] for other in options[1:]):
                continue
            if strict:
                raise IncompatibleCheckpoint(
                    f"{path}.{_GROUPS}: {sorted(map(str, keys))[:8]} are in one parameter group, "
                    f"but were in {len(matching)} with different options: group the parameters as "
                    "they were when the checkpoint was saved, or keep the options with strict=False"
                )
            self._changed |= keys

    def _load_groups(self, saved: list[dict[str, Any]]) -> None:
        """Puts saved options into the live groups that hold the same parameters."""
        for group, keys in self._groups():
            matching = [g for g in saved if keys & set(g["params"])]
            if not matching or keys & self._changed:
                continue
            options = {k: v for k, v in matching[0].items() if k not in _OF_GROUP}
            if isinstance(self._state, KeyedOptimizer):  # which would refuse any other option
                options = {k: v for k, v in options.items() if k in group}
            for name, value in options.items():
                if isinstance(group.get(name), torch.Tensor) and isinstance(value, torch.Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value

    def _groups(self) -> Iterator[tuple[dict[str, Any], set[Key]]]:
        """The torch optimizers' parameter groups, with the keys of what they hold."""
        found: dict[int, tuple[dict[str, Any], set[Key]]] = {}
        for parameter in self._parameters():
            if parameter.group is not None:
                group = parameter.group
                found.setdefault(id(group), (group, set()))[1].add(parameter.key)
        yield from found.values()

    def _parameters(self) -> Iterator[_Parameter]:
        if isinstance(self._state, KeyedOptimizer):
            yield from self._of_keyed(self._state, "")
        else:
            keys = self._keys()
            for group in self._state.param_groups:
                for parameter in group["params"]:
                    key = keys[parameter]
                    name = self._names.get(parameter, str(key))
                    yield _Parameter(key, name, parameter, self._state, group)

    def _of_keyed(self, state: KeyedOptimizer, prefix: str) -> Iterator[_Parameter]:
        if isinstance(state, CombinedOptimizer):
            for key, part in state.optimizers:
                yield from self._of_keyed(part, CombinedOptimizer.prepend_opt_key(key, prefix))
            return
        if isinstance(inner := getattr(state, "_optimizer", None), KeyedOptimizer):
            yield from self._of_keyed(inner, prefix)  # warm-up, clipping
            return
        for optimizer in torch_optimizers([state]):
            groups = {p: group for group in optimizer.param_groups for p in group["params"]}
            for name, parameter in state.params.items():
                key = CombinedOptimizer.prepend_opt_key(name, prefix)
                name = self._names.get(parameter, name)
                yield _Parameter(key, name, parameter, optimizer, groups.get(parameter))

    def _keys(self) -> dict[torch.Tensor, Key]:
        """A plain optimizer's parameters in torch's order, and what they are stored under."""
        parameters = dict.fromkeys(p for g in self._state.param_groups for p in g["params"])
        if self._numbered or not all(p in self._names for p in parameters):
            return {parameter: number for number, parameter in enumerate(parameters)}
        return {parameter: self._names[parameter] for parameter in parameters}

    def _by_key(self, content: Mapping[str, Any], back: bool = False) -> dict[str, Any]:
        """A plain optimizer's state dict by its keys instead of torch's numbers, or back."""
        if isinstance(self._state, KeyedOptimizer):
            return dict(content)
        keys: dict[Key, Key] = dict(enumerate(self._keys().values()))
        if back:
            keys = {key: number for number, key in keys.items()}
        groups = [
            {**group, "params": [keys.get(k, k) for k in group["params"]]}
            for group in content[_GROUPS]
        ]
        state = {keys.get(k, k): value for k, value in content["state"].items()}
        return {**content, "state": state, _GROUPS: groups}


_OF_GROUP = ("params", "param_names")
"""What says of a group's dict which parameters it has; the rest are options."""


def _is_known(state: object) -> TypeGuard[Optimizer]:
    """Whether it is an optimizer with the state dict that torch's or TorchRec's have."""
    if isinstance(state, KeyedOptimizer):
        return True
    return isinstance(state, Optimizer) and type(state).state_dict is Optimizer.state_dict


def _keys_of(group: Mapping[Key, Tree]) -> set[Key]:
    return {decode_state(key, b"") for key in tree_values(group.get("params"))}
