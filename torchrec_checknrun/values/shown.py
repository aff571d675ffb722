"""Find values among those that states show, to tell what no state holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
import torch
import xxhash
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

MOST_VALUES = 1 << 14
"""About as many values of a tensor are compared: training waits meanwhile."""
_NUMBERS = frozenset({int, float})


class Shown:
    """The values that states show, by name: a large model has thousands, of which many may move."""

    def __init__(self, states: Iterable[object]) -> None:
        self._named: dict[str, list[object]] = {}
        self._extra: list[object] = []
        for path, leaf in chain.from_iterable(map(_leaves, states)):
            self._named.setdefault(path[-1].rpartition(".")[2], []).append(leaf)
            if any(part.endswith(_EXTRA_STATE_KEY_SUFFIX) for part in path):
                self._extra.append(leaf)

    def holds(self, name: str, value: object) -> bool:
        """Return whether a state has a value under its name, or a module's extra state has it."""
        named = self._named.get(name.rpartition(".")[2], ())
        if named and type(value) not in _NUMBERS:
            return True
        return any(_equals(leaf, value) for leaf in chain(named, self._extra))


def _equals(leaf: object, value: object) -> bool:
    if isinstance(leaf, torch.Tensor):
        if isinstance(value, torch.Tensor):
            return leaf.data_ptr() == value.data_ptr()
        return type(value) in _NUMBERS and leaf.numel() == 1 and bool(leaf.item() == value)
    return type(leaf) in _NUMBERS and type(value) in _NUMBERS and leaf == value


def shows(state: object, value: int) -> bool:
    """Return whether a state has a whole number or a flag under any name."""

    def is_it(leaf: object) -> bool:
        if isinstance(leaf, (list, tuple, deque)):
            return any(type(item) is type(value) and item == value for item in leaf)
        return _equals(leaf, value) or (type(leaf) is type(value) and leaf == value)

    return any(is_it(leaf) for _, leaf in _leaves(state))


def all_leaves(value: object) -> Iterator[object]:
    """Yield the numbers, tensors, arrays and lists in a state."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        yield value
        for item in value:
            yield from all_leaves(item)
    elif isinstance(value, (torch.Tensor, np.ndarray, float)):
        yield value


def may_show(leaf: Any, shapes: set[tuple[int, ...]], rows: set[tuple[int, ...]]) -> bool:
    """Return whether a value of a state may be one of some tensors, by their shapes and rows."""
    if isinstance(leaf, (list, tuple)):
        return (len(leaf),) in rows and isinstance(leaf[0], (float, list))
    return isinstance(leaf, float) or np.shape(leaf) in shapes


def content(value: Any) -> tuple[int, bytes] | None:
    """Return what is the same of equal values, whatever their form; None if it is unknown.

    Of large ones a sample decides: training waits meanwhile.
    """
    with suppress(Exception):  # tensors may be of any class, lists of anything
        values = torch.as_tensor(value).detach()
        values = torch.view_as_real(values) if values.is_complex() else values
        flat = values.reshape(-1)
        some = flat[:: max(1, len(flat) // MOST_VALUES)].cpu().to(torch.float64) + 0.0
        return len(flat), xxhash.xxh3_128_digest(some.numpy().data)  # of both zeros one
    return None


def _leaves(value: object, path: tuple[str, ...] = ("",)) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the keys under which a state has values, lists among them, each with the value."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, (*path, str(name)))
        return
    yield path, value
    for item in value if isinstance(value, (list, tuple, deque)) else ():
        if isinstance(item, (Mapping, list, tuple, deque)):
            yield from _leaves(item, path)
