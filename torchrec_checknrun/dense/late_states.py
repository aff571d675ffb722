"""Make the state that TorchRec's optimizers lack in a user's object, before that loads it.

A trainer, or a wrapper with a ``state_dict`` of its own, hands its content on to the optimizers
that it holds. TorchRec's refuse state of parameters that they have not stepped yet, and that only
once the model was changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_checknrun.dense.first_state import first_state
from torchrec_checknrun.dense.tree import Parameters, inner_optimizers
from torchrec_checknrun.values.state import Tree, tree_items, tree_values


class LateStates:
    """The state that was made for one object's optimizers.

    Args:
        holder: a state object that is restored by its own ``load_state_dict``.
        names: the model's parameters.
        sharded: names of the model's tables in fused kernels.
    """

    def __init__(
        self, holder: object, names: Mapping[torch.Tensor, str], sharded: Collection[str]
    ) -> None:
        inner = inner_optimizers(holder).values()
        held = [each for each in inner if isinstance(each, KeyedOptimizer)]
        self._parameters = [p for each in held for p in Parameters(each, names, sharded)]
        self._made: list[tuple[Any, torch.Tensor]] = []

    def make(self, tree: Tree) -> bool:
        """Make the missing state of all parameters that the object's stored tree has state of;
        return whether there were any.
        """
        missing = [p for p in self._parameters if not p.sharded and p.state is None]
        saved = set(_keys_of_dicts(tree)) if missing else set()
        for parameter in missing:
            if parameter.key in saved:
                made = first_state(parameter.optimizer, parameter.group, parameter.parameter)
                if made:
                    parameter.optimizer.state[parameter.parameter] = made
                    self._made.append((parameter.optimizer.state, parameter.parameter))
        return bool(self._made)

    def undo(self) -> None:
        """Take the state away again."""
        for mapping, parameter in self._made:
            mapping.pop(parameter, None)
        self._made = []


def _keys_of_dicts(tree: Tree | None) -> Iterator[str | int]:
    """Yield the keys, at any depth, under which a tree has a dict with content."""
    for key, node in tree_items(tree).items():
        if tree_items(node):
            yield key
        yield from _keys_of_dicts(node)
    for node in tree_values(tree):
        yield from _keys_of_dicts(node)
