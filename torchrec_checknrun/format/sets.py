"""Sets in states: stored in an order that doesn't depend on the process, and read as untrusted."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from torchrec_checknrun.errors import CorruptCheckpoint, UnsupportedState

SETS: dict[str, type[set[Any]] | type[frozenset[Any]]] = {"set": set, "frozenset": frozenset}
"""By the name of their node."""
_MEMBERS = (
    *(type(None), bool, int, float, complex, str, bytes, range),
    *(torch.dtype, torch.Size, PurePath, np.generic, frozenset, tuple),
)
"""What a set may hold: values that are equal again when they are read."""

Encode = Callable[[object, str], tuple[dict[str, Any], list[bytes | memoryview]]]
"""Gives a value's tree and bytes, see ``state.encode_state``."""


def sorted_members(members: Collection[Any], path: str, encode: Encode) -> list[Any]:
    """Sort a set's members, of whatever types, in the same order in every process.

    Args:
        path: what errors call the set.

    Raises:
        UnsupportedState: a member may not be equal to itself when it is read again.
    """
    for kind in (int, str):
        if all(type(member) is kind for member in members):
            return sorted(members)
    _require_members(members, path)
    keys = []
    for member in members:
        tree, pieces = encode(member, path)
        keys.append((json.dumps(tree), b"".join(pieces), member))
    return [member for _, _, member in sorted(keys, key=lambda key: key[:2])]


def set_of(members: Sequence[Any], kind: type[set[Any]] | type[frozenset[Any]]) -> Any:
    """Make a set of members that were read.

    Raises:
        CorruptCheckpoint: one has no hash, or is there twice.
    """
    try:
        found = kind(members)
    except TypeError as error:
        raise CorruptCheckpoint(f"state tree: a set with a member of {error}") from None
    if len(found) != len(members):
        raise CorruptCheckpoint(f"state tree: {len(members)} members make a set of {len(found)}")
    return found


def _require_members(members: Iterable[Any], path: str) -> None:
    for member in members:
        if not isinstance(member, _MEMBERS):
            raise UnsupportedState(
                f"{path} is a set with a {type(member).__qualname__}, which may not be equal to "
                "itself when it is read again: keep it in a list, or let state_dict() return its "
                "values"
            )
        if type(member) is tuple:
            _require_members(member, path)
