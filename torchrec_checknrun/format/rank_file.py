"""One rank's file of a checkpoint: chunks, then their index (JSON), then a footer that locates it.

The index holds a checksum for each chunk; footer and manifest hold the index's. Writing is a
pipeline: while one chunk is being written, the next is encoded. Parsing checks every index entry
before use.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as shown
from typing import Any, Protocol

import xxhash
from msgspec import UNSET, to_builtins
from msgspec.structs import replace

from torchrec_checknrun.errors import CorruptCheckpoint, InvalidPlan, UnsupportedFormat
from torchrec_checknrun.format.checks import (
    INDEX_BYTES,
    Count,
    Record,
    parse_json,
    require_limits,
    typed,
)
from torchrec_checknrun.format.chunk import BlockHeader, EncodedChunk, block_header
from torchrec_checknrun.format.entries import (
    ROWS_DTYPES,
    UNWRITTEN,
    BlockEntry,
    CollisionsEntry,
    Entry,
    RowsEntry,
    StateEntry,
    content_bytes,
    difference_of,
    parse_entry,
)
from torchrec_checknrun.format.manifest import RankFile, TableTotals
from torchrec_checknrun.format.row_chunk import RowsHeader, rows_header
from torchrec_checknrun.format.state_tree import check_tree
from torchrec_checknrun.shards import TableShape
from torchrec_checknrun.store.behind import WriteBehind
from torchrec_checknrun.store.file_copy import NO_COPY, CopyTo
from torchrec_checknrun.store.folder import Folder

FOOTER = struct.Struct("<QQ16s8s")
"""Index offset, index length, index checksum (xxh3-64, hex), magic."""
MAGIC = b"CHKNRUN1"
LARGEST_CHUNK = 2 << 30
"""The most bytes of a chunk of rows or a block; a state object is one chunk of any size."""

Header = RowsHeader | BlockHeader
"""The content that the index entry of a chunk of rows, or of a block, stands for."""


@dataclass
class FileSummary:
    """A rank's report to rank 0 on its file: the rank's contribution to the manifest.

    Attributes:
        needs_parent: whether chunks are differences to the parent's.
        encoded_at, written_at: when the last chunk was encoded and when the file was durable, on
            this machine's monotonic clock.
        digests: of tables that are stored as differences, the sum of the rank's rows before the
            checkpoint (None: it is a base) and after.
    """

    file: RankFile
    tables: dict[str, TableTotals]
    dense_bytes: int
    needs_parent: bool = False
    encoded_at: float = 0.0
    written_at: float = 0.0
    digests: Mapping[str, tuple[int | None, int]] = field(default_factory=dict)


class Job(Protocol):
    """A chunk to write, encoded when its turn comes."""

    def encode(self) -> EncodedChunk:
        """Encode the chunk."""

    def close(self) -> None:
        """Release the chunk's memory, once written."""


WriteRankFile = Callable[[Folder, int, Iterable[Job]], FileSummary]
"""A function that writes a rank's file, such as ``write_rank_file``."""


def rank_file_name(rank: int) -> str:
    """Return the name of a rank's file in each checkpoint."""
    return f"rank-{rank:05d}.bin"


def write_rank_file(
    folder: Folder, rank: int, jobs: Iterable[Job], copy: CopyTo = NO_COPY
) -> FileSummary:
    """Write a rank's file, durable on return; each chunk is encoded while the previous one is
    written.

    Args:
        copy: where the same bytes go as well, if there is room.

    Raises:
        OSError: the storage failed.
        InvalidPlan: a chunk or the index is larger than readers accept.
    """
    name = rank_file_name(rank)
    chunks: list[_Written] = []
    with folder.write_behind(name, copy) as file:
        for job in jobs:
            chunks.append(_write_chunk(file, job))
            del job  # before the next one is made
        encoded_at = time.monotonic()
        file.flush()
        index = [chunk.entry for chunk in chunks]
        rank_file = _write_index(file, name, rank, index)
    tables, dense_bytes = _totals(index)
    needs_parent = any(difference_of(entry) is not None for entry in index)
    ended = time.monotonic()
    return FileSummary(rank_file, tables, dense_bytes, needs_parent, encoded_at, ended)


@dataclass(frozen=True)
class _Written:
    """A chunk's place in a file. The checksum is complete once the chunk is written."""

    described: Entry
    offset: int
    length: int
    checksum: xxhash.xxh3_64

    @property
    def entry(self) -> Entry:
        """Return the chunk's entry in the index."""
        checksum = self.checksum.hexdigest()
        return replace(self.described, offset=self.offset, length=self.length, checksum=checksum)


def _write_chunk(file: WriteBehind, job: Job) -> _Written:
    """Encode a chunk, and hand its bytes to the thread that writes."""
    chunk, checksum = job.encode(), xxhash.xxh3_64()
    length = sum(memoryview(piece).nbytes for piece in chunk.pieces)
    try:
        require_chunk_size(chunk.entry, length)
        _require_readable(chunk.entry)
    except InvalidPlan:
        job.close()  # the next job may wait for this one's memory
        raise
    offset = file.append(chunk.pieces, checksum.update, job.close)
    return _Written(chunk.entry, offset, length, checksum)


def _write_index(file: WriteBehind, name: str, rank: int, index: list[Entry]) -> RankFile:
    data = index_bytes(rank, index, name)
    checksum = xxhash.xxh3_64_hexdigest(data)
    offset = index[-1].offset + index[-1].length if index else 0
    footer = FOOTER.pack(offset, len(data), checksum.encode(), MAGIC)
    file.append((data, footer))
    size = offset + len(data) + len(footer)
    return RankFile(name, size, offset, len(data), checksum, len(index))


def read_footer(folder: Folder, file: RankFile) -> None:
    """Compare a file's footer with the manifest.

    Raises:
        CorruptCheckpoint: footer and manifest differ.
    """
    data = folder.read(file.name, file.size - FOOTER.size, FOOTER.size)
    wanted = FOOTER.pack(file.index_offset, file.index_length, file.index_checksum.encode(), MAGIC)
    if data != wanted:
        raise CorruptCheckpoint(
            f"{folder}/{file.name}: the last {FOOTER.size} bytes don't match the manifest"
        )


def _totals(index: list[Entry]) -> tuple[dict[str, TableTotals], int]:
    tables: dict[str, TableTotals] = {}
    dense = 0
    for entry in index:
        if not isinstance(entry, RowsEntry):
            dense += entry.length
            continue
        first, last = entry.columns
        error, weight = entry.error or None, entry.weight
        one = TableTotals(
            rows=entry.table_rows,
            dim=entry.table_dim,
            stored_values=entry.count * (last - first),
            weight_bytes=weight.bytes,
            ids_bytes=entry.ids.bytes,
            optimizer_bytes=sum(state.bytes for state in entry.optimizer),
            modified_bytes=_memory_bytes(entry),
            encoded_bytes=_encoded_bytes(entry),
            value_bits=weight.value_bits,
            error_mean=error and error.mean,
            error_max=error and error.max,
            error_rows=error.sampled_rows if error else 0,
            codecs=[weight.codec],
        )
        known = tables.get(entry.table)
        tables[entry.table] = add_totals(known, one) if known else one
    return tables, dense


def _memory_bytes(entry: RowsEntry) -> int:
    """Return the bytes of a chunk's rows in memory."""
    first, last = entry.columns
    cols = last - first
    row = cols * ROWS_DTYPES[entry.weight.dtype].itemsize
    for state in entry.optimizer:
        row += ROWS_DTYPES[state.dtype].itemsize * (1 if state.rowwise else cols)
    return entry.count * row


def _encoded_bytes(entry: RowsEntry) -> int:
    """Return the bytes of a chunk's payload before compression; row ids count as stored."""
    exact = (entry.weight.exceptions,) if entry.weight.exceptions else ()
    sections = (entry.weight, *exact, *entry.optimizer)
    return entry.ids.bytes + sum(s.bytes if s.raw is UNSET else s.raw for s in sections)


def add_totals(one: TableTotals, other: TableTotals) -> TableTotals:
    """Add the totals of two parts of one table."""
    rows = one.error_rows + other.error_rows
    mean = maximum = None
    if rows:
        parts = [(t.error_mean or 0.0, t.error_rows) for t in (one, other)]
        mean = sum(error * count for error, count in parts) / rows
        maximum = max(one.error_max or 0.0, other.error_max or 0.0)
    return replace(
        one,
        stored_values=one.stored_values + other.stored_values,
        weight_bytes=one.weight_bytes + other.weight_bytes,
        ids_bytes=one.ids_bytes + other.ids_bytes,
        optimizer_bytes=one.optimizer_bytes + other.optimizer_bytes,
        modified_bytes=one.modified_bytes + other.modified_bytes,
        encoded_bytes=one.encoded_bytes + other.encoded_bytes,
        value_bits=min(one.value_bits, other.value_bits),
        error_mean=mean,
        error_max=maximum,
        error_rows=rows,
        codecs=one.codecs + [codec for codec in other.codecs if codec not in one.codecs],
    )


def sum_tables(
    shapes: Mapping[str, TableShape],
    parts: Iterable[Mapping[str, TableTotals]],
    settings: Mapping[str, Mapping[str, Any]],
) -> dict[str, TableTotals]:
    """Sum the totals of all tables over ranks.

    Args:
        parts: by rank, the totals of the rank's chunks by table.
        settings: by table, the fields that are no sums.
    """
    totals = {name: TableTotals(shape.rows, shape.dim) for name, shape in shapes.items()}
    # Rank by rank, as in memory: a thousand ranks' parts exceed every processor's cache.
    for part in parts:
        for name, of_rank in part.items():
            if name in totals:
                totals[name] = add_totals(totals[name], of_rank)
    return {name: replace(total, **settings[name]) for name, total in totals.items()}


def index_bytes(rank: int, entries: Sequence[Entry], name: str) -> bytes:
    """Encode a rank file's index.

    Args:
        name: the file's, for errors.

    Raises:
        InvalidPlan: the index is larger than readers accept.
        ValueError: an entry holds a NaN or an infinity.
    """
    # Not by msgspec: states may hold lone surrogates, and NaN would become null.
    document = {"rank": rank, "chunks": to_builtins(entries)}
    data = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    try:
        require_limits(data, INDEX_BYTES)
    except ValueError as error:
        raise InvalidPlan(
            f"the index of {name}, of {len(entries)} chunks, can't be written: {error}. Make "
            "chunks larger (chunk_bytes), or state objects of fewer parts"
        ) from error
    return data


def require_chunk_size(entry: Entry, length: int) -> None:
    """Refuse a chunk that readers would refuse.

    Raises:
        InvalidPlan: the chunk is too large.
    """
    if isinstance(entry, (RowsEntry, BlockEntry)) and length > LARGEST_CHUNK:
        raise InvalidPlan(
            f"a chunk of {_content(entry)} has {length} bytes; at most {LARGEST_CHUNK} can be "
            "read: make chunks smaller (chunk_bytes)"
        )


def _require_readable(entry: Entry) -> None:
    """Refuse an index entry that readers would refuse, as a user's own codec may make one.

    Raises:
        InvalidPlan: names the chunk, and what is wrong.
    """
    has_tree = isinstance(entry, (StateEntry, CollisionsEntry))
    try:
        found = parse_entry(to_builtins(replace(entry, tree={}) if has_tree else entry))
        if isinstance(found, RowsEntry):
            rows_header(found)
        elif isinstance(found, BlockEntry):
            block_header(found)
    except UnsupportedFormat:
        pass  # readers that know the codec take it
    except (CorruptCheckpoint, TypeError) as error:
        raise InvalidPlan(f"no reader would take a chunk of {_content(entry)}: {error}") from error


def _content(entry: Entry) -> str:
    """Name a chunk's content, for errors."""
    if isinstance(entry, RowsEntry):
        return f"{entry.table:.200}"
    return shown([*entry.path] if isinstance(entry, BlockEntry) else entry.name)


class _Index(Record, frozen=True):
    """An index; its entries are converted one by one, for errors that name the chunk."""

    rank: Count
    chunks: list[Any]


def parse_index(
    data: bytes | bytearray, file: RankFile, where: str
) -> list[tuple[Entry, Header | None]]:
    """Parse a rank file's index: the entries in the order of their chunks, each with its header.

    Args:
        data: the index, its checksum verified.
        file: the file's description in the manifest.
        where: the file's name in errors.

    Raises:
        CorruptCheckpoint: the index is malformed, or doesn't match the file.
        UnsupportedFormat: an entry's kind or codec is unknown to this release.
    """
    try:
        documents = typed(parse_json(data, INDEX_BYTES), _Index).chunks
        if len(documents) != file.chunks:
            raise ValueError(f"{len(documents)} chunks, where the manifest says {file.chunks}")
    except ValueError as error:
        raise CorruptCheckpoint(f"{where}: the index is malformed: {error}") from error
    end = 0
    found = []
    for number, document in enumerate(documents):
        try:
            entry = parse_entry(document)
            found.append((entry, _header_of(entry, end)))
            end = entry.offset + entry.length
        except (ValueError, CorruptCheckpoint) as error:
            raise CorruptCheckpoint(f"{where}, chunk {number}: {error}") from error
        except UnsupportedFormat as error:
            raise UnsupportedFormat(f"{where}, chunk {number}: {error}") from error
    if end != file.index_offset:
        raise CorruptCheckpoint(
            f"{where}: the chunks end at {end}, but the index begins at {file.index_offset}"
        )
    return found


def _header_of(entry: Entry, end: int) -> Header | None:
    """Check the place of an entry's chunk, and the entry itself; return the header, if any.

    Args:
        end: the offset where the previous chunk ended.
    """
    if UNWRITTEN in (entry.offset, entry.length) or not entry.checksum:
        raise ValueError("offset, length or checksum is missing")
    if entry.offset != end:
        raise ValueError(f"begins at {entry.offset}, but the previous one ends at {end}")
    if not isinstance(entry, (RowsEntry, BlockEntry)):
        check_tree(entry.tree, content_bytes(entry))
        return None
    if entry.length > LARGEST_CHUNK:
        raise ValueError(f"{entry.length} bytes, more than the {LARGEST_CHUNK} that are read")
    return rows_header(entry) if isinstance(entry, RowsEntry) else block_header(entry)
