"""Keep an optimizer's dicts the same objects while it loads a state dict.

Wrappers and schedulers hold an optimizer's ``state`` and ``param_groups``. torch's
``load_state_dict`` makes new ones, and TorchRec's wrappers copy the old ones: the rates that a
scheduler sets afterwards would have no effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
    with ExitStack() as stack:
        for node in reversed(nest):  # they are put back in the nest's order
            same = _same_dicts if _makes_dicts(node) else _same_attributes
            stack.enter_context(same(node.optimizer))
        yield


def _makes_dicts(node: Node) -> bool:
    """Return whether an optimizer loads into its own dicts, not into an inner optimizer's."""
    plain = not isinstance(node.optimizer, KeyedOptimizer)
    return node.steps or (plain and {"state", "param_groups"} <= vars(node.optimizer).keys())


@contextmanager
def _same_attributes(optimizer: Optimizer) -> Iterator[None]:
    """Put back the dicts that a wrapper shares with the optimizer inside."""
    held = vars(optimizer)
    kept = {name: held[name] for name in ("state", "param_groups") if name in held}
    yield
    for name, value in kept.items():
        setattr(optimizer, name, value)


@contextmanager
def _same_dicts(optimizer: Optimizer) -> Iterator[None]:
    """Put back the dicts of an optimizer that keeps parameters' state, with the loaded content."""
    groups: Any = optimizer.param_groups
    state: Any = optimizer.state
    contents = list(groups)
    before = {parameter: dict(values) for parameter, values in state.items()}
    yield
    if len(optimizer.param_groups) != len(contents):
        return  # a user's load_state_dict made other groups
    for content, loaded in zip(contents, optimizer.param_groups, strict=True):
        if content is not loaded:
            content.clear()
            content.update(loaded)
    optimizer.param_groups = groups
    if optimizer.state is state:
        return
    found = dict(optimizer.state)
    for parameter, values in found.items():
        for name, live in before.get(parameter, {}).items():
            value = values.get(name)
            both = isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor)
            if both and value.dtype != live.dtype:
                values[name] = live  # already restored in place
    state.clear()
    state.update(found)
    optimizer.state = state
