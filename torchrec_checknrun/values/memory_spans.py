"""Tell which bytes of memory some tensors take, so that another tensor's can be found among them.

Tensors of one storage needn't belong together: an optimizer that keeps all moments in one flat
buffer has those of data-parallel tables, which are stored with rows, beside those of layers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import torch


class MemorySpans:
    """The bytes that tensors take, by the storages that these are in.

    Args:
        tensors: dense tensors with memory; empty ones take none.

    Attributes:
        storages: the addresses of these storages.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._spans: dict[int, list[tuple[int, int]]] = {}
        self._merged: dict[int, list[tuple[int, int]]] = {}
        for tensor in tensors:
            if tensor.numel():
                storage = tensor.untyped_storage().data_ptr()
                self._spans.setdefault(storage, []).append(_span(tensor))
        self.storages = self._spans.keys()

    def cover(self, tensor: torch.Tensor) -> bool:
        """Return whether all bytes of a tensor with memory are those of the tensors."""
        storage = tensor.untyped_storage().data_ptr()
        if storage not in self._spans:
            return False
        if storage not in self._merged:
            self._merged[storage] = _merged(self._spans[storage])
        spans = self._merged[storage]
        start, end = _span(tensor)
        at = bisect_right(spans, start, key=_start) - 1
        return at >= 0 and end <= spans[at][1]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte, and behind its last one."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in strides)
    return start, start + (last + 1) * tensor.element_size()


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
