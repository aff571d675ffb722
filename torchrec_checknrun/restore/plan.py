"""DCP's load protocol for table rows: which stored chunks this rank's shards need, and into them.

Everything that can be known from manifests and indexes is checked on all ranks before a tensor is
touched: DCP's planning step fails on every rank if it fails on one.
"""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner import LoadPlanner as DcpLoadPlanner

from torchrec_checknrun.dense.buffers import BUFFERS, PerRankBuffers
from torchrec_checknrun.dense.state_objects import StateObjects
from torchrec_checknrun.errors import CorruptCheckpoint, IncompatibleCheckpoint
from torchrec_checknrun.format.chunk import (
    BLOCK,
    COLLISIONS,
    ROWS,
    STATE,
    Entry,
    decode_state_chunk,
    state_tree,
)
from torchrec_checknrun.format.reader import StoredChunk
from torchrec_checknrun.format.state import SHARDED, Tree, is_sharded, tree_items
from torchrec_checknrun.format.state_tree import leaves
from torchrec_checknrun.model.dense_states import DenseStates
from torchrec_checknrun.model.hand_written import mark_memory
from torchrec_checknrun.model.marks import Consumer
from torchrec_checknrun.model.progress import OptimizerClock
from torchrec_checknrun.model.state_dict import (
    MODEL,
    StoredTables,
    find_blocks,
    find_shards,
    plain_targets,
    write_whole,
)
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.restore.blocks import BlockRestore, SavedBlocks, saved_blocks
from torchrec_checknrun.restore.chunks import ChainContent, ReadableChunk
from torchrec_checknrun.restore.collisions import CollisionRestore, check_names
from torchrec_checknrun.restore.content_tree import conversions, tensor_paths, with_blocks
from torchrec_checknrun.restore.fit import Fit, match_tables
from torchrec_checknrun.restore.rows import RowRestore
from torchrec_checknrun.restore.state_fit import check_state, common_state, merge_state
from torchrec_checknrun.shards import LocalShard, TableShape

logger = logging.getLogger(__name__)

_AS_SAVED = Fit()

Merge = Callable[[list[Any]], Any]
"""Makes one rank's state of all ranks' saved ones (in rank order), for another number of ranks."""


class LoadPlanner(DcpLoadPlanner):
    """Restores a checkpoint of this package's format, for ``dcp.load(…, planner=…)``.

    Args:
        tracked: from ``track(model)``: rows go into its shards, and its marks start anew. Without
            it they go into the tables of the state dict.
        per_rank: how to merge states that each rank had its own of, should the number of ranks
            have changed; None or absent makes that an error.
        fit: what may differ between checkpoint and model.
        buffers: the model's buffers that each rank has its own of.
        objects: state objects that are handed what they gave; the others' content must fit.
        optimizers: the dense ones among the state objects, which are fitted to the checkpoint;
            the caller hands back to them what was restored, and then ``progress``. Without them
            (``dcp.load``) they must have made their state already.
        dry_run: read, verify and decode everything, but change nothing.

    Attributes:
        began: whether anything may have been changed.
        converted: whether tables differ from the saved ones in more than the ranks that hold their
            rows, so that a differential checkpoint can't follow.
        skipped: what was on one side only, where ``fit`` allows that.
    """

    def __init__(
        self,
        tracked: TrackedModel | None = None,
        *,
        per_rank: Mapping[str, Merge | None] | None = None,
        fit: Fit = _AS_SAVED,
        optimizers: DenseStates | None = None,
        buffers: PerRankBuffers | None = None,
        objects: StateObjects | None = None,
        dry_run: bool = False,
    ) -> None:
        self._tracked = tracked
        self._fit = fit
        self._merge = dict(per_rank or {})
        self._optimizers = optimizers
        self._buffers = buffers or PerRankBuffers()
        self._model_content: dict[str, Any] | None = None
        self._objects = objects or StateObjects({})
        self._dry_run = dry_run
        self._state_dict: dict[str, Any] = {}
        self._shards: list[LocalShard] = []
        self._tables: dict[str, TableShape] = {}
        self._states_read: dict[str, list[Any]] = {}
        self._targets: dict[str, str] = {}
        self._lock = threading.Lock()
        self.began = False
        self.converted = False
        self.skipped: list[str] = []

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        content = metadata.planner_data if metadata else None
        if isinstance(content, Exception):
            raise content
        if not isinstance(content, ChainContent):
            raise IncompatibleCheckpoint(
                "LoadPlanner reads checkpoints of this package's format: pass "
                "storage_reader=StorageReader(path) to dcp.load as well"
            )
        self._content = content
        self._state_dict = state_dict
        self._saved_blocks: SavedBlocks = saved_blocks(self._entries(BLOCK))
        self._by_blocks: set[int] = set()
        self._from_trees: set[int] = set()
        if self._tracked is None:
            self._shards, self._tables = find_shards(state_dict)
        else:
            self._tables = self._tracked.tables
        saved = {n: TableShape(t.rows, t.dim) for n, t in content.chain.head.tables.items()}
        match = match_tables(self._tables, saved, self._fit)
        self._saved, self._targets = saved, match.target
        self.converted, self.skipped = match.resized, match.skipped
        self._rows = RowRestore(content, match.target, self._fit)
        if self._optimizers is not None:
            state_dict.update(self._fit_optimizers(self._optimizers))
        self._split_buffers()
        if self._tracked is not None:
            self._tracked.flush()
            self._shards = [shard.local for shard in self._tracked.shards]

    def create_local_plan(self) -> LoadPlan:
        self._stored = StoredTables(self._tables.keys() | self._saved.keys(), self._shards)
        marks = None if self._tracked is None else [shard.marks for shard in self._tracked.shards]
        rows = self._rows.plan(self._shards, marks)
        self.converted = self.converted or self._rows.converted
        self.skipped += self._rows.skipped
        keys = [*rows, *self._plan_blocks(), *self._plan_states()]
        return LoadPlan([_read_item(key) for key in keys])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        self._left = len(central_plan.items)
        if not self._dry_run:
            self.began = True
            self._mark()
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Loads a chunk; several threads may, where chunks of rows are concerned."""
        assert isinstance(value, ReadableChunk)
        kind = value.entry["kind"]
        if kind == ROWS:
            self._rows.load(value, self._dry_run)
        elif kind == "state":
            self._load_state(value)
        elif kind == BLOCK:
            payload = value.payload()
            if not self._dry_run:
                self._blocks.load(value.entry, payload)
        elif kind == COLLISIONS:
            self._collisions.load(value.entry, value.payload())
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._finish()

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        raise AssertionError("this format has no tensor items")

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        raise AssertionError("this format has no tensor items")

    def _mark(self) -> None:
        """Before anything is written: marks it for all who track it. Own marks start anew."""
        mark_memory(self._written())
        if self._tracked is None:
            return
        self._tracked.check_writes()
        tables = set(self._targets.values())
        for own in self._tracked.shards:
            for shard in own.everywhere() if own.table in tables else ():
                shard.mark_all()
        # The others' intervals go on: all that may differ from what they saved last is marked, and
        # forgetting them on those ranks only that hold their rows would set the ranks at odds.
        self._tracked.restores += 1
        self._tracked.mark_all()
        self._tracked.clear(Consumer.LAST | Consumer.BASELINE)

    def _written(self) -> Iterator[torch.Tensor]:
        """All tensors that may be written but a tracked model's tables."""
        if self._tracked is None:
            for shard in self._shards:
                yield from shard.tensors
        for block, _ in self._blocks.blocks():
            yield block.tensor
        yield from _dense_tensors(self._state_dict)

    def _finish(self) -> None:
        """What is to be done when everything has come."""
        self._rows.finish(self._dry_run)
        self._join_buffers()
        if self._dry_run:
            return
        self._collisions.finish()
        if self._tracked is not None:
            self._tracked.acknowledge_writes()
            self._tracked.purge()
            if self._optimizers is None:
                self._tracked.set_progress(self.progress)

    @property
    def progress(self) -> dict[str, OptimizerClock]:
        """The tables' optimizer counters and learning rates at the head, by the model's tables."""
        if not self._fit.optimizer:
            return {}
        tables = self._content.chain.head.tables
        return {
            into: OptimizerClock(
                table.optimizer_step, table.learning_rate, dict(table.optimizer_options)
            )
            for name, into in self._targets.items()
            if (table := tables[name]).learning_rate is not None
            and into not in self._rows.without_state
        }

    def _fit_optimizers(self, optimizers: DenseStates) -> dict[str, Any]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        trees = {}
        for name, by_rank in self._state_chunks().items():
            chunk = by_rank.get(None) or by_rank.get(rank) or next(iter(by_rank.values()))
            trees[name] = with_blocks(state_tree(chunk.entry), name, self._saved_blocks)
        restored = self._rows.states if self._fit.optimizer else {}
        tables = {table: restored.get(table) for table in self._tables}
        world = dist.get_world_size() if dist.is_initialized() else 1
        resized = self._content.chain.head.world_size != world
        return optimizers.fit(trees, tables, self._fit.strict, resized)

    def _split_buffers(self) -> None:
        """Take the buffers that were saved per rank out of the model's state dict, as the
        checkpoint has them; ``_join_buffers`` puts them back.
        """
        model, head = self._state_dict.get(MODEL), self._content.chain.head
        if not isinstance(model, dict) or BUFFERS not in head.states:
            return
        names: dict[str | int, None] = {}
        for chunk in self._state_chunks().get(BUFFERS, {}).values():
            names |= dict.fromkeys(tree_items(state_tree(chunk.entry)))
        self._model_content = model
        self._state_dict[MODEL] = {k: v for k, v in model.items() if k not in names}
        self._state_dict[BUFFERS] = {k: v for k, v in model.items() if k in names}
        world = dist.get_world_size() if dist.is_initialized() else 1
        if head.world_size != world:
            self._buffers.require_merges(list(map(str, names)), head.world_size, world)
            self._merge[BUFFERS] = self._buffers.merge

    def _join_buffers(self) -> None:
        if self._model_content is not None:
            self._model_content.update(self._state_dict[MODEL])
            self._model_content.update(self._state_dict.pop(BUFFERS))
            self._state_dict[MODEL] = self._model_content

    def _plan_states(self) -> Iterable[str]:
        """The chunks of the head's state objects that were asked for, checked against them."""
        head, chunks = self._content.chain.head, self._state_chunks()
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for name, current in self._state_dict.items():
            plain = name in head.states or not is_sharded(current)
            if (name,) in self._saved_blocks or (self._stored.covers(current) and not plain):
                continue
            if name not in head.states and not self._fit.strict:
                self.skipped.append(f"state {name!r}: not in the checkpoint")
                continue
            if name not in head.states:
                raise IncompatibleCheckpoint(
                    f"{head.id} has no state {name!r} (it has {sorted(head.states)}): restore with "
                    "the state objects it was saved with"
                )
            stored = chunks.get(name, {})
            wanted: Sequence[int | None] = [rank] if head.states[name] else [None]
            if head.states[name] and head.world_size != world:
                if self._merge.get(name) is None:
                    raise IncompatibleCheckpoint(
                        f"state {name!r} was saved per rank on {head.world_size} ranks, and there "
                        f"are {world} now: declare it PerRank(…, merge=function), or restore on "
                        f"{head.world_size} ranks"
                    )
                wanted = range(head.world_size)
            for of_rank in wanted:
                if of_rank not in stored:
                    raise CorruptCheckpoint(f"{head.id} lacks state {name!r} of rank {of_rank}")
                tree = with_blocks(state_tree(stored[of_rank].entry), name, self._saved_blocks)
                if not self._fit.strict or (len(wanted) > 1 and name != BUFFERS):
                    pass
                elif name in self._objects:
                    self._objects.check(name, current, tree, self._stored.covers)
                else:
                    self._warn_of_conversions(current, tree, name)
                    covers, of_table = self._stored.covers, self._stored.name
                    exact = self._optimizers is not None and name in self._optimizers
                    check_state(current, tree, name, covers, of_table, exact)
                yield stored[of_rank].key

    def _state_chunks(self) -> dict[str, dict[int | None, StoredChunk]]:
        """The head's state objects: by name and rank (None: all ranks have it alike)."""
        found: dict[str, dict[int | None, StoredChunk]] = {}
        for chunk in self._content.chunks[-1]:
            if chunk.entry["kind"] == STATE:
                found.setdefault(chunk.entry["name"], {})[chunk.entry["rank"]] = chunk
        return found

    def _entries(self, kind: str) -> dict[str, Entry]:
        """The index entries of the head's chunks of one kind, by the chunks' names."""
        chunks = self._content.chunks[-1]
        return {chunk.key: chunk.entry for chunk in chunks if chunk.entry["kind"] == kind}

    def _plan_blocks(self) -> Iterable[str]:
        """The chunks of the head's sharded tensors that overlap the local ones."""
        where, saved = self._content.chain.head.id, self._saved_blocks
        found = find_blocks(self._state_dict, self._stored, self._optimizers or ())
        # What was whole on every rank lies in the states' trees.
        whole = {block.path for block in found} & {
            path
            for name, chunks in self._state_chunks().items()
            for chunk in chunks.values()
            for path in tensor_paths(state_tree(chunk.entry), (name,))
        }
        wanted = [block for block in found if block.path not in whole]
        wanted += plain_targets(self._state_dict, saved)
        targets = leaves(self._state_dict, (torch.Tensor,))
        self._by_blocks = {id(leaf) for path, leaf in targets if path in saved}
        sharded = dict(leaves(self._state_dict, SHARDED))
        self._from_trees = {id(sharded[path]) for path in whole}
        self._blocks = BlockRestore(wanted, saved, self._fit.strict)
        self._collisions = CollisionRestore(
            self._tracked.collisions if self._tracked is not None else None
        )
        renamed = {old: new for old, new in self._targets.items() if old != new}
        check_names(wanted, renamed)
        yield from self._blocks.plan(where, self._state_dict, sharded, self._objects)
        self.skipped += self._blocks.skipped
        modules = self._entries(COLLISIONS)
        yield from self._collisions.plan(modules, self._blocks.blocks(), where)

    def _warn_of_conversions(self, current: Any, tree: Tree, name: str) -> None:
        if names := list(conversions(current, tree, name)):
            logger.warning(
                "%s: %d tensors were saved as another type of float, and are converted: %s%s",
                self._content.chain.head.id,
                len(names),
                ", ".join(names[:4]),
                ", …" if len(names) > 4 else "",
            )

    def _kept(self, current: Any, saved: Any) -> bool:
        """Whether a live value stays where a saved state is merged into it: blocks restore it, or
        rows, or it is sharded and gets its parts of a plain tensor here.
        """
        if id(current) in self._from_trees and isinstance(saved, torch.Tensor):
            write_whole(current, saved)
        return id(current) in self._by_blocks or is_sharded(current)

    def _in_place(self, current: object) -> bool:
        """Whether a live value is restored in place: as rows, or from blocks."""
        return id(current) in self._by_blocks or self._stored.covers(current)

    def _load_state(self, chunk: ReadableChunk) -> None:
        name = chunk.entry["name"]
        value = decode_state_chunk(chunk.entry, chunk.payload())
        if self._dry_run:
            return
        head = self._content.chain.head
        read = self._states_read.setdefault(name, [])
        read.append(value)
        merge = self._merge.get(name)
        world = dist.get_world_size() if dist.is_initialized() else 1
        if head.states[name] and head.world_size != world and merge is not None:
            if len(read) < head.world_size:
                return
            value = merge(read)
        current = self._state_dict[name]
        if name in self._objects:
            self._state_dict[name] = self._objects.content(
                name,
                current,
                value,
                self._kept,
                self._in_place,
                self._stored.name,
                self._fit.strict,
                self.skipped,
            )
            return
        if not self._fit.strict:
            value = common_state(current, value, name, self.skipped)
        self._state_dict[name] = merge_state(current, value, self._stored.name, self._kept)


def _dense_tensors(value: object) -> Iterator[torch.Tensor]:
    """A state dict's tensors that are whole on this rank; data-parallel tables are among them."""
    if isinstance(value, dict):
        for item in value.values():
            yield from _dense_tensors(item)
    elif isinstance(value, torch.Tensor) and not is_sharded(value):
        yield value


def _read_item(key: str) -> ReadItem:
    index, nothing = MetadataIndex(key), torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
