"""Checks of a saved optimizer against the live one, before anything is changed.

State of parameters is compared elsewhere, with all other state. But torch's SGD has none, and a
parameter group or a wrapper that is there on one side only would be lost without a word.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from torchrec_checknrun.dense.param_groups import GROUPS, Group, Key, SavedGroups
from torchrec_checknrun.dense.tree import Node, own_parameters
from torchrec_checknrun.dense.wrappers import WRAPPERS, without_takers
from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.format.state import Tree, tree_items

logger = logging.getLogger(__name__)


def check_groups(
    saved: SavedGroups, live: Sequence[Group], path: str, strict: bool, tables: Collection[str]
) -> set[Key]:
    """Refuse groups whose parameters had different options, and parameters that only one side has
    in a group, but for tables: these move to kernels and back.

    Args:
        path: what errors call the optimizer.
        strict: refuse; otherwise what differs is left as it is live.
        tables: names of the model's tables.

    Returns:
        Parameters whose options can't be told, and stay.

    Raises:
        IncompatibleCheckpoint: names the parameters.
    """
    changed: set[Key] = set()
    for group in live:
        matching = saved.match(group)
        if saved.agree(matching):
            continue
        if strict:
            raise IncompatibleCheckpoint(
                f"{path}.{GROUPS}: {sorted(map(str, group.keys))[:8]} are in one parameter "
                f"group, but were in {len(matching)} with different options: group the "
                "parameters as they were when the checkpoint was saved, or keep the options "
                "with strict=False"
            )
        changed |= set(group.keys)
    sides = ("checkpoint", "optimizer")
    for side, keys in zip(sides, saved.on_one_side(live), strict=True):
        if not (names := sorted(str(key) for key in keys if not _is_table(key, tables))):
            continue
        text = (
            f"{path}.{GROUPS}: only the {side} has a parameter group with {names[:8]}: make "
            "the optimizer with the groups that it had when the checkpoint was saved (call "
            "add_param_group before the restore)"
        )
        if strict:
            raise IncompatibleCheckpoint(f"{text}, or leave that out with strict=False")
        logger.warning("%s", text)
    return changed


def check_wrappers(
    saved: Mapping[Key, Tree], live: Sequence[Node], path: str, strict: bool
) -> None:
    """Refuse a checkpoint whose wrappers had counters that no live wrapper takes, if strict; and
    tell of attributes whose wrapper is none of the live ones.

    Raises:
        IncompatibleCheckpoint: names the counters and the wrapper.
    """
    own = {node.identity: own_parameters(node).keys() for node in live}
    made_of = f"it is made of {sorted(own)}"
    for identity, of_node in saved.items() if strict else ():
        names = tree_items(tree_items(of_node).get("state")).keys()
        if lost := names - own.get(str(identity), set()):
            raise IncompatibleCheckpoint(
                f"{path}.{WRAPPERS}: the checkpoint has {sorted(map(str, lost))} of "
                f"{identity}, which this optimizer has not ({made_of}): "
                "wrap it as it was when the checkpoint was saved, or leave that out with "
                "strict=False"
            )
    for identity, attributes in without_takers(saved, live).items():
        logger.warning(
            "%s.%s: %s of %s are not restored, for this optimizer has no such wrapper (%s): wrap "
            "it as it was when the checkpoint was saved, under the same name of the class, if "
            "they are needed",
            path,
            WRAPPERS,
            attributes,
            identity,
            made_of,
        )


def _is_table(key: Key, tables: Collection[str]) -> bool:
    """Tell whether a key is a table's weight, with the keys of combined optimizers before it."""
    weight = f".{key}"
    return any(weight.endswith(f".{table}.weight") for table in tables)
