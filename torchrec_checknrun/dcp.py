"""Save and load through ``dcp.save`` and ``dcp.load``: planners, writer, reader of this format."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import StorageMeta

from torchrec_checknrun.codecs.quantization import Quantization
from torchrec_checknrun.errors import CheckpointExists, CheckpointNotFound, CorruptCheckpoint
from torchrec_checknrun.format.manifest import MANIFEST_NAME, Header, Kind, Link
from torchrec_checknrun.format.state import is_sharded
from torchrec_checknrun.model.marks import Consumer, Cut
from torchrec_checknrun.model.state_dict import (
    MODEL,
    StoredTables,
    drop_tables,
    find_blocks,
    find_shards,
)
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.restore.chunks import StorageReader
from torchrec_checknrun.restore.plan import LoadPlanner
from torchrec_checknrun.root.chain import Chain
from torchrec_checknrun.root.checkpoints import read_manifest
from torchrec_checknrun.save.commit import StorageWriter
from torchrec_checknrun.save.items import Items
from torchrec_checknrun.save.plan import CheckpointPlanner, Prepared, summarize
from torchrec_checknrun.save.rank_differences import RankDifferences
from torchrec_checknrun.save.snapshot import ShardSnapshot, Snapshot, take_rows
from torchrec_checknrun.shards import CHUNK_BYTES, TableShape
from torchrec_checknrun.store.folder import Folder

__all__ = ["LoadPlanner", "SavePlanner", "StorageReader", "StorageWriter", "models_of"]


class SavePlanner(CheckpointPlanner):
    """Plans a checkpoint of this package's format, for ``dcp.save(…, planner=…)``.

    With a ``tracked`` model the first checkpoint is full, and each later one beside it holds only
    the rows modified since the one before. Without one, every checkpoint is full: the tables are
    those in the state dict. Tables of a tracked model need not be in the state dict, but may.

    Args:
        tracked: from ``track(model)``. Its next interval starts with this save; if the save turns
            out not to have been committed, the rows are part of the next one.
        quantization: width of the stored rows.
        per_rank: top-level state-dict keys whose content differs between ranks.
        replicated: top-level keys of which rank 0's content is right for all ranks: they are not
            compared. Of others it is an error if they differ, unless they are a model's (see
            ``models_of``): of those the lowest rank's is stored.
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
        replicated: Iterable[str] = (),
        full: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        super().__init__(self._take)
        self._tracked = tracked
        self._quantization = (quantization or Quantization()).resolved(lossy_restores=0)
        self._per_rank = frozenset(per_rank)
        self._replicated = frozenset(replicated)
        self._told: set[str] = set()
        self._full = full
        self._chunk_bytes = chunk_bytes
        self._state_dict: dict[str, Any] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._state_dict = state_dict
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def _take(self, path: str) -> Prepared:
        header = Header(bits=self._quantization.width)
        tables: dict[str, TableShape]
        if self._tracked is None:
            local, tables = find_shards(self._state_dict)
            shards = [ShardSnapshot(shard, None) for shard in local]
        else:
            self._tracked.check_writes()
            self._tracked.all_reduce_marks()
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
            header = dataclasses.replace(header, kind=kind, parent=parent, previous=beside)
        stored = StoredTables(tables, (snapshot.shard for snapshot in shards))
        states = drop_tables(self._state_dict, stored)
        per_rank = self._per_rank & states.keys()
        snapshot = Snapshot(
            shards,
            tables,
            states,
            per_rank,
            replicated=self._replicated & states.keys() - per_rank,
            models=models_of(self._state_dict),
        )
        snapshot.blocks = [b for b in find_blocks(self._state_dict, stored) if not b.replica]
        if self._tracked is not None:
            snapshot.progress = self._tracked.progress()
            snapshot.collisions = self._tracked.collisions.state()
        items = Items.of(snapshot, self._quantization, self._chunk_bytes)
        summary = summarize(header, snapshot, items, self._quantization)
        differences = RankDifferences(items.trees, snapshot.models, told=self._told)
        if dist.is_initialized():
            of_blocks = {number: items.shared_digest(number) for number in items.shared}
            summary = summary.with_digests(items.digests(), of_blocks)
        return Prepared(summary, items.by_name, differences=differences)


def models_of(state_dict: Mapping[str, Any]) -> frozenset[str]:
    """Find the top-level keys whose content is a model's: ``model``, dicts that hold a sharded
    table, and all tensors beside a table.
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
        self._restores = 0
        self.widths: dict[str, int] = {}

    @classmethod
    def of(cls, tracked: TrackedModel) -> DirectInterval:
        """The one interval of a tracked model; settles what the last save left open."""
        interval = cls._of.setdefault(tracked, cls())
        if interval._restores != tracked.restores:
            # Rows are others than the last checkpoint's: the next one can only be full.
            interval = cls._of[tracked] = cls()
            interval._restores = tracked.restores
        if interval._pending is not None:
            folder, cut = interval._pending
            try:
                manifest = read_manifest(folder.parent, folder.name)
                interval._parent = (folder.parent.url, manifest.link)
                widths = Chain((manifest,)).widths
                if manifest.kind == "differential":
                    widths = {t: min(bits, interval.widths[t]) for t, bits in widths.items()}
                interval.widths = widths
                tracked.forget(cut)
            except (CheckpointNotFound, CorruptCheckpoint):
                tracked.merge(cut)
            interval._pending = None
        if tracked.converted:
            interval._parent = None  # a differential checkpoint can't follow
            tracked.converted = False
        return interval

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
