"""Tell which bytes of memory some tensors take, so that another tensor's can be found among them.

Tensors of one storage needn't belong together: an optimizer that keeps all moments in one flat
buffer has those of data-parallel tables, which are stored with rows, beside those of layers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

import torch


class _Blocks(NamedTuple):
    """Blocks of bytes at equal distances: columns of a matrix, or one block (of a count of one)."""

    start: int
    width: int
    period: int
    number: int

    def hold(self, other: _Blocks) -> bool:
        """Return whether all bytes of other blocks are in these; of other periods none is told."""
        if other.number > 1 and other.period != self.period:
            return False
        first, inside = divmod(other.start - self.start, self.period)
        return inside + other.width <= self.width and 0 <= first <= self.number - other.number


class MemorySpans:
    """The bytes that tensors take, by the storages that these are in.

    Args:
        tensors: dense tensors with memory; empty ones take none.

    Attributes:
        storages: the addresses of these storages.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._spans: dict[int, list[tuple[int, int]]] = {}
        self._columns: dict[int, list[_Blocks]] = {}
        self._merged: dict[int, list[tuple[int, int]]] = {}
        for tensor in tensors:
            if tensor.numel():
                storage = tensor.untyped_storage().data_ptr()
                spans = self._spans.setdefault(storage, [])
                blocks = _blocks(tensor)
                if blocks is None:
                    continue
                if blocks.number == 1:
                    spans.append((blocks.start, blocks.start + blocks.width))
                else:
                    self._columns.setdefault(storage, []).append(blocks)
        self.storages = self._spans.keys()

    def cover(self, tensor: torch.Tensor) -> bool:
        """Return whether all bytes of a tensor with memory are those of the tensors.

        Columns of a matrix are found in columns of a single tensor only, and tensors with gaps of
        several sizes not at all.
        """
        storage = tensor.untyped_storage().data_ptr()
        if storage not in self._spans:
            return False
        if storage not in self._merged:
            self._merged[storage] = _merged(self._spans[storage])
        spans = self._merged[storage]
        start, end = _hull(tensor)
        at = bisect_right(spans, start, key=_start) - 1
        if at >= 0 and end <= spans[at][1]:
            return True
        columns = self._columns.get(storage, [])
        blocks = _blocks(tensor) if columns else None
        return blocks is not None and any(held.hold(blocks) for held in columns)


def _hull(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte, and behind its last one."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in strides)
    return start, start + (last + 1) * tensor.element_size()


def _blocks(tensor: torch.Tensor) -> _Blocks | None:
    """Return the bytes of a tensor as blocks; None for gaps of several sizes."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return _Blocks(start, tensor.nbytes, tensor.nbytes, 1)
    width, period, count = tensor.element_size(), 0, 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        step = stride * tensor.element_size()
        if size == 1 or step == 0:
            continue
        if count == 1 and step <= width:  # Neighbours, or windows that overlap: one block.
            width += (size - 1) * step
        elif count == 1:
            period, count = step, size
        elif step == period * count:
            count *= size
        else:
            return None
    return _Blocks(start, width, period or width, count)


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join spans that overlap or touch, in order."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _start(span: tuple[int, int]) -> int:
    return span[0]
