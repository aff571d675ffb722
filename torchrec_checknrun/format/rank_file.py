"""One rank's file of a checkpoint: chunks, then their index (JSON), then a footer that finds it.

A checksum per chunk stands in the index, the index's in the footer and in the manifest. Made of
chunks that come one after the other; while one is being written the next is being encoded.
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
from torchrec_checknrun.format import block_chunk, row_chunk
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
from torchrec_checknrun.format.chunk import EncodedChunk, Entry
from torchrec_checknrun.format.manifest import RankFile, TableTotals
from torchrec_checknrun.format.row_chunk import RowsHeader
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


@dataclass
class FileSummary:
    """What a rank tells rank 0 of the file it wrote: all that the manifest says of it.

    Attributes:
        encoded_at, written_at: when the last chunk was encoded and when the file was durable, by
            this machine's monotonic clock.
    """

    file: RankFile
    tables: dict[str, TableTotals]
    dense_bytes: int
    encoded_at: float = 0.0
    written_at: float = 0.0


class Job(Protocol):
    """Something to be written."""

    def encode(self) -> EncodedChunk:
        """Its bytes."""

    def close(self) -> None:
        """It is written: its memory is free."""


WriteRankFile = Callable[[Folder, int, Iterator[Job]], FileSummary]
"""Writes a rank's file; see ``write_rank_file``."""


def write_rank_file(folder: Folder, rank: int, jobs: Iterator[Job]) -> FileSummary:
    """Writes a rank's chunks as they come; when it returns, they are durable.

    Raises:
        OSError: the storage failed.
        InvalidPlan: readers would refuse the file: a chunk or the index is too large.
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
    """The thread that writes. After an error it is waited for, but not if it hangs."""
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
        job.close()  # the next job may wait for its memory, also where this one has failed
    return {**chunk.entry, "offset": offset, "length": length, "checksum": checksum.hexdigest()}


def _write_index(file: NewFile, name: str, rank: int, index: list[Entry]) -> RankFile:
    data = index_bytes(rank, index, name)
    checksum = xxhash.xxh3_64_hexdigest(data)
    offset = file.tell()
    file.write(data)
    file.write(FOOTER.pack(offset, len(data), checksum.encode(), MAGIC))
    return RankFile(name, file.tell(), offset, len(data), checksum, len(index))


def read_footer(folder: Folder, file: RankFile) -> None:
    """Compares a file's end with what the manifest says of it.

    Raises:
        CorruptCheckpoint: they differ.
    """
    data = folder.read(file.name, file.size - FOOTER.size, FOOTER.size)
    wanted = FOOTER.pack(file.index_offset, file.index_length, file.index_checksum.encode(), MAGIC)
    if data != wanted:
        raise CorruptCheckpoint(
            f"{folder}/{file.name}: its last {FOOTER.size} bytes are not those that the manifest "
            "says"
        )


def _totals(index: list[Entry]) -> tuple[dict[str, TableTotals], int]:
    tables: dict[str, TableTotals] = {}
    dense = 0
    for entry in index:
        if entry["kind"] != "rows":
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
    """What a chunk's rows take in memory."""
    first, last = entry["columns"]
    cols, weight = last - first, entry["weight"]
    row = cols * TORCH_DTYPES[weight["dtype"]].itemsize
    for state in entry["optimizer"]:
        row += TORCH_DTYPES[state["dtype"]].itemsize * (1 if state["rowwise"] else cols)
    return int(entry["count"]) * row


def _encoded_bytes(entry: Entry) -> int:
    """A chunk's payload as it was before compression; row ids count as they are stored."""
    sections = [entry["weight"], *entry["optimizer"]]
    if "exceptions" in entry["weight"]:
        sections.append(entry["weight"]["exceptions"])
    raw = sum(section.get("raw", section["bytes"]) for section in sections)
    return int(entry["ids"]["bytes"]) + int(raw)


def add_totals(one: TableTotals, other: TableTotals) -> TableTotals:
    """What two parts of one table come to."""
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


LARGEST_CHUNK = 2 << 30
"""What a chunk may have at most, unless it is a state object, which is one chunk whatever it has.
"""


_CHECKSUM = re.compile(r"[0-9a-f]{16}")


def index_bytes(rank: int, entries: list[Entry], name: str) -> bytes:
    """The index as it is stored.

    Args:
        name: the file's.

    Raises:
        InvalidPlan: readers would refuse it: it is too large.
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
    """Refuses a chunk that readers would refuse.

    Raises:
        InvalidPlan: it is too large.
    """
    if entry["kind"] in (row_chunk.KIND, block_chunk.KIND) and length > LARGEST_CHUNK:
        raise InvalidPlan(
            f"a chunk of {entry.get('table') or entry.get('path')} has {length} bytes; at most "
            f"{LARGEST_CHUNK} can be read again: make chunks smaller (chunk_bytes)"
        )


def parse_index(
    data: bytes | bytearray, file: RankFile, where: str
) -> list[tuple[Entry, RowsHeader | None]]:
    """The index entries of a rank file, in the order of their chunks; those of rows with what is
    known from them.

    Args:
        data: the index, its checksum verified.
        file: what the manifest says of the file.
        where: what errors call it.

    Raises:
        CorruptCheckpoint: it isn't an index, or not one of this file.
        UnsupportedFormat: an entry is of a kind or a codec that this release doesn't know.
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
        raise CorruptCheckpoint(f"{where}: its index is malformed: {error}") from error
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
            f"{where}: its chunks end at {end}, and its index begins at {file.index_offset}"
        )
    return found


def _check_entry(entry: Any, end: int) -> RowsHeader | None:
    """Checks an entry.

    Args:
        end: where the chunk before it ended.
    """
    if type(entry) is not dict:
        raise ValueError(f"{shown(entry)} is no index entry")
    kind = entry.get("kind")
    if kind not in ("rows", "block", "state", "collisions") or type(kind) is not str:
        raise UnsupportedFormat(
            f"chunks of kind {shown(kind)} are unknown to this release: upgrade torchrec_checknrun"
        )
    for name in ("offset", "length"):
        if name not in entry:
            raise ValueError(f"{name} is missing")
        as_count(entry[name])
    offset, length = entry["offset"], entry["length"]
    if offset != end:
        raise ValueError(f"it begins at {offset}, where the one before it ends at {end}")
    checksum = entry.get("checksum")
    if type(checksum) is not str or not _CHECKSUM.fullmatch(checksum):
        raise ValueError(f"its checksum is {shown(checksum)}, which is no xxh3-64")
    if kind in (row_chunk.KIND, block_chunk.KIND):
        if length > LARGEST_CHUNK:
            raise ValueError(f"it has {length} bytes, more than the {LARGEST_CHUNK} that are read")
        if kind == row_chunk.KIND:
            return row_chunk.rows_header(entry)
        block_chunk.block_header(entry)
    else:
        _check_state(entry, length)
    return None


def _check_state(entry: dict[str, Any], length: int) -> None:
    """Of a state object, or of what managed collisions know."""
    of_any = {"kind": as_text, "name": as_text, "offset": as_count, "length": as_count}
    checks = {**of_any, "checksum": as_text, "rank": optional(as_count), "tree": lambda tree: tree}
    if entry["kind"] == "collisions":
        checks["modules"] = dict_of(dict_of(_fact))
    check_object(entry, checks)
    check_tree(entry["tree"], length)


def _fact(value: object) -> object:
    """Numbers, None, or a pair of numbers; ``collisions`` knows which is which."""
    if isinstance(value, list):
        return list_of(as_count)(value)
    if value is not None and (type(value) is not int or not -1 <= value < 2**63):
        raise ValueError(f"{shown(value)} is no number")
    return value
