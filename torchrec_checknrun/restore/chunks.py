"""Read a chain: the indexes of its files, and its chunks by several threads, each one verified."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any, NoReturn

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as DcpStorageReader
from torch.futures import Future

from torchrec_checknrun.errors import (
    CheckNRunError,
    CorruptCheckpoint,
    InvalidPlan,
    StorageUnreachable,
)
from torchrec_checknrun.format.chunk import Entry
from torchrec_checknrun.format.manifest import Manifest, TableTotals
from torchrec_checknrun.format.reader import Columns, StoredChunk, read_chunk, read_indexes
from torchrec_checknrun.format.row_chunk import KIND as ROWS
from torchrec_checknrun.root.chain import Chain, resolve
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.threads import Turn, run_in_order

_THREADS = 8
_CHUNKS_AT_ONCE = 3
"""Memory for all threads, in sizes of the largest chunk's decoded rows."""
_IDS_BYTES = 24


@dataclass(frozen=True)
class ChainContent:
    """A chain with the chunks of each checkpoint, from the files' indexes, oldest first."""

    chain: Chain
    chunks: tuple[tuple[StoredChunk, ...], ...]


class ReadableChunk(io.BytesIO):
    """A stored chunk to be loaded, whose bytes are read only on demand.

    A BytesIO because DCP passes those to planners.

    Args:
        key: the chunk's key within the chain.
        entry: the chunk's index entry.
        read: returns the verified bytes, in memory that is reused once the chunk is loaded.
        turn: a context that one thread at a time enters, after the turns of the table's chunks of
            checkpoints that come before in the plan.
    """

    def __init__(self, key: str, entry: Entry, read: Callable[[], memoryview], turn: Turn) -> None:
        super().__init__()
        self.key = key
        self.entry = entry
        self.payload = read
        self.turn = turn


def read_content(root: Folder, chain: Chain) -> ChainContent:
    """Read the chunk indexes of a chain.

    Checks that the tables have the sizes given in the manifests, so that memory of these sizes may
    be taken.

    Raises:
        CorruptCheckpoint: an index is missing, or differs from the manifest; or the full checkpoint
            isn't full.
    """
    content = ChainContent(
        chain, tuple(read_indexes(root, manifest) for manifest in chain.manifests)
    )
    for manifest, chunks in zip(chain.manifests, content.chunks, strict=True):
        for problem in table_problems(manifest, chunks):
            raise CorruptCheckpoint(problem)
    return content


def table_problems(manifest: Manifest, chunks: Sequence[StoredChunk]) -> Iterator[str]:
    """Compare a manifest's tables with the indexes of its chunks; yield at most two problems for
    each table.
    """
    others: dict[str, str] = {}
    rows: dict[str, Counter[Columns]] = {name: Counter() for name in manifest.tables}
    for chunk in chunks:
        entry = chunk.entry
        if entry["kind"] != ROWS:
            continue
        name, size = entry["table"], (entry["table_rows"], entry["table_dim"])
        table = manifest.tables.get(name)
        if table is not None:
            first, last = entry["columns"]
            rows[name][first, last] += entry["count"]
        if table is None or size != (table.rows, table.dim):
            said = "has none" if table is None else f"has it as {table.rows} × {table.dim}"
            others.setdefault(
                name,
                f"{chunk.checkpoint}/{chunk.file}, chunk {chunk.number}: rows of a table "
                f"{name!r} of {size[0]} × {size[1]}, where the manifest {said}",
            )
    if manifest.kind == "full":
        for name, table in manifest.tables.items():
            if gap := _gap(name, table, rows[name]):
                yield f"{manifest.id} {gap}: {manifest.id} is not full"
    yield from others.values()


def _gap(name: str, table: TableTotals, rows: Counter[Columns]) -> str:
    """Describe columns of which a full checkpoint has too few or too many rows; empty if none.

    Args:
        rows: number of rows by the columns of chunks.
    """
    changes: Counter[int] = Counter()
    for (first, last), count in rows.items():
        changes[first] += count
        changes[last] -= count
    held = at = 0
    for column in sorted({*changes, table.dim}):
        if column > at and held != table.rows:
            values = sum((last - first) * count for (first, last), count in rows.items())
            return (
                f"holds {values} of the {table.rows * table.dim} values of {name}; it has columns "
                f"{shown(sorted(rows))} of {table.dim}, and of {at} to {column - 1} it holds "
                f"{held} of the {table.rows} rows"
            )
        held, at = held + changes[column], column
    return ""


class StorageReader(DcpStorageReader):
    """Reads a checkpoint and its parents, for ``dcp.load(…, storage_reader=…)``.

    Args:
        path: the checkpoint's directory, a path or fsspec URL; an open folder keeps its
            ``timeout_seconds``.
        chain: the chain to read; None: found by its head.
        threads: number of reading threads; None: one for each CPU of this process, up to 8. Memory
            stays at a few chunks, however many threads read.

    Raises:
        ValueError: ``threads`` is less than 1.
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
        """Read the chain's indexes; an error is raised by the planner, with its own type."""
        content: ChainContent | CheckNRunError | OSError
        try:
            if self._chain is None:
                self._chain = resolve(self._folder.parent, self._folder.name)
            content = read_content(self._folder.parent, self._chain)
            self._chunks = {chunk.key: chunk for part in content.chunks for chunk in part}
        except (CheckNRunError, OSError) as error:
            content = error  # DCP would replace an exception by a message of its own
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
        """Pass the planned chunks to the planner; chunks of rows by several threads, with turns in
        the plan's order. Every chunk is verified before the planner sees a byte of it.
        """
        items = [(item, self._chunks[item.storage_index.fqn]) for item in plan.items]
        rows = [(item, chunk) for item, chunk in items if chunk.entry["kind"] == ROWS]
        longest = max((chunk.entry["length"] for _, chunk in rows), default=0)
        # As many are touched as chunks are loaded at once.
        free = [np.empty(longest, dtype=np.uint8).data for _ in range(self._threads)]

        def load(number: int, turn: Turn) -> None:
            memory = free.pop()
            try:
                self._load(*rows[number], planner, turn, memory)
            except StorageUnreachable:
                raise  # an abandoned read may still write to the memory
            except BaseException:
                free.append(memory)
                raise
            free.append(memory)

        sizes = [_memory(chunk) for _, chunk in rows]
        most = _CHUNKS_AT_ONCE * max((_decoded(chunk) for _, chunk in rows), default=0)
        stages = [(chunk.entry["table"], chunk.checkpoint) for _, chunk in rows]
        run_in_order(load, sizes, stages, most, self._threads)
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
    """Return the bytes that loading a chunk of rows takes: its own, and the ids in several forms."""
    return int(chunk.entry["length"]) + _IDS_BYTES * int(chunk.entry["count"])


def _decoded(chunk: StoredChunk) -> int:
    """Return the bytes of a chunk's decoded rows."""
    first, last = chunk.entry["columns"]
    return max(4 * (last - first) * int(chunk.entry["count"]), _memory(chunk))


class _ForLoadPlannerOnly(dict[str, Any]):
    """State-dict metadata that refuses DCP's own planner, which would otherwise load nothing or
    name a missing key instead of the wrong planner.
    """

    def _refuse(self, *_: object) -> NoReturn:
        raise InvalidPlan(
            "StorageReader reads checkpoints for this package's LoadPlanner: pass "
            "planner=LoadPlanner() to dcp.load as well"
        )

    keys = items = __iter__ = __contains__ = __getitem__ = _refuse
