"""Encode small Python values of a state as JSON nodes, without pickle.

Complex numbers, dtypes, devices, sizes, ranges, slices, paths, dates, times and members of
enumerations each become a node of one field, named after the type, and decode to exactly that type.
Sets become lists of nodes in an order that is the same in every process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from enum import Enum
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from reprlib import repr as shown
from typing import Any

import numpy as np
import torch

from torchrec_checknrun.errors import CorruptCheckpoint, UnsupportedState
from torchrec_checknrun.values.limits import LARGEST
from torchrec_checknrun.values.members import MEMBER, AbsentMember, decode_member, encode_member

Node = dict[str, Any]

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
    *(torch.dtype, torch.device, torch.Size, PurePath, np.generic, frozenset, tuple),
    *(date, time, timedelta, Enum, AbsentMember),
)
"""Types that a set may hold: their values still compare equal after a round trip."""

Encode = Callable[[object, str], tuple[dict[str, Any], list[bytes | memoryview]]]
"""A function that returns a value's tree and bytes, see ``state.encode_state``."""


@dataclass(frozen=True)
class _Form:
    """The form of one type's values in a node.

    Attributes:
        kind: the type; its subclasses have no form.
        encode: returns the content of a value's node; None: this value has no form.
        decode: returns the value; raises ``ValueError`` if the content is malformed.
    """

    kind: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def encode_value(value: object) -> Node | None:
    """Encode a value as a node.

    Returns:
        None if the type of the value, or of a part, is not one of this module's.
    """
    name = MEMBER if isinstance(value, (Enum, AbsentMember)) else _NAMES.get(type(value))
    content = None if name is None else _FORMS[name].encode(value)
    return None if name is None or content is None else {name: content}


def decode_value(node: Node) -> Any:
    """Decode a node.

    Raises:
        ValueError: the node is not one that ``encode_value`` makes.
    """
    if len(node) != 1:
        raise ValueError(f"{shown(node)} is not a node")
    ((name, content),) = node.items()
    if name not in _FORMS:
        raise ValueError(f"{shown(node)} is not a node")
    return _FORMS[name].decode(content)


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


def _encode_slice(value: slice) -> list[Node] | None:
    parts = [value.start, value.stop, value.step]
    plain = all(type(part) in _PLAIN_LEAVES for part in parts)
    return [_encode_leaf(part) for part in parts] if plain else None


def _encode_range(value: range) -> list[int] | None:
    numbers = [int(n) for n in (value.start, value.stop, value.step)]
    return numbers if all(abs(n) <= LARGEST for n in numbers) else None


def _decode_range(content: object) -> range:
    start, stop, step = _parts(content, 3, _as_integer)
    if not step:
        raise ValueError("a range with steps of 0")
    return range(start, stop, step)


def _decode_dtype(content: object) -> torch.dtype:
    if type(content) is not str or content not in DTYPES:
        raise ValueError(f"{shown(content)} is not a dtype")
    return DTYPES[content]


def _decode_device(content: object) -> torch.device:
    if type(content) is not str or not _DEVICE.fullmatch(content):
        raise ValueError(f"{shown(content)} is not a device")
    try:
        return torch.device(content)
    except RuntimeError:
        raise ValueError(f"{shown(content)} is not a device of this torch") from None


def _encode_time(value: datetime | time) -> str | None:
    # Another zone's offset, and which of two equal times is meant, depend on a database. Python
    # reads no offset of less than a second.
    plain = type(value.tzinfo) in (type(None), timezone) and not value.fold
    offset = value.utcoffset() if plain else None
    whole = not (offset and offset % timedelta(minutes=1))
    return value.isoformat() if plain and whole else None


def _decode_time(kind: type[datetime] | type[date] | type[time]) -> Callable[[Any], Any]:
    def decode(content: object) -> Any:
        if type(content) is not str or len(content) > 64:
            raise ValueError(f"{shown(content)} is not a {kind.__name__}")
        return kind.fromisoformat(content)

    return decode


def _decode_timedelta(content: object) -> timedelta:
    try:
        return timedelta(*_parts(content, 3, _as_integer))
    except OverflowError:
        raise ValueError(f"{shown(content)} is too long a time") from None


def _decode_path(kind: type[PurePath]) -> Callable[[Any], PurePath]:
    def decode(content: object) -> PurePath:
        if type(content) is not str:
            raise ValueError(f"{shown(content)} is not a path")
        return kind(content)

    return decode


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


_DEVICE = re.compile(r"[a-z]{1,32}(:[0-9]{1,3})?")
_FORMS = {
    "complex": _Form(
        complex,
        lambda value: [float.hex(value.real), float.hex(value.imag)],
        lambda content: complex(*_parts(content, 2, as_float)),
    ),
    "torch.dtype": _Form(
        torch.dtype, lambda value: str(value).removeprefix("torch."), _decode_dtype
    ),
    "torch.device": _Form(torch.device, str, _decode_device),
    "torch.Size": _Form(torch.Size, list, lambda content: torch.Size(_each(content, _as_integer))),
    "range": _Form(range, _encode_range, _decode_range),
    "slice": _Form(slice, _encode_slice, lambda content: slice(*_parts(content, 3, _decode_leaf))),
    "datetime": _Form(datetime, _encode_time, _decode_time(datetime)),
    "date": _Form(date, date.isoformat, _decode_time(date)),
    "time": _Form(time, _encode_time, _decode_time(time)),
    "timedelta": _Form(
        timedelta, lambda value: [value.days, value.seconds, value.microseconds], _decode_timedelta
    ),
    "Path": _Form(type(Path()), str, _decode_path(Path)),
    "PurePosixPath": _Form(PurePosixPath, str, _decode_path(PurePosixPath)),
    "PureWindowsPath": _Form(PureWindowsPath, str, _decode_path(PureWindowsPath)),
    MEMBER: _Form(Enum, encode_member, decode_member),
}
"""The forms by the names of their nodes."""
_NAMES = {form.kind: name for name, form in _FORMS.items()}


def _require_members(members: Iterable[Any], path: str) -> None:
    for member in members:
        if not isinstance(member, _MEMBERS):
            raise UnsupportedState(
                f"{path} is a set with a {type(member).__qualname__}, which may not compare "
                "equal after a restore: keep it in a list, or let state_dict() return its values"
            )
        if type(member) is tuple:
            _require_members(member, path)
