"""Save and restore one dense optimizer, torch's or TorchRec's, with the wrappers around it.

The state of its parameters, all options of its parameter groups and the values that wrappers hold
are stored by name. Values that TorchRec's ``load_state_dict`` resets are written after it, rates
last.
"""

from __future__ import annotations

import logging
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Mapping,
    MutableMapping,
    Sequence,
)
from functools import cached_property
from typing import Any

import torch
from torch.optim import Optimizer
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_checknrun.dense.checks import check_groups, check_keys, check_wrappers, fixed
from torchrec_checknrun.dense.first_state import first_state_of_own_form, is_resized, state_to_make
from torchrec_checknrun.dense.optimizers import row_names, row_states
from torchrec_checknrun.dense.param_groups import (
    GROUPS,
    OWNERS,
    Group,
    SavedGroups,
    live_groups,
    options_of,
    stored_groups,
)
from torchrec_checknrun.dense.references import References, references_of
from torchrec_checknrun.dense.state_dicts import (
    is_shown,
    load_own,
    own_state_dict,
    present_state,
    put_rest,
    same_objects,
    shared,
    state_dict_of,
    stored_elsewhere,
    with_present_dicts,
    without_arrays,
)
from torchrec_checknrun.dense.tree import (
    Key,
    Node,
    Parameter,
    Parameters,
    all_nodes,
    nodes,
    own_parameters,
    shown,
)
from torchrec_checknrun.dense.wrappers import WRAPPERS, give_back, held, own_tensors, tell_twins
from torchrec_checknrun.format.row_chunk import RowForms
from torchrec_checknrun.format.state_tree import leaves
from torchrec_checknrun.values.state import Tree, decode_state, is_sharded, tree_items

logger = logging.getLogger(__name__)

_LATE = "late"
"""Key of the parameters whose state was still to be made, each with its optimizer's class."""
_FORM = "own_form"
"""Key of the result of a user's own ``state_dict`` in a form of its own."""
_SHARED = "shared"
"""Key of the places of tensors that are the state of several parameters."""
_ROWS = "rows"
"""Key of the names of data-parallel tables' states that are stored with rows, with fused names."""
_BY_ID = "$id"
"""The first part of a key of state by a parameter's id, before the parameter's key."""
_BESIDE = (GROUPS, OWNERS, _LATE, WRAPPERS, _SHARED, _ROWS)
"""Keys beside ``state`` with no tensor to restore in place."""


class DenseOptimizer:
    """One optimizer in the stored form, which extends that of TorchRec's state dicts.

    The form is ``{"state": {key: …}}`` with ``param_groups`` and ``param_groups_of`` (see
    ``stored_groups``), ``wrappers`` (the values that each wrapper holds, by identity) and ``late``
    if some state was still to be made. Keys are parameter names, a TorchRec optimizer's own or the
    model's; if the model doesn't know all parameters, torch's numbers.

    Args:
        state: the outermost optimizer.
        names: the model's parameters.
        sharded: names of the model's tables in fused kernels.
        is_table: tells whether a fused optimizer's parameter is a table of the model.
        elsewhere: tensors, modules and objects that are stored elsewhere; looked through only if
            an answer depends on them.
        resized: the checkpoint to restore was saved by another number of ranks.
    """

    def __init__(
        self,
        state: Optimizer,
        names: Mapping[torch.Tensor, str],
        sharded: Collection[str],
        is_table: Callable[[torch.Tensor], bool],
        elsewhere: Iterable[object],
        resized: bool,
    ) -> None:
        self._state = state
        self._elsewhere = elsewhere
        self._resized = resized
        self._names = names
        self._tables, self._is_table = sharded, is_table
        self._parameters = Parameters(state, names, sharded)
        self._changed: set[Key] = set()
        self._kept: set[Key] = set()
        self._of_none: set[Key] = set()
        self._before: list[tuple[MutableMapping[Any, Any], torch.Tensor, Any]] = []
        self._saved_groups = SavedGroups({})
        self._beside: dict[str, Any] = {}

    @cached_property
    def nest(self) -> list[Node]:
        """Return the optimizers in the nest as it was at the first look, or as it is ``stored``."""
        return all_nodes(self._state)

    def stored(self) -> dict[str, Any]:
        """Return the state in the stored form, with the live tensors."""
        # First: a user's own may change what is found next.
        given = state_dict_of(self._state, self._tables)
        self.nest = all_nodes(self._state)
        found = shown(self.nest)
        parameters = list(self._parameters.of(found))
        tell_twins(parameters)
        made = {p.key: state for p in parameters if (state := p.state) is not None}
        content = self._content(given, found, parameters, made)
        strict = not isinstance(self._state, KeyedOptimizer)
        if _FORM not in content:
            check_keys(found, content["state"])
        content |= stored_groups(self._groups(found, parameters), strict)
        late = {
            p.key: type(p.optimizer).__name__
            for p in parameters
            if not p.sharded and p.key not in made
        }
        rows = {
            p.key: row_names(made[p.key], p.parameter)
            for p in parameters
            if p.key in made and not p.sharded and self._is_whole_table(p.parameter)
        }
        references = self._references(found, parameters)
        of_nodes = {node.identity: held(node, references) for node in found}
        wrappers = {identity: of_node for identity, of_node in of_nodes.items() if of_node}
        beside = {WRAPPERS: wrappers, _LATE: late, _SHARED: shared(parameters), _ROWS: rows}
        return {**content, **{name: value for name, value in beside.items() if value}}

    def fit(
        self,
        tree: Tree,
        path: str,
        tables: Mapping[str, RowForms | None],
        skipped: list[str] | None,
    ) -> dict[str, Any]:
        """Make the live state match a stored tree, see ``DenseStates.fit``; ``path`` names it."""
        stored, strict = tree_items(tree), skipped is None
        self._saved_groups = SavedGroups(stored)
        self._parameters.numbered = self._saved_groups.numbered
        saved = tree_items(stored.get("state"))
        late, own_rows = (
            {k: decode_state(v, b"") for k, v in tree_items(stored.get(part)).items()}
            for part in (_LATE, _ROWS)
        )
        for parameter in self._parameters:
            if parameter.sharded:
                continue
            table = parameter.name.removesuffix(".weight")
            of_key = saved.get(parameter.key)
            was_late = late.get(parameter.key) == type(parameter.optimizer).__name__
            if _FORM in stored and of_key is None and not was_late:
                if parameter.state is None:
                    self._set(parameter, first_state_of_own_form(parameter, self._state, path))
                continue
            if (rows := tables.get(table, {})) is None:
                continue
            state, items = parameter.state, tree_items(of_key)
            missing = rows or items or (strict and not was_late)
            if missing if state is None else items.keys() - state.keys():
                names = own_rows.get(parameter.key, {})
                forms = {own: rows[fused] for own, fused in names.items() if fused in rows}
                known = len(forms) == len(names)  # not of a table within modules around the model
                same = known and self._saved_groups.is_of(parameter)
                state = state_to_make(parameter, of_key, forms, same)
            wanted: Collection[Key] = rows if table in tables else items
            if wanted and state is not None and not strict:
                of_own = None if table in tables else of_key
                self._compare(parameter, state, set(map(str, wanted)), of_own)
            if parameter.key in self._kept:
                continue
            if parameter.state is not state:
                self._set(parameter, state)
            elif was_late and not (wanted or items):
                self._set(parameter, None)
        found = nodes(self._state)
        groups = self._groups(found, list(self._parameters.of(found)))
        self._changed |= check_groups(self._saved_groups, groups, path, skipped, tables)
        check_wrappers(tree_items(stored.get(WRAPPERS)), found, path, skipped)
        parameters = list(self._parameters)
        made = {p.key: state for p in parameters if (state := p.state) is not None}
        content = self._content(own_state_dict(self._state), found, parameters, made)
        own = set(self._own())
        if not isinstance(self._state, KeyedOptimizer):
            keys = {p.key for p in parameters}
            self._of_none = (content["state"].keys() | self._saved_groups.others(saved)) - keys
        left_out = self._kept | own | self._of_none
        shapes = {p.key: p.parameter.shape for p in parameters}
        live = {
            k: fixed(v, saved.get(k), shapes.get(k))
            for k, v in content["state"].items()
            if k not in left_out
        }
        live |= dict.fromkeys((own | self._of_none) & saved.keys())
        # None: restored as stored, not into live tensors.
        return {**content, "state": live, **{name: None for name in _BESIDE if name in stored}}

    def load(self, content: dict[str, Any]) -> None:
        """Load the restored state; ``finish`` writes the rest."""
        restored = dict(content)
        self._beside = {name: restored.pop(name, None) for name in _BESIDE}
        if not self._beside[WRAPPERS]:  # saved by ``dcp.save``, as TorchRec's state dict shows it
            for key, (node, of_node) in self._own().items():
                if key in restored["state"]:
                    node.optimizer.state[of_node] = dict(restored["state"][key])
        given, form = own_state_dict(self._state), restored.pop(_FORM, None)
        loaded: Collection[Key] = ()
        unshown: Collection[Key] = ()
        if not self._is_own_form(given):
            own = self._by_key(given)
            unshown = present_state(nodes(self._state), own["state"]).keys()
            shown = {k: v for k, v in own["state"].items() if k not in self._of_none}
            shown |= dict.fromkeys(self._of_none & restored["state"].keys())
            state = {k: restored["state"].get(k, value) for k, value in shown.items()}
            if isinstance(self._state, KeyedOptimizer):
                state = {k: with_present_dicts(value, shown[k]) for k, value in state.items()}
            else:
                state = {k: without_arrays(value) for k, value in state.items()}
            own |= {**restored, "state": state}
            loaded, form = state.keys(), self._by_key(own, back=True)
        if form is not None:
            with same_objects(all_nodes(self._state)):
                load_own(self._state, form)
        for parameter in self._parameters:
            apart = parameter.key not in loaded or parameter.key in unshown
            if apart and parameter.key in restored["state"]:
                parameter.optimizer.state[parameter.parameter].update(
                    restored["state"][parameter.key]
                )
        put_rest(self._parameters, restored["state"], self._beside[_SHARED] or [])

    def finish(self, name: str) -> None:
        """Write wrappers' values and group options, after everything that may reset them."""
        wrappers = self._beside.get(WRAPPERS) or {}
        found = nodes(self._state)
        parameters = list(self._parameters.of(found))
        references = self._references(found, parameters)
        for node in found if wrappers else ():
            of_node = wrappers.get(node.identity, {})
            changed = give_back(node, of_node, references, self._resized)
            if changed:
                logger.warning(
                    "%s (%s) continues with %s, as saved%s: set another value after the restore "
                    "if needed",
                    name,
                    node.identity,
                    ", ".join(changed),
                    " on another number of ranks" if self._resized else "",
                )
        saved = self._beside.get(GROUPS) or []
        apart = own_tensors(found, wrappers)
        for group in self._groups(found, parameters):
            matching = self._saved_groups.match(group)
            if matching and not self._changed & set(group.keys):
                group.set(options_of(saved[matching[0]]), apart)
        self._beside = {}

    def undo(self) -> None:
        """Put the live state back as it was before ``fit``."""
        for mapping, parameter, state in reversed(self._before):
            if state is None:
                mapping.pop(parameter, None)
            else:
                mapping[parameter] = state
        self._before = []
        self._changed, self._kept, self._of_none = set(), set(), set()

    def _compare(
        self, parameter: Parameter, own: dict[str, Any], saved: set[str], tree: Tree | None
    ) -> None:
        """Note the options to keep, if a saved state (of rows without ``tree``) is another kind's;
        and the state to keep, if the kinds have none in common, or that is of another shape.
        """
        if tree is not None and is_resized(parameter, tree):
            self._kept.add(parameter.key)
        names = set(row_states(own, parameter.parameter) if tree is None else own)
        if names != saved:
            self._changed.add(parameter.key)
            if not names & saved - {"step"}:
                self._kept.add(parameter.key)

    def _is_whole_table(self, parameter: torch.Tensor) -> bool:
        return parameter.numel() > 0 and not is_sharded(parameter) and self._is_table(parameter)

    def _set(self, parameter: Parameter, state: dict[str, Any] | None) -> None:
        if not (state or parameter.state):
            return
        mapping = parameter.optimizer.state
        self._before.append((mapping, parameter.parameter, parameter.state))
        if state is None:
            del mapping[parameter.parameter]
        else:
            mapping[parameter.parameter] = state

    def _content(
        self,
        given: Any,
        found: Sequence[Node],
        parameters: Sequence[Parameter],
        made: Mapping[Key, dict[str, Any]],
    ) -> dict[str, Any]:
        """Turn the state dict into one by keys, without groups and sharded parameters.

        State that TorchRec's state dict omits is added: state made after a combined optimizer was
        wrapped and combined again.

        Args:
            made: the parameters' state, by key.
        """
        if self._is_own_form(given):
            form = References([value for _, value in leaves({_FORM: given}, (torch.Tensor,))])
            made = {k: v for k, v in made.items() if not is_shown(v, form)}
            content: dict[str, Any] = {_FORM: given, "state": {}}
        else:
            content = self._by_key(given)
        content.pop(GROUPS, None)
        present = present_state(found, content["state"])
        listed = {k: v for k, v in content["state"].items() if present.get(k, v) is not None}
        listed |= {k: v for k, v in present.items() if v is not None}
        state = {key: listed[key] if key in listed else dict(own) for key, own in made.items()}
        left_out = {p.key for p in parameters if p.sharded}
        left_out |= stored_elsewhere(listed, found, self._is_table)
        state = {k: v for k, v in {**state, **listed}.items() if k not in left_out}
        # One without content is made again by the first step that needs it.
        return {**content, "state": {k: v for k, v in state.items() if v != {}}}

    def _own(self) -> dict[Key, tuple[Node, torch.Tensor]]:
        """Return the parameters that wrappers made for themselves, by key of their state."""
        return {
            node.key(name): (node, parameter)
            for node in nodes(self._state)
            if not (node.fused or node.steps)
            for name, parameter in own_parameters(node).items()
        }

    def _groups(self, found: Sequence[Node], parameters: Sequence[Parameter]) -> list[Group]:
        keys = {id(p.parameter): p.key for p in parameters if not p.sharded}
        return live_groups(found, keys)

    def _is_own_form(self, given: object) -> bool:
        """Return whether a state dict is of a user's own form instead of TorchRec's."""
        plain = isinstance(given, dict) and isinstance(given.get("state"), dict)
        return isinstance(self._state, KeyedOptimizer) and not plain

    def _references(self, found: Sequence[Node], parameters: Sequence[Parameter]) -> References:
        return references_of(self.nest, found, parameters, self._names, self._elsewhere)

    def _by_key(self, content: Mapping[str, Any], back: bool = False) -> dict[str, Any]:
        """Translate a plain optimizer's state dict from torch's numbers to keys, or back.

        State that the optimizer keeps by the parameters' ids, which are no keys of torch's, too.
        """
        if isinstance(self._state, KeyedOptimizer):
            return dict(content)
        own = self._parameters.keys()
        numbers = dict(enumerate(own.values()))
        ids = {id(parameter): (_BY_ID, key) for parameter, key in own.items()}
        keys: dict[Any, Any] = {**numbers, **ids}
        if back:
            keys = {key: number for number, key in keys.items()}
        groups = [
            {**group, "params": [keys.get(k, k) for k in group["params"]]}
            for group in content[GROUPS]
        ]
        state = {keys.get(k, k): value for k, value in content["state"].items()}
        return {**content, "state": state, GROUPS: groups}
