"""Encode state objects without pickle: a JSON tree of containers, and the tensors' raw bytes.

All state except rows of sharded tables is stored so: dense parameters, dense optimizers, readers,
progress. The tree is part of the chunk index, so that shapes are known before any data is read.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from torchrec_checknrun.errors import CorruptCheckpoint, UnsupportedState
from torchrec_checknrun.values.configs import container_of, is_config
from torchrec_checknrun.values.dense import require_dense
from torchrec_checknrun.values.dicts import KIND, kind_of, of_kind
from torchrec_checknrun.values.keys import decode_key, encode_key
from torchrec_checknrun.values.plain_values import (
    DTYPES,
    SETS,
    decode_value,
    encode_value,
    set_of,
    sorted_members,
)
from torchrec_checknrun.values.tensor_bytes import (
    RawViews,
    array_in_order,
    is_order,
    put_in_order,
    raw_bytes,
    strides_of,
)

MOST_DEPTH = 100
"""The deepest nesting of containers: decoding recurses, and stacks are limited."""
MOST_DIMENSIONS = 32
"""The most dimensions of a tensor or an array."""
SHARDED = (ShardedTensor, DTensor)
"""Types of state-dict leaves of which each rank holds a part."""
TORCH_DTYPES = {name: dtype for name, dtype in DTYPES.items() if not name.startswith("q")}
"""Dtypes of tensors that can be stored, by name."""
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_MOST_BITS = 14284
"""The most bits of an integer: Python reads no more than 4,300 digits, unless told otherwise."""
_SHOWN_IN_TREE = frozenset({type(None), bool, int, str})
"""Types of values that the tree shows as they are."""
_ALIGN = 64
"""Bytes to which each leaf's offset in the payload is aligned."""
_ZEROS = bytes(_ALIGN)
_ARRAYS = (np.ndarray, np.memmap)
"""Types of arrays that come back as one: others (``np.matrix``) compute in ways of their own."""
_NUMPY_KINDS = "biufcSUmM"
"""Kinds of NumPy dtypes that can be stored: numbers, booleans, bytes, text, dates and times."""

Tree = dict[str, Any]
"""A node: a letter for the type, with the content; see ``_Encoder``."""


class Whole(dict[Any, Any]):
    """A state dict of which nothing was left out, and whose values need no live ones to come back:
    plain dicts, and tensors without gradients in the CPU's memory. Its tree says so.
    """


def encode_state(
    value: object, name: str, views: RawViews | None = None
) -> tuple[Tree, list[bytes | memoryview]]:
    """Encode a state dict as a tree, and the pieces of the payload that its leaves point into.

    Args:
        value: tensors, numpy arrays and scalars, bytes, str, int, float, complex, bool, None,
            ``torch.dtype``, ``torch.device``, ``torch.Size``, paths, ranges, slices, dates, times,
            members of enumerations, and list, tuple, set, frozenset, deque or dict (keys see
            ``keys``, types ``dicts``) of them. Sets are stored in sorted order.
        name: the object's name in errors.
        views: knows the bytes of tensors that were encoded before.

    Raises:
        UnsupportedState: the state holds a value of another type; names the key.
    """
    encoder = _Encoder(views)
    tree = encoder.node(value, name)
    return tree, encoder.pieces


class _Encoder:
    """Encoder of one state object.

    A node is ``{"v": value}`` for null, booleans, integers and strings, ``{"f": hex}`` for floats,
    ``{"d": [[key, node], …]}``, ``{"l": nodes}``, ``{"t": nodes}`` and ``{"set": nodes}`` for
    containers, a list's with ``maxlen`` for a deque, a dict's with ``kind`` for one of ``dicts``,
    ``{"b": span}`` for bytes, ``{"x": span, …}`` for tensors, ``{"n": span, …}`` for NumPy arrays,
    or one of ``plain_values``. A span is offset and length in the payload.
    """

    def __init__(self, views: RawViews | None) -> None:
        self.pieces: list[bytes | memoryview] = []
        self._views = views
        self._size = 0

    def node(self, value: Any, path: str, depth: int = 0) -> Tree:
        kind = type(value)
        if depth > MOST_DEPTH:
            raise UnsupportedState(
                f"{path} is nested more than {MOST_DEPTH} deep, or contains itself: let "
                "state_dict() return something flatter"
            )
        if kind in _SHOWN_IN_TREE:
            return {"v": _readable(value, path) if kind is int else value}
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return self._tensor(value, path)
        if kind is float:
            return {"f": float.hex(value)}
        if kind is dict or isinstance(value, dict):
            items = [
                [
                    k if type(k) is str else _readable_key(k, path),
                    self.node(v, f"{path}.{k}", depth + 1),
                ]
                for k, v in value.items()
            ]
            return {"d": items} if kind is dict else _marked_dict(value, items)
        return self._other(value, path, depth)

    def _other(self, value: object, path: str, depth: int) -> Tree:
        """Encode a value of a less frequent type."""
        kind = type(value)
        if isinstance(value, (list, tuple)) and kind in (list, tuple):
            letter = "l" if kind is list else "t"
            return {letter: [self.node(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]}
        if isinstance(value, deque) and kind is deque:
            return {**self._other([*value], path, depth), "maxlen": value.maxlen}
        if isinstance(value, (set, frozenset)) and kind in (set, frozenset):
            members = sorted_members(value, path, encode_state)
            nodes = [self.node(v, f"{path}{{}}", depth + 1) for v in members]
            return {kind.__name__: nodes}
        _check_dimensions(value, path)
        if isinstance(value, bytes) and kind is bytes:
            return {"b": self._add(value)}
        if (
            isinstance(value, (np.ndarray, np.generic))
            and (kind in _ARRAYS or isinstance(value, np.generic))
            and value.dtype.kind in _NUMPY_KINDS
        ):
            array = np.asarray(value)
            array = array.astype(array.dtype.newbyteorder("<"))
            shown: Tree = {
                "n": self._add(array.tobytes()),
                "dtype": array.dtype.str,
                "shape": list(np.shape(value)),
                "scalar": isinstance(value, np.generic),
            }
            return _ordered(shown, strides_of(array))
        if (node := encode_value(value)) is not None:
            return node
        if is_config(value):
            return self.node(container_of(value, path), path, depth)
        raise UnsupportedState(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which can't be stored without "
            "pickle: let state_dict() return tensors, numpy arrays, bytes, str, int, float, "
            "complex, bool, None, torch.dtype, torch.device, torch.Size, paths, ranges, slices (of "
            "numbers), dates, times, members of an enumeration that its module holds, or list, "
            "tuple, dict, set, deque of them"
        )

    def _tensor(self, tensor: torch.Tensor, path: str) -> Tree:
        views = self._views
        data = None if views is None else views.known(tensor)
        if data is None:
            _check_tensor(tensor, path)
            data = raw_bytes(tensor) if views is None else views.of(tensor)
        node = {
            "x": self._add(data),
            "dtype": _NAMES[tensor.dtype],
            "shape": [*tensor.shape],
        }
        return _ordered(node, strides_of(tensor))

    def _add(self, data: bytes | memoryview) -> list[int]:
        padding = -self._size % _ALIGN
        if padding:
            self.pieces.append(_ZEROS[:padding])
        offset = self._size + padding
        self.pieces.append(data)
        length = data.nbytes if type(data) is memoryview else len(data)
        self._size = offset + length
        return [offset, length]


def _marked_dict(value: dict[Any, Any], items: list[Any]) -> Tree:
    """Return the node of a dict that is not a plain one."""
    if type(value) is Whole:
        return {"d": items, "whole": True}
    kind = kind_of(value)
    return {"d": items} if kind is None else {"d": items, KIND: kind}


def _ordered(node: Tree, strides: list[int] | None) -> Tree:
    return node if strides is None else {**node, "strides": strides}


def _readable_key(key: object, path: str) -> str | int | Tree:
    """Return a key as the tree has it; refuse one that can't be stored."""
    found = key if type(key) is int else encode_key(key)
    if found is None:
        raise UnsupportedState(
            f"{path} has the key {key!r}: dict keys must be str, int, float, bool, None, members "
            "of an enumeration or tuples of them"
        )
    return _readable(found, f"a key of {path}") if isinstance(found, int) else found


def _readable(number: int, path: str) -> int:
    """Return an integer; refuse one that Python would write and not read, or not write."""
    if number.bit_length() > _MOST_BITS:
        raise UnsupportedState(
            f"{path} is an integer of {number.bit_length()} bits; up to {_MOST_BITS}, about 4300 "
            "digits, can be stored: let state_dict() return its bytes (int.to_bytes)"
        )
    return number


def are_convertible(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether saved values can be restored as the wanted dtype: the same, or both floats."""
    return saved == wanted or (saved.is_floating_point and wanted.is_floating_point)


def _check_tensor(tensor: torch.Tensor, path: str) -> None:
    """Refuse a tensor that can't be stored."""
    _check_dimensions(tensor, path)
    require_dense(tensor, path)
    if tensor.is_meta or tensor.dtype not in _NAMES:
        raise UnsupportedState(
            f"{path} is a {tensor.dtype} tensor on {tensor.device}: only dense tensors with data "
            "can be stored"
        )


def _check_dimensions(value: object, path: str) -> None:
    """Refuse a tensor or an array of more dimensions than readers take."""
    dimensions = getattr(value, "ndim", 0)
    if isinstance(dimensions, int) and dimensions > MOST_DIMENSIONS:
        raise UnsupportedState(
            f"{path} has {dimensions} dimensions; {MOST_DIMENSIONS} can be stored: flatten it"
        )


def decode_state(tree: Tree, payload: bytes | memoryview) -> Any:
    """Decode a value; tensors and arrays are on the CPU and own their memory.

    Raises:
        CorruptCheckpoint: the tree is malformed or points outside the payload.
    """
    return _visit(tree, lambda node: _leaf(node, memoryview(payload)))


def tree_items(tree: Tree | None) -> dict[Any, Tree]:
    """Return the nodes of a dict's items by key; an empty dict if the tree is not a dict."""
    if not isinstance(tree, dict):
        return {}
    return {_require_key(key): node for key, node in tree.get("d", [])}


def tree_values(tree: Tree | None) -> list[Tree]:
    """Return the nodes of a list's or tuple's items; an empty list if the tree is neither."""
    nodes = (tree.get("l") or tree.get("t")) if isinstance(tree, dict) else None
    return list(nodes or [])


def empty_state(tree: Tree) -> Any:
    """Build a value of a tree's structure: zeros for tensors, None for other leaves and sets."""

    def zeros(node: Tree) -> torch.Tensor | None:
        dtype = TORCH_DTYPES.get(node.get("dtype", "")) if "x" in node else None
        if dtype is None:
            return None
        return put_in_order(torch.zeros(node["shape"], dtype=dtype, device="cpu"), _strides(node))

    return _visit(tree, zeros, lambda *_: None)


def _visit(
    node: Tree, leaf: Callable[[Tree], Any], of_set: Callable[[list[Any], Any], Any] = set_of
) -> Any:
    if not isinstance(node, dict):
        raise CorruptCheckpoint(f"state tree: expected a node, found {type(node).__name__}")
    if "d" in node:
        items = {_require_key(k): _visit(v, leaf, of_set) for k, v in node["d"]}
        return of_kind(node.get(KIND), items)
    if "l" in node:
        listed = [_visit(v, leaf, of_set) for v in node["l"]]
        return deque(listed, node["maxlen"]) if "maxlen" in node else listed
    if "t" in node:
        return tuple(_visit(v, leaf, of_set) for v in node["t"])
    for name, kind in SETS.items():
        if name in node:
            return of_set([_visit(v, leaf, of_set) for v in node[name]], kind)
    return leaf(node)


def _require_key(key: object) -> Any:
    try:
        return decode_key(key)
    except ValueError as error:
        raise CorruptCheckpoint(f"state tree: {error}") from None


def _leaf(node: Tree, payload: memoryview) -> Any:
    if "v" in node:
        return node["v"]
    if "f" in node:
        return float.fromhex(node["f"])
    if "b" in node:
        return bytes(_slice(payload, node["b"]))
    if "x" in node:
        dtype, shape = TORCH_DTYPES.get(node["dtype"]), node["shape"]
        data = _slice(payload, node["x"])
        if dtype is None or math.prod(shape) * dtype.itemsize != len(data):
            raise CorruptCheckpoint(f"state tree: {len(data)} bytes don't make {node}")
        if not len(data):
            return torch.empty(shape, dtype=dtype, device="cpu")
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)
        return put_in_order(flat.reshape(shape), _strides(node))
    if "n" in node:
        np_dtype = np.dtype(node["dtype"])
        data = _slice(payload, node["n"])
        if np_dtype.kind not in _NUMPY_KINDS or math.prod(node["shape"]) * np_dtype.itemsize != len(
            data
        ):
            raise CorruptCheckpoint(f"state tree: {len(data)} bytes don't make {node}")
        array = np.frombuffer(bytes(data), np_dtype).reshape(node["shape"]).copy()
        return array[()] if node["scalar"] else array_in_order(array, _strides(node))
    try:
        return decode_value(node)
    except ValueError as error:
        raise CorruptCheckpoint(f"state tree: {error}") from error


def _strides(node: Tree) -> list[int] | None:
    strides: list[int] | None = node.get("strides")
    if strides is not None and not is_order(node["shape"], strides):
        raise CorruptCheckpoint(f"state tree: {strides} are no strides of {node['shape']}")
    return strides


def _slice(payload: memoryview, span: list[int]) -> memoryview:
    offset, length = span
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise CorruptCheckpoint(f"state tree: {span} is not an offset and a length")
    if offset + length > len(payload):
        raise CorruptCheckpoint(f"state tree: {span} lies outside the {len(payload)} bytes stored")
    return payload[offset : offset + length]


def is_sharded(value: object) -> bool:
    """Return whether a state-dict leaf is sharded: a table, its optimizer state or a tensor."""
    return isinstance(value, SHARDED)


def never(_: object) -> bool:
    """Return False: the default of predicates that recognize a table's keys."""
    return False
