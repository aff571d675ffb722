"""The chunk index at a rank file's end: which chunks there are, where, and what they hold.

It is read as a stranger's: every entry is checked before one of its chunks is. Chunks lie one
behind the other from the file's first byte to its index, so that no byte belongs to two of them.
"""

from __future__ import annotations

import json
import re
from reprlib import repr as shown
from typing import Any

from torchrec_checknrun.errors import CorruptCheckpoint, InvalidPlan, UnsupportedFormat
from torchrec_checknrun.format import block_chunk, row_chunk
from torchrec_checknrun.format.checks import (
    INDEX_BYTES,
    as_count,
    as_text,
    dict_of,
    list_of,
    optional,
    parse_json,
    record,
    require_limits,
)
from torchrec_checknrun.format.chunk import Entry
from torchrec_checknrun.format.manifest import RankFile
from torchrec_checknrun.format.row_chunk import RowsHeader
from torchrec_checknrun.format.state_tree import check_tree

CHUNK_BYTES = 2 << 30
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
    if entry["kind"] in (row_chunk.KIND, block_chunk.KIND) and length > CHUNK_BYTES:
        raise InvalidPlan(
            f"a chunk of {entry.get('table') or entry.get('path')} has {length} bytes; at most "
            f"{CHUNK_BYTES} can be read again: make chunks smaller (chunk_bytes)"
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
        document = record(
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
        if length > CHUNK_BYTES:
            raise ValueError(f"it has {length} bytes, more than the {CHUNK_BYTES} that are read")
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
    record(entry, checks)
    check_tree(entry["tree"], length)


def _fact(value: object) -> object:
    """Numbers, None, or a pair of numbers; ``collisions`` knows which is which."""
    if isinstance(value, list):
        return list_of(as_count)(value)
    if value is not None and (type(value) is not int or not -1 <= value < 2**63):
        raise ValueError(f"{shown(value)} is no number")
    return value
