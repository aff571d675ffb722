"""One rank's file of a checkpoint: chunks, then their index (JSON), then a footer that finds it.

A checksum per chunk stands in the index, the index's in the footer and in the manifest. Made of
chunks that come one after the other; while one is being written the next is being encoded.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import xxhash

from torchrec_checknrun.errors import CorruptCheckpoint, StorageUnreachable
from torchrec_checknrun.format.chunk import EncodedChunk, Entry
from torchrec_checknrun.format.index import index_bytes, require_chunk_size
from torchrec_checknrun.format.manifest import RankFile, TableTotals
from torchrec_checknrun.format.state import TORCH_DTYPES
from torchrec_checknrun.ranks import picklable_errors
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


@picklable_errors()  # DCP sends them to rank 0
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
