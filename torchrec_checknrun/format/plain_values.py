"""Python values that states hold beside numbers, texts and containers, as JSON: never as pickle.

Each becomes a node of one field, named after its type, and comes back as exactly that type.
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
from torchrec_checknrun.format.checks import LARGEST, list_of

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
"""All that torch has, by name."""
_PLAIN_LEAVES = (bool, int, str, float, type(None))


def encode_value(value: object) -> Node | None:
    """Make a value a node.

    Returns:
        None if it is of a type that is not stored here, or has parts that are not.
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
        members = [value.start, value.stop, value.step]
        if not all(_is_member(member) for member in members):
            return None
        return {"slice": [_encode_leaf(member) for member in members]}
    name = "Path" if kind is type(Path()) else kind.__name__
    if kind in (type(Path()), PurePosixPath, PureWindowsPath):
        return {name: str(value)}
    return None


def decode_value(node: Node) -> Any:
    """Make a node a value again.

    Raises:
        ValueError: it is no node of these types.
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
    """Return a node that ``encode_value`` makes.

    Raises:
        ValueError: it is another one.
    """
    if len(node) != 1:
        raise ValueError(f"{shown(node)} is no node")
    ((name, content),) = node.items()
    if name == "complex":
        _parts(content, 2, as_float)
    elif name == "torch.dtype":
        if type(content) is not str or content not in DTYPES:
            raise ValueError(f"{shown(content)} is no dtype")
    elif name == "torch.Size":
        list_of(_as_integer)(content)
    elif name == "range":
        _, _, step = _parts(content, 3, _as_integer)
        if not step:
            raise ValueError("a range of steps of 0")
    elif name == "slice":
        _parts(content, 3, _decode_leaf)
    elif name not in _PATHS or type(content) is not str:
        raise ValueError(f"{shown(node)} is no node")
    return node


def readable(value: object) -> object:
    """Show a value in JSON for people and other programs: as a node, but with plain numbers."""
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, slice):
        return {"slice": [value.start, value.stop, value.step]}
    return encode_value(value)


def _is_member(value: object) -> bool:
    """Whether a slice may hold it: what most slices do, and what is hashable."""
    return type(value) in _PLAIN_LEAVES


def _encode_leaf(value: Any) -> Node:
    return {"f": float.hex(value)} if type(value) is float else {"v": value}


def _decode_leaf(node: object) -> Any:
    if type(node) is dict and len(node) == 1:
        ((letter, content),) = node.items()
        if letter == "f":
            return as_float(content)
        if letter == "v" and type(content) in (bool, int, str, type(None)):
            return content
    raise ValueError(f"{shown(node)} is no part of a slice")


def _parts(content: object, count: int, check: Any) -> list[Any]:
    parts = list_of(check)(content)
    if len(parts) != count:
        raise ValueError(f"{shown(content)} are not {count} parts")
    return parts


def _as_integer(value: object) -> int:
    if type(value) is not int or abs(value) > LARGEST:
        raise ValueError(f"{shown(value)} is no integer up to {LARGEST}")
    return value


def as_float(text: object) -> float:
    """Read a float as ``float.hex`` has written it.

    Raises:
        ValueError: it is none, or too large.
    """
    if type(text) is not str or len(text) > 64:
        raise ValueError(f"{shown(text)} is no number")
    try:
        return float.fromhex(text)
    except OverflowError:
        raise ValueError(f"{shown(text)} is too large a number") from None


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
