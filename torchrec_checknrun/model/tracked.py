"""Track a sharded model: its modified rows, and the rows of the local shards in and out.

Useful on its own (to publish rows to serving, say); the Checkpointer is built on it. The model is
used as before: tracking only hangs hooks on the kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.mc_embedding_modules import (
    BaseShardedManagedCollisionEmbeddingCollection,
)
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection

from torchrec_checknrun.dense.optimizers import DenseOptimizers
from torchrec_checknrun.marks.cuts import Cut, Cuts
from torchrec_checknrun.marks.layers import Consumer
from torchrec_checknrun.marks.marks import marks_of
from torchrec_checknrun.model.collisions import Collisions, CollisionState
from torchrec_checknrun.model.dense_model import DenseModel
from torchrec_checknrun.model.hand_written import WriteWatch, announced
from torchrec_checknrun.model.hooks import (
    DataParallelHook,
    KernelHook,
    announce_evictions,
    surround,
)
from torchrec_checknrun.model.kernels import Kernel, find_kernels
from torchrec_checknrun.model.module_tree import ModuleTree, embedding_collections, find_modules
from torchrec_checknrun.model.progress import (
    Clocks,
    OptimizerClock,
    by_table,
    set_table_progress,
    table_clocks,
)
from torchrec_checknrun.model.resharding import (
    Collections,
    all_states_moved,
    carry_cuts,
    carry_marks,
)
from torchrec_checknrun.model.tracked_shard import TrackedShard, TrackedTables
from torchrec_checknrun.ranks import Ranks

logger = logging.getLogger(__name__)


def refuse_part_of_job(model: object) -> None:
    """Refuse a model that only some of the job's ranks train, before the others are waited for.

    Raises:
        ValueError: names the number of ranks, and the remedy.
    """
    for module in model.modules() if isinstance(model, nn.Module) else ():
        # Of DMPCollection, a subclass, groups of ranks hold the same tables.
        env: Any = module._env if type(module) is DistributedModelParallel else None
        if env is None or env.process_group is None or env.world_size >= dist.get_world_size():
            continue
        raise ValueError(
            f"model is sharded over {env.world_size} of the job's {dist.get_world_size()} ranks, "
            "and a Checkpointer is made on all ranks of a job: start ranks that don't train this "
            "model, such as an evaluator's, as a job of their own"
        )


def track(model: nn.Module, optimizers: Iterable[object] = ()) -> TrackedModel:
    """Start to track every sharded embedding (bag) collection under ``model``.

    When TorchRec's ``update_shards`` (``model.reshard``) moves shards, marks move with their rows,
    and ``shards`` holds new objects. TorchRec makes new kernels, so the fused optimizers' step
    counters and learning rates start over: set them again if they matter (``set_progress``).

    Args:
        model: a DistributedModelParallel, or any module with sharded collections in it.
        optimizers: the dense optimizers (torch's, or TorchRec's wrappers), if there are data-
            parallel tables whose optimizer rows should travel with them.

    Raises:
        UnsupportedTable: a table is held by a kernel whose rows can't be read and written in place.
    """
    return TrackedModel(model, DenseOptimizers(optimizers))


class TrackedModel(TrackedTables):
    """All local shards of a model, their marks, and the hooks that set them.

    The methods, in groups:

    * mark by hand: ``mark``, ``mark_all``, ``writing``;
    * read and clear marks: ``modified_rows``, ``is_modified``, ``clear``;
    * cut a checkpoint: ``waiting``, ``all_reduce_marks``, ``cut``, then ``merge`` or ``forget``;
      ``keep_spares`` ahead of the first;
    * keep up with the kernels' memory: ``refresh``, ``places``, ``flush``, ``write_back``,
      ``purge``;
    * notice other writes than training's: ``check_writes``, ``begin_restore``,
      ``acknowledge_writes``;
    * move the optimizers' clocks: ``progress``, ``clocks``, ``beside_rows``, ``set_progress``;
    * stop tracking: ``close``.

    Attributes:
        tables: every sharded table's whole shape, the same on all ranks.
        shards: this rank's parts of the tables; another list when they were looked for again.
        replicas: those of data-parallel tables, which all ranks have.
        collisions: the model's managed-collision modules.
        dense: the model's state beside the tables.
        converted: whether a reshard on any rank has cut rows into other columns, or an optimizer on
            this one keeps other rows of state, since this was last set to False; the next
            checkpoint must then be full.
        restores: number of restores of rows; each voids what is known of earlier checkpoints.
    """

    def __init__(self, model: nn.Module, optimizers: DenseOptimizers | None = None) -> None:
        self._model = model
        self._optimizers = optimizers or DenseOptimizers(())
        self.collisions = Collisions(model)
        self._tree = ModuleTree(model)
        self._finds = 0
        self._found_at = 0
        """The tree's generation when kernels and shards were last looked for."""
        self.dense = DenseModel(model, self, self._tree)
        self._hooks: dict[KernelHook, list[TrackedShard]] = {}
        self._cuts = Cuts()
        self._collections = Collections(model, self._resharding)
        self._converted = False
        self.restores = 0
        self.elsewhere = {}
        collections = find_modules(model, (BaseShardedManagedCollisionEmbeddingCollection,))
        self._undo = [announce_evictions(collection) for _, collection in collections]
        self._undo += [
            surround(replicas, "sync", self._synchronizing)
            for replicas in model.modules()
            if isinstance(replicas, DMPCollection)
        ]
        self._find()

    def is_modified(self, consumer: Consumer) -> bool:
        """Return whether any row of this rank's shards is marked."""
        self.check_writes()
        return any(shard.marks.any(consumer) for shard in self.shards)

    def clear(self, consumer: Consumer = Consumer.USER) -> None:
        """Clear the consumer's marks: its next interval begins."""
        self.check_writes()
        self._begin_interval()
        for shard in self.shards:
            shard.marks.clear(consumer)

    @property
    def converted(self) -> bool:
        """Return whether the next checkpoint must be full; see the class."""
        return self._converted or any(kernel.other_states for kernel in self._kernels())

    @converted.setter
    def converted(self, value: bool) -> None:
        self._converted = value
        for kernel in self._kernels():
            kernel.other_states = False

    @property
    def waiting(self) -> bool:
        """Return whether gradients of data-parallel tables wait for their optimizer."""
        hooks = [hook for hook in self._hooks if isinstance(hook, DataParallelHook)]
        if hooks:
            self._optimizers.find()
        return any(hook.waiting for hook in hooks)

    def all_reduce_marks(self, group: dist.ProcessGroup | None = None) -> None:
        """Set each rank's marks of data-parallel tables to the union over ranks; a collective.

        Args:
            group: of all ranks, for tensors of the CPU; None is the default group.
        """
        replicas = [shard.marks for shard in self.replicas]
        if not replicas or not dist.is_initialized():
            return
        united = torch.cat([marks.everything().cpu() for marks in replicas])
        dist.all_reduce(united, op=dist.ReduceOp.BOR, group=group)
        for marks, own in zip(replicas, united.split([m.rows for m in replicas]), strict=True):
            marks.live.bitwise_or_(own.to(marks.device))

    def cut(self, consumers: Consumer) -> Cut:
        """Take the consumers' marks away, to be given back by ``merge`` if still needed."""
        self._begin_interval()
        return self._cuts.take([shard.marks for shard in self.shards], consumers)

    def merge(self, cut: Cut) -> None:
        """Mark a cut's rows again, in addition to those marked since: a superset is always safe."""
        self._cuts.merge(cut)

    def forget(self, cut: Cut) -> None:
        """Drop a cut whose rows are durable; call on all ranks.

        The cut's rows then no longer follow the shards. Which ranks still hold the cut may differ.
        """
        self._cuts.forget(cut)

    def keep_spares(self) -> None:
        """Make the memory that the next cut takes, ahead of it."""
        for shard in self.shards:
            shard.marks.keep_spare()

    def refresh(self) -> None:
        """Find the shards again if they were replaced without notice, or by a failed reshard.

        All rows of the new shards then count as modified.

        Raises:
            UnsupportedTable: a data-parallel table's parameter was replaced, see ``Kernel``.
        """
        gone, new = self._find() if self._tree.generation() != self._found_at else ([], [])
        if gone or new:
            logger.warning("the model was resharded: all rows of what changed count as modified")
        for shard in new:
            shard.mark_all()
        for hook in self._hooks:
            if hook.kernel.data_parallel:  # another optimizer may step the tables now
                hook.kernel.require_own_memory()
                hook.writes.flush()
        self.check_writes()

    def places(self) -> tuple[int, ...] | None:
        """Return numbers that are others once ``shards`` are others, or lie elsewhere; None with
        data-parallel tables, whose rows of state an optimizer may replace at any time.
        """
        kernels = list(self._kernels())
        if any(kernel.data_parallel for kernel in kernels):
            return None
        for kernel in kernels:
            kernel.memory()  # looks where it lies
        return (self._finds, *[kernel.moves for kernel in kernels])

    def flush(self) -> None:
        """Prepare the shards' memory for use: find it again, and write GPU caches back to it."""
        self.refresh()
        self.write_back()

    def write_back(self) -> None:
        """Write rows in GPU caches back to the shards' memory."""
        for hook in self._hooks:
            hook.writes.flush()

    def purge(self) -> None:
        """Drop the rows in GPU caches, after the shards' memory was written."""
        for hook in self._hooks:
            hook.writes.purge()

    def check_writes(self) -> None:
        """Mark the rows of tables that were written by hand, for all trackers of the kernels."""
        for watch in WriteWatch.of(kernel.module for kernel in self._kernels()):
            watch.check()

    def expect_writes(self) -> None:
        """Copy the rows of all tables that were written by hand so far at the cut from now on."""
        for watch in WriteWatch.of(kernel.module for kernel in self._kernels()):
            watch.expect_writes()

    def acknowledge_writes(self) -> None:
        """Accept the tables' present content, for all trackers of the kernels.

        Call it once each of them has marked what was written.
        """
        for watch in WriteWatch.of(kernel.module for kernel in self._kernels()):
            watch.acknowledge()
            watch.by_hand.forget()
        for shard in self.shards:
            untouched = shard.marks.untouched
            if untouched is not None and untouched.forgotten:
                untouched.remember()

    def begin_restore(self, tables: Container[str]) -> None:
        """Mark what a restore of tables may change, for every tracker; start this one's over."""
        self.check_writes()
        for shard in self.shards:
            shard.mark_all(everywhere=shard.table in tables)
        # Intervals of other trackers go on: what may differ from their last checkpoint is marked,
        # and to forget it only on ranks that hold these rows would set the ranks at odds.
        self.restores += 1
        self.clear(Consumer.LAST | Consumer.BASELINE)

    def progress(self) -> dict[str, OptimizerClock]:
        """Return the clocks of the tables' optimizers, by table with a shard on this rank."""
        return by_table(self.clocks())

    def clocks(self) -> Clocks:
        """Return ``progress`` by clock, which of thousands of tables takes a part of the time."""
        return table_clocks(self._kernels())

    def beside_rows(self) -> tuple[dict[str, OptimizerClock], CollisionState | None]:
        """Return what a checkpoint stores of the tables beside rows: ``progress``, and the state of
        managed-collision modules; None without such modules.
        """
        return self.progress(), self.collisions.state()

    def set_progress(self, progress: Mapping[str, OptimizerClock]) -> None:
        """Set the clocks of the tables' optimizers, see ``set_table_progress``."""
        set_table_progress(self._kernels(), progress)

    def close(self) -> None:
        """Stop tracking; the model stays as it is."""
        for hook in self._hooks:
            hook.remove()
        for undo in self._undo:
            undo()
        self._collections.close()

    def _find(self) -> tuple[list[TrackedShard], list[TrackedShard]]:
        """Find kernels and shards; those of known kernels keep their marks and hooks.

        Returns:
            The shards that are gone, and those that are new.
        """
        self._found_at = self._tree.generation()
        self._finds += 1
        left = {id(hook.kernel): hook for hook in self._hooks}
        collections = list(embedding_collections(self._model))
        found = find_kernels(self._model, self._optimizers, self._kernels(), collections)
        kernels, tables = found
        self.tables = {**self.elsewhere, **tables}
        before, self._hooks = self._hooks, {}
        new = []
        for kernel in kernels:
            hook = left.pop(id(kernel), None)
            if hook is not None:
                self._hooks[hook] = before[hook]
                continue
            marks = marks_of(kernel.shards, sampled=kernel.changes_in_backward_only)
            hooked = DataParallelHook if kernel.data_parallel else KernelHook
            hook = hooked(kernel, marks)
            shards = [TrackedShard(hook.writes, i) for i in range(len(marks))]
            self._hooks[hook] = shards
            new += shards
        self.shards = [shard for shards in self._hooks.values() for shard in shards]
        self.replicas = [shard for shard in self.shards if shard.local.replicated]
        for hook in left.values():
            hook.remove()
        self._converted |= self._collections.changed(collections)
        return [shard for hook in left.values() for shard in before[hook]], new

    @contextmanager
    def _synchronizing(self, *_: object, **__: object) -> Iterator[None]:
        """Surround the averaging of tables among their replicas, of two-dimensional parallelism:
        it changes rows that other replicas have trained, unseen by PyTorch.
        """
        for shard in self.shards:
            shard.mark_all(everywhere=True)
        with announced(kernel.module for kernel in self._kernels()):
            yield

    @contextmanager
    def _resharding(self, group: dist.ProcessGroup | None) -> Iterator[None]:
        """Surround a collection's ``update_shards``, on all ranks."""
        self.check_writes()
        for watch in WriteWatch.of(kernel.module for kernel in self._kernels()):
            watch.before_overwriting()
        try:
            yield
            self._tree.forget()
            self._follow(Ranks.of(group))
        except BaseException:
            self._tree.forget()
            self.mark_all()  # the rows' content is unknown now
            raise

    def _follow(self, ranks: Ranks) -> None:
        """Carry marks and the rows of cuts to the shards that hold the rows now."""
        gone: list[TrackedShard] = []
        new: list[TrackedShard] = []
        cuts = {cut.number: cut for cut in self._cuts}

        def find() -> tuple[bool, frozenset[int]]:
            for shards, found in zip((gone, new), self._find(), strict=True):
                shards += found
            return all_states_moved([shard.local for shard in gone]), frozenset(cuts)

        facts = ranks.on_all_ranks(find)
        carry_marks(gone, new, ranks, all(states_moved for states_moved, _ in facts))
        carry_cuts(gone, new, ranks, cuts, [numbers for _, numbers in facts])

    def _begin_interval(self) -> None:
        for hook in self._hooks:
            hook.writes.warns = True

    def _kernels(self) -> list[Kernel]:
        return [hook.kernel for hook in self._hooks]
