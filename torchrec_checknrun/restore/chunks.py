"""Read a chain: the indexes of its files, and its chunks by several threads, each one verified."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain as chained
from itertools import pairwise
from reprlib import repr as shown
from types import MappingProxyType

import numpy as np
from msgspec.structs import replace

from torchrec_checknrun.errors import CorruptCheckpoint, StorageUnreachable
from torchrec_checknrun.format.entries import RowsEntry
from torchrec_checknrun.format.manifest import Manifest, RankFile, TableTotals
from torchrec_checknrun.format.reader import (
    Columns,
    IndexBytes,
    Read,
    StoredChunk,
    coalesced_reads,
    read_chain,
    read_chunk,
    read_index_bytes,
    read_indexes,
)
from torchrec_checknrun.format.row_chunk import RowsHeader
from torchrec_checknrun.in_order import Turn, run_in_order
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.root.chain import Chain
from torchrec_checknrun.store.coalescing import RUN_BYTES, RunBytes, coalesced
from torchrec_checknrun.store.folder import Folder

_MOST_THREADS = 8
_CHUNKS_AT_ONCE = 3
"""Memory for all threads, in sizes of the largest chunk's decoded rows."""
_IDS_BYTES = 24
_SHARED_BYTES = 1 << 27
"""Bytes of indexes that ranks read for each other; all are in memory at once."""
_LARGER = 4
"""Times the mean of a checkpoint's indexes: what is longer is not sent."""


RowChunk = tuple[StoredChunk, RowsHeader]
"""A chunk of rows in storage, with its header."""


def rows_by_table(chunks: Iterable[StoredChunk]) -> dict[str, list[RowChunk]]:
    """Group the chunks of rows among some by table, in their order: one pass for all tables."""
    found: dict[str, list[RowChunk]] = {}
    for chunk in chunks:
        if isinstance(chunk.header, RowsHeader):
            found.setdefault(chunk.header.table, []).append((chunk, chunk.header))
    return found


@dataclass(frozen=True)
class ChainContent:
    """A chain with the chunks of each checkpoint, from the files' indexes, oldest first."""

    chain: Chain
    chunks: tuple[tuple[StoredChunk, ...], ...]

    @cached_property
    def head(self) -> Manifest:
        """Return the newest checkpoint."""
        return self.chain.head

    def reader(self, root: Folder) -> Read:
        """Return a reader of all chunks, for one thread: it reads small ones together."""
        reads = coalesced_reads(root, chained.from_iterable(self.chunks))
        return partial(read_chunk, root, at_hand=reads.part)

    @cached_property
    def by_table(self) -> tuple[dict[str, list[RowChunk]], ...]:
        """Return the chunks of rows of each checkpoint by table."""
        return tuple(map(rows_by_table, self.chunks))

    @cached_property
    def rows_by_columns(self) -> dict[str, dict[Columns, list[RowChunk]]]:
        """Return the chunks of rows by table and range of columns, newest checkpoint first."""
        found: dict[str, dict[Columns, list[RowChunk]]] = {}
        for chunks in reversed(self.by_table):
            for table, of_table in chunks.items():
                for chunk, header in of_table:
                    columns = header.rectangle.col_start, header.rectangle.col_stop
                    by_columns = found.setdefault(table, {})
                    by_columns.setdefault(columns, []).append((chunk, header))
        return found


@dataclass(frozen=True)
class ReadableChunk:
    """A stored chunk to be loaded, whose bytes are read only on demand.

    Attributes:
        stored: the chunk in storage.
        payload: returns the verified bytes, in memory that is reused once the chunk is loaded.
        turn: a context that one thread at a time enters, after the turns of the table's chunks of
            checkpoints that come before in the plan.
    """

    stored: StoredChunk
    payload: Callable[[], memoryview]
    turn: Turn


def overlap(ranges: Iterable[Columns]) -> bool:
    """Tell whether some of several different ranges of columns have a column in common."""
    return any(start < stop for (_, stop), (start, _) in pairwise(sorted(ranges)))


def share_indexes(root: Folder, chain: Chain, ranks: Ranks) -> IndexBytes:
    """Read the indexes of a chain's files, each on one rank, and give them to all. A collective.

    Every rank needs all of them, which from a thousand ranks would be millions of requests. Not
    among them are those much larger than the others, as of the rank that stores the dense part:
    ranks send as much as the one that has most.

    Raises:
        CorruptCheckpoint: an index is missing, or differs from the manifest; on all ranks.
    """
    if ranks.world_size == 1:
        return {}
    own: list[tuple[str, RankFile]] = []
    left = _SHARED_BYTES
    for manifest in chain.manifests:
        files = manifest.files
        most = _LARGER * sum(file.index_length for file in files) / max(1, len(files))
        for number, file in enumerate(files):
            left -= file.index_length
            # On the ranks that wrote them, if these have the same numbers: copies are there.
            if number % ranks.world_size == ranks.rank and file.index_length <= most and left >= 0:
                own.append((manifest.id, file))

    def together(of_ranks: list[IndexBytes]) -> IndexBytes:
        return {key: data for of_rank in of_ranks for key, data in of_rank.items()}

    return ranks.reduce(lambda: read_index_bytes(root, own), together)


def read_content(
    root: Folder,
    chain: Chain,
    whole: bool = False,
    at_hand: IndexBytes = MappingProxyType({}),
) -> ChainContent:
    """Read the chunk indexes of a chain; ``whole`` and ``at_hand`` as of ``read_chain``.

    Checks that the tables have the sizes given in the manifests, so that memory of these sizes may
    be taken.

    Raises:
        CorruptCheckpoint: an index is missing, or differs from the manifest; or the full checkpoint
            isn't full.
    """
    content = ChainContent(chain, tuple(read_chain(root, chain.manifests, whole, at_hand)))
    for manifest, chunks in zip(chain.manifests, content.chunks, strict=True):
        for problem in table_problems(manifest, chunks):
            raise CorruptCheckpoint(problem)
    return content


def read_content_of(root: Folder, chain: Chain, file: str) -> ChainContent:
    """Read the chunk indexes of one rank's files of a chain, and of no others.

    Args:
        file: name of the rank's files.

    Raises:
        CorruptCheckpoint: an index is missing, or differs from the manifest.
    """

    def own(manifest: Manifest) -> Manifest:
        return replace(manifest, files=tuple(f for f in manifest.files if f.name == file))

    return ChainContent(chain, tuple(read_indexes(root, own(m)) for m in chain.manifests))


def table_problems(manifest: Manifest, chunks: Sequence[StoredChunk]) -> Iterator[str]:
    """Compare a manifest's tables with the indexes of its chunks; yield at most two problems for
    each table.
    """
    others: dict[str, str] = {}
    rows: dict[str, Counter[Columns]] = {name: Counter() for name in manifest.tables}
    for chunk in chunks:
        entry = chunk.entry
        if not isinstance(entry, RowsEntry):
            continue
        name, size = entry.table, (entry.table_rows, entry.table_dim)
        header = chunk.header
        if manifest.kind == "full" and isinstance(header, RowsHeader) and header.is_link:
            others.setdefault(
                name,
                f"{chunk.checkpoint}/{chunk.file}, chunk {chunk.number}: rows of {name} are "
                "differences in a full checkpoint",
            )
        table = manifest.tables.get(name)
        if table is not None:
            rows[name][entry.columns] += entry.count
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


def read_chunks(
    root: Folder,
    chunks: Sequence[StoredChunk],
    load: Callable[[ReadableChunk], object],
    decodes_whole: bool = False,
) -> None:
    """Read chunks and load them; chunks of rows by several threads, with turns in the given order.

    Every chunk is verified before ``load`` sees a byte of it. Memory stays at a few chunks, however
    many threads read.

    Args:
        load: called for each chunk.
        decodes_whole: whether ``load`` decodes all rows of a chunk at once.

    Raises:
        CorruptCheckpoint: a chunk is damaged.
        OSError: the storage failed.
    """
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    rows = {c.key: c.entry for c in chunks if isinstance(c.entry, RowsEntry)}
    each = sum(entry.length for entry in rows.values()) // threads  # so that all have work
    runs = coalesced([c for c in chunks if c.key in rows], min(RUN_BYTES, each))
    # As many are touched as runs are loaded at once.
    longest = max((run.size for run in runs), default=0)
    free = [np.empty(longest, dtype=np.uint8).data for _ in range(threads)]

    def load_run(number: int, turn: Callable[[int], Turn]) -> None:
        memory, run = free.pop(), runs[number]
        read = partial(read_chunk, root, memory=memory)
        if len(run.parts) > 1:
            read = partial(read_chunk, root, at_hand=RunBytes(root, run, memory).part)
        try:
            for part, chunk in enumerate(run.parts):
                load(ReadableChunk(chunk, partial(read, chunk), turn(part)))
        except StorageUnreachable:
            raise  # an abandoned read may still write to the memory
        except BaseException:
            free.append(memory)
            raise
        free.append(memory)

    bytes_of = _decoded if decodes_whole else _memory
    sizes = [
        run.size + max(bytes_of(rows[c.key]) - rows[c.key].length for c in run.parts)
        for run in runs
    ]
    together = [size for size, run in zip(sizes, runs, strict=True) if len(run.parts) > 1]
    largest = max(map(_decoded, rows.values()), default=0)
    most = max(_CHUNKS_AT_ONCE * largest, threads * max(together, default=0))
    stages = [[(rows[c.key].table, c.checkpoint) for c in run.parts] for run in runs]
    run_in_order(load_run, sizes, stages, most, threads)
    others = [chunk for chunk in chunks if chunk.key not in rows]
    read = partial(read_chunk, root)
    # A difference to a whole one takes two requests.
    if len(others) > 1 or any(c.base is not None and c.base.base is not None for c in others):
        read = partial(read_chunk, root, at_hand=coalesced_reads(root, others, ahead=True).part)
    for chunk in others:
        load(ReadableChunk(chunk, partial(read, chunk), nullcontext()))


def _memory(entry: RowsEntry) -> int:
    """Return the bytes to load a chunk of rows: its own, and the ids in several forms."""
    return entry.length + _IDS_BYTES * entry.count


def _decoded(entry: RowsEntry) -> int:
    """Return the bytes of a chunk's decoded rows."""
    first, last = entry.columns
    return max(4 * (last - first) * entry.count, _memory(entry))
