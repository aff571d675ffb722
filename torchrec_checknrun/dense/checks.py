"""Check a saved optimizer against the live one, before anything is changed.

Parameters' state is compared elsewhere, with all other state. But torch's SGD has none, and a
parameter group or wrapper on one side only would be lost silently.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from torchrec_checknrun.dense.param_groups import GROUPS, Group, SavedGroups
from torchrec_checknrun.dense.tree import Key, Node, own_parameters
from torchrec_checknrun.dense.wrappers import WRAPPERS, without_takers
from torchrec_checknrun.errors import IncompatibleCheckpoint, SaveFailed
from torchrec_checknrun.values.state import Tree, tree_items

logger = logging.getLogger(__name__)


def check_keys(found: Iterable[Node], listed: Collection[Key]) -> None:
    """Refuse to save what TorchRec refuses to load: two parts of a combined optimizer have a
    parameter, and not both have state of it.

    Args:
        found: the optimizers in the nest.
        listed: keys of the state.

    Raises:
        SaveFailed: names the parameter and the parts.
    """
    stepping = [node for node in found if node.steps and node.keyed is not None]
    states = {id(p) for node in stepping for p in node.optimizer.state}
    first: dict[int, str] = {}
    for node in stepping:
        for name, parameter in node.keyed.params.items() if node.keyed is not None else ():
            key = node.key(name)
            other = first.setdefault(id(parameter), key)
            if other != key and id(parameter) in states and not {key, other} <= set(listed):
                raise SaveFailed(
                    f"{other!r} and {key!r} are one parameter, of which not both optimizers have "
                    "state: TorchRec would refuse to load that. Give each KeyedOptimizerWrapper "
                    "only the parameters that its optimizer steps"
                )


def check_groups(
    saved: SavedGroups,
    live: Sequence[Group],
    path: str,
    skipped: list[str] | None,
    tables: Collection[str],
) -> set[Key]:
    """Refuse groups whose parameters had different options, and parameters in one side's groups.

    Tables are exempt from the latter: they move to kernels and back.

    Args:
        path: the optimizer's name in errors.
        skipped: receives a line for each group whose options stay as they are, or that is left
            out; None: such groups are refused.
        tables: names of the model's tables.

    Returns:
        Parameters whose saved options are ambiguous; they keep their live ones.

    Raises:
        IncompatibleCheckpoint: names the parameters.
    """
    changed: set[Key] = set()
    for group in live:
        matching = saved.match(group)
        if saved.agree(matching):
            continue
        text = (
            f"{path}.{GROUPS}: {sorted(map(str, group.keys))[:8]} are in one parameter group, but "
            f"were in {len(matching)} with different options"
        )
        if skipped is None:
            raise IncompatibleCheckpoint(
                f"{text}: group the parameters as they were when the checkpoint was saved, or keep "
                "the options with strict=False"
            )
        skipped.append(f"state {text}")
        changed |= set(group.keys)
    sides = ("checkpoint", "optimizer")
    for side, keys in zip(sides, saved.on_one_side(live), strict=True):
        if not (names := sorted(str(key) for key in keys if not _is_table(key, tables))):
            continue
        text = f"{path}.{GROUPS}: only the {side} has a parameter group with {names[:8]}"
        if skipped is None:
            raise IncompatibleCheckpoint(
                f"{text}: make the optimizer with the groups that it had when the checkpoint was "
                "saved (call add_param_group before the restore), or leave that out with "
                "strict=False"
            )
        skipped.append(f"state {text}")
    return changed


def check_wrappers(
    saved: Mapping[Key, Tree], live: Sequence[Node], path: str, skipped: list[str] | None
) -> None:
    """Refuse a checkpoint whose wrappers had counters that no live wrapper takes.

    Attributes of a missing wrapper are only reported by a warning.

    Args:
        saved: stored wrappers by identity.
        path: the optimizer's name in messages.
        skipped: receives a line for each wrapper's counters that are left out; None: these are
            refused.

    Raises:
        IncompatibleCheckpoint: names the counters and the wrapper.
    """
    own = {node.identity: own_parameters(node).keys() for node in live}
    made_of = f"it is made of {sorted(own)}"
    for identity, of_node in saved.items():
        names = tree_items(tree_items(of_node).get("state")).keys()
        if not (lost := names - own.get(str(identity), set())):
            continue
        text = (
            f"{path}.{WRAPPERS}: the checkpoint has {sorted(map(str, lost))} of {identity}, which "
            f"this optimizer does not have ({made_of})"
        )
        if skipped is None:
            raise IncompatibleCheckpoint(
                f"{text}: wrap it as it was when the checkpoint was saved, or leave that out with "
                "strict=False"
            )
        skipped.append(f"state {text}")
    for identity, attributes in without_takers(saved, live).items():
        logger.warning(
            "%s.%s: %s of %s are not restored, since this optimizer has no such wrapper (%s): if "
            "they are needed, wrap it as it was when the checkpoint was saved, with the same class "
            "name",
            path,
            WRAPPERS,
            attributes,
            identity,
            made_of,
        )


def _is_table(key: Key, tables: Collection[str]) -> bool:
    """Return whether a key is a table's weight, perhaps prefixed by combined optimizers' keys."""
    weight = f".{key}"
    return any(weight.endswith(f".{table}.weight") for table in tables)


def fixed(state: Any, saved: Tree | None, of_parameter: torch.Size | None) -> Any:
    """Return a parameter's state to restore into, with None for what is restored as stored: lists,
    whose content may be of any length and form (LBFGS's history), dicts of other content than the
    live ones (a history by step), and tensors of another order in memory (a decomposition's) than
    the live ones, unless these have the parameter's shape.

    Args:
        saved: the state's stored tree.
        of_parameter: the parameter's shape; None: unknown.
    """
    if not isinstance(state, dict):
        return state
    nodes = tree_items(saved)

    def is_free(name: str, value: object) -> bool:
        if isinstance(value, dict):
            return form_of(value) != _stored_form(nodes.get(name, {}))
        if not isinstance(value, torch.Tensor) or value.shape == of_parameter:
            return isinstance(value, (list, tuple))
        strides = nodes.get(name, {}).get("strides")  # None of a sharded one, which has no own
        return strides is not None and strides != list(value.stride())

    return {name: None if is_free(name, value) else value for name, value in state.items()}


def form_of(value: object) -> Any:
    """Return the keys of dicts and the shapes of tensors in them, at any depth."""
    if isinstance(value, dict):
        return {key: form_of(item) for key, item in value.items()}
    return list(value.shape) if isinstance(value, torch.Tensor) else None


def _stored_form(node: Tree) -> Any:
    """Return a stored value's form, as ``form_of`` does a live one's."""
    if "d" in node:
        return {key: _stored_form(item) for key, item in tree_items(node).items()}
    return node["shape"] if "x" in node else None
