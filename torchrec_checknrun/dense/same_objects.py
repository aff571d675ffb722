"""Keep an optimizer's dicts the same objects while it loads a state dict.

Wrappers and schedulers hold an optimizer's ``state`` and ``param_groups``. torch's
``load_state_dict`` makes new ones, and TorchRec's wrappers copy the old ones: the rates that a
scheduler sets afterwards would have no effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_checknrun.dense.tree import Node


@contextmanager
def same_objects(nest: Sequence[Node]) -> Iterator[None]:
    """Put each optimizer's own dicts back after the block, with the loaded content.

    State keeps its dtype as well: torch casts it to the parameter's, and an fp32 moment loses bits.

    Inner optimizers get their own dicts back as well: SAM's ``load_state_dict`` gives its base
    optimizer the parameter groups that torch has just made.

    Args:
        nest: all optimizers, innermost first.
    """
    kept = [_Kept(node.optimizer) for node in nest if _makes_dicts(node)]
    wrappers = [
        (node.optimizer, name, vars(node.optimizer)[name])
        for node in nest
        if not _makes_dicts(node)
        for name in ("state", "param_groups")
        if name in vars(node.optimizer)
    ]
    yield
    for optimizer in kept:
        optimizer.put_back()
    for wrapper, name, value in wrappers:
        setattr(wrapper, name, value)


def _makes_dicts(node: Node) -> bool:
    """Return whether an optimizer loads into its own dicts, not into an inner optimizer's."""
    plain = not isinstance(node.optimizer, KeyedOptimizer)
    return node.steps or (plain and {"state", "param_groups"} <= vars(node.optimizer).keys())


class _Kept:
    """The original dicts of an optimizer that keeps parameters' state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups: Any = optimizer.param_groups
        self._state: Any = optimizer.state
        self._contents = list(self._groups)
        self._values = {parameter: dict(values) for parameter, values in self._state.items()}

    def put_back(self) -> None:
        """Fill the original dicts with the loaded content, and put them back."""
        optimizer = self._optimizer
        if len(optimizer.param_groups) != len(self._contents):
            return  # a user's load_state_dict made other groups
        for content, loaded in zip(self._contents, optimizer.param_groups, strict=True):
            if content is not loaded:
                content.clear()
                content.update(loaded)
        optimizer.param_groups = self._groups
        if optimizer.state is self._state:
            return
        state = dict(optimizer.state)
        for parameter, values in state.items():
            for name, before in self._values.get(parameter, {}).items():
                value = values.get(name)
                if not (isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor)):
                    continue
                if value.dtype != before.dtype:
                    values[name] = before  # already restored in place
        self._state.clear()
        self._state.update(state)
        optimizer.state = self._state
