"""Show chunks to tests: the index entry in JSON's form, and decoded rows."""

from __future__ import annotations

from typing import Any

from msgspec import to_builtins

from torchrec_checknrun.format.chunk import (
    BlockHeader,
    EncodedChunk,
    block_header,
    decode_state_chunk,
)
from torchrec_checknrun.format.entries import (
    BlockEntry,
    CollisionsEntry,
    Entry,
    RowsEntry,
    StateEntry,
    parse_entry,
)
from torchrec_checknrun.format.reader import StoredChunk
from torchrec_checknrun.format.row_chunk import RowsHeader, rows_header
from torchrec_checknrun.format.row_reader import StoredRows
from torchrec_checknrun.shards import Rows


def fields(chunk: EncodedChunk | StoredChunk) -> dict[str, Any]:
    """Return a chunk's index entry with the names of JSON."""
    found: dict[str, Any] = to_builtins(chunk.entry)
    return found


def header_of(entry: Entry | dict[str, Any]) -> RowsHeader:
    """Check the index entry of a chunk of rows as a reader does."""
    entry = parse_entry(entry) if isinstance(entry, dict) else entry
    assert isinstance(entry, RowsEntry)
    return rows_header(entry)


def block_of(entry: Entry | dict[str, Any]) -> BlockHeader:
    """Check the index entry of a block as a reader does."""
    entry = parse_entry(entry) if isinstance(entry, dict) else entry
    assert isinstance(entry, BlockEntry)
    return block_header(entry)


def collisions_of(document: dict[str, Any]) -> CollisionsEntry:
    """Check the index entry of managed collisions as a reader does."""
    entry = parse_entry(document)
    assert isinstance(entry, CollisionsEntry)
    return entry


def decode_rows(entry: Entry | dict[str, Any], payload: bytes | memoryview) -> Rows:
    """Decode all rows of a chunk."""
    return StoredRows(header_of(entry), memoryview(payload)).rows()


def decode_stored(entry: Entry | dict[str, Any], payload: bytes | memoryview) -> Any:
    """Decode the state of a chunk."""
    entry = parse_entry(entry) if isinstance(entry, dict) else entry
    assert isinstance(entry, (StateEntry, CollisionsEntry))
    return decode_state_chunk(entry, payload)
