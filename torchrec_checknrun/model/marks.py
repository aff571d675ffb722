"""Which rows training has changed: one byte per row, one bit per consumer.

A row is marked when the backward pass reaches its kernel, where the fused optimizer updates it (and
when its id is evicted, which resets it). A mark set in the forward pass, as in the paper (Check-N-
Run, section 4.1), would be lost with pipelines that look the next batch up before the current one
is applied, and evaluation would mark rows that nothing changes. Marking stores a constant at the
looked-up ids: no atomics, no growth.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntFlag
from types import MethodType
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_checknrun.dense.gradients import has_gradient
from torchrec_checknrun.dense.optimizers import touches_other_rows, wraps_another
from torchrec_checknrun.model.hand_written import WriteWatch, announced
from torchrec_checknrun.model.kernels import Kernel
from torchrec_checknrun.row_sets import RowSet
from torchrec_checknrun.model.resets import ResetHook

logger = logging.getLogger(__name__)

_FEW_IDS = 4096
"""So many rows of a small table may wait for their optimizer as ids, however few rows it has."""


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

    @property
    def raw(self) -> torch.Tensor:
        """The mark bytes themselves, ``(rows,)`` uint8."""
        return self._bytes[: self.rows]

    def take(self, consumer: Consumer) -> RowSet:
        """The consumer's marks, taken away."""
        return RowSet(self.raw, int(consumer), take=True)

    def merge(self, taken: RowSet, consumer: Consumer) -> None:
        """Marks again what was taken, beside what is marked now."""
        for start, mask in taken.masks():
            again = torch.from_numpy(mask).to(self._bytes.device, torch.uint8) * int(consumer)
            self._bytes[start : start + len(mask)].bitwise_or_(again)


class PendingRows:
    """Rows of one local shard that the next optimizer step will change: as ids, while these are
    fewer than the shard's rows.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._ids: list[torch.Tensor] = []
        self._count = 0
        self._many: Marks | None = None

    def __bool__(self) -> bool:
        return bool(self._ids) or self._many is not None

    def add(self, ids: torch.Tensor) -> None:
        """Add shard-local ids, as ``Marks.mark`` takes them; their memory may not change."""
        self._ids.append(ids)
        self._count += max(1, ids.numel())  # a list of nothing takes memory, too
        if self._count > max(self._marks.rows, _FEW_IDS):
            if self._many is None:
                self._many = Marks(self._marks.rows, self._marks.raw.device)
            self._mark_into(self._many)

    def mark(self) -> None:
        """Mark them for every consumer, and forget them."""
        if self._many is not None:
            self._marks.raw.bitwise_or_(self._many.raw)
            self._many = None
        self._mark_into(self._marks)

    def _mark_into(self, marks: Marks) -> None:
        for ids in self._ids:
            marks.mark(ids)
        self._ids, self._count = [], 0


@dataclass(eq=False)
class Cut:
    """Marks taken away at one instant, until it is known that what they name is durable.

    Attributes:
        number: which of the tracked model's cuts it is.
        taken: by consumer, the rows of each shard, by its marks.
    """

    number: int
    taken: dict[Consumer, dict[Marks, RowSet]]

    def bytes(self, marks: Marks) -> torch.Tensor:
        """A shard's rows as its marks were, ``(rows,)`` uint8."""
        again = Marks(marks.rows, marks.raw.device)
        for consumer, taken in self.taken.items():
            if marks in taken:
                again.merge(taken[marks], consumer)
        return again.raw

    def move(self, gone: Iterable[Marks], new: Mapping[Marks, torch.Tensor]) -> None:
        """Puts such bytes of new shards in the place of old ones."""
        for consumer, taken in self.taken.items():
            for marks in gone:
                taken.pop(marks, None)
            taken |= {marks: RowSet(rows, int(consumer)) for marks, rows in new.items()}


class KernelHook:
    """Marks the rows of one kernel as its backward passes come by."""

    def __init__(self, kernel: Kernel, marks: list[Marks]) -> None:
        self.kernel = kernel
        self._marks = marks
        self._warned = False
        self.writes = WriteWatch(kernel, marks)
        """What is written to its tables beside training."""
        self._handle = kernel.module.register_forward_hook(self._after_forward)
        self._resets = ResetHook(kernel.module._emb_module, self._at_reset)

    def remove(self) -> None:
        """Takes the hooks off the kernel."""
        self.writes.warns = False
        self._handle.remove()
        self._resets.remove()

    def _after_forward(
        self, module: nn.Module, args: tuple[KeyedJaggedTensor, ...], out: torch.Tensor
    ) -> None:
        if self.kernel.touches_other_rows and self.kernel.module._emb_module.training:
            self._mark_all()  # a moving average is taken here already, gradient or not
        if not out.requires_grad:
            return  # evaluation: nothing will be updated
        features = args[0]
        # Both are at hand already (the kernel has just used them): no device synchronisation.
        values, offsets = features.values(), features.offset_per_key()
        out.register_hook(lambda _grad: self._at_backward(values, offsets))

    def _at_backward(self, values: torch.Tensor, offsets: list[int]) -> None:
        if self.kernel.touches_other_rows:
            self._mark_all()
            return
        for feature, shard in enumerate(self.kernel.feature_to_shard):
            self._marks[shard].mark(values[offsets[feature] : offsets[feature + 1]])

    def _at_reset(self, table: int, rows: torch.Tensor) -> None:
        # Managed collisions initialise the rows of this table, by the kernel's order. But what it
        # resets is a feature's table, so that theirs may be another table's rows as well.
        shards = {table}
        if self.kernel.module._emb_module.optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD:
            shards.add(self.kernel.feature_to_shard[table])  # for others it does nothing
        for shard in shards & set(range(len(self._marks))):
            marks = self._marks[shard]
            marks.mark(rows[(rows >= 0) & (rows < marks.rows)])

    def _mark_all(self) -> None:
        if not self._warned:
            self._warned = True
            _warn_all_rows(
                self.kernel.module._emb_module.optimizer,
                [shard.table for shard in self.kernel.shards],
            )
        for marks in self._marks:
            marks.mark_all()


class DataParallelHook(KernelHook):
    """Marks the rows of data-parallel tables, which change when their dense optimizer steps.

    Until then a backward pass's rows are pending: with gradient accumulation a step applies those
    of several passes. Each rank sees the lookups of its own batch only; ``TrackedModel.unite``
    makes the union before a checkpoint is cut.
    """

    def __init__(self, kernel: Kernel, marks: list[Marks]) -> None:
        super().__init__(kernel, marks)
        self._pending = [PendingRows(each) for each in marks]
        self._steps = register_optimizer_step_pre_hook(self._before_step)
        self._stepped = register_optimizer_step_post_hook(self._after_step)

    @property
    def waiting(self) -> bool:
        """Whether gradients wait for one of the dense optimizers that are known. They don't when
        ``zero_grad`` has dropped them; the rows stay pending, and the next step marks them as well.
        """
        return any(
            has_gradient(stepped.parameter)
            for optimizer in self.kernel.optimizers
            for stepped in self.writes.stepped.of(optimizer)
            if self._pending[stepped.table]
        )

    def remove(self) -> None:
        """Takes the hooks off the kernel and the optimizers."""
        super().remove()
        self._steps.remove()
        self._stepped.remove()

    def _at_backward(self, values: torch.Tensor, offsets: list[int]) -> None:
        values = values.clone()  # until the step its memory may have become another batch's
        for feature, shard in enumerate(self.kernel.feature_to_shard):
            self._pending[shard].add(values[offsets[feature] : offsets[feature + 1]])

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        if self.writes.stepped.of(optimizer):
            self.writes.check()  # the step writes as well, and its writes are expected

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        stepped = self.writes.stepped.of(optimizer)
        if not stepped or wraps_another(optimizer):
            return  # the one inside has told us
        self.writes.acknowledge()
        groups = {
            number: touches_other_rows(optimizer, optimizer.param_groups[number])
            for number in {each.group for each in stepped}
        }
        for i in {each.table for each in stepped}:
            self._pending[i].mark()
        everywhere = sorted({each.table for each in stepped if groups[each.group]})
        for i in everywhere:
            self._marks[i].mark_all()
        if everywhere and not self._warned:
            self._warned = True
            tables = [self.kernel.shards[i].table for i in everywhere]
            _warn_all_rows(type(optimizer).__name__, tables)


def _warn_all_rows(optimizer: object, tables: list[str]) -> None:
    logger.warning(
        "optimizer %s may change rows that were not looked up: all rows of %s count as modified "
        "after every step, and differential checkpoints save nothing there",
        optimizer,
        tables,
    )
















