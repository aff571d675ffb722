"""DCP's save protocol for table rows: every rank plans its own shards, rank 0 checks the whole.

The local plan lists chunks of the local shards' rows; the global plan refuses a checkpoint in which
two ranks would write the same rectangle or a part of a table is missing; ``resolve_data`` encodes a
chunk only when it is about to be written, so memory stays at one chunk.
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner import SavePlanner as DcpSavePlanner

from torchrec_checknrun.blocks import Block, BlockSummary, Path, check_blocks
from torchrec_checknrun.chain import Chain, read_manifest
from torchrec_checknrun.chunks import EncodedChunk, state_chunk
from torchrec_checknrun.coverage import check_coverage
from torchrec_checknrun.errors import (
    CheckpointExists,
    CheckpointNotFound,
    CorruptCheckpoint,
    InvalidPlan,
)
from torchrec_checknrun.filesystem import Folder
from torchrec_checknrun.importance_budget import Key, Survey, constants, survey, with_constant
from torchrec_checknrun.manifest import MANIFEST_NAME, Header, Kind, Link
from torchrec_checknrun.progress import OptimizerProgress
from torchrec_checknrun.quantization import Quantization
from torchrec_checknrun.row_chunks import encode_rows
from torchrec_checknrun.sharded_state import StoredTables, drop_tables, find_blocks, find_shards
from torchrec_checknrun.shards import Rectangle, TableShape
from torchrec_checknrun.snapshot import ShardSnapshot, Snapshot, take_rows
from torchrec_checknrun.state import Tree, encode_state
from torchrec_checknrun.tracked import TrackedModel
from torchrec_checknrun.tracking import Consumer, Cut

CHUNK_BYTES = 32 << 20
"""Memory for a chunk's rows while they are saved or restored, with every copy of them."""


@dataclass
class OwnStorage(StorageMeta):
    """Says that this package's StorageWriter writes what is planned; others lose the index."""


@dataclass(frozen=True)
class PlanSummary:
    """What rank 0 needs of a rank's plan to check the whole (sent once, not scattered back)."""

    header: Header
    tables: dict[str, TableShape]
    shards: list[tuple[str, Rectangle]]
    fp32_bytes: dict[str, int]
    progress: dict[str, OptimizerProgress]
    replicated: dict[str, int]
    """Bytes of each state that all ranks have alike: only one of them will write it."""
    per_rank: tuple[str, ...]
    blocks: list[BlockSummary] = field(default_factory=list)
    importance: dict[Key, Survey] = field(default_factory=dict)


@dataclass(frozen=True)
class GlobalPlan:
    """What the storage writer turns into a manifest once everything is written."""

    header: Header
    tables: dict[str, TableShape]
    fp32_bytes: dict[str, int]
    progress: dict[str, OptimizerProgress]
    states: dict[str, bool]
    """By name, whether each rank has its own."""
    chunks: tuple[int, ...]
    """How many chunks each rank is to write."""


@dataclass
class _RowsItem:
    shard: ShardSnapshot
    start: int
    stop: int


@dataclass
class _BlockItem:
    block: Block
    start: int
    stop: int


@dataclass
class _StateItem:
    name: str
    rank: int | None
    tree: Tree
    pieces: list[bytes | memoryview]


class SavePlanner(DcpSavePlanner):
    """Plans a checkpoint of this package's format, for ``dcp.save(…, planner=…)``.

    With a ``tracked`` model the first checkpoint is full, and each later one beside it holds only
    the rows modified since the one before. Without one, every checkpoint is full: the tables are
    those in the state dict. Tables of a tracked model need not be in the state dict, but may.

    Args:
        tracked: from ``track(model)``. Its next interval starts with this save; if the save turns
            out not to have been committed, the rows are part of the next one.
        quantization: width of the stored rows.
        per_rank: top-level state-dict keys whose content differs between ranks.
        full: a full checkpoint even where a differential one could be.
        chunk_bytes: memory for the rows on their way to storage (and later back, since rows are
            read as they were written); a chunk holds up to a fifth of that.
    """

    def __init__(
        self,
        tracked: TrackedModel | None = None,
        *,
        quantization: Quantization | None = None,
        per_rank: Iterable[str] = (),
        full: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._tracked = tracked
        self._quantization = (quantization or Quantization()).resolved(lossy_restores=0)
        self._per_rank = frozenset(per_rank)
        self._full = full
        self._chunk_bytes = chunk_bytes
        self._take: Callable[[], Snapshot] | None = None
        self._header = Header(bits=self._quantization.width)
        self._snapshot: Snapshot | None = None
        self._constants: dict[Key, float] = {}
        self._items: dict[str, _RowsItem | _BlockItem | _StateItem | EncodedChunk] = {}

    @classmethod
    def decided(
        cls,
        header: Header,
        take: Callable[[], Snapshot],
        quantization: Quantization,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> SavePlanner:
        """A planner for what was decided already (the Checkpointer's way).

        Args:
            take: takes the snapshot; called within DCP's planning, so that an error on one rank is
                an error on all.
        """
        planner = cls(quantization=quantization, chunk_bytes=chunk_bytes)
        planner._header, planner._take = header, take
        return planner

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._items = {}
        if not isinstance(storage_meta, OwnStorage) or storage_meta.checkpoint_id is None:
            raise InvalidPlan(
                "SavePlanner makes chunks that this package's StorageWriter writes: pass "
                "storage_writer=StorageWriter(path) to dcp.save as well"
            )
        if self._take is not None:
            self._snapshot = self._take()
            return
        tables: dict[str, TableShape]
        if self._tracked is None:
            local, tables = find_shards(state_dict)
            shards = [ShardSnapshot(shard, None) for shard in local]
        else:
            path = storage_meta.checkpoint_id
            self._tracked.unite()
            self._tracked.refresh()
            interval = DirectInterval.of(self._tracked)
            beside = interval.begin(path)
            # Rows not written again would stay in the fewer bits they have now.
            rows = {name: shape.rows for name, shape in self._tracked.tables.items()}
            widths = self._quantization.widths(rows)
            rise = any(bits > interval.widths.get(table, 0) for table, bits in widths.items())
            parent = None if self._full or rise else beside
            shards, cut = take_rows(self._tracked, Consumer.LAST if parent else None)
            interval.pending(path, cut)
            tables = self._tracked.tables
            kind: Kind = "differential" if parent else "full"
            self._header = dataclasses.replace(
                self._header, kind=kind, parent=parent, previous=beside
            )
        stored = StoredTables(tables, (snapshot.shard for snapshot in shards))
        states = drop_tables(state_dict, stored)
        per_rank = self._per_rank & states.keys()
        self._snapshot = Snapshot(shards, tables, states, per_rank)
        self._snapshot.blocks = find_blocks(state_dict, stored)
        if self._tracked is not None:
            self._snapshot.progress = self._tracked.progress()
            self._snapshot.collisions = self._tracked.collisions.state()

    def create_local_plan(self) -> SavePlan:
        assert self._snapshot is not None
        replicated: dict[str, int] = {}
        for shard in self._snapshot.shards:
            for number, (start, stop) in enumerate(shard.spans(self._chunk_bytes)):
                self._items[f"{shard.shard}#{number}"] = _RowsItem(shard, start, stop)
        rank = dist.get_rank() if dist.is_initialized() else 0
        for i, block in enumerate(self._snapshot.blocks):
            for number, (start, stop) in enumerate(block.spans(self._chunk_bytes)):
                self._items[f"block:{i}@{rank}#{number}"] = _BlockItem(block, start, stop)
        if self._snapshot.blocks and self._snapshot.collisions is not None:
            self._items[f"collisions@{rank}"] = self._snapshot.collisions.encode(rank)
        for name, value in self._snapshot.states.items():
            own = name in self._snapshot.per_rank
            state = _StateItem(name, rank if own else None, *encode_state(value, name))
            if not own:
                replicated[name] = sum(memoryview(piece).nbytes for piece in state.pieces)
            self._items[f"state:{name}@{rank}" if own else _state_key(name)] = state
        summary = PlanSummary(
            header=self._header,
            tables=self._snapshot.tables,
            shards=[(s.shard.table, s.shard.rectangle) for s in self._snapshot.shards],
            fp32_bytes=_fp32_bytes(self._snapshot.shards),
            progress=dict(self._snapshot.progress),
            replicated=replicated,
            per_rank=tuple(sorted(self._snapshot.per_rank)),
            blocks=[block.summary for block in self._snapshot.blocks],
            importance=survey(self._snapshot.shards, self._quantization),
        )
        items = [
            WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO) for key in self._items
        ]
        return SavePlan(items, planner_data=summary)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        summaries: list[PlanSummary] = [plan.planner_data for plan in all_plans]
        _check_agreement(summaries)
        _check_coverage(summaries)
        writers = _assign_writers(summaries)
        found = constants(summary.importance for summary in summaries)
        plans = []
        for rank, plan in enumerate(all_plans):
            items = [i for i in plan.items if writers.get(i.index.fqn, rank) == rank]
            plans.append(dataclasses.replace(plan, items=items, planner_data=found or None))
        progress = {table: p for s in summaries for table, p in s.progress.items()}
        fp32_bytes = dict.fromkeys(summaries[0].tables, 0)
        for summary in summaries:
            for table, size in summary.fp32_bytes.items():
                fp32_bytes[table] += size
        states = dict.fromkeys((name for s in summaries for name in s.replicated), False)
        states |= dict.fromkeys(summaries[0].per_rank, True)
        metadata = Metadata(
            {item.index.fqn: BytesStorageMetadata() for plan in plans for item in plan.items},
            planner_data=GlobalPlan(
                header=summaries[0].header,
                tables=summaries[0].tables,
                fp32_bytes=fp32_bytes,
                progress=progress,
                states=states,
                chunks=tuple(len(plan.items) for plan in plans),
            ),
        )
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._constants = new_plan.planner_data or {}
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> EncodedChunk:
        item = self._items[write_item.index.fqn]
        if isinstance(item, _StateItem):
            return state_chunk(item.name, item.rank, item.tree, item.pieces)
        if isinstance(item, _BlockItem):
            return item.block.encode(item.start, item.stop)
        if isinstance(item, EncodedChunk):
            return item
        shard = item.shard.shard
        encoding = self._quantization.for_table(shard.table, shard.shape.rows)
        encoding = with_constant(encoding, self._constants)
        return encode_rows(shard, item.shard.ids(item.start, item.stop), encoding)


class DirectInterval:
    """Between two ``dcp.save`` of one tracked model: whether the last one was committed.

    ``dcp.save`` tells a planner nothing of its end, so that is looked up when the next one begins:
    by then the manifest is there, or the rows are marked again.

    Attributes:
        widths: the fewest bits of a value since the last full checkpoint, by table.
    """

    _of: ClassVar[weakref.WeakKeyDictionary[TrackedModel, DirectInterval]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self) -> None:
        self._parent: tuple[str, Link] | None = None
        self._pending: tuple[Folder, Cut] | None = None
        self.widths: dict[str, int] = {}

    @classmethod
    def of(cls, tracked: TrackedModel) -> DirectInterval:
        """The one interval of a tracked model; settles what the last save left open."""
        interval = cls._of.setdefault(tracked, cls())
        if interval._pending is not None:
            folder, cut = interval._pending
            try:
                manifest = read_manifest(folder.parent, folder.name)
                interval._parent = (folder.parent.url, manifest.link)
                widths = Chain((manifest,)).widths
                if manifest.kind == "differential":
                    widths = {t: min(bits, interval.widths[t]) for t, bits in widths.items()}
                interval.widths = widths
            except (CheckpointNotFound, CorruptCheckpoint):
                tracked.merge(cut)
            interval._pending = None
        if tracked.converted:
            interval._parent = None  # a differential checkpoint can't follow
            tracked.converted = False
        return interval

    @classmethod
    def forget(cls, tracked: TrackedModel) -> None:
        """The model was restored or replaced: the next checkpoint can only be full."""
        cls._of.pop(tracked, None)

    def begin(self, path: str | os.PathLike[str]) -> Link | None:
        """The checkpoint that one at ``path`` can be differential to: the last, if beside it.

        Raises:
            CheckpointExists: one is at ``path`` already, and would be taken for this one later.
        """
        folder = Folder(path)
        if folder.size(MANIFEST_NAME) is not None:
            raise CheckpointExists(
                f"{folder} already holds a checkpoint: save into a new directory"
            )
        if self._parent is None or folder.parent.url != self._parent[0]:
            return None
        return self._parent[1]

    def pending(self, path: str | os.PathLike[str], cut: Cut) -> None:
        """Remembers a cut until it is known whether the checkpoint at ``path`` was committed."""
        self._pending = (Folder(path), cut)


def _state_key(name: str) -> str:
    return f"state:{name}"


def _fp32_bytes(shards: list[ShardSnapshot]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for shard in shards:
        values = sum(tensor.numel() for tensor in shard.shard.tensors)
        sizes[shard.shard.table] = sizes.get(shard.shard.table, 0) + 4 * values
    return sizes


def _check_agreement(summaries: list[PlanSummary]) -> None:
    for rank, summary in enumerate(summaries):
        for what in ("header", "tables", "per_rank"):
            first, other = getattr(summaries[0], what), getattr(summary, what)
            if first != other:
                raise InvalidPlan(
                    f"ranks 0 and {rank} don't save the same checkpoint: {what} is {first} there "
                    f"and {other} here; call save on all ranks at the same step with the same "
                    "arguments"
                )


def _check_coverage(summaries: list[PlanSummary]) -> None:
    """No two ranks write the same, and no part of a table or a sharded buffer is left out."""
    held: dict[str, list[tuple[Rectangle, int]]] = {name: [] for name in summaries[0].tables}
    blocks: dict[Path, list[tuple[BlockSummary, int]]] = {}
    for rank, summary in enumerate(summaries):
        for table, rectangle in summary.shards:
            if table not in held:
                raise InvalidPlan(f"rank {rank} writes rows of {table!r}, which is no known table")
            held[table].append((rectangle, rank))
        for block in summary.blocks:
            blocks.setdefault(block.path, []).append((block, rank))
    for table, shape in summaries[0].tables.items():
        check_coverage(table, shape, held[table])
    for path, parts in blocks.items():
        check_blocks(path, parts)


def _assign_writers(summaries: list[PlanSummary]) -> dict[str, int]:
    """Which rank writes each state that all have alike: the biggest first, to the least loaded."""
    holders: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for rank, summary in enumerate(summaries):
        for name, size in summary.replicated.items():
            holders.setdefault(name, []).append(rank)
            sizes[name] = max(size, sizes.get(name, 0))
    load = [0] * len(summaries)
    writers = {}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        rank = min(holders[name], key=lambda r: (load[r], r))
        load[rank] += sizes[name]
        writers[_state_key(name)] = rank
    return writers
