"""Encode the keys of a state's dicts: text and whole numbers as they are, others as nodes.

Loops count by pairs, by flags, by thresholds and by phases: a tuple, a bool, None, a float or a
member of an enumeration is a key as good as a name. NumPy's scalars become Python's, which are
equal to them and have the same hash.
"""

from __future__ import annotations

from enum import Enum
from reprlib import repr as shown
from typing import Any

import numpy as np

from torchrec_checknrun.values.limits import LARGEST
from torchrec_checknrun.values.members import MEMBER, AbsentMember, decode_member, encode_member
from torchrec_checknrun.values.plain_values import as_float

MOST_NESTED = 8
"""The deepest nesting of tuples in a key."""
_OF_NUMPY = (str, int, bool, float)


def encode_key(key: object) -> str | int | dict[str, Any] | None:
    """Return a key as the tree has it; None if the key can't be stored."""
    key = _of_python(key)
    if isinstance(key, (str, int)) and type(key) in (str, int):
        return key
    return _encode(key, 0)


def decode_key(key: object) -> Any:
    """Return the key that a tree has.

    Raises:
        ValueError: ``encode_key`` makes no such key.
    """
    if isinstance(key, (str, int)) and type(key) in (str, int):
        return key
    found = _decode(key, 0)
    if type(found) in (str, int):
        raise ValueError(f"{shown(key)} is not a key")
    return found


def key_name(key: object) -> str:
    """Return a key as a part of a name; of a member, the same where a process lacks its class."""
    if isinstance(key, Enum):
        return f"{type(key).__name__}.{key._name_}"
    if isinstance(key, AbsentMember):
        return f"{key.kind.rpartition('.')[2]}.{key.member}"
    if type(key) is tuple:
        named = (Enum, AbsentMember, tuple)
        items = [key_name(item) if isinstance(item, named) else repr(item) for item in key]
        return f"({', '.join(items)}{',' * (len(items) == 1)})"
    return str(key)


def _of_python(key: object) -> object:
    """Return a scalar of NumPy's as Python's; any other key as it is."""
    if isinstance(key, np.generic) and type(key.item()) in _OF_NUMPY:
        return key.item()
    return key


def _encode(key: object, depth: int) -> dict[str, Any] | None:
    if key is None or type(key) is bool or (depth and type(key) is str):
        return {"v": key}
    if isinstance(key, int) and type(key) is int and depth and abs(key) <= LARGEST:
        return {"v": key}
    if isinstance(key, float) and type(key) is float and key == key:
        return {"f": float.hex(key)}
    if isinstance(key, tuple) and type(key) is tuple and depth < MOST_NESTED:
        items = [_encode(_of_python(item), depth + 1) for item in key]
        return None if None in items else {"t": items}
    if isinstance(key, (Enum, AbsentMember)) and (content := encode_member(key)) is not None:
        return {MEMBER: content}
    return None


def _decode(node: object, depth: int) -> Any:
    if isinstance(node, dict) and len(node) == 1 and depth <= MOST_NESTED:
        ((letter, content),) = node.items()
        if letter == "v" and (content is None or type(content) in (bool, int, str)):
            return content
        if letter == "f" and (number := as_float(content)) == number:
            return number
        if letter == "t" and isinstance(content, list):
            return tuple(_decode(item, depth + 1) for item in content)
        if letter == MEMBER:
            return decode_member(content)
    raise ValueError(f"{shown(node)} is not a key")
