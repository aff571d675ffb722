"""DCP's storage protocol: one file per rank that ends in its own index, and the manifest, last.

Nothing is ever unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, NoReturn

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader as DcpStorageReader
from torch.distributed.checkpoint.storage import StorageWriter as DcpStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchrec_checknrun.errors import (
    CheckNRunError,
    CheckpointExists,
    CorruptCheckpoint,
    InvalidPlan,
    SaveFailed,
    StorageUnreachable,
)
from torchrec_checknrun.format.manifest import (
    MANIFEST_NAME,
    Manifest,
    TableTotals,
    is_plain_name,
    require_sequence,
)
from torchrec_checknrun.format.rank_file import (
    FileSummary,
    WriteRankFile,
    add_totals,
    write_rank_file,
)
from torchrec_checknrun.format.reader import StoredChunk, read_chunk
from torchrec_checknrun.format.row_chunk import KIND as ROWS
from torchrec_checknrun.restore.chunks import ChainContent, ReadableChunk, read_content
from torchrec_checknrun.root.chain import Chain, check_sizes, highest_sequence, last_number, resolve
from torchrec_checknrun.root.claims import latest_claim
from torchrec_checknrun.save.plan import CheckpointPlanner, GlobalPlan, OwnStorage
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.threads import Turn, paused, work_in_order
from torchrec_checknrun.version import __version__


class StorageWriter(DcpStorageWriter):
    """Writes one checkpoint into a directory of its own.

    Args:
        path: the checkpoint's directory, a path or fsspec URL; it must not hold anything yet.
            Differential checkpoints must be beside their parents. One that is open is not opened
            again, which some stores refuse at times.
        write: how a rank's file is written.
        before_commit: raises an error if the checkpoint must not come to be.
        after_commit: raises an error if it did not come to be after all, although it was written.

    Attributes:
        written: this rank's file, once it is.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Folder,
        write: WriteRankFile = write_rank_file,
        before_commit: Callable[[], object] = lambda: None,
        after_commit: Callable[[], object] = lambda: None,
    ) -> None:
        self._folder = path if isinstance(path, Folder) else Folder(path)
        self._write = write
        self._before_commit = before_commit
        self._after_commit = after_commit
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

    @paused()
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits: everything is durable by now, and the manifest makes the checkpoint exist."""
        plan: GlobalPlan = metadata.planner_data
        summaries = [result.storage_data for of_rank in results for result in of_rank]
        written = tuple(summary.file.chunks for summary in summaries)
        if written != plan.chunks:
            raise InvalidPlan(f"ranks were to write {plan.chunks} chunks, but wrote {written}")
        header = plan.header
        root, sequence, epoch = self._folder.parent, header.sequence, header.epoch
        if sequence is None:
            sequence = highest_sequence(root) + 1
            require_sequence(sequence)
        if epoch is None:
            epoch = claim.epoch if (claim := latest_claim(root)) else 0
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
            lineage=header.lineage,
            epoch=epoch,
        ).sealed()
        self._before_commit()
        self._check_files(manifest, "while it was written")
        data = manifest.to_bytes()
        self._folder.put(MANIFEST_NAME, data, new=True)
        _numbers[root.url.rstrip("/")] = max(sequence, last_number(root))
        # Between the last look and the put this process may have been stopped for hours.
        self._check_files(manifest, "while it was committed")
        if self._folder.read(MANIFEST_NAME) != data:
            raise SaveFailed(f"{self._folder}/{MANIFEST_NAME} is another one than was written")
        claim = latest_claim(root) if header.epoch is None else None
        if claim is not None and not claim.admits(manifest.id, epoch):
            raise SaveFailed(
                f"a writer claimed {root} while {manifest.id} was committed, so that it doesn't "
                "count: save again, into another directory"
            )
        self._after_commit()
        # dcp.save gives every rank this metadata once all is done.
        metadata.planner_data = manifest

    def _check_files(self, manifest: Manifest, when: str) -> None:
        """Check that the files are as they were written.

        Raises:
            SaveFailed: somebody has taken them for leftovers.
        """
        try:
            check_sizes(self._folder.parent, manifest)
        except CorruptCheckpoint as error:
            raise SaveFailed(
                f"files of {manifest.id} went away {when}: {error}. Leave deleting to `retention` "
                "or `checknrun prune`"
            ) from error


_numbers: dict[str, int] = {}


_THREADS = 8
_CHUNKS_AT_ONCE = 3
"""Of the size that the largest chunk's rows have in memory: what all threads may take."""
_IDS_BYTES = 24


class StorageReader(DcpStorageReader):
    """Reads a checkpoint, and the ones it is differential to.

    Args:
        path: the checkpoint's directory, a path or fsspec URL; one that is open is not opened
            again, and its ``timeout_seconds`` are kept.
        chain: what a restore needs, if that is decided already; else it is looked up.
        threads: how many read; None: one for each CPU of this process, up to 8. However many, they
            take no more memory than a few chunks do.

    Raises:
        ValueError: no thread.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Folder,
        chain: Chain | None = None,
        threads: int | None = None,
    ) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        self._folder = path if isinstance(path, Folder) else Folder(path)
        self._chain = chain
        self._threads = threads or min(_THREADS, len(os.sched_getaffinity(0)))
        self._chunks: dict[str, StoredChunk] = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._folder, self._chain = Folder(checkpoint_id), None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The chain and all chunks in it; the planner raises what went wrong, by its own type."""
        content: ChainContent | CheckNRunError | OSError
        try:
            if self._chain is None:
                self._chain = resolve(self._folder.parent, self._folder.name)
            content = read_content(self._folder.parent, self._chain)
            self._chunks = {chunk.key: chunk for part in content.chunks for chunk in part}
        except (CheckNRunError, OSError) as error:
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
        """Gives the planner its chunks; those of table rows by several threads, each chunk with its
        turn in the plan's order. Every chunk is verified before the planner sees a byte of it.
        """
        items = [(item, self._chunks[item.storage_index.fqn]) for item in plan.items]
        rows = [(item, chunk) for item, chunk in items if chunk.entry["kind"] == ROWS]
        longest = max((chunk.entry["length"] for _, chunk in rows), default=0)
        # Of these only so many are ever touched as chunks are loaded at once.
        free = [np.empty(longest, dtype=np.uint8).data for _ in range(self._threads)]

        def load(number: int, turn: Turn) -> None:
            memory = free.pop()
            try:
                self._load(*rows[number], planner, turn, memory)
            except StorageUnreachable:
                raise  # a read that was given up may still fill it
            except BaseException:
                free.append(memory)
                raise
            free.append(memory)

        sizes = [_memory(chunk) for _, chunk in rows]
        most = _CHUNKS_AT_ONCE * max((_decoded(chunk) for _, chunk in rows), default=0)
        stages = [(chunk.entry["table"], chunk.checkpoint) for _, chunk in rows]
        work_in_order(load, sizes, stages, most, self._threads)
        for item, chunk in items:
            if chunk.entry["kind"] != ROWS:
                self._load(item, chunk, planner, nullcontext(), None)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _load(
        self,
        item: ReadItem,
        chunk: StoredChunk,
        planner: LoadPlanner,
        turn: Turn,
        memory: memoryview | None,
    ) -> None:
        def read() -> memoryview:
            return read_chunk(self._folder.parent, chunk, memory)

        planner.load_bytes(item, ReadableChunk(chunk.key, chunk.entry, read, turn))


def _memory(chunk: StoredChunk) -> int:
    """Bytes that it takes to load a chunk of rows: its own, and their ids in several forms."""
    return int(chunk.entry["length"]) + _IDS_BYTES * int(chunk.entry["count"])


def _decoded(chunk: StoredChunk) -> int:
    """Bytes of a chunk's rows as a table has them."""
    first, last = chunk.entry["columns"]
    return max(4 * (last - first) * int(chunk.entry["count"]), _memory(chunk))


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


def _sum_tables(plan: GlobalPlan, parts: list[dict[str, TableTotals]]) -> dict[str, TableTotals]:
    totals = {name: TableTotals(shape.rows, shape.dim) for name, shape in plan.tables.items()}
    # Rank by rank, as they lie in memory: a thousand ranks' parts fit in no processor's cache.
    for part in parts:
        for name, of_rank in part.items():
            if name in totals:
                totals[name] = add_totals(totals[name], of_rank)
    for name, total in totals.items():
        progress = plan.progress.get(name)
        totals[name] = replace(
            total,
            fp32_bytes=plan.fp32_bytes[name],
            optimizer_step=progress.step if progress else None,
            learning_rate=progress.learning_rate if progress else None,
            optimizer_options=dict(progress.options) if progress else {},
        )
    return totals
