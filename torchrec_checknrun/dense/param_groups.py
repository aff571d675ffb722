"""Save the options of optimizers' parameter groups, and match saved groups with live ones.

TorchRec's state dicts omit the groups, and so the rates that schedulers have set. Groups are stored
as torch stores them, but by parameter names; those of fused optimizers are saved with the tables.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper

from torchrec_checknrun.dense.tree import Key, Node, Parameter, is_semisync, is_torchs
from torchrec_checknrun.errors import UnsupportedState
from torchrec_checknrun.values.state import (
    Tree,
    decode_state,
    encode_state,
    tree_items,
    tree_values,
)

logger = logging.getLogger(__name__)

GROUPS, OWNERS = "param_groups", "param_groups_of"
"""Stored keys: the groups, and for each group its optimizer's identity."""
_WRAPPERS = (CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper)
"""TorchRec's optimizers that show the groups of those inside."""
_OF_GROUP = ("params", "param_names")
"""Keys of a group's dict that list its parameters; all other keys are options."""
_ON_OR_OFF = frozenset({"v", "f"})
"""Keys of the trees of options that are numbers, switches, text or None."""
_PLAIN = frozenset({type(None), bool, int, float, str})
"""Types of most options, which can be stored."""


@dataclass(frozen=True)
class Group:
    """One live parameter group.

    Attributes:
        content: torch's dict.
        keys: keys of the parameters' state, without sharded tables, which differ between ranks.
        owner: identity of the optimizer with the group.
        number: position among the owner's groups.
    """

    content: dict[str, Any]
    keys: list[Key]
    owner: str
    number: int

    def set(self, options: dict[str, Any], held: Collection[int] = ()) -> None:
        """Write saved options; keep options that only the live group has (a new scheduler's)."""
        for name, value in options.items():
            set_option(self.content, name, value, held)


def set_option(group: dict[str, Any], name: str, value: Any, held: Collection[int] = ()) -> None:
    """Write an option of a live group; a tensor is filled in place where the value allows that.

    Args:
        held: ids of tensors that have their own saved value already, a wrapper's first rate for
            instance: where an option is one of these in a new process, and was saved with another
            value, it has become another tensor since.
    """
    live = group.get(name)
    if not isinstance(live, torch.Tensor) or not isinstance(value, (torch.Tensor, float, int)):
        group[name] = value
        return
    with torch.no_grad():
        if id(live) in held and not bool((live == value).all()):
            live = group[name] = torch.empty_like(live)
        # A number is not made a tensor first: that would be float32, whatever the live one is.
        live.copy_(value) if isinstance(value, torch.Tensor) else live.fill_(value)


def options_of(group: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a live or saved group's dict without its parameters."""
    return {name: value for name, value in group.items() if name not in _OF_GROUP}


def live_groups(nodes: Iterable[Node], keys: Mapping[int, Key]) -> list[Group]:
    """List the groups in a nest of optimizers, each once, with the innermost owner.

    A wrapper of TorchRec's that shows other groups than the optimizer inside has earlier ones, see
    ``present_state``; nothing uses these.

    Args:
        nodes: the optimizers, innermost first.
        keys: the parameters' keys by ``id``; parameters without one are not stored.
    """
    found, seen = [], set()
    grouped: set[int] = set()
    for node in nodes:
        wrapper = not node.steps and isinstance(node.optimizer, _WRAPPERS)
        for number, content in enumerate(node.optimizer.param_groups):
            parameters = set(map(id, content["params"]))
            if id(content) in seen or (wrapper and parameters and parameters <= grouped):
                continue
            seen.add(id(content))
            grouped |= parameters
            # Those inside have the groups, with a form of their own.
            if not (node.fused or is_semisync(node.optimizer)):
                own = [keys[id(p)] for p in content["params"] if id(p) in keys]
                found.append(Group(content, own, node.identity, number))
    return found


def stored_groups(groups: Sequence[Group], strict: bool) -> dict[str, Any]:
    """Return the stored form of the groups, with the live tensors.

    Args:
        strict: keep options that can't be stored, so that the save fails and names them; otherwise
            leave them out with a warning.
    """
    stored = []
    for group in groups:
        options = options_of(group.content)
        for name, value in list(options.items()) if not strict else ():
            if type(value) in _PLAIN:
                continue
            try:
                encode_state(value, name)
            except UnsupportedState as error:
                logger.warning(
                    "parameter group option %r of %s is not saved: %s", name, group.owner, error
                )
                del options[name]
        stored.append({"params": group.keys, **options})
    return {GROUPS: stored, OWNERS: [group.owner for group in groups]}


class SavedGroups:
    """The groups of a checkpoint, to be matched with live ones.

    Args:
        tree: the stored tree that contains the result of ``stored_groups``.
    """

    def __init__(self, tree: dict[Key, Tree]) -> None:
        self._groups = [tree_items(group) for group in tree_values(tree.get(GROUPS))]
        self._keys = [
            {decode_state(key, b"") for key in tree_values(group.get("params"))}
            for group in self._groups
        ]
        self._owners = [decode_state(o, b"") for o in tree_values(tree.get(OWNERS))]

    @property
    def numbered(self) -> bool:
        """Return whether parameters are stored by torch's numbers."""
        keys = [key for of_group in self._keys for key in of_group]
        return bool(keys) and all(type(key) is int for key in keys)

    def others(self, keys: Collection[Key]) -> set[Key]:
        """Return those of a saved state's keys that no group lists: a user's own, of no parameter.

        Empty if the checkpoint has no groups.
        """
        return set(keys).difference(*self._keys) if self._groups else set()

    def is_of(self, parameter: Parameter) -> bool:
        """Return whether a parameter was in a group of an optimizer of the same class.

        torch's own make state by their options: those that are on must have been on, too.
        """
        kind, key, group = type(parameter.optimizer), parameter.key, parameter.group
        for keys, owner, saved in zip(self._keys, self._owners, self._groups, strict=True):
            if key in keys and owner.rpartition(".")[2].partition("#")[0] == kind.__name__:
                own = [n for n in inspect.signature(kind).parameters if n in saved and n in group]
                return not is_torchs(kind) or all(
                    bool(decode_state(saved[name], b"")) == bool(group[name])
                    for name in own
                    if name != "lr" and saved[name].keys() <= _ON_OR_OFF
                )
        return False

    def match(self, group: Group) -> list[int]:
        """Return the positions of the saved groups that hold a live group's parameters.

        A group of only sharded tables is found by its position among its owner's groups.
        """
        found = [i for i, keys in enumerate(self._keys) if keys & set(group.keys)]
        if found or not self._owners:
            return found
        same = [i for i, owner in enumerate(self._owners) if owner == group.owner]
        if group.number < len(same) and not self._keys[same[group.number]]:
            return [same[group.number]]
        return []

    def on_one_side(self, groups: Iterable[Group]) -> tuple[set[Key], set[Key]]:
        """Return the parameters only in saved groups, and those only in live groups.

        Both are empty if the checkpoint has no groups.
        """
        if not self._groups:
            return set(), set()
        saved = {key for keys in self._keys for key in keys}
        live = {key for group in groups for key in group.keys}
        return saved - live, live - saved

    def agree(self, positions: Sequence[int]) -> bool:
        """Return whether the saved groups at these positions had the same options."""
        options = [options_of(self._groups[i]) for i in positions]
        return all(other == options[0] for other in options[1:])
