"""State objects as bytes without pickle: a JSON tree of containers, and the tensors' raw bytes.

Everything that isn't a row of a sharded table goes this way: dense parameters, dense optimizers,
readers, progress. The tree stands in the chunk index, so shapes are known before data is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from torchrec_checknrun.errors import CorruptCheckpoint, IncompatibleCheckpoint, UnsupportedState
from torchrec_checknrun.format.plain_values import (
    DTYPES,
    SETS,
    decode_value,
    encode_value,
    set_of,
    sorted_members,
)
from torchrec_checknrun.placements import dtype_of

Tree = dict[str, Any]
"""One node: its type's letter, and what that needs; see ``_Encoder``."""

_ALIGN = 64
MOST_DEPTH = 100
"""Of containers in containers: what is deeper can't be read on every stack."""
MOST_DIMENSIONS = 32
"""Of a tensor or an array."""
SHARDED = (ShardedTensor, DTensor)
TORCH_DTYPES = {name: dtype for name, dtype in DTYPES.items() if not name.startswith("q")}
"""Of tensors that can be stored, by name."""
_NUMPY_KINDS = "biufc"


def encode_state(value: object, name: str) -> tuple[Tree, list[bytes | memoryview]]:
    """The tree of a state dict, and the pieces of payload that its leaves point into, in order.

    Args:
        value: tensors, numpy arrays and scalars, bytes, str, int, float, complex, bool, None,
            ``torch.dtype``, ``torch.Size``, paths, ranges, slices, and list, tuple, set, frozenset
            or dict (keys str or int) of them. Sets are stored in sorted order.
        name: what errors call the object.

    Raises:
        UnsupportedState: anything else is in there; names the key.
    """
    encoder = _Encoder()
    tree = encoder.node(value, name)
    return tree, encoder.pieces


class _Encoder:
    def __init__(self) -> None:
        self.pieces: list[bytes | memoryview] = []
        self._size = 0

    def node(self, value: object, path: str, depth: int = 0) -> Tree:
        kind = type(value)
        if depth > MOST_DEPTH:
            raise UnsupportedState(
                f"{path} is nested more than {MOST_DEPTH} deep, or contains itself: let "
                "state_dict() return something flatter"
            )
        if value is None or kind in (bool, int, str):
            return {"v": value}
        if isinstance(value, float) and kind is float:
            return {"f": float.hex(value)}
        if isinstance(value, dict):
            return {
                "d": [
                    [self._key(k, path), self.node(v, f"{path}.{k}", depth + 1)]
                    for k, v in value.items()
                ]
            }
        if isinstance(value, (list, tuple)) and kind in (list, tuple):
            letter = "l" if kind is list else "t"
            return {letter: [self.node(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]}
        if isinstance(value, (set, frozenset)) and kind in (set, frozenset):
            members = sorted_members(value, path, encode_state)
            nodes = [self.node(v, f"{path}{{}}", depth + 1) for v in members]
            return {kind.__name__: nodes}
        dimensions = getattr(value, "ndim", 0)
        if isinstance(dimensions, int) and dimensions > MOST_DIMENSIONS:
            raise UnsupportedState(
                f"{path} has {dimensions} dimensions; {MOST_DIMENSIONS} can be stored: flatten it"
            )
        if isinstance(value, bytes) and kind is bytes:
            return {"b": self._add(value)}
        if isinstance(value, torch.Tensor) and kind in (torch.Tensor, torch.nn.Parameter):
            return self._tensor(value, path)
        if (
            isinstance(value, (np.ndarray, np.generic))
            and not isinstance(value, np.ma.MaskedArray)
            and value.dtype.kind in _NUMPY_KINDS
        ):
            array = np.asarray(value)
            array = array.astype(array.dtype.newbyteorder("<"))
            return {
                "n": self._add(array.tobytes()),
                "dtype": array.dtype.str,
                "shape": list(np.shape(value)),
                "scalar": isinstance(value, np.generic),
            }
        if (node := encode_value(value)) is not None:
            return node
        raise UnsupportedState(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which can't be stored without "
            "pickle: let state_dict() return tensors, numpy arrays, bytes, str, int, float, "
            "complex, bool, None, torch.dtype, torch.Size, paths, ranges, slices (of numbers), or "
            "list, tuple, dict, set of them"
        )

    def _key(self, key: object, path: str) -> str | int:
        if type(key) is str or type(key) is int:
            return key
        raise UnsupportedState(f"{path} has the key {key!r}: dict keys must be str or int")

    def _tensor(self, tensor: torch.Tensor, path: str) -> Tree:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout != torch.strided or tensor.is_meta or dtype not in TORCH_DTYPES:
            raise UnsupportedState(
                f"{path} is a {tensor.layout} {tensor.dtype} tensor on {tensor.device}: only dense "
                "tensors with data can be stored"
            )
        return {"x": self._add(raw_bytes(tensor)), "dtype": dtype, "shape": list(tensor.shape)}

    def _add(self, data: bytes | memoryview) -> list[int]:
        padding = -self._size % _ALIGN
        if padding:
            self.pieces.append(bytes(padding))
        offset = self._size + padding
        self.pieces.append(data)
        length = len(data) if isinstance(data, bytes) else data.nbytes
        self._size = offset + length
        return [offset, length]


def are_convertible(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Tell whether values of one dtype are restored into another: the same, or both are floats."""
    return saved == wanted or (saved.is_floating_point and wanted.is_floating_point)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes; no copy of one that is contiguous in CPU memory."""
    if tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_cpu:
        return np.ascontiguousarray(tensor.detach().numpy()).data  # bytes already
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # Of a single element PyTorch takes any stride for contiguous, but not for a view.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data


def decode_state(tree: Tree, payload: bytes | memoryview) -> Any:
    """The value again; tensors and arrays are on the CPU and own their memory.

    Raises:
        CorruptCheckpoint: the tree is malformed or points outside the payload.
    """
    return _visit(tree, lambda node: _leaf(node, memoryview(payload)))


def tree_items(tree: Tree | None) -> dict[str | int, Tree]:
    """The nodes of a dict's items, by key; empty if the tree is no dict."""
    if not isinstance(tree, dict):
        return {}
    return {_require_key(key): node for key, node in tree.get("d", [])}


def tree_values(tree: Tree | None) -> list[Tree]:
    """The nodes of a list's or tuple's elements; empty if the tree is none."""
    nodes = (tree.get("l") or tree.get("t")) if isinstance(tree, dict) else None
    return list(nodes or [])


def empty_state(tree: Tree) -> Any:
    """A value of that structure: tensors of its shapes and dtypes with zeros, other leaves None."""

    def zeros(node: Tree) -> torch.Tensor | None:
        dtype = TORCH_DTYPES.get(node.get("dtype", "")) if "x" in node else None
        return None if dtype is None else torch.zeros(node["shape"], dtype=dtype, device="cpu")

    return _visit(tree, zeros)


def _visit(node: Tree, leaf: Callable[[Tree], Any]) -> Any:
    if not isinstance(node, dict):
        raise CorruptCheckpoint(f"state tree: expected a node, found {type(node).__name__}")
    if "d" in node:
        return {_require_key(k): _visit(v, leaf) for k, v in node["d"]}
    if "l" in node:
        return [_visit(v, leaf) for v in node["l"]]
    if "t" in node:
        return tuple(_visit(v, leaf) for v in node["t"])
    for name, kind in SETS.items():
        if name in node:
            return set_of([_visit(v, leaf) for v in node[name]], kind)
    return leaf(node)


def _require_key(key: object) -> str | int:
    if type(key) is str or type(key) is int:
        return key
    raise CorruptCheckpoint(f"state tree: dict key {key!r} is neither str nor int")


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
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)
    if "n" in node:
        np_dtype = np.dtype(node["dtype"])
        data = _slice(payload, node["n"])
        if np_dtype.kind not in _NUMPY_KINDS or math.prod(node["shape"]) * np_dtype.itemsize != len(
            data
        ):
            raise CorruptCheckpoint(f"state tree: {len(data)} bytes don't make {node}")
        array = np.frombuffer(bytes(data), np_dtype).reshape(node["shape"]).copy()
        return array[()] if node["scalar"] else array
    try:
        return decode_value(node)
    except ValueError as error:
        raise CorruptCheckpoint(f"state tree: {error}") from error


def _slice(payload: memoryview, span: list[int]) -> memoryview:
    offset, length = span
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise CorruptCheckpoint(f"state tree: {span} is no offset and length")
    if offset + length > len(payload):
        raise CorruptCheckpoint(f"state tree: {span} lies outside the {len(payload)} bytes stored")
    return payload[offset : offset + length]


def is_sharded(value: object) -> bool:
    """Tell whether a state-dict leaf is a table, its optimizer state or another sharded tensor."""
    return isinstance(value, SHARDED)


def never(_: object) -> bool:
    """Tell of any key that it is no table's."""
    return False


def check_state(
    current: object,
    tree: Tree,
    path: str,
    covered: Callable[[object], bool],
    of_table: Callable[[object], bool] = never,
    exact: bool = False,
) -> None:
    """Refuses a saved tree that doesn't fit the live object, before anything is changed.

    A dict that has lost keys, or a tensor of another shape or dtype, doesn't fit, but that one type
    of float is converted into another. Keys that only
    the checkpoint has are fine, unless ``exact``: some objects create their state late. So are
    lists of another length: what an object keeps in a list may be more at one time than at another.

    Args:
        covered: tells leaves of ``current`` that are restored as table rows.
        of_table: tells keys of a table, under which an optimizer keeps what is not rows (its step
            counter): that depends on the table's sharding, and what is missing stays as it is.

    Raises:
        IncompatibleCheckpoint: names the key, saved and wanted.
    """
    if isinstance(current, dict) and "d" in tree:
        saved = tree_items(tree)
        for key, value in current.items():
            if key in saved:
                if of_table(key) and isinstance(value, dict) and "d" in saved[key]:
                    known = tree_items(saved[key])
                    value = {k: v for k, v in value.items() if k in known}
                    check_state(value, saved[key], f"{path}.{key}", covered, of_table)
                else:
                    check_state(value, saved[key], f"{path}.{key}", covered, of_table, exact)
            elif not of_table(key) and not _all_covered(value, covered):
                raise IncompatibleCheckpoint(
                    f"{path}.{key} is not in the checkpoint, which has {_some(saved)}: restore "
                    "with the model and state objects it was saved with, or start a fresh run"
                )
        extra = [key for key in saved.keys() - current.keys() if not of_table(key)]
        if exact and extra:
            raise IncompatibleCheckpoint(
                f"{path}.{extra[0]} is in the checkpoint only; the model's has {_some(current)}: "
                "restore with the state objects (the optimizer) it was saved with"
            )
    elif isinstance(current, (list, tuple)):
        items = tree_values(tree)
        for i, value in enumerate(current if len(items) == len(current) else ()):
            check_state(value, items[i], f"{path}[{i}]", covered, of_table, exact)
    elif isinstance(current, torch.Tensor) and (
        not covered(current) or ("x" in tree and isinstance(current, SHARDED))
    ):
        wanted = f"{str(dtype_of(current)).removeprefix('torch.')} {list(current.shape)}"
        found = f"{tree['dtype']} {tree['shape']}" if "x" in tree else f"no tensor ({sorted(tree)})"
        if "x" not in tree or not _fits(current, TORCH_DTYPES.get(tree["dtype"]), tree["shape"]):
            raise IncompatibleCheckpoint(
                f"{path}: the checkpoint has {found}, the model wants {wanted}: build the model as "
                "it was when the checkpoint was saved"
            )


def _all_covered(value: object, covered: Callable[[object], bool]) -> bool:
    if isinstance(value, dict):
        return all(_all_covered(v, covered) for v in value.values())
    return covered(value)


def _some(saved: Mapping[Any, object]) -> str:
    names = [str(key) for key in saved]
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "nothing there"


def common_state(current: Any, saved: Any, path: str, skipped: list[str]) -> Any:
    """What of ``saved`` fits a live state dict, for restores that aren't strict.

    Args:
        skipped: gets what doesn't fit: keys only one side has, tensors of another shape or dtype.
    """
    if isinstance(current, dict) and isinstance(saved, dict):
        skipped += [f"state {path}.{key}: only in the checkpoint" for key in saved.keys() - current]
        return {
            key: common_state(current[key], value, f"{path}.{key}", skipped)
            for key, value in saved.items()
            if key in current
        }
    if isinstance(current, torch.Tensor) and not (
        isinstance(saved, torch.Tensor) and _fits(current, saved.dtype, list(saved.shape))
    ):
        skipped.append(f"state {path}: of another shape or type than the model's")
        return current
    return saved


def _fits(current: torch.Tensor, dtype: torch.dtype | None, shape: list[int]) -> bool:
    own = dtype_of(current)
    same_type = dtype is not None and (own is None or are_convertible(dtype, own))
    return same_type and list(current.shape) == shape


def merge_state(
    current: Any,
    saved: Any,
    of_table: Callable[[object], bool] = never,
    kept: Callable[[Any, Any], bool] = lambda current, _: is_sharded(current),
) -> Any:
    """Puts saved values into a live state dict, in place where it can be, and returns it.

    Live tensors keep their identity (they may be a model's parameters) and get the saved content;
    what the checkpoint doesn't have stays.

    Args:
        kept: tells live values that stay as they are, with what was saved in their place: those
            that are restored elsewhere.
    """
    if kept(current, saved):
        return current
    if isinstance(current, dict) and isinstance(saved, dict):
        for key, value in saved.items():
            if not of_table(key):
                current[key] = merge_state(current.get(key), value, of_table, kept)
            elif isinstance(known := current.get(key), dict) and isinstance(value, dict):
                merge_state(known, {k: v for k, v in value.items() if k in known}, kept=kept)
        return current
    if isinstance(current, torch.Tensor) and isinstance(saved, torch.Tensor):
        with torch.no_grad():
            current.copy_(saved)
        return current
    return _graft(current, saved, kept)


def _graft(current: Any, saved: Any, kept: Callable[[Any, Any], bool]) -> Any:
    """The saved value, with the live ones in it that are restored elsewhere."""
    if kept(current, saved):
        return current
    if isinstance(current, dict) and isinstance(saved, dict):
        found = {key: _graft(current.get(key), value, kept) for key, value in saved.items()}
        others = {k: v for k, v in current.items() if k not in found and kept(v, None)}
        return {**found, **others}
    same_kind = isinstance(saved, (list, tuple)) and type(saved) is type(current)
    if same_kind and len(saved) == len(current):
        return type(saved)(_graft(c, s, kept) for c, s in zip(current, saved, strict=True))
    if isinstance(current, torch.Tensor) and isinstance(saved, torch.Tensor):
        return saved.to(current.dtype) if are_convertible(saved.dtype, current.dtype) else saved
    return saved
