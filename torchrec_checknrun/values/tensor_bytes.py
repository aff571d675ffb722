"""Read the bytes of tensors, row-major, and tell the order in memory that they have besides.

Values come back in the order that they had: sums over a column-major tensor add up its values in
another order than those over a row-major one, and may differ in their last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

_NUMPYS = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
    }
)
"""Dtypes that NumPy has as well."""


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes, without a copy if it is contiguous in CPU memory."""
    if not tensor.numel():
        return memoryview(b"")  # a view would keep it from being resized, as observers do
    if tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_cpu:
        return np.ascontiguousarray(tensor.detach().numpy()).data  # bytes already
    if _is_plain(tensor):  # most tensors; far fewer steps than below
        return tensor.detach().numpy().reshape(-1).view(np.uint8).data
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # PyTorch calls a single element contiguous whatever its stride, but refuses to view it.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data


def shows_memory(tensor: torch.Tensor) -> bool:
    """Return whether ``raw_bytes`` of a tensor are its memory, and no copy of it."""
    return tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def strides_of(value: torch.Tensor | np.ndarray) -> list[int] | None:
    """Return the strides, in values, with which a copy of a tensor or an array has its order in
    memory; None if that is row-major, as of most.
    """
    if value.ndim < 2:
        return None
    if isinstance(value, np.ndarray):
        if value.flags.c_contiguous:
            return None
        found = [step // value.itemsize for step in np.empty_like(value).strides]
    else:
        # torch calls it contiguous whatever the strides of dimensions of one value are, by which
        # convolutions tell whether channels come last.
        if value.is_contiguous() and (value.ndim < 4 or 1 not in value.shape):
            return None
        found = list(torch.empty_like(value, device="meta").stride())
    return None if found == _row_major(value.shape) or not is_order(value.shape, found) else found


def is_order(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether strides give each value of a shape a place of its own, without gaps."""
    if len(shape) != len(strides) or 0 in shape:
        return False
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return all(0 < stride <= expected for stride in strides)


def put_in_order(tensor: torch.Tensor, strides: Sequence[int] | None) -> torch.Tensor:
    """Return a tensor's values in the order in memory that ``strides_of`` has told."""
    if strides is None:
        return tensor
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def array_in_order(array: np.ndarray, strides: Sequence[int] | None) -> np.ndarray:
    """Return an array's values in the order in memory that ``strides_of`` has told."""
    if strides is None:
        return array
    outer_first = sorted(range(array.ndim), key=lambda at: -strides[at])
    return np.ascontiguousarray(array.transpose(outer_first)).transpose(np.argsort(outer_first))


def _row_major(shape: Sequence[int]) -> list[int]:
    found, stride = [], 1
    for size in reversed(shape):
        found.append(stride)
        stride *= max(size, 1)
    return found[::-1]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory is the bytes of its values, and NumPy can show it."""
    return (
        tensor.dtype in _NUMPYS
        and tensor.is_cpu
        and tensor.is_contiguous()
        and tensor.numel() > 0
        and not (tensor.is_conj() or tensor.is_neg())
    )


class _Seen(NamedTuple):
    """A tensor whose bytes were shown, with all that tells whether these are its bytes still."""

    tensor: torch.Tensor
    place: tuple[int, int]
    shape: torch.Size
    strides: tuple[int, ...]
    view: memoryview


class RawViews:
    """The bytes of a state's tensors, from one time that it is encoded to the next.

    To make a view takes longer than all else that is encoded of a small tensor. A view of the same
    memory is the same; it keeps the memory, at most until the state is encoded without it.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[int, int], _Seen] = {}
        self._now: dict[tuple[int, int], _Seen] = {}
        self._known: dict[int, _Seen] = {}
        """The views from before, by the tensor's ``id``."""

    def begin(self) -> None:
        """Begin to encode; views that nobody asked for since the last time are dropped."""
        self._before, self._now = self._now, {}
        self._known = {id(seen.tensor): seen for seen in self._before.values()}

    def known(self, tensor: torch.Tensor) -> memoryview | None:
        """Return the bytes of a tensor that is the same object as the last time, at the same place
        and of the same layout; None if it isn't.
        """
        seen = self._known.get(id(tensor))
        if (
            seen is None
            or seen.place != (tensor.data_ptr(), tensor.nbytes)
            or seen.shape != tensor.shape
            or seen.strides != tensor.stride()
        ):
            return None
        self._now[seen.place] = seen
        return seen.view

    def of(self, tensor: torch.Tensor) -> memoryview:
        """Return a tensor's bytes, as ``raw_bytes`` does."""
        if not _is_plain(tensor):
            return raw_bytes(tensor)
        place = tensor.data_ptr(), tensor.nbytes
        seen = self._before.get(place)
        view = raw_bytes(tensor) if seen is None else seen.view
        self._now[place] = _Seen(tensor, place, tensor.shape, tensor.stride(), view)
        return view
