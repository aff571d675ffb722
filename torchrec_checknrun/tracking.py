"""Which rows training has changed: one byte per row, one bit per consumer.

A row is marked when the backward pass reaches its kernel, where the fused optimizer updates it. A
mark set in the forward pass, as in the paper (Check-N-Run, section 4.1), would be lost with
pipelines that look the next batch up before the current one is applied, and evaluation would mark
rows that nothing changes. Marking stores a constant at the looked-up ids: no atomics, no growth.
"""

from __future__ import annotations

import logging
from enum import IntFlag

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_checknrun.shards import Kernel

logger = logging.getLogger(__name__)


class Consumer(IntFlag):
    """Who asks which rows were modified; each has its own bit and clears only that."""

    LAST = 1
    """Since the last checkpoint."""
    BASELINE = 2
    """Since the last full checkpoint."""
    USER = 4
    """Free for whoever uses ``track`` without a Checkpointer."""

    EVERY = 255


class Marks:
    """The mark bytes of one local shard, on the device of its weight."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows = rows
        # One byte more than rows: pruned lookups (id -1 on a GPU) are marked there, for nobody.
        self._bytes = torch.zeros(rows + 1, dtype=torch.uint8, device=device)

    def mark(self, ids: torch.Tensor) -> None:
        """Marks shard-local ``ids`` (any integer dtype, in any order, repeated or not)."""
        if ids.numel() == 0 or self.rows == 0:
            return
        if ids.is_cuda or ids.dtype != torch.int64:
            # FBGEMM corrects ids it finds out of range to row 0, but in its own int64 copy.
            ids = ids.to(torch.int64)
            ids = torch.where(
                ids == -1, self.rows, torch.where((ids < 0) | (ids >= self.rows), 0, ids)
            )
        self._bytes.index_fill_(0, ids, int(Consumer.EVERY))

    def mark_all(self) -> None:
        self._bytes.fill_(int(Consumer.EVERY))

    def add(self, ids: torch.Tensor, consumer: Consumer) -> None:
        """Marks sorted distinct local ``ids`` for one consumer only."""
        ids = ids.to(self._bytes.device)
        self._bytes[ids] = self._bytes[ids] | int(consumer)

    def modified(self, consumer: Consumer) -> torch.Tensor:
        """A copy of the consumer's marks, ``(rows,)`` bool."""
        return torch.bitwise_and(self._bytes[: self.rows], int(consumer)) != 0

    def clear(self, consumer: Consumer) -> None:
        self._bytes.bitwise_and_(int(Consumer.EVERY & ~consumer))

    def merge(self, modified: torch.Tensor, consumer: Consumer) -> None:
        """Marks again what ``modified`` (from ``modified()``) says, beside what is marked now."""
        self._bytes[: self.rows].bitwise_or_(modified.to(torch.uint8) * int(consumer))


class KernelHook:
    """Marks the rows of one kernel as its backward passes come by."""

    def __init__(self, kernel: Kernel, marks: list[Marks]) -> None:
        self._kernel = kernel
        self._marks = marks
        self._warned = False
        self._handle = kernel.module.register_forward_hook(self._after_forward)

    def remove(self) -> None:
        self._handle.remove()

    def _after_forward(
        self, module: nn.Module, args: tuple[KeyedJaggedTensor, ...], out: torch.Tensor
    ) -> None:
        if not out.requires_grad:
            return  # evaluation: nothing will be updated
        features = args[0]
        # Both are at hand already (the kernel has just used them): no device synchronisation.
        values, offsets = features.values(), features.offset_per_key()
        out.register_hook(lambda _grad: self._at_backward(values, offsets))

    def _at_backward(self, values: torch.Tensor, offsets: list[int]) -> None:
        if self._kernel.touches_other_rows:
            self._mark_all()
            return
        for feature, shard in enumerate(self._kernel.feature_to_shard):
            self._marks[shard].mark(values[offsets[feature] : offsets[feature + 1]])

    def _mark_all(self) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "optimizer %s may change rows that were not looked up: all rows of %s count as "
                "modified after every step, and differential checkpoints save nothing there",
                self._kernel.module._emb_module.optimizer,
                [shard.table for shard in self._kernel.shards],
            )
        for marks in self._marks:
            marks.mark_all()
