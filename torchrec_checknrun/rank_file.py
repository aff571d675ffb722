"""One rank's file of a checkpoint: chunks, then their index (JSON), then a footer that finds it.

A checksum per chunk stands in the index, the index's in the footer and in the manifest. Made of
chunks that come one after the other; while one is being written the next is being encoded.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import IO

import xxhash

from torchrec_checknrun.chunks import EncodedChunk, Entry
from torchrec_checknrun.filesystem import Folder
from torchrec_checknrun.manifest import RankFile, TableTotals

FOOTER = struct.Struct("<QQ16s8s")
"""Index offset, index length, index checksum (xxh3-64, hex), magic."""
MAGIC = b"CHKNRUN1"


@dataclass
class FileSummary:
    """What a rank tells rank 0 of the file it wrote: all that the manifest says of it."""

    file: RankFile
    tables: dict[str, TableTotals]
    dense_bytes: int


def write_rank_file(folder: Folder, rank: int, chunks: Iterable[EncodedChunk]) -> FileSummary:
    """Writes a rank's chunks as they come; when it returns, they are durable.

    Raises:
        OSError: the storage failed.
    """
    name = f"rank-{rank:05d}.bin"
    index: list[Entry] = []
    with folder.write(name) as file:
        for chunk in chunks:
            index.append(_write_chunk(file, chunk))
            del chunk  # before the next one is made
        rank_file = _write_index(file, name, rank, index)
    return FileSummary(rank_file, *_totals(index))


def _write_chunk(file: IO[bytes], chunk: EncodedChunk) -> Entry:
    offset, checksum = file.tell(), xxhash.xxh3_64()
    for piece in chunk.pieces:
        checksum.update(piece)
        file.write(piece)
    length = file.tell() - offset
    return {**chunk.entry, "offset": offset, "length": length, "checksum": checksum.hexdigest()}


def _write_index(file: IO[bytes], name: str, rank: int, index: list[Entry]) -> RankFile:
    data = json.dumps({"rank": rank, "chunks": index}, separators=(",", ":")).encode()
    checksum = xxhash.xxh3_64_hexdigest(data)
    offset = file.tell()
    file.write(data)
    file.write(FOOTER.pack(offset, len(data), checksum.encode(), MAGIC))
    return RankFile(name, file.tell(), offset, len(data), checksum, len(index))


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
            value_bits=entry["weight"]["value_bits"],
            error_mean=error and error["mean"],
            error_max=error and error["max"],
            error_rows=error["sampled_rows"] if error else 0,
            codecs=[entry["weight"]["codec"]],
        )
        known = tables.get(entry["table"])
        tables[entry["table"]] = add_totals(known, one) if known else one
    return tables, dense


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
        value_bits=min(one.value_bits, other.value_bits),
        error_mean=mean,
        error_max=maximum,
        error_rows=rows,
        codecs=one.codecs + [codec for codec in other.codecs if codec not in one.codecs],
    )
