"""What a chain holds, and its chunks' bytes: all that is read is checked against the checksums."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from reprlib import repr as shown

import xxhash
from tenacity import (
    Retrying,
    retry_if_exception_type,
    retry_if_result,
    stop_after_delay,
    wait_fixed,
)

from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format.checks import INDEX_BYTES
from torchrec_checknrun.format.chunk import Entry
from torchrec_checknrun.format.index import parse_index
from torchrec_checknrun.format.manifest import Manifest, RankFile, TableTotals
from torchrec_checknrun.format.rank_file import FOOTER
from torchrec_checknrun.format.row_chunk import KIND, RowsHeader
from torchrec_checknrun.in_order import Turn
from torchrec_checknrun.root.chain import Chain
from torchrec_checknrun.store.folder import Folder

VISIBLE_SECONDS = 10.0
_LOOK_SECONDS = 0.25

Columns = tuple[int, int]
"""A half-open range."""


@dataclass(frozen=True)
class StoredChunk:
    """A chunk in storage: its index entry, where it is, and what a chunk of rows holds."""

    checkpoint: str
    file: str
    number: int
    entry: Entry = field(hash=False)
    header: RowsHeader | None = field(compare=False)

    @property
    def key(self) -> str:
        """Names the chunk within a chain (an offset would not: chunks may be empty)."""
        return f"{self.checkpoint}/{self.file}#{self.number}"


@dataclass(frozen=True)
class ChainContent:
    """A chain with the index of every file in it, checkpoints oldest first."""

    chain: Chain
    chunks: tuple[tuple[StoredChunk, ...], ...]


class ReadableChunk(io.BytesIO):
    """A stored chunk for the planner, which may find that it needs no byte of it.

    A BytesIO because DCP's planners are given those.

    Args:
        key: which chunk of the chain.
        read: gives its bytes, verified, in memory that may be used again once it is loaded.
        turn: entered by what one thread at a time must do, when several load chunks, and after what
            the plan has of the table's other checkpoints before.
    """

    def __init__(self, key: str, entry: Entry, read: Callable[[], memoryview], turn: Turn) -> None:
        super().__init__()
        self.key = key
        self.entry = entry
        self.payload = read
        self.turn = turn


def read_content(root: Folder, chain: Chain) -> ChainContent:
    """Reads the chunk indexes of a chain.

    The tables are of the size that the manifests say, so that memory of it may be taken.

    Raises:
        CorruptCheckpoint: an index is missing, or differs from what the manifest says of it or of
            the tables; or the full checkpoint isn't full.
    """
    content = ChainContent(
        chain, tuple(read_indexes(root, manifest) for manifest in chain.manifests)
    )
    for manifest, chunks in zip(chain.manifests, content.chunks, strict=True):
        for problem in table_problems(manifest, chunks):
            raise CorruptCheckpoint(problem)
    return content


def table_problems(manifest: Manifest, chunks: Sequence[StoredChunk]) -> Iterator[str]:
    """How tables that a manifest has aren't those of its chunks, as far as indexes tell: at most
    two lines for each table.
    """
    others: dict[str, str] = {}
    rows: dict[str, Counter[Columns]] = {name: Counter() for name in manifest.tables}
    for chunk in chunks:
        entry = chunk.entry
        if entry["kind"] != KIND:
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
    """Columns of which a full checkpoint has too few rows, or too many.

    Args:
        rows: by the columns of chunks, how many rows they have.
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


def read_indexes(root: Folder, manifest: Manifest) -> tuple[StoredChunk, ...]:
    """All chunks of one checkpoint.

    Raises:
        CorruptCheckpoint, UnsupportedFormat: as ``read_content``.
    """
    folder = root / manifest.id
    chunks: list[StoredChunk] = []
    for file in manifest.files:
        where = f"{folder}/{file.name}"
        _check_layout(file, where)
        data = bytearray(file.index_length)
        _fill(folder, memoryview(data), file.name, file.index_offset)
        checksum = xxhash.xxh3_64_hexdigest(data)
        if checksum != file.index_checksum:
            raise CorruptCheckpoint(
                f"{where}: its index at {file.index_offset} has checksum {checksum}, the manifest "
                f"says {file.index_checksum}"
            )
        chunks += [
            StoredChunk(manifest.id, file.name, number, entry, header)
            for number, (entry, header) in enumerate(parse_index(data, file, where))
        ]
    return tuple(chunks)


def _check_layout(file: RankFile, where: str) -> None:
    """Whether index and footer end the file, and the index is of a size that is read."""
    end = file.index_offset + file.index_length + FOOTER.size
    if end != file.size or file.index_length > INDEX_BYTES:
        raise CorruptCheckpoint(
            f"{where}: an index of {file.index_length} bytes at {file.index_offset} and a footer "
            f"don't end a file of {file.size} bytes, or it is larger than {INDEX_BYTES} bytes"
        )


def _fill(folder: Folder, memory: memoryview, name: str, offset: int) -> int:
    """Reads what rank 0 has seen in the storage already: on a network file system it may take this
    machine some seconds to see it, too.

    Returns:
        How many bytes there were, after all that waiting.
    """
    try:
        if (count := folder.read_into(memory, name, offset)) == len(memory):
            return count
    except FileNotFoundError:
        pass  # so far
    try:
        return Retrying(
            retry=retry_if_exception_type(FileNotFoundError)
            | retry_if_result(lambda count: count < len(memory)),
            stop=stop_after_delay(VISIBLE_SECONDS),
            wait=wait_fixed(_LOOK_SECONDS),
            retry_error_callback=lambda state: state.outcome and state.outcome.result(),
        )(lambda: folder.read_into(memory, name, offset))
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{folder}/{name} is missing") from None


def read_chunk(root: Folder, chunk: StoredChunk, memory: memoryview | None = None) -> memoryview:
    """A chunk's bytes, verified.

    Args:
        memory: where to put them, if there is room; else new memory is taken.

    Raises:
        CorruptCheckpoint: they are not what was written.
    """
    entry, folder = chunk.entry, root / chunk.checkpoint
    length = entry["length"]
    if memory is None or len(memory) < length:
        try:
            memory = memoryview(bytearray(length))
        except MemoryError:
            raise CorruptCheckpoint(
                f"{folder}/{chunk.file}: a chunk of {length} bytes, which this machine has no "
                "memory for"
            ) from None
    data = memory[:length]
    count = _fill(folder, data, chunk.file, entry["offset"])
    checksum = xxhash.xxh3_64_hexdigest(data[:count])
    if count != length or checksum != entry["checksum"]:
        raise CorruptCheckpoint(
            f"{folder}/{chunk.file} at offset {entry['offset']}: {count} bytes with checksum "
            f"{checksum}, expected {length} with {entry['checksum']}"
        )
    return data
