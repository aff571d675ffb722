"""One dense optimizer in a checkpoint, torch's or TorchRec's, under whatever wraps it.

Stored by names: the state of its parameters, all options of its parameter groups, and what wrappers
hold themselves. What TorchRec's ``load_state_dict`` sets back is written after it, rates last.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.first_state import first_state, to_device
from torchrec_checknrun.optimizer_tree import Node, nodes, own_parameters
from torchrec_checknrun.optimizers import row_states
from torchrec_checknrun.param_groups import (
    GROUPS,
    OWNERS,
    Group,
    Key,
    SavedGroups,
    live_groups,
    stored_groups,
)
from torchrec_checknrun.same_objects import same_objects
from torchrec_checknrun.state import Tree, decode_state, empty_state, tree_items
from torchrec_checknrun.wrapper_state import WRAPPERS, give_back, held, memory

logger = logging.getLogger(__name__)

_LATE = "late"
"""Beside ``state`` in what is stored: whose state was still to be made, and by which optimizer."""
_BESIDE = (GROUPS, OWNERS, _LATE, WRAPPERS)
"""What stands beside ``state`` and is no tensor to restore in place."""


@dataclass
class _Parameter:
    """One parameter of an optimizer.

    Attributes:
        key: what its state is stored under.
        name: in the model, or the key.
        optimizer: torch's, which keeps its state.
        group: its parameter group.
        sharded: a sharded table, or this rank's part of it. Its optimizer is in its kernel: it gets
            no gradient here, and each rank has other such parameters. It isn't stored.
    """

    key: Key
    name: str
    parameter: torch.Tensor
    optimizer: Optimizer
    group: dict[str, Any]
    sharded: bool

    @property
    def state(self) -> dict[str, Any] | None:
        """What has been made for it; None if nothing has."""
        return self.optimizer.state.get(self.parameter) or None

    def first_state(self) -> dict[str, Any] | None:
        """What the first step would make for it; None if that can't be told."""
        return first_state(self.optimizer, self.group, self.parameter)


class DenseOptimizer:
    """One optimizer in the stored form: as TorchRec's state dicts are, and more beside.

    That is ``{"state": {key: …}}`` with ``param_groups`` and ``param_groups_of`` (see
    ``stored_groups``), ``wrappers`` (what each wrapper holds, by its identity) and ``late`` if some
    state was still to be made. Keys are parameter names: those that a TorchRec optimizer goes by,
    or the model's; only if it doesn't know all parameters their numbers.

    Args:
        names: the model's parameters.
        sharded: names of the model's tables that are in fused kernels.
    """

    def __init__(
        self, state: Optimizer, names: Mapping[torch.Tensor, str], sharded: Collection[str] = ()
    ) -> None:
        self._state = state
        self._names = names
        self._sharded = sharded
        self._numbered = False
        self._changed: set[Key] = set()
        self._kept: set[Key] = set()
        self._before: list[tuple[MutableMapping[Any, Any], torch.Tensor, Any]] = []
        self._saved_groups = SavedGroups({})
        self._beside: dict[str, Any] = {}

    def stored(self) -> dict[str, Any]:
        """The state dict in the stored form."""
        parameters = [p for p in self._parameters() if not p.sharded]
        content = self._content()
        late = {p.key: type(p.optimizer).__name__ for p in parameters if p.state is None}
        strict = not isinstance(self._state, KeyedOptimizer)
        content |= stored_groups(self._groups(), strict)
        elsewhere = set(memory(self._tensors()))
        found = {node.identity: held(node, elsewhere) for node in nodes(self._state)}
        wrappers = {identity: of_node for identity, of_node in found.items() if of_node}
        beside = {WRAPPERS: wrappers, _LATE: late}
        return {**content, **{name: value for name, value in beside.items() if value}}

    def fit(
        self, tree: Tree, path: str, tables: Mapping[str, Collection[str] | None], strict: bool
    ) -> dict[str, Any]:
        """See ``DenseStates.fit``; of this one optimizer."""
        stored = tree_items(tree)
        self._saved_groups = SavedGroups(stored)
        self._numbered = self._saved_groups.numbered
        saved = tree_items(stored.get("state"))
        late = {k: decode_state(v, b"") for k, v in tree_items(stored.get(_LATE)).items()}
        for parameter in self._parameters():
            if parameter.sharded:
                continue
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
        self._check_groups(path, strict)
        if strict:
            self._check_wrappers(tree_items(stored.get(WRAPPERS)), path)
        content = self._content()
        left_out = self._kept | self._own().keys()
        live = {k: v for k, v in content["state"].items() if k not in left_out}
        live |= dict.fromkeys(self._own().keys() & saved.keys())
        # The others come back as they were stored.
        return {**content, "state": live, **{name: None for name in _BESIDE if name in stored}}

    def load(self, content: dict[str, Any]) -> None:
        """Give the optimizer its restored state; ``finish`` gives it the rest."""
        restored = dict(content)
        self._beside = {name: restored.pop(name, None) for name in _BESIDE}
        if not self._beside[WRAPPERS]:  # saved by ``dcp.save``: what TorchRec's state dict shows
            for key, (node, of_node) in self._own().items():
                if key in restored["state"]:
                    node.optimizer.state[of_node] = dict(restored["state"][key])
        own = self._by_key(self._state.state_dict())
        state = {k: restored["state"].get(k, value) for k, value in own["state"].items()}
        own |= {**restored, "state": state}
        with same_objects(nodes(self._state)):
            self._state.load_state_dict(self._by_key(own, back=True))
        for parameter in self._parameters():
            if parameter.key not in own["state"] and parameter.key in restored["state"]:
                parameter.optimizer.state[parameter.parameter].update(
                    restored["state"][parameter.key]
                )

    def finish(self, name: str) -> None:
        """Give wrappers and parameter groups what they had, after all that may set it back."""
        wrappers = self._beside.get(WRAPPERS) or {}
        elsewhere = set(memory(self._tensors()))
        for node in nodes(self._state) if wrappers else ():
            changed = give_back(node, wrappers.get(node.identity, {}), elsewhere)
            if changed:
                logger.warning(
                    "%s (%s) goes on with %s, as saved: set it after the restore if you want "
                    "another value",
                    name,
                    node.identity,
                    ", ".join(changed),
                )
        saved = self._beside.get(GROUPS) or []
        for group in self._groups():
            matching = self._saved_groups.match(group)
            if matching and not self._changed & set(group.keys):
                options = {**saved[matching[0]]}
                for of_group in ("params", "param_names"):
                    options.pop(of_group, None)
                group.set(options)
        self._beside = {}

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
        elif parameter.state is not None and was_late and not wanted:
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

    def _check_groups(self, path: str, strict: bool) -> None:
        """Refuses groups whose parameters had different options, or leaves theirs alone."""
        for group in self._groups():
            matching = self._saved_groups.match(group)
            if self._saved_groups.agree(matching):
                continue
            if strict:
                raise IncompatibleCheckpoint(
                    f"{path}.{GROUPS}: {sorted(map(str, group.keys))[:8]} are in one parameter "
                    f"group, but were in {len(matching)} with different options: group the "
                    "parameters as they were when the checkpoint was saved, or keep the options "
                    "with strict=False"
                )
            self._changed |= set(group.keys)

    def _check_wrappers(self, saved: Mapping[Key, Tree], path: str) -> None:
        """Refuse a checkpoint whose wrappers had counters that no live wrapper takes."""
        live = {node.identity: own_parameters(node).keys() for node in nodes(self._state)}
        for identity, of_node in saved.items():
            names = tree_items(tree_items(of_node).get("state")).keys()
            if lost := names - live.get(str(identity), set()):
                raise IncompatibleCheckpoint(
                    f"{path}.{WRAPPERS}: the checkpoint has {sorted(map(str, lost))} of "
                    f"{identity}, which this optimizer has not (it is made of {sorted(live)}): "
                    "wrap it as it was when the checkpoint was saved, or leave that out with "
                    "strict=False"
                )

    def _content(self) -> dict[str, Any]:
        """The state dict by keys, without what is stored beside it or not at all.

        TorchRec's omit state that was made after a combined optimizer was wrapped and combined
        again; it is added.
        """
        content = self._by_key(self._state.state_dict())
        content.pop(GROUPS, None)
        parameters = list(self._parameters())
        made = {p.key: dict(p.state) for p in parameters if p.state is not None}
        content["state"] = {**made, **content["state"]}
        left_out = {p.key for p in parameters if p.sharded}
        content["state"] = {k: v for k, v in content["state"].items() if k not in left_out}
        return content

    def _own(self) -> dict[Key, tuple[Node, torch.Tensor]]:
        """What wrappers keep as the state of parameters of their own, by its key."""
        return {
            node.key(name): (node, parameter)
            for node in nodes(self._state)
            if not (node.fused or node.steps)
            for name, parameter in own_parameters(node).items()
        }

    def _groups(self) -> list[Group]:
        keys = {id(p.parameter): p.key for p in self._parameters() if not p.sharded}
        return live_groups(nodes(self._state), lambda node, parameter: keys.get(id(parameter)))

    def _tensors(self) -> Iterator[object]:
        """All tensors that are stored otherwise than with a wrapper."""
        yield from self._names
        for parameter in self._parameters():
            yield parameter.parameter
            yield from (parameter.state or {}).values()

    def _parameters(self) -> Iterator[_Parameter]:
        if not isinstance(self._state, KeyedOptimizer):
            keys = self._keys()
            for group in self._state.param_groups:
                for parameter in group["params"]:
                    yield self._parameter(keys[parameter], parameter, self._state, group)
            return
        for node in nodes(self._state):
            if node.steps and node.keyed is not None:
                yield from self._of_node(node, node.keyed)

    def _of_node(self, node: Node, keyed: KeyedOptimizer) -> Iterator[_Parameter]:
        groups = {p: group for group in node.optimizer.param_groups for p in group["params"]}
        for name, parameter in keyed.params.items():
            if parameter in groups:
                group = groups[parameter]
                yield self._parameter(node.key(name), parameter, node.optimizer, group)

    def _parameter(
        self, key: Key, parameter: torch.Tensor, optimizer: Optimizer, group: dict[str, Any]
    ) -> _Parameter:
        name = self._names.get(parameter, str(key))
        sharded = name.removesuffix(".weight") in self._sharded
        return _Parameter(key, name, parameter, optimizer, group, sharded)

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
            for group in content[GROUPS]
        ]
        state = {keys.get(k, k): value for k, value in content["state"].items()}
        return {**content, "state": state, GROUPS: groups}
