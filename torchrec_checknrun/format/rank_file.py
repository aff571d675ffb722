"""One rank's file of a checkpoint: chunks, then their index (JSON), then a footer that locates it.

The index holds a checksum for each chunk; footer and manifest hold the index's. Writing is a
pipeline: while one chunk is being written, the next is encoded. Parsing checks every index entry
before use.
"""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from reprlib import repr as shown
from typing import Any, Protocol, TypeVar

import xxhash

from torchrec_checknrun.errors import (
    CorruptCheckpoint,
    InvalidPlan,
    StorageUnreachable,
    UnsupportedFormat,
)
from torchrec_checknrun.format.block_chunk import block_header
from torchrec_checknrun.format.checks import (
    INDEX_BYTES,
    as_count,
    as_text,
    check_object,
    dict_of,
    list_of,
    optional,
    parse_json,
    require_limits,
)
from torchrec_checknrun.format.chunk import (
    BLOCK,
    COLLISIONS,
    ROWS,
    STATE,
    EncodedChunk,
    Entry,
)
from torchrec_checknrun.format.manifest import RankFile, TableTotals
from torchrec_checknrun.format.row_chunk import RowsHeader, rows_header
from torchrec_checknrun.format.state import TORCH_DTYPES
from torchrec_checknrun.format.state_tree import check_tree
from torchrec_checknrun.store.deadlines import Patience, silent
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.store.new_file import NewFile
from torchrec_checknrun.threads import Threads

T = TypeVar("T")

FOOTER = struct.Struct("<QQ16s8s")
"""Index offset, index length, index checksum (xxh3-64, hex), magic."""
MAGIC = b"CHKNRUN1"
LARGEST_CHUNK = 2 << 30
"""The most bytes of a chunk of rows or a block; a state object is one chunk of any size."""
_CHECKSUM = re.compile(r"[0-9a-f]{16}")


@dataclass
class FileSummary:
    """A rank's report to rank 0 on its file: the rank's contribution to the manifest.

    Attributes:
        encoded_at, written_at: when the last chunk was encoded and when the file was durable, on
            this machine's monotonic clock.
    """

    file: RankFile
    tables: dict[str, TableTotals]
    dense_bytes: int
    encoded_at: float = 0.0
    written_at: float = 0.0


class Job(Protocol):
    """A chunk to write, encoded when its turn comes."""

    def encode(self) -> EncodedChunk:
        """Encode the chunk."""

    def close(self) -> None:
        """Release the chunk's memory, once written."""


WriteRankFile = Callable[[Folder, int, Iterator[Job]], FileSummary]
"""A function that writes a rank's file, such as ``write_rank_file``."""


def write_rank_file(folder: Folder, rank: int, jobs: Iterator[Job]) -> FileSummary:
    """Write a rank's file, durable on return; each chunk is encoded when the previous one is
    handed to the writing thread.

    Raises:
        OSError: the storage failed.
        InvalidPlan: a chunk or the index is larger than readers accept.
    """
    name = f"rank-{rank:05d}.bin"
    index: list[Entry] = []
    being_written: Future[Entry] | None = None
    what, patience = f"writing {folder}/{name}", folder.patience
    with folder.write(name) as file, _one_thread(patience, what) as writer:

        def written(future: Future[T]) -> T:
            return patience.result(future, what, file.tell)

        for job in jobs:
            chunk = job.encode()
            if being_written is not None:
                index.append(written(being_written))
            being_written = writer.submit(partial(_write_chunk, file, chunk, job))
            del chunk, job  # before the next one is made
        encoded_at = time.monotonic()
        if being_written is not None:
            index.append(written(being_written))
        rank_file = written(writer.submit(partial(_write_index, file, name, rank, index)))
    tables, dense_bytes = _totals(index)
    return FileSummary(rank_file, tables, dense_bytes, encoded_at, time.monotonic())


@contextmanager
def _one_thread(patience: Patience, what: str) -> Iterator[Threads]:
    """Run the thread that writes. After an error, join the thread unless the storage hangs."""
    threads = Threads(1, "checknrun-write")
    try:
        yield threads
    except StorageUnreachable:
        threads.close(cancel=True, seconds=0)
        raise
    except BaseException as error:
        if not threads.close(cancel=True, seconds=patience.seconds):
            raise silent(what, patience.seconds, patience.timeout_seconds) from error
        raise
    threads.close()


def _write_chunk(file: NewFile, chunk: EncodedChunk, job: Job) -> Entry:
    offset, checksum = file.tell(), xxhash.xxh3_64()
    try:
        require_chunk_size(chunk.entry, sum(memoryview(piece).nbytes for piece in chunk.pieces))
        for piece in chunk.pieces:
            checksum.update(piece)
            file.write(piece)
        length = file.tell() - offset
    finally:
        job.close()  # even after a failure: the next job may wait for this one's memory
    return {**chunk.entry, "offset": offset, "length": length, "checksum": checksum.hexdigest()}


def _write_index(file: NewFile, name: str, rank: int, index: list[Entry]) -> RankFile:
    data = index_bytes(rank, index, name)
    checksum = xxhash.xxh3_64_hexdigest(data)
    offset = file.tell()
    file.write(data)
    file.write(FOOTER.pack(offset, len(data), checksum.encode(), MAGIC))
    return RankFile(name, file.tell(), offset, len(data), checksum, len(index))


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
        if entry["kind"] != ROWS:
            dense += entry["length"]
            continue
        first, last = entry["columns"]
        error = entry.get("error")
        one = TableTotals(
            rows=entry["table_rows"],
            dim=entry["table_dim"],
            stored_values=entry["count"] * (last - first),
            weight_bytes=entry["weight"]["bytes"],
            ids_bytes=entry["ids"]["bytes"],
            optimizer_bytes=sum(state["bytes"] for state in entry["optimizer"]),
            modified_bytes=_memory_bytes(entry),
            encoded_bytes=_encoded_bytes(entry),
            value_bits=entry["weight"]["value_bits"],
            error_mean=error and error["mean"],
            error_max=error and error["max"],
            error_rows=error["sampled_rows"] if error else 0,
            codecs=[entry["weight"]["codec"]],
        )
        known = tables.get(entry["table"])
        tables[entry["table"]] = add_totals(known, one) if known else one
    return tables, dense


def _memory_bytes(entry: Entry) -> int:
    """Return the bytes of a chunk's rows in memory."""
    first, last = entry["columns"]
    cols, weight = last - first, entry["weight"]
    row = cols * TORCH_DTYPES[weight["dtype"]].itemsize
    for state in entry["optimizer"]:
        row += TORCH_DTYPES[state["dtype"]].itemsize * (1 if state["rowwise"] else cols)
    return int(entry["count"]) * row


def _encoded_bytes(entry: Entry) -> int:
    """Return the bytes of a chunk's payload before compression; row ids count as stored."""
    sections = [entry["weight"], *entry["optimizer"]]
    if "exceptions" in entry["weight"]:
        sections.append(entry["weight"]["exceptions"])
    raw = sum(section.get("raw", section["bytes"]) for section in sections)
    return int(entry["ids"]["bytes"]) + int(raw)


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


def index_bytes(rank: int, entries: list[Entry], name: str) -> bytes:
    """Encode a rank file's index.

    Args:
        name: the file's, for errors.

    Raises:
        InvalidPlan: the index is larger than readers accept.
        ValueError: an entry holds a NaN or an infinity.
    """
    document = {"rank": rank, "chunks": entries}
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
    if entry["kind"] in (ROWS, BLOCK) and length > LARGEST_CHUNK:
        raise InvalidPlan(
            f"a chunk of {entry.get('table') or entry.get('path')} has {length} bytes; at most "
            f"{LARGEST_CHUNK} can be read: make chunks smaller (chunk_bytes)"
        )


def parse_index(
    data: bytes | bytearray, file: RankFile, where: str
) -> list[tuple[Entry, RowsHeader | None]]:
    """Parse a rank file's index: the entries in the order of their chunks, each with its header if
    it is a chunk of rows.

    Args:
        data: the index, its checksum verified.
        file: the file's description in the manifest.
        where: the file's name in errors.

    Raises:
        CorruptCheckpoint: the index is malformed, or doesn't match the file.
        UnsupportedFormat: an entry's kind or codec is unknown to this release.
    """
    try:
        document = check_object(
            parse_json(data, INDEX_BYTES),
            {"rank": as_count, "chunks": list_of(lambda entry: entry)},
        )
        entries = document["chunks"]
        if len(entries) != file.chunks:
            raise ValueError(f"{len(entries)} chunks, where the manifest says {file.chunks}")
    except ValueError as error:
        raise CorruptCheckpoint(f"{where}: the index is malformed: {error}") from error
    end = 0
    found = []
    for number, entry in enumerate(entries):
        try:
            found.append((entry, _check_entry(entry, end)))
            end = entry["offset"] + entry["length"]
        except (ValueError, CorruptCheckpoint) as error:
            raise CorruptCheckpoint(f"{where}, chunk {number}: {error}") from error
        except UnsupportedFormat as error:
            raise UnsupportedFormat(f"{where}, chunk {number}: {error}") from error
    if end != file.index_offset:
        raise CorruptCheckpoint(
            f"{where}: the chunks end at {end}, but the index begins at {file.index_offset}"
        )
    return found


def _check_entry(entry: Any, end: int) -> RowsHeader | None:
    """Check an entry; return its header if it is a chunk of rows.

    Args:
        end: the offset where the previous chunk ended.
    """
    if type(entry) is not dict:
        raise ValueError(f"{shown(entry)} is not an index entry")
    kind = entry.get("kind")
    if kind not in (ROWS, BLOCK, STATE, COLLISIONS) or type(kind) is not str:
        raise UnsupportedFormat(
            f"chunks of kind {shown(kind)} are unknown to this release: upgrade torchrec_checknrun"
        )
    for name in ("offset", "length"):
        if name not in entry:
            raise ValueError(f"{name} is missing")
        as_count(entry[name])
    offset, length = entry["offset"], entry["length"]
    if offset != end:
        raise ValueError(f"begins at {offset}, but the previous one ends at {end}")
    checksum = entry.get("checksum")
    if type(checksum) is not str or not _CHECKSUM.fullmatch(checksum):
        raise ValueError(f"checksum {shown(checksum)} is not an xxh3-64")
    if kind in (ROWS, BLOCK):
        if length > LARGEST_CHUNK:
            raise ValueError(f"{length} bytes, more than the {LARGEST_CHUNK} that are read")
        if kind == ROWS:
            return rows_header(entry)
        block_header(entry)
    else:
        _check_state(entry, length)
    return None


def _check_state(entry: dict[str, Any], length: int) -> None:
    """Check the entry of a state object, or of the state of managed collisions."""
    of_any = {"kind": as_text, "name": as_text, "offset": as_count, "length": as_count}
    checks = {**of_any, "checksum": as_text, "rank": optional(as_count), "tree": lambda tree: tree}
    if entry["kind"] == COLLISIONS:
        checks["modules"] = dict_of(dict_of(_fact))
    check_object(entry, checks)
    check_tree(entry["tree"], length)


def _fact(value: object) -> object:
    """Check a number, None or a list of numbers; ``collision_chunk`` checks which of them."""
    if isinstance(value, list):
        return list_of(as_count)(value)
    if value is not None and (type(value) is not int or not -1 <= value < 2**63):
        raise ValueError(f"{shown(value)} is not a number")
    return value
