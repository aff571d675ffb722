"""Mark rows as training changes them, by hooks on kernels, optimizers and evictions.

Fused kernels have a hook on the gradient of their output, data-parallel tables on their dense
optimizers. Rows of evicted ids change without a backward pass: TorchRec has the kernel reset them
(for managed collisions and pruning) and initializes them again. There are no hooks for either, so
the kernel's own method and the collection's method that initializes rows are surrounded by contexts
(``surround``). The latter writes to a parameter, as users do by hand, and is announced to the
``WriteWatch``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
from torchrec_checknrun.marks.lookups import mark_lookup
from torchrec_checknrun.marks.marks import Marks, PendingRows
from torchrec_checknrun.model.hand_written import Lookup, WriteWatch, announced
from torchrec_checknrun.model.kernels import Kernel
from torchrec_checknrun.ranks import listed

logger = logging.getLogger(__name__)

Around = Callable[..., AbstractContextManager[None]]
"""Makes a context for one call of a method, given the call's arguments."""

_RESET = "reset_embedding_weight_momentum"
"""FBGEMM's method that resets rows."""


class KernelHook:
    """A hook that marks the rows of one kernel at its backward passes and resets.

    Args:
        marks: of the kernel's local shards, in the kernel's order.

    Attributes:
        writes: notices writes to the kernel's tables outside of training.
    """

    def __init__(self, kernel: Kernel, marks: list[Marks]) -> None:
        self.kernel = kernel
        self._marks = marks
        self._warned = False
        # FBGEMM's own where TorchRec, before 1.6, hands on what it gets.
        used = getattr(kernel.module._emb_module, "embedding_table_index_type", torch.int64)
        self._used = getattr(kernel.module, "_embedding_table_index_type", used)
        """The type of the ids that the lookup uses."""
        self.writes = WriteWatch(kernel, marks)
        self._handles = [kernel.module.register_forward_hook(self._after_forward)]
        if kernel.touches_other_rows:
            self._handles.append(kernel.module.register_forward_pre_hook(self._before_forward))
        self._stop_resets = surround(kernel.module._emb_module, _RESET, self._around_reset)

    def remove(self) -> None:
        """Remove the hooks from the kernel."""
        self.writes.warns = False
        for handle in self._handles:
            handle.remove()
        self._stop_resets()

    def _before_forward(self, module: nn.Module, args: tuple[KeyedJaggedTensor, ...]) -> None:
        """Keep and mark all rows: the forward pass updates moving averages, even without a
        gradient.
        """
        if not self.kernel.module._emb_module.training:
            return
        if self.writes.journal is not None:
            self.writes.check()  # first: rows written by hand must not be taken for a step's
        self.writes.note_stream()
        self._mark_whole()

    def _after_forward(
        self, module: nn.Module, args: tuple[KeyedJaggedTensor, ...], out: torch.Tensor
    ) -> None:
        if self.writes.journal is not None:
            self.writes.check()  # early: rows written by hand must not be taken for a step's
        if not out.requires_grad:
            return  # evaluation updates nothing
        features = args[0]
        # The kernel has just used both, so reading them needs no device synchronization.
        values, offsets = features.values(), features.offset_per_key()
        if values.dtype != self._used:
            # The batch's memory may hold another one by the backward pass: the kernel has a copy,
            # which FBGEMM corrects, of ids that TorchRec has cut.
            narrow = self._used != torch.int64
            values = values.to(self._used) if narrow else values.clone()
        lookup = Lookup()
        if self.writes.journal is not None:
            self.writes.journal.looked_up(lookup)

        def at_backward(_: torch.Tensor) -> None:
            if self.writes.journal is not None:
                self.writes.journal.goes_back(lookup)
            self._at_backward(values, offsets)

        out.register_hook(at_backward)

    def _at_backward(self, values: torch.Tensor, offsets: list[int]) -> None:
        self.writes.note_stream()
        if self.kernel.touches_other_rows:
            self._mark_whole()
            return
        if self.writes.updates_to_look_at:
            self.writes.look_early()
        self.writes.before_change()
        copies, journal = self.writes.copies, self.writes.journal
        if copies is not None:
            copies.before_update(values, offsets, self.kernel.feature_to_shard)
        if journal is not None:
            journal.before_update(values, offsets, self.kernel.feature_to_shard)
        places = self.kernel.feature_to_shard
        mark_lookup(self._marks, values, offsets, places, keep=journal is None)

    @contextmanager
    def _around_reset(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> Iterator[None]:
        for table, rows in reset_rows(*args, **kwargs):
            self._at_reset(table, rows)
        with announced([self.kernel.module]):
            yield

    def _at_reset(self, table: int, rows: torch.Tensor) -> None:
        # Managed collisions initialize rows of the table with this number in the kernel's order.
        # But the kernel resets the table of the feature with this number: perhaps another one.
        shards = {table}
        if self.kernel.module._emb_module.optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD:
            shards.add(self.kernel.feature_to_shard[table])  # other optimizers' rows aren't reset
        for shard in shards & set(range(len(self._marks))):
            inside = (rows >= 0) & (rows < self._marks[shard].rows)
            self.writes.before_write(shard, rows[inside])

    def _mark_whole(self) -> None:
        if self.writes.journal is not None:
            self.writes.journal.before_any()
        self._mark_all(range(len(self._marks)), self.kernel.touches_other_rows)

    def _mark_all(self, tables: Collection[int], why: str) -> None:
        """Mark all rows of tables, by their places in the kernel; warn once why."""
        for i in tables:
            self._marks[i].mark_all()
        if tables and not self._warned:
            self._warned = True
            logger.warning(
                "%s: all rows of %s count as modified after every step, and differential "
                "checkpoints save nothing there",
                why,
                listed([self.kernel.shards[i].table for i in tables]),
            )


class DataParallelHook(KernelHook):
    """A hook that marks the rows of data-parallel tables when their dense optimizer steps.

    Until then the rows of a backward pass are pending: with gradient accumulation one step applies
    those of several passes. Each rank sees the lookups of its own batch only;
    ``TrackedModel.all_reduce_marks`` makes the union before a checkpoint is cut.
    """

    def __init__(self, kernel: Kernel, marks: list[Marks]) -> None:
        super().__init__(kernel, marks)
        self._pending = [PendingRows(each) for each in marks]
        before, after = map(torch.compiler.disable, (self._before_step, self._after_step))
        self._steps = register_optimizer_step_pre_hook(before)
        self._stepped = register_optimizer_step_post_hook(after)

    @property
    def waiting(self) -> bool:
        """Return whether gradients wait for one of the known dense optimizers.

        Gradients that ``zero_grad`` has dropped don't; their rows stay pending, and the next step
        marks them as well.
        """
        return any(
            has_gradient(stepped.parameter)
            for optimizer in self.kernel.optimizers
            for stepped in self.writes.stepped.of(optimizer)
            if self._pending[stepped.table]
        )

    def remove(self) -> None:
        """Remove the hooks from the kernel and the optimizers."""
        super().remove()
        self._steps.remove()
        self._stepped.remove()

    def _at_backward(self, values: torch.Tensor, offsets: list[int]) -> None:
        values = values.clone()  # the memory may hold another batch by the time of the step
        for feature, shard in enumerate(self.kernel.feature_to_shard):
            ids = values[offsets[feature] : offsets[feature + 1]]
            self._pending[shard].add(ids)
            self.writes.by_hand.at_backward(shard, ids)

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        if self.writes.stepped.of(optimizer):
            self.writes.check()  # before the step, whose own writes are expected

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        stepped = self.writes.stepped.of(optimizer)
        if not stepped or wraps_another(optimizer):
            return  # the inner optimizer has announced the same step
        self.writes.acknowledge()
        touches_others = {
            number: touches_other_rows(optimizer, optimizer.param_groups[number])
            for number in {each.group for each in stepped}
        }
        self.writes.by_hand.stepped(each.table for each in stepped)
        for i in {each.table for each in stepped}:
            self._pending[i].mark()
        whole = sorted({each.table for each in stepped if touches_others[each.group]})
        name = type(optimizer).__name__
        self._mark_all(whole, f"optimizer {name} may change rows that were not looked up")


def reset_rows(
    pruned_indices: torch.Tensor,
    pruned_indices_offsets: torch.Tensor,
    logical_table_ids: torch.Tensor,
    buffer_ids: torch.Tensor,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the rows that a call of FBGEMM's method resets, by the arguments of that method.

    Yields:
        A logical table's number, and shard-local rows ``(n,)``.
    """
    offsets = pruned_indices_offsets.tolist()
    for table, buffer in zip(logical_table_ids.tolist(), buffer_ids.tolist(), strict=True):
        yield table, pruned_indices[offsets[buffer] : offsets[buffer + 1]]


def announce_evictions(collection: Any) -> Callable[[], None]:
    """Announce a managed-collision collection's writes to the rows of evicted ids.

    Returns:
        A function that undoes it.
    """

    @contextmanager
    def around(evictions_per_table: Mapping[str, torch.Tensor | None]) -> Iterator[None]:
        if all(rows is None for rows in evictions_per_table.values()):
            yield
            return
        lookups = collection._embedding_module._lookups
        with announced(kernel for lookup in lookups for kernel in lookup._emb_modules):
            yield

    return surround(collection, "_evict", around)


class _Surrounded:
    """A method of one object, in its place, for all trackers that surround the method."""

    def __init__(self, owner: Any, name: str) -> None:
        # The owner, not the method: in a copy of the owner this must call the copy's.
        self.owner, self.name = owner, name
        self.own: Callable[..., Any] | None = vars(owner).get(name)
        self.around: list[Around] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method within all contexts."""
        with ExitStack() as stack:
            for around in self.around:
                stack.enter_context(around(*args, **kwargs))
            if self.own is not None:
                return self.own(*args, **kwargs)
            return getattr(type(self.owner), self.name)(self.owner, *args, **kwargs)


def surround(owner: Any, name: str, around: Around) -> Callable[[], None]:
    """Surround every call of an object's method by a context; do nothing if there is no such.

    Returns:
        A function that undoes it, once or more often; the last one restores the object's own
        method.
    """
    if not hasattr(owner, name):
        return lambda: None
    found = vars(owner).get(name)
    surrounded = found if isinstance(found, _Surrounded) else _Surrounded(owner, name)
    vars(owner)[name] = surrounded
    surrounded.around.append(around)

    def stop() -> None:
        if around not in surrounded.around:
            return
        surrounded.around.remove(around)
        if surrounded.around:
            return
        if surrounded.own is None:
            del vars(owner)[name]
        else:
            vars(owner)[name] = surrounded.own

    return stop
