"""A chunk: some rows of one shard, or one state object, as one run of bytes with its index entry.

The entry (JSON, in the rank file's index) says what the bytes are; the storage layer adds where
they are and their checksum. A rows chunk is row ids, then encoded weights, then each optimizer
state.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchrec_checknrun import row_ids
from torchrec_checknrun.codecs import Codec, Exact, codec_from_spec
from torchrec_checknrun.errors import CorruptCheckpoint, UnsupportedTable
from torchrec_checknrun.shards import LocalShard, Rectangle, Rows, TableShape
from torchrec_checknrun.state import Tree, decode_state, raw_bytes

Entry = dict[str, Any]

_ERROR_SAMPLE_ROWS = 1024
_BLOCK_BYTES = 1 << 20
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32),  # counters of some optimizers
    )
}


class EncodedChunk(io.BytesIO):
    """A chunk's index entry and its bytes, which stay in pieces: joined, they would be there twice.

    A BytesIO because DCP's planners hand those over; this package uses ``pieces``.
    """

    def __init__(self, entry: Entry, pieces: list[bytes | memoryview]) -> None:
        super().__init__()
        self.entry = entry
        self.pieces = pieces

    def getvalue(self) -> bytes:
        """All bytes; no copy of a single piece."""
        return b"".join(self.pieces)


@dataclass(frozen=True)
class RowsHeader:
    """What a restore must know of a rows chunk before it reads it."""

    table: str
    shape: TableShape
    rectangle: Rectangle
    """The shard's columns, and the rows from the chunk's first to its last."""
    count: int
    ids_encoding: str
    ids_bytes: int
    dtype: torch.dtype
    codec: Codec
    optimizer: dict[str, tuple[torch.dtype, bool]]
    """By state name: dtype, and whether it is row-wise (one value a row)."""

    @property
    def covers_range(self) -> bool:
        """Whether every row from first to last is there."""
        return self.count == self.rectangle.rows


def encode_rows(shard: LocalShard, rows: Rows, codec: Codec) -> EncodedChunk:
    """Encodes rows of a shard (sorted, at least one); falls back to the exact codec for rows that
    the codec can't hold (NaN, infinity, beyond its range), since a lost row is the worst error.

    Raises:
        UnsupportedTable: weight or optimizer state is of a data type that can't be read again.
    """
    for tensor in (rows.weight, *rows.optimizer.values()):
        if tensor.dtype not in _DTYPES.values():
            raise UnsupportedTable(
                f"{shard.table} or its optimizer state is of {tensor.dtype}: its rows can't be "
                f"stored; use one of {list(_DTYPES)}"
            )
    weight = rows.weight.detach()
    if codec.lossy and not codec.accepts(weight):
        codec = Exact()
    ids = rows.ids.cpu().numpy()
    ids_encoding, ids_bytes = row_ids.encode(ids)
    encoded = codec.encode(weight)
    pieces: list[bytes | memoryview] = [ids_bytes, raw_bytes(encoded)]
    optimizer = []
    for name, state in rows.optimizer.items():
        data = raw_bytes(state)
        pieces.append(data)
        optimizer.append(
            {
                "name": name,
                "dtype": dtype_name(state.dtype),
                "rowwise": state.dim() == 1,
                "bytes": data.nbytes,
            }
        )
    entry: Entry = {
        "kind": "rows",
        "table": shard.table,
        "table_rows": shard.shape.rows,
        "table_dim": shard.shape.dim,
        "columns": [shard.rectangle.col_start, shard.rectangle.col_stop],
        "first": int(ids[0]),
        "last": int(ids[-1]),
        "count": len(ids),
        "ids": {"encoding": ids_encoding, "bytes": len(ids_bytes)},
        "weight": {
            "codec": codec.spec(),
            "dtype": dtype_name(weight.dtype),
            "value_bits": codec.value_bits,
            "bytes": encoded.numel(),
        },
        "optimizer": optimizer,
    }
    if codec.lossy:
        entry["error"] = _relative_error(weight, encoded, codec)
    return EncodedChunk(entry, pieces)


def rows_header(entry: Entry) -> RowsHeader:
    """The entry, checked.

    Raises:
        CorruptCheckpoint: a field is missing, of a wrong type or out of range.
    """
    try:
        shape = TableShape(as_count(entry["table_rows"]), as_count(entry["table_dim"]))
        col_start, col_stop = (as_count(c) for c in entry["columns"])
        rectangle = Rectangle(
            as_count(entry["first"]), as_count(entry["last"]) + 1, col_start, col_stop
        )
        count = as_count(entry["count"])
        whole = Rectangle(0, shape.rows, 0, shape.dim)
        if rectangle.intersect(whole) != rectangle or not 1 <= count <= rectangle.rows:
            raise ValueError(f"{count} rows in {rectangle} of a table {shape}")
        return RowsHeader(
            table=str(entry["table"]),
            shape=shape,
            rectangle=rectangle,
            count=count,
            ids_encoding=str(entry["ids"]["encoding"]),
            ids_bytes=as_count(entry["ids"]["bytes"]),
            dtype=_DTYPES[entry["weight"]["dtype"]],
            codec=codec_from_spec(entry["weight"]["codec"]),
            optimizer={
                str(s["name"]): (_DTYPES[s["dtype"]], bool(s["rowwise"]))
                for s in entry["optimizer"]
            },
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpoint(f"index entry of a rows chunk is malformed: {error!r}") from error


def decode_rows(entry: Entry, payload: bytes | memoryview) -> Rows:
    """The rows again, on the CPU.

    Raises:
        CorruptCheckpoint: entry and payload don't fit each other.
    """
    (rows,) = decode_blocks(entry, payload, rows_header(entry).count)
    return rows


def decode_blocks(
    entry: Entry, payload: bytes | memoryview, block_rows: int | None = None
) -> Iterator[Rows]:
    """The rows again, on the CPU, some at a time: blocks that stay small are memory used again.

    Args:
        block_rows: how many at a time; None for about a megabyte.

    Raises:
        CorruptCheckpoint: entry and payload don't fit each other.
    """
    header = rows_header(entry)
    n, cols = header.count, header.rectangle.cols
    view = memoryview(payload)
    row_bytes = header.codec.row_bytes(cols, header.dtype)
    sizes = [header.ids_bytes, n * row_bytes]
    for dtype, rowwise in header.optimizer.values():
        sizes.append(n * dtype.itemsize * (1 if rowwise else cols))
    if sum(sizes) != len(view):
        raise CorruptCheckpoint(
            f"a chunk of {n} rows of {header.table} should have {sum(sizes)} bytes, not {len(view)}"
        )
    ends = np.cumsum(sizes)
    parts = [view[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    ids = row_ids.decode(
        header.ids_encoding,
        parts[0],
        header.rectangle.row_start,
        header.rectangle.row_stop - 1,
        n,
    )
    size = block_rows or max(1, _BLOCK_BYTES // (4 * cols))
    for start in range(0, n, size):
        count = min(size, n - start)
        encoded = _rows_of(parts[1], start, count, row_bytes)
        optimizer = {}
        for (name, (dtype, rowwise)), part in zip(header.optimizer.items(), parts[2:], strict=True):
            width = 1 if rowwise else cols
            state = _rows_of(part, start, count, width * dtype.itemsize).view(dtype)
            optimizer[name] = state.reshape(-1) if rowwise else state
        yield Rows(
            torch.from_numpy(ids[start : start + count]),
            header.codec.decode(encoded, cols, header.dtype),
            optimizer,
        )


def state_chunk(
    name: str, rank: int | None, tree: Tree, pieces: list[bytes | memoryview]
) -> EncodedChunk:
    """An encoded state object as a chunk; ``rank`` is None for one that all ranks have alike."""
    return EncodedChunk({"kind": "state", "name": name, "rank": rank, "tree": tree}, pieces)


def state_tree(entry: Entry) -> Tree:
    """A state chunk's tree.

    Raises:
        CorruptCheckpoint: there is none.
    """
    tree = entry.get("tree")
    if not isinstance(tree, dict):
        raise CorruptCheckpoint(f"index entry of state {entry.get('name')!r} has no tree")
    return tree


def decode_state_chunk(entry: Entry, payload: bytes | memoryview) -> Any:
    """The state object again.

    Raises:
        CorruptCheckpoint: tree and payload don't fit each other.
    """
    try:
        return decode_state(state_tree(entry), payload)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        name = entry.get("name")
        raise CorruptCheckpoint(f"state {name!r} can't be decoded: {error!r}") from error


def _relative_error(weight: torch.Tensor, encoded: torch.Tensor, codec: Codec) -> Entry:
    """Mean and maximum over rows of ‖ŵ − w‖/‖w‖, from evenly spaced rows where there are many."""
    stride = -(-weight.shape[0] // _ERROR_SAMPLE_ROWS)
    sample = weight[::stride].to(torch.float32)
    decoded = codec.decode(encoded[::stride].contiguous(), weight.shape[1], torch.float32)
    norm = sample.norm(dim=1)
    error = (decoded - sample).norm(dim=1)
    relative = torch.where(norm > 0, error / norm, torch.where(error > 0, 1.0, 0.0))
    return {
        "mean": float(relative.mean()),
        "max": float(relative.max()),
        "sampled_rows": sample.shape[0],
    }


def _rows_of(data: memoryview, start: int, count: int, row_bytes: int) -> torch.Tensor:
    """A copy of some rows, ``(count, row_bytes)`` uint8: tensors must be aligned and writable."""
    part = bytearray(data[start * row_bytes : (start + count) * row_bytes])
    return torch.frombuffer(part, dtype=torch.uint8).view(count, row_bytes)


def dtype_name(dtype: torch.dtype) -> str:
    """A data type as index entries have it."""
    return str(dtype).removeprefix("torch.")


def as_count(value: object) -> int:
    """A number from an index entry, checked.

    Raises:
        ValueError: it is no count.
    """
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
