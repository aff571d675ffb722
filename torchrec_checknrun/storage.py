"""DCP's storage protocol: one file per rank that ends in its own index, and the manifest, last.

Reading checks all that it uses against the checksums; nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, NoReturn

import xxhash
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader as DcpStorageReader
from torch.distributed.checkpoint.storage import StorageWriter as DcpStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchrec_checknrun.chain import Chain, highest_sequence, resolve
from torchrec_checknrun.chunks import EncodedChunk, Entry
from torchrec_checknrun.errors import (
    CheckNRunError,
    CheckpointExists,
    CorruptCheckpoint,
    InvalidPlan,
)
from torchrec_checknrun.filesystem import Folder
from torchrec_checknrun.manifest import (
    MANIFEST_NAME,
    Manifest,
    TableTotals,
    is_plain_name,
)
from torchrec_checknrun.rank_file import FileSummary, WriteRankFile, add_totals, write_rank_file
from torchrec_checknrun.save_plan import CheckpointPlanner, GlobalPlan, OwnStorage
from torchrec_checknrun.version import __version__


@dataclass(frozen=True)
class StoredChunk:
    """A chunk in storage: its index entry, and where it is."""

    checkpoint: str
    file: str
    number: int
    entry: Entry = field(hash=False)

    @property
    def key(self) -> str:
        """Names the chunk within a chain (an offset would not: chunks may be empty)."""
        return f"{self.checkpoint}/{self.file}#{self.number}"


class StorageWriter(DcpStorageWriter):
    """Writes one checkpoint into a directory of its own.

    Args:
        path: the checkpoint's directory, a path or fsspec URL; it must not hold anything yet.
            Differential checkpoints must be beside their parents.
        write: how a rank's file is written.

    Attributes:
        written: this rank's file, once it is.
    """

    def __init__(
        self, path: str | os.PathLike[str], write: WriteRankFile = write_rank_file
    ) -> None:
        self._folder = Folder(path)
        self._write = write
        self.written: FileSummary | None = None
        self._rank = 0
        self._is_coordinator = True

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._folder = Folder(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        return OwnStorage(checkpoint_id=self._folder.url)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._is_coordinator = is_coordinator
        self._rank = int(kwargs.get("rank", 0))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuses a directory that was used before: its files could be mistaken for new ones."""
        if not is_plain_name(self._folder.name):
            raise InvalidPlan(
                f"{self._folder} can't be a checkpoint: its name {self._folder.name!r} must have 1 "
                "to 255 characters without backslash, '::' and control characters"
            )
        if self._is_coordinator and self._folder.names():
            raise CheckpointExists(
                f"{self._folder} already holds {self._folder.names()[:3]}: a checkpoint directory "
                "is written once; save into a new one, or remove it if it is not needed"
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._folder.create()
        self._folder.sync()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._folder.create()
        if not isinstance(planner, CheckpointPlanner):
            raise InvalidPlan(
                "StorageWriter writes chunks that this package's SavePlanner encodes: pass "
                "planner=SavePlanner() to dcp.save as well"
            )
        jobs = (planner.job(item) for item in plan.items)
        self.written = summary = self._write(self._folder, self._rank, jobs)
        done: Future[list[WriteResult]] = Future()
        index = MetadataIndex(summary.file.name)
        done.set_result([WriteResult(index, summary.file.size, summary)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits: everything is durable by now, and the manifest makes the checkpoint exist."""
        plan: GlobalPlan = metadata.planner_data
        summaries = [result.storage_data for of_rank in results for result in of_rank]
        written = tuple(summary.file.chunks for summary in summaries)
        if written != plan.chunks:
            raise InvalidPlan(f"ranks were to write {plan.chunks} chunks, but wrote {written}")
        header = plan.header
        sequence = header.sequence
        if sequence is None:
            sequence = highest_sequence(self._folder.parent) + 1
        manifest = Manifest(
            id=self._folder.name,
            sequence=sequence,
            step=header.step,
            kind=header.kind,
            parent=header.parent,
            previous=header.previous,
            world_size=len(summaries),
            created_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            created_by=f"torchrec_checknrun {__version__}",
            lossy_restores=header.lossy_restores,
            bits=header.bits,
            tables=_sum_tables(plan, [summary.tables for summary in summaries]),
            states=plan.states,
            dense_bytes=sum(summary.dense_bytes for summary in summaries),
            files=tuple(summary.file for summary in summaries),
            earlier_fractions=header.earlier_fractions,
        ).sealed()
        self._folder.put(MANIFEST_NAME, manifest.to_bytes())
        # dcp.save gives every rank this metadata once all is done.
        metadata.planner_data = manifest


class StorageReader(DcpStorageReader):
    """Reads a checkpoint, and the ones it is differential to.

    Args:
        path: the checkpoint's directory.
        chain: what a restore needs, if that is decided already; else it is looked up.
    """

    def __init__(self, path: str | os.PathLike[str], chain: Chain | None = None) -> None:
        self._folder = Folder(path)
        self._chain = chain
        self._chunks: dict[str, StoredChunk] = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._folder, self._chain = Folder(checkpoint_id), None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The chain and all chunks in it; the planner raises what went wrong, by its own type."""
        content: ChainContent | CheckNRunError
        try:
            if self._chain is None:
                self._chain = resolve(self._folder.parent, self._folder.name)
            content = read_content(self._folder.parent, self._chain)
            self._chunks = {chunk.key: chunk for part in content.chunks for chunk in part}
        except CheckNRunError as error:
            content = error  # DCP would turn an exception into a message of its own
        return Metadata(_ForLoadPlannerOnly(), planner_data=content)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads chunk by chunk in the plan's order, each verified before the planner sees it."""
        root = self._folder.parent
        for item in plan.items:
            chunk = self._chunks[item.storage_index.fqn]
            planner.load_bytes(item, EncodedChunk(chunk.entry, [read_chunk(root, chunk)]))
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _ForLoadPlannerOnly(dict[str, Any]):
    """DCP's own planner would look for its keys here; without them it loads nothing, or names a
    missing key where the planner is what is wrong.
    """

    def _refuse(self, *_: object) -> NoReturn:
        raise InvalidPlan(
            "StorageReader reads checkpoints for this package's LoadPlanner: pass "
            "planner=LoadPlanner() to dcp.load as well"
        )

    keys = items = __iter__ = __contains__ = __getitem__ = _refuse


@dataclass(frozen=True)
class ChainContent:
    """A chain with the index of every file in it, checkpoints oldest first."""

    chain: Chain
    chunks: tuple[tuple[StoredChunk, ...], ...]


def read_content(root: Folder, chain: Chain) -> ChainContent:
    """Reads the chunk indexes of a chain.

    Raises:
        CorruptCheckpoint: an index is missing, or differs from what the manifest says of it.
    """
    return ChainContent(chain, tuple(read_indexes(root, manifest) for manifest in chain.manifests))


def read_indexes(root: Folder, manifest: Manifest) -> tuple[StoredChunk, ...]:
    """All chunks of one checkpoint."""
    folder = root / manifest.id
    chunks: list[StoredChunk] = []
    for file in manifest.files:
        where = f"{folder}/{file.name}"
        try:
            data = folder.read(file.name, file.index_offset, file.index_length)
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{where} is missing") from None
        checksum = xxhash.xxh3_64_hexdigest(data)
        if checksum != file.index_checksum:
            raise CorruptCheckpoint(
                f"{where}: its index at {file.index_offset} has checksum {checksum}, the manifest "
                f"says {file.index_checksum}"
            )
        entries = json.loads(data)["chunks"]
        for entry in entries:
            if entry["offset"] < 0 or entry["offset"] + entry["length"] > file.index_offset:
                raise CorruptCheckpoint(
                    f"{where}: a chunk at {entry['offset']} lies outside the file"
                )
        chunks += [StoredChunk(manifest.id, file.name, i, e) for i, e in enumerate(entries)]
    return tuple(chunks)


def read_chunk(root: Folder, chunk: StoredChunk) -> bytes:
    """A chunk's bytes, verified.

    Raises:
        CorruptCheckpoint: they are not what was written.
    """
    entry, folder = chunk.entry, root / chunk.checkpoint
    where = f"{folder}/{chunk.file} at offset {entry['offset']}"
    try:
        data = folder.read(chunk.file, entry["offset"], entry["length"])
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{folder}/{chunk.file} is missing") from None
    checksum = xxhash.xxh3_64_hexdigest(data)
    if len(data) != entry["length"] or checksum != entry["checksum"]:
        raise CorruptCheckpoint(
            f"{where}: {len(data)} bytes with checksum {checksum}, expected {entry['length']} with "
            f"{entry['checksum']}"
        )
    return data


def _sum_tables(plan: GlobalPlan, parts: list[dict[str, TableTotals]]) -> dict[str, TableTotals]:
    tables = {}
    for name, shape in plan.tables.items():
        total = TableTotals(shape.rows, shape.dim)
        for part in parts:
            if name in part:
                total = add_totals(total, part[name])
        progress = plan.progress.get(name)
        tables[name] = replace(
            total,
            fp32_bytes=plan.fp32_bytes[name],
            optimizer_step=progress.step if progress else None,
            learning_rate=progress.learning_rate if progress else None,
        )
    return tables
