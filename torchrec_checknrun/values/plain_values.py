"""Encode small Python values of a state as JSON nodes, without pickle.

Complex numbers, dtypes, sizes, ranges, slices and paths each become a node of one field, named
after the type, and decode to exactly that type. Sets become lists of nodes in an order that is the
same in every process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from reprlib import repr as shown
from typing import Any

import numpy as np
import torch

from torchrec_checknrun.errors import CorruptCheckpoint, UnsupportedState
from torchrec_checknrun.values.limits import LARGEST

Node = dict[str, Any]

_PATHS: dict[str, type[PurePosixPath] | type[PureWindowsPath] | type[Path]] = {
    "Path": Path,
    "PurePosixPath": PurePosixPath,
    "PureWindowsPath": PureWindowsPath,
}
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
"""All dtypes of torch, by name."""

SETS: dict[str, type[set[Any]] | type[frozenset[Any]]] = {"set": set, "frozenset": frozenset}
"""Types of sets, by the names of their nodes."""

_PLAIN_LEAVES = (bool, int, str, float, type(None))
"""Types that a slice may hold: the hashable ones that slices hold in practice."""

_MEMBERS = (
    *(type(None), bool, int, float, complex, str, bytes, range),
    *(torch.dtype, torch.Size, PurePath, np.generic, frozenset, tuple),
)
"""Types that a set may hold: their values still compare equal after a round trip."""

Encode = Callable[[object, str], tuple[dict[str, Any], list[bytes | memoryview]]]
"""A function that returns a value's tree and bytes, see ``state.encode_state``."""


def encode_value(value: object) -> Node | None:
    """Encode a value as a node.

    Returns:
        None if the type of the value, or of a part, is not one of this module's.
    """
    kind = type(value)
    if isinstance(value, complex) and kind is complex:
        return {"complex": [float.hex(value.real), float.hex(value.imag)]}
    if isinstance(value, torch.dtype):
        return {"torch.dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Size):
        return {"torch.Size": list(value)}
    if isinstance(value, range):
        numbers = [int(n) for n in (value.start, value.stop, value.step)]
        return {"range": numbers} if all(abs(n) <= LARGEST for n in numbers) else None
    if isinstance(value, slice):
        parts = [value.start, value.stop, value.step]
        if not all(type(part) in _PLAIN_LEAVES for part in parts):
            return None
        return {"slice": [_encode_leaf(part) for part in parts]}
    name = "Path" if kind is type(Path()) else kind.__name__
    if kind in (type(Path()), PurePosixPath, PureWindowsPath):
        return {name: str(value)}
    return None


def decode_value(node: Node) -> Any:
    """Decode a node.

    Raises:
        ValueError: the node is not one that ``encode_value`` makes.
    """
    ((name, content),) = check_value(node).items()
    if name == "complex":
        return complex(*map(float.fromhex, content))
    if name == "torch.dtype":
        return DTYPES[content]
    if name == "torch.Size":
        return torch.Size(content)
    if name == "range":
        return range(*content)
    if name == "slice":
        return slice(*map(_decode_leaf, content))
    return _PATHS[name](content)


def check_value(node: Node) -> Node:
    """Check that a node is one that ``encode_value`` makes; return the node.

    Raises:
        ValueError: the node is malformed.
    """
    if len(node) != 1:
        raise ValueError(f"{shown(node)} is not a node")
    ((name, content),) = node.items()
    if name == "complex":
        _parts(content, 2, as_float)
    elif name == "torch.dtype":
        if type(content) is not str or content not in DTYPES:
            raise ValueError(f"{shown(content)} is not a dtype")
    elif name == "torch.Size":
        _each(content, _as_integer)
    elif name == "range":
        _, _, step = _parts(content, 3, _as_integer)
        if not step:
            raise ValueError("a range with steps of 0")
    elif name == "slice":
        _parts(content, 3, _decode_leaf)
    elif name not in _PATHS or type(content) is not str:
        raise ValueError(f"{shown(node)} is not a node")
    return node


def readable(value: object) -> object:
    """Convert a value to JSON for people and other programs: a node, but with decimal numbers."""
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, slice):
        return {"slice": [value.start, value.stop, value.step]}
    return encode_value(value)


def as_float(text: object) -> float:
    """Parse a float from the output of ``float.hex``.

    Raises:
        ValueError: the text is malformed, or the number too large.
    """
    if type(text) is not str or len(text) > 64:
        raise ValueError(f"{shown(text)} is not a number")
    try:
        return float.fromhex(text)
    except OverflowError:
        raise ValueError(f"{shown(text)} is too large a number") from None


def sorted_members(members: Collection[Any], path: str, encode: Encode) -> list[Any]:
    """Sort a set's members, of mixed types perhaps, in the same order in every process.

    Args:
        path: the set's name in errors.

    Raises:
        UnsupportedState: a member may not compare equal after a round trip.
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
    """Make a set from decoded members.

    Raises:
        CorruptCheckpoint: a member is unhashable or a duplicate.
    """
    try:
        found = kind(members)
    except TypeError as error:
        raise CorruptCheckpoint(f"state tree: a set has a member of {error}") from None
    if len(found) != len(members):
        raise CorruptCheckpoint(f"state tree: {len(members)} members make a set of {len(found)}")
    return found


def _encode_leaf(value: Any) -> Node:
    return {"f": float.hex(value)} if type(value) is float else {"v": value}


def _decode_leaf(node: object) -> Any:
    if type(node) is dict and len(node) == 1:
        ((letter, content),) = node.items()
        if letter == "f":
            return as_float(content)
        if letter == "v" and type(content) in (bool, int, str, type(None)):
            return content
    raise ValueError(f"{shown(node)} is not a part of a slice")


def _each(content: object, check: Any) -> list[Any]:
    if type(content) is not list:
        raise ValueError(f"{shown(content)} is not a list")
    return [check(item) for item in content]


def _parts(content: object, count: int, check: Any) -> list[Any]:
    parts = _each(content, check)
    if len(parts) != count:
        raise ValueError(f"{shown(content)} are not {count} parts")
    return parts


def _as_integer(value: object) -> int:
    if type(value) is not int or abs(value) > LARGEST:
        raise ValueError(f"{shown(value)} is not an integer up to {LARGEST}")
    return value


def _require_members(members: Iterable[Any], path: str) -> None:
    for member in members:
        if not isinstance(member, _MEMBERS):
            raise UnsupportedState(
                f"{path} is a set with a {type(member).__qualname__}, which may not compare "
                "equal after a restore: keep it in a list, or let state_dict() return its values"
            )
        if type(member) is tuple:
            _require_members(member, path)
