"""Check a stored state's tree before decoding: depth, types and bytes; search live state dicts.

Decoding a checked tree allocates at most a small multiple of the bytes of payload and index: every
leaf has bytes of its own, exactly as many as its shape and dtype imply.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable
from reprlib import repr as shown
from typing import Any

import numpy as np

from torchrec_checknrun.format.checks import Count, Record, typed
from torchrec_checknrun.format.chunk import Path
from torchrec_checknrun.values.dicts import KIND, is_kind
from torchrec_checknrun.values.keys import decode_key
from torchrec_checknrun.values.limits import LARGEST
from torchrec_checknrun.values.plain_values import SETS, as_float, decode_value
from torchrec_checknrun.values.state import MOST_DEPTH, MOST_DIMENSIONS, TORCH_DTYPES
from torchrec_checknrun.values.tensor_bytes import is_order

_NUMPY_DTYPE = re.compile(r"[<|]([biufc][0-9]{1,2}|[SU][0-9]{1,9}|[mM]8(\[[0-9a-zA-Z]{1,12}\])?)")
_HEX_FLOAT = re.compile(r"[-+]?(0x[01]\.[0-9a-f]{1,13}p[-+][0-9]{1,4}|inf|nan)")


def check_tree(tree: object, length: int) -> None:
    """Refuse a tree that ``state.encode_state`` would not make.

    Args:
        length: bytes of the payload that the tree points into.

    Raises:
        ValueError: names the defect.
    """
    end = _check(tree, 0, 0)
    if end > length:
        raise ValueError(f"a leaf ends at byte {end} of {length}")


def _check(node: object, end: int, depth: int) -> int:
    """Check a node; return the offset where the bytes of its last leaf end.

    Args:
        end: the offset where the bytes of the previous leaf ended.
    """
    if type(node) is not dict or not node:
        raise ValueError(f"{shown(node)} is not a node")
    if depth > MOST_DEPTH:
        raise ValueError(f"nested more than {MOST_DEPTH} deep")
    letter = next(iter(node))
    value = node[letter]
    if letter in ("x", "n"):
        return _check_array(node, letter, end)
    if len(node) != 1 and not _is_marked(node, letter, value):
        raise ValueError(f"{shown(node)} is not a node")
    if letter == "b":
        return _after(end, typed(node, _Bytes).b)
    if letter == "v" and (value is None or type(value) in (bool, int, str)):
        return end
    if letter == "f" and type(value) is str and _HEX_FLOAT.fullmatch(value):
        as_float(value)
        return end
    if letter in ("l", "t", "d", *SETS) and type(value) is list:
        return _check_container(letter, value, end, depth + 1)
    decode_value(node)
    return end


def _is_marked(node: dict[str, Any], letter: str, value: object) -> bool:
    """Return whether a node is a dict with a mark of its own, or a deque."""
    if letter == "d":
        of_kind = node.keys() == {"d", KIND} and is_kind(node[KIND])
        return of_kind or node == {"d": value, "whole": True}
    most = node.get("maxlen", 0)
    fits = most is None or (type(most) is int and type(value) is list and most >= len(value))
    return letter == "l" and node.keys() == {"l", "maxlen"} and fits


def _check_container(letter: str, items: list[Any], end: int, depth: int) -> int:
    """Check the items of a list, tuple, set or dict; return as ``_check``."""
    keys = set()
    for item in items:
        node = item
        if letter == "d":
            if type(item) is not list or len(item) != 2:
                raise ValueError(f"{shown(item)} is not a key with a node")
            key = item[0] if type(item[0]) in (str, int) else decode_key(item[0])
            if key in keys:
                raise ValueError(f"the key {shown(key)} appears twice")
            keys.add(key)
            node = item[1]
        end = _check(node, end, depth)
        if letter in SETS:
            _check_member(node)
    return end


def _check_member(node: dict[str, Any]) -> None:
    """Refuse a node that no set can hold: members are hashable and compare equal when decoded."""
    letter = next(iter(node))
    if letter in ("l", "d", "x", "set", "slice") or (letter == "n" and node["scalar"] is False):
        raise ValueError(f"a set has {shown(node)} as a member, which has no hash")
    for item in node["t"] if letter == "t" else ():
        _check_member(item)


class _Span(Record, frozen=True, array_like=True):
    """A leaf's place in the payload."""

    offset: Count
    length: Count


class _Tensor(Record, frozen=True):
    """A node of a tensor."""

    x: _Span
    dtype: str
    shape: tuple[Count, ...]
    strides: tuple[Count, ...] | None = None


class _Array(Record, frozen=True):
    """A node of a NumPy array, or of a scalar."""

    n: _Span
    dtype: str
    shape: tuple[Count, ...]
    scalar: bool
    strides: tuple[Count, ...] | None = None


class _Bytes(Record, frozen=True):
    """A node of bytes."""

    b: _Span


def _check_array(node: dict[str, Any], letter: str, end: int) -> int:
    leaf = typed(node, _Tensor) if letter == "x" else typed(node, _Array)
    shape, span = leaf.shape, leaf.x if isinstance(leaf, _Tensor) else leaf.n
    if len(shape) > MOST_DIMENSIONS or math.prod(n for n in shape if n) > LARGEST:
        raise ValueError(f"the shape {shown(shape)} is too large")
    if leaf.strides is not None and not is_order(shape, leaf.strides):
        raise ValueError(f"{shown(leaf.strides)} are no strides of {shown(shape)}")
    stop = _after(end, span)
    size = math.prod(shape) * _item_bytes(letter, leaf.dtype)
    if size != span.length:
        raise ValueError(
            f"{shown(shape)} of {shown(leaf.dtype)} take {size} bytes, not {span.length}"
        )
    return stop


def _item_bytes(letter: str, dtype: str) -> int:
    if letter == "x" and dtype in TORCH_DTYPES:
        return TORCH_DTYPES[dtype].itemsize
    if letter == "n" and _NUMPY_DTYPE.fullmatch(dtype):
        try:
            return np.dtype(dtype).itemsize
        except TypeError:
            pass
    raise ValueError(f"{shown(dtype)} is not a dtype that is stored")


def _after(end: int, span: _Span) -> int:
    """Return the offset where a leaf's bytes end. Leaves come in the order of their bytes, so that
    no two share any.
    """
    if span.offset < end:
        raise ValueError(f"a leaf begins at byte {span.offset}, but the previous one ends at {end}")
    return span.offset + span.length


def leaves(value: Any, kinds: tuple[type, ...], path: Path = ()) -> list[tuple[Path, Any]]:
    """Find the values of given types in a live state dict, each with the keys that lead to it."""
    found: list[tuple[Path, Any]] = []
    _collect(value, kinds, (*_CONTAINERS, *kinds), path, found)
    return found


_CONTAINERS = (dict, list, tuple, deque)


def _collect(
    value: Any,
    kinds: tuple[type, ...],
    looked_at: tuple[type, ...],
    path: Path,
    found: list[tuple[Path, Any]],
) -> None:
    if isinstance(value, kinds):
        found.append((path, value))
        return
    items: Iterable[tuple[Any, Any]] = ()
    if len(path) <= MOST_DEPTH:
        if isinstance(value, dict):
            items = value.items()
        elif type(value) in (list, tuple, deque):
            items = enumerate(value)
    for key, item in items:
        if isinstance(item, looked_at):
            _collect(item, kinds, looked_at, (*path, key), found)
