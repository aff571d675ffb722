"""``track(model)``: which rows changed, and rows in and out of the local shards.

Useful on its own (to publish rows to serving, say); the Checkpointer is built on it. The model is
used as before: tracking only hangs hooks on the kernels.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torchrec.distributed.mc_embedding_modules import (
    BaseShardedManagedCollisionEmbeddingCollection,
)

from torchrec_checknrun.dense.optimizers import torch_optimizers
from torchrec_checknrun.model.collisions import Collisions
from torchrec_checknrun.model.hand_written import WriteWatch, announced
from torchrec_checknrun.model.hooks import DataParallelHook, EvictionHook, KernelHook
from torchrec_checknrun.model.kernels import Kernel, find_kernels, find_modules
from torchrec_checknrun.model.marks import Consumer, Cut, Marks
from torchrec_checknrun.model.progress import (
    OptimizerClock,
    set_table_progress,
    table_progress,
)
from torchrec_checknrun.model.resharding import (
    Collections,
    Part,
    all_states_moved,
    carry,
)
from torchrec_checknrun.model.tracked_shard import RowIds, TrackedShard, as_ids
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.shards import TableShape

logger = logging.getLogger(__name__)


def track(model: nn.Module, optimizers: Iterable[object] = ()) -> TrackedModel:
    """Tracks every sharded embedding (bag) collection under ``model`` from now on.

    When TorchRec's ``update_shards`` (``model.reshard``) moves shards, marks move with their rows;
    the ``shards`` are others then. The fused optimizers' step counters and learning rates begin
    anew, as TorchRec makes them: set them again if they matter (``set_progress``).

    Args:
        model: a DistributedModelParallel, or any module with sharded collections in it.
        optimizers: the dense optimizers (torch's, or TorchRec's wrappers), if there are data-
            parallel tables whose optimizer rows should travel with them.

    Raises:
        UnsupportedTable: a table is held by a kernel whose rows can't be read and written in place.
    """
    return TrackedModel(model, tuple(torch_optimizers(optimizers)))


class TrackedModel:
    """All local shards of a model, their marks, and the hooks that set them."""

    _alive: ClassVar[weakref.WeakSet[TrackedModel]] = weakref.WeakSet()

    tables: dict[str, TableShape]
    """Every sharded table's whole shape, the same on all ranks."""
    shards: list[TrackedShard]
    """This rank's parts of them."""

    converted: bool
    """Whether rows were cut into other columns since this was last set to False, on any rank: then
    the next checkpoint must be full."""

    restores: int
    """How often rows were restored: what was known of earlier checkpoints is void then."""

    def __init__(self, model: nn.Module, optimizers: tuple[Optimizer, ...] = ()) -> None:
        self._model = model
        self._optimizers = optimizers
        self.collisions = Collisions(model)
        """Its managed-collision modules."""
        self._hooks: dict[KernelHook, list[TrackedShard]] = {}
        self._cuts: weakref.WeakSet[Cut] = weakref.WeakSet()
        self._cuts_made = 0
        self._collections = Collections(model, self._resharding)
        self.converted = False
        self.restores = 0
        collections = find_modules(model, (BaseShardedManagedCollisionEmbeddingCollection,))
        self._evictions = [EvictionHook(collection) for _, collection in collections]
        self._find()
        self._alive.add(self)

    def _find(self) -> tuple[list[TrackedShard], list[TrackedShard]]:
        """Finds kernels and shards; those of kernels that stay keep their marks and hooks.

        Returns:
            The shards that are gone, and those that are new.
        """
        left = {id(hook.kernel): hook for hook in self._hooks}
        known = [hook.kernel for hook in self._hooks]
        kernels, self.tables = find_kernels(self._model, self._optimizers, known)
        before, self._hooks = self._hooks, {}
        new = []
        for kernel in kernels:
            hook = left.pop(id(kernel), None)
            if hook is not None:
                self._hooks[hook] = before[hook]
                continue
            marks = [Marks(s.rectangle.rows, s.weight.device) for s in kernel.shards]
            hooked = DataParallelHook if kernel.data_parallel else KernelHook
            hook = hooked(kernel, marks)
            shards = [TrackedShard(kernel, i, m, hook.writes) for i, m in enumerate(marks)]
            self._hooks[hook] = shards
            new += shards
        self.shards = [shard for shards in self._hooks.values() for shard in shards]
        for hook in left.values():
            hook.remove()
        self.converted |= self._collections.changed()
        return [shard for hook in left.values() for shard in before[hook]], new

    def mark(self, table: str, rows: RowIds) -> None:
        """Marks rows written by hand, global ids; call it on every rank.

        Raises:
            KeyError: no such table.
            IndexError: an id is no row of it; nothing is marked.
        """
        shards, ids = self._shards_of(table), as_ids(rows)
        count = self.tables[table].rows
        outside = ids[(ids < 0) | (ids >= count)]
        if len(outside):
            raise IndexError(
                f"{table} has rows 0 to {count - 1}, but {len(outside)} of the ids to mark are "
                f"others, the first {int(outside[0])}: pass the table's own row ids"
            )
        for shard in shards:
            shard.mark(ids)

    @contextmanager
    def writing(self, table: str, rows: RowIds) -> Iterator[None]:
        """Mark rows (global ids) that the block writes by hand; enter it on every rank.

        Writes inside the block don't mark other rows: it must write no others.

        Raises:
            KeyError, IndexError, TypeError: as ``mark``.
        """
        shards = self._shards_of(table)
        with announced(shard.kernel_module for shard in shards):
            self.mark(table, rows)
            for shard in shards:
                for other in shard.everywhere():
                    other.mark(rows)
            yield

    def mark_all(self, table: str | None = None) -> None:
        """Marks every row of a table, or of all tables; call it on every rank."""
        for shard in self.shards if table is None else self._shards_of(table):
            shard.mark_all()

    def modified_rows(self, consumer: Consumer = Consumer.USER) -> dict[str, torch.Tensor]:
        """Per table with a shard here, sorted global ids modified since ``clear(consumer)``."""
        found: dict[str, list[torch.Tensor]] = {}
        for shard in self.shards:
            found.setdefault(shard.table, []).append(shard.modified_rows(consumer))
        return {table: torch.unique(torch.cat(ids)) for table, ids in found.items()}

    def is_modified(self, consumer: Consumer) -> bool:
        """Whether any row of the shards here is marked."""
        self.check_writes()
        return any(bool((s.marks.raw & int(consumer)).any()) for s in self.shards)

    def clear(self, consumer: Consumer = Consumer.USER) -> None:
        """Starts the consumer's next interval."""
        self.check_writes()
        self._begin_interval()
        for shard in self.shards:
            shard.marks.clear(consumer)

    @classmethod
    def all_hooks(cls) -> Iterator[tuple[KernelHook, list[TrackedShard]]]:
        """Every tracker's kernels, each with its shards there."""
        for tracked in cls._alive:
            yield from tracked._hooks.items()

    @classmethod
    def mark_memory(cls, written: Iterable[torch.Tensor]) -> None:
        """Marks every row, for all who track it, of the kernels that hold one of these tensors."""
        memory = {tensor.untyped_storage().data_ptr() for tensor in written if tensor.numel()}
        for hook, shards in cls.all_hooks():
            # Asked for now: it may have moved since the shards were last used.
            weights = hook.kernel.module.split_embedding_weights()
            states = [state for shard in shards for state in shard.local.optimizer.values()]
            if any(t.untyped_storage().data_ptr() in memory for t in (*weights, *states)):
                for shard in shards:
                    shard.mark_all()

    @property
    def waiting(self) -> bool:
        """Whether gradients of data-parallel tables wait for their optimizer."""
        return any(hook.waiting for hook in self._hooks if isinstance(hook, DataParallelHook))

    def all_reduce_marks(self, group: dist.ProcessGroup | None = None) -> None:
        """Makes every rank's marks of data-parallel tables the union over ranks; a collective.

        Args:
            group: a gloo group of all ranks; None is the default group.
        """
        replicas = [shard.marks for shard in self.shards if shard.local.replicated]
        if not replicas or not dist.is_initialized():
            return
        united = torch.cat([marks.raw.cpu() for marks in replicas])
        dist.all_reduce(united, op=dist.ReduceOp.BOR, group=group)
        for marks, own in zip(replicas, united.split([m.rows for m in replicas]), strict=True):
            marks.raw.copy_(own)

    def cut(self, consumers: Consumer) -> Cut:
        """Takes the consumers' marks away; ``merge`` gives them back if they are still needed."""
        self._cuts_made += 1
        self._begin_interval()
        cut = Cut(self._cuts_made, {})
        self._cuts.add(cut)
        taking: Marks | None = None
        try:
            for consumer in (Consumer.LAST, Consumer.BASELINE):
                if consumer & consumers:
                    taken = cut.taken[consumer] = {}
                    for shard in self.shards:
                        taking = shard.marks
                        taken[taking] = taking.take(consumer)
        except BaseException:
            self.merge(cut)
            if taking is not None:
                taking.mark_all()  # interrupted, perhaps, between being taken and being kept
            raise
        return cut

    def merge(self, cut: Cut) -> None:
        """Marks a cut's rows again, beside those marked since: a superset is always right."""
        self._cuts.discard(cut)
        for consumer, taken in cut.taken.items():
            for marks, rows in taken.items():
                marks.merge(rows, consumer)

    def forget(self, cut: Cut) -> None:
        """A cut's rows are durable: they needn't follow the shards any more. To be called on all
        ranks, since who still holds the cut may differ between them.
        """
        self._cuts.discard(cut)

    def refresh(self) -> None:
        """Finds the shards again, should they have been replaced in a way that was not heard of (or
        that failed): then all their rows count as modified.
        """
        gone, new = self._find()
        if gone or new:
            logger.warning("the model was sharded anew: all rows of what changed count as modified")
        for shard in new:
            shard.mark_all()
        self.check_writes()

    def flush(self) -> None:
        """Before the shards' memory is used: finds it again if it was moved or sharded anew, and
        brings rows back from GPU caches.
        """
        self.refresh()
        self.write_back()

    def write_back(self) -> None:
        """Brings rows back from GPU caches."""
        for hook in self._hooks:
            hook.writes.flush()

    @contextmanager
    def _resharding(self, group: dist.ProcessGroup | None) -> Iterator[None]:
        """Around ``update_shards`` of a collection, on all ranks."""
        self.check_writes()
        try:
            yield
            self._follow(Ranks.of(group))
        except BaseException:
            self.mark_all()  # nobody knows what the rows are now
            raise

    def _follow(self, ranks: Ranks) -> None:
        """Marks, and the rows of cuts, go where their rows have gone."""
        gone: list[TrackedShard] = []
        new: list[TrackedShard] = []
        own = {cut.number: cut for cut in self._cuts}

        def find() -> tuple[bool, frozenset[int]]:
            for shards, found in zip((gone, new), self._find(), strict=True):
                shards += found
            return all_states_moved([shard.local for shard in gone]), frozenset(own)

        facts = ranks.on_all_ranks(find)
        unknown = carry(
            [Part(shard.place, shard.marks.raw) for shard in gone],
            [Part(shard.place, shard.marks.raw) for shard in new],
            ranks,
        )
        all_known = all(states_moved for states_moved, _ in facts)
        for i in unknown if all_known else range(len(new)):
            new[i].mark_all()
        for number in sorted(frozenset().union(*(cuts for _, cuts in facts))):
            cut = own.get(number, Cut(number, {}))
            pending = {shard.marks: torch.zeros_like(shard.marks.raw) for shard in new}
            carry(
                [Part(shard.place, cut.bytes(shard.marks)) for shard in gone],
                [Part(shard.place, pending[shard.marks]) for shard in new],
                ranks,
            )
            if all(number in cuts for _, cuts in facts):
                cut.move([shard.marks for shard in gone], pending)
                continue
            for marks, taken in pending.items():  # some rank may never merge it: a superset
                marks.raw.bitwise_or_(taken)

    def check_writes(self) -> None:
        """Mark the rows of tables that were written by hand, for all who track them."""
        for watch in WriteWatch.of(kernel.module for kernel in self._kernels()):
            watch.check()

    def acknowledge_writes(self) -> None:
        """Take the tables as they are for known, for all who track them: they have marked what
        was written.
        """
        for watch in WriteWatch.of(kernel.module for kernel in self._kernels()):
            watch.acknowledge()

    def progress(self) -> dict[str, OptimizerClock]:
        """Step counter and learning rate of the tables' optimizers, by table with a shard here."""
        return table_progress(self._kernels())

    def set_progress(self, progress: Mapping[str, OptimizerClock]) -> None:
        """Sets them; see ``set_table_progress``."""
        set_table_progress(self._kernels(), progress)

    def _begin_interval(self) -> None:
        for hook in self._hooks:
            hook.writes.warns = True

    def _kernels(self) -> list[Kernel]:
        return [hook.kernel for hook in self._hooks]

    def purge(self) -> None:
        """After the shards' memory was written: drops rows from GPU caches."""
        for hook in self._hooks:
            hook.kernel.purge()

    def close(self) -> None:
        """Stops tracking; the model stays as it is."""
        for hook in self._hooks:
            hook.remove()
        while self._evictions:
            self._evictions.pop().remove()
        self._collections.close()

    def _shards_of(self, table: str) -> list[TrackedShard]:
        if table not in self.tables:
            raise KeyError(f"no sharded table {table!r}; the model has {sorted(self.tables)}")
        return [shard for shard in self.shards if shard.table == table]
