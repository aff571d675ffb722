"""Save through ``dcp.save``: a planner and a storage writer of this package's format."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner import SavePlanner as DcpSavePlanner
from torch.distributed.checkpoint.storage import StorageWriter as DcpStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchrec_checknrun.codecs.quantization import ALONE, Quantization
from torchrec_checknrun.dcp.interval import DirectInterval
from torchrec_checknrun.errors import InvalidPlan
from torchrec_checknrun.format.chunk import EncodedChunk
from torchrec_checknrun.format.manifest import Header, Kind
from torchrec_checknrun.format.rank_file import FileSummary, Job
from torchrec_checknrun.marks.layers import Consumer
from torchrec_checknrun.model.blocks import is_step
from torchrec_checknrun.model.state_dict import (
    MODEL,
    StoredTables,
    drop_tables,
    find_blocks,
    find_shards,
)
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.ranks import gloo_beside, picklable_errors
from torchrec_checknrun.save.commit import CheckpointWriter
from torchrec_checknrun.save.plan import (
    GlobalPlan,
    LocalPlan,
    Prepared,
    Share,
    make_global_plan,
    summarize,
)
from torchrec_checknrun.save.rank_differences import RankDifferences
from torchrec_checknrun.shards import CHUNK_BYTES, TableShape
from torchrec_checknrun.snapshot.items import Items
from torchrec_checknrun.snapshot.snapshot import ShardSnapshot, Snapshot, take_rows
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.values.state import is_sharded


@dataclasses.dataclass
class OwnStorage(StorageMeta):
    """Metadata of this package's StorageWriter, by which a planner recognizes it."""


class SavePlanner(DcpSavePlanner):
    """A planner of a checkpoint of this package's format, for ``dcp.save(…, planner=…)``.

    With a ``tracked`` model the first checkpoint is full, and each later one beside it holds only
    the rows modified since the previous one. Without one every checkpoint is full, and the tables
    are those in the state dict. Tables of a tracked model need not be in the state dict, but may.

    Args:
        tracked: from ``track(model)``. Its next interval starts with this save; if the save turns
            out not to have been committed, its rows are part of the next one. Its rows are read
            while ``dcp.save`` waits; ``dcp.async_save``, which doesn't, is refused.
        quantization: width of the stored rows.
        per_rank: top-level state-dict keys whose content differs between ranks.
        replicated: top-level keys of which rank 0's content is right for all ranks, so that they
            are not compared. Differences in other keys are an error, except in a model's (see
            ``models_of``), of which the lowest rank's content is stored.
        full: make a full checkpoint even where a differential one is possible.
        chunk_bytes: memory for the rows on their way to storage (and later back, since rows are
            read as they were written), in bytes; a chunk holds up to a fifth of that.
    """

    def __init__(
        self,
        tracked: TrackedModel | None = None,
        *,
        quantization: Quantization | None = None,
        per_rank: Iterable[str] = (),
        replicated: Iterable[str] = (),
        full: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._tracked = tracked
        self._quantization = (quantization or Quantization()).resolved(lossy_restores=0)
        if (method := self._quantization.link_method) is not None:
            raise ValueError(
                f"quantization method={method!r} needs what the last checkpoint restores, which "
                f"only Checkpointer keeps: use method={ALONE[method]!r}, each row by itself"
            )
        self._per_rank = frozenset(per_rank)
        self._replicated = frozenset(replicated)
        self._told: set[str] = set()
        self._full = full
        self._chunk_bytes = chunk_bytes
        self._share = Share((), {})
        self._made_by = _this_thread()

    @picklable_errors()  # DCP sends errors to rank 0
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        if not isinstance(storage_meta, OwnStorage) or storage_meta.checkpoint_id is None:
            raise InvalidPlan(
                "SavePlanner makes chunks that this package's StorageWriter writes: pass "
                "storage_writer=StorageWriter(path) to dcp.save as well"
            )
        if self._tracked is not None and self._made_by != _this_thread():
            raise InvalidPlan(
                "SavePlanner(tracked) reads the live tables, and was made by another thread than "
                "this one, as with dcp.async_save: training may go on meanwhile, so that rows "
                "would be of several steps. Use Checkpointer, which saves beside training, or "
                "dcp.save in the thread that trains; or SavePlanner() without a tracked model, "
                "which stores what dcp.async_save has copied"
            )
        self._prepared = self._prepare(state_dict, str(storage_meta.checkpoint_id))

    def create_local_plan(self) -> SavePlan:
        plan = self._prepared.local_plan
        return SavePlan(_write_items(plan.items), planner_data=plan.summary)

    @picklable_errors()  # DCP sends errors to other ranks
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans = [LocalPlan(_names(plan), plan.planner_data) for plan in all_plans]
        shares, whole = make_global_plan(plans, self._prepared.differences)
        # The files' indexes say where chunks are; DCP would send this metadata to all ranks.
        return [
            SavePlan(_write_items(share.items), planner_data=share.settled or None)
            for share in shares
        ], Metadata({}, planner_data=whole)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._share = Share(_names(new_plan), new_plan.planner_data or {})
        return new_plan

    def job(self, write_item: WriteItem) -> Job:
        """Return the job of an item, which encodes the item when its turn comes."""
        return self._prepared.items[write_item.index.fqn].job(self._share.settled)

    def resolve_data(self, write_item: WriteItem) -> EncodedChunk:
        return self.job(write_item).encode()

    def _prepare(self, state_dict: dict[str, Any], path: str) -> Prepared:
        """Take a snapshot of the live tables and the state dict."""
        header = Header(bits=self._quantization.width)
        tables: dict[str, TableShape]
        if self._tracked is None:
            local, tables = find_shards(state_dict)
            shards = [ShardSnapshot(shard, None) for shard in local]
        else:
            self._tracked.check_writes()
            self._tracked.all_reduce_marks(gloo_beside())
            self._tracked.refresh()
            interval = DirectInterval.of(self._tracked)
            beside = interval.begin(path)
            # Rows that are not written again would keep their fewer bits.
            rows = {name: shape.rows for name, shape in self._tracked.tables.items()}
            widths = self._quantization.widths(rows)
            rise = any(bits > interval.widths.get(table, 0) for table, bits in widths.items())
            parent = None if self._full or rise else beside
            shards, cut = take_rows(self._tracked, Consumer.LAST if parent else None)
            interval.pending(path, cut)
            tables = self._tracked.tables
            kind: Kind = "differential" if parent else "full"
            header = dataclasses.replace(header, kind=kind, parent=parent, previous=beside)
        stored = StoredTables(tables, (snapshot.shard for snapshot in shards))
        states = drop_tables(state_dict, stored)
        per_rank = self._per_rank & states.keys()
        snapshot = Snapshot(
            shards,
            tables,
            states,
            per_rank,
            replicated=self._replicated & states.keys() - per_rank,
            models=models_of(state_dict),
        )
        snapshot.blocks = [b for b in find_blocks(state_dict, stored) if not b.replica]
        if self._tracked is not None:
            snapshot.blocks = [b for b in snapshot.blocks if not is_step(b.path)]  # of the progress
            snapshot.progress, snapshot.collisions = self._tracked.beside_rows()
        items = Items.of(snapshot, self._quantization, self._chunk_bytes)
        summary = summarize(header, snapshot, items, self._quantization)
        differences = RankDifferences(items.trees, snapshot.models, told=self._told)
        if dist.is_initialized():
            of_blocks = {number: items.shared_digest(number) for number in items.shared}
            summary = summary.with_digests(items.digests(), of_blocks)
        return Prepared(summary, items.by_name, differences=differences)


class StorageWriter(DcpStorageWriter):
    """A writer of one checkpoint into a directory of its own, for
    ``dcp.save(…, storage_writer=…)``.

    Args:
        path: the checkpoint's directory, a path or fsspec URL, which must be empty or missing.
            Differential checkpoints must lie beside their parents.
    """

    def __init__(self, path: str | os.PathLike[str] | Folder) -> None:
        self._writer = CheckpointWriter(path if isinstance(path, Folder) else Folder(path))
        self._rank = 0
        self._is_coordinator = True

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._writer = CheckpointWriter(Folder(checkpoint_id))

    def storage_meta(self) -> StorageMeta:
        return OwnStorage(checkpoint_id=self._writer.folder.url)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._is_coordinator = is_coordinator
        self._rank = int(kwargs.get("rank", 0))

    @picklable_errors()  # DCP sends errors to other ranks
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._writer.check(self._is_coordinator)
        return plan

    @picklable_errors()  # DCP sends errors to other ranks
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._writer.create()
        return plans

    @picklable_errors()  # DCP sends errors to rank 0
    def write_data(self, plan: SavePlan, planner: DcpSavePlanner) -> Future[list[WriteResult]]:
        if not isinstance(planner, SavePlanner):
            raise InvalidPlan(
                "StorageWriter writes chunks that this package's SavePlanner encodes: pass "
                "planner=SavePlanner() to dcp.save as well"
            )
        summary = self._writer.write(self._rank, (planner.job(item) for item in plan.items))
        done: Future[list[WriteResult]] = Future()
        index = MetadataIndex(summary.file.name)
        done.set_result([WriteResult(index, summary.file.size, summary)])
        return done

    @picklable_errors()  # DCP sends errors to other ranks
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        plan: GlobalPlan = metadata.planner_data
        written: list[FileSummary] = [r.storage_data for of_rank in results for r in of_rank]
        # dcp.save returns this metadata on every rank.
        metadata.planner_data = self._writer.commit(plan, written)


def models_of(state_dict: Mapping[str, Any]) -> frozenset[str]:
    """Find the top-level keys of a model's content: ``model``, dicts that hold a sharded table, and
    all tensors beside a table.
    """
    if _holds_table(state_dict):
        return frozenset(n for n, value in state_dict.items() if isinstance(value, torch.Tensor))
    found = {
        name
        for name, value in state_dict.items()
        if isinstance(value, Mapping) and _holds_table(value)
    }
    return frozenset(found | {MODEL} & state_dict.keys())


def _holds_table(content: Mapping[Any, Any]) -> bool:
    return any(is_sharded(v) and str(key).endswith(".weight") for key, v in content.items())


def _this_thread() -> tuple[int, int]:
    return os.getpid(), threading.get_ident()


def _names(plan: SavePlan) -> tuple[str, ...]:
    return tuple(item.index.fqn for item in plan.items)


def _write_items(names: Iterable[str]) -> list[WriteItem]:
    return [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in names]
