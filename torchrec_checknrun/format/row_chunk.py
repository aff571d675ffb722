"""Encode rows of a shard as a chunk, and check such index entries; ``row_reader`` decodes.

The payload is row ids, encoded weights, the rows that the codec can't represent, then each
optimizer state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from torchrec_checknrun.codecs import (
    Codec,
    Encoded,
    Exact,
    Parameters,
    RowContext,
    codec_from_spec,
    row_state,
)
from torchrec_checknrun.codecs.quantization import TableEncoding
from torchrec_checknrun.errors import CorruptCheckpoint, UnsupportedTable
from torchrec_checknrun.format import row_ids
from torchrec_checknrun.format.checks import (
    Check,
    as_count,
    as_flag,
    as_measure,
    as_options,
    as_text,
    check_object,
    list_of,
)
from torchrec_checknrun.format.chunk import (
    DECODED_BYTES,
    ROWS,
    EncodedChunk,
    Entry,
    Section,
    Sections,
    decoded_most,
    dtype_name,
)
from torchrec_checknrun.format.row_values import EncodedRows
from torchrec_checknrun.format.state import raw_bytes
from torchrec_checknrun.shards import Rectangle, RowBlock, TableShape

_ERROR_SAMPLE_ROWS = 1024
"""The most rows of a chunk on which the error is measured."""
_DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32),  # counters of some optimizers
    )
}


@dataclass(frozen=True)
class RowsHeader:
    """A chunk's index entry, checked.

    Attributes:
        shape: the whole table's.
        rectangle: the shard's columns, and the rows from the chunk's first to its last.
        count: rows in the chunk.
        dtype: of the weights.
        exceptions: rows stored exactly, because the codec can't represent them.
        optimizer: by state name, dtype and whether the state is row-wise (one value a row).
        sections: ids, weights, exceptions if there are any, optimizer states: in payload order.
    """

    table: str
    shape: TableShape
    rectangle: Rectangle
    count: int
    ids_encoding: str
    dtype: torch.dtype
    codec: Codec
    parameters: Parameters
    exceptions: int
    optimizer: dict[str, tuple[torch.dtype, bool]]
    state_encodings: dict[str, Parameters]
    sections: tuple[Section, ...]

    @property
    def decoded_bytes(self) -> int:
        """Bytes of the rows in memory, with ids and optimizer state."""
        cols = self.rectangle.cols
        row = 8 + cols * self.dtype.itemsize
        for dtype, rowwise in self.optimizer.values():
            row += dtype.itemsize * (1 if rowwise else cols)
        return self.count * row


def encode_rows(block: RowBlock, encoding: TableEncoding) -> EncodedChunk:
    """Encode rows; those that the codec can't represent (NaN, infinity, too large) are stored
    exactly, since a lost row is the worst error.

    Raises:
        UnsupportedTable: weight or optimizer state is of a dtype that can't be stored.
    """
    weight, states = block.weight, block.optimizer
    for tensor in (weight, *states.values()):
        if tensor.dtype not in _DTYPES.values():
            raise UnsupportedTable(
                f"{block.table} or its optimizer state is of {tensor.dtype}: its rows can't be "
                f"stored; use one of {list(_DTYPES)}"
            )
    n = len(block.ids)
    codec = encoding.codec
    encoded = codec.encode(weight, block.positions, RowContext(states))
    row_bytes = weight.shape[1] * weight.element_size()
    size = encoded.data.numel() + len(encoded.exceptions) * (row_bytes + 4)
    if codec.lossy and size >= n * row_bytes:
        codec = Exact()
        encoded = codec.encode(weight, block.positions)
    sections = Sections(encoding.compress and may_be_compressed(block))
    ids_encoding, ids_bytes = row_ids.encode(block.ids.cpu().numpy())
    sections.pieces.append(ids_bytes)  # compressed already
    weight_entry = _add_weight(sections, block, encoded, codec)
    optimizer = []
    for name, state in states.items():
        data, parameters = row_state.encode_row_state(state, encoding.optimizer)
        optimizer.append(
            {
                "name": name,
                "dtype": dtype_name(state.dtype),
                "rowwise": state.dim() == 1,
                "encoding": parameters,
                **sections.add(raw_bytes(data)),
            }
        )
    entry: Entry = {
        "kind": ROWS,
        "table": block.table,
        "table_rows": block.shape.rows,
        "table_dim": block.shape.dim,
        "columns": list(block.columns),
        "first": int(block.ids[0]),
        "last": int(block.ids[-1]),
        "count": n,
        "ids": {"encoding": ids_encoding, "bytes": len(ids_bytes)},
        "weight": weight_entry,
        "optimizer": optimizer,
    }
    if codec.lossy:
        entry["error"] = _relative_error(block, encoded, codec)
    return EncodedChunk(entry, sections.pieces)


def _add_weight(sections: Sections, block: RowBlock, encoded: Encoded, codec: Codec) -> Entry:
    """Append encoded weights and exceptions; return their part of the index entry."""
    entry: Entry = {
        "codec": codec.spec(),
        "dtype": dtype_name(block.weight.dtype),
        "value_bits": codec.value_bits,
        **sections.add(raw_bytes(encoded.data)),
    }
    if encoded.parameters:
        entry["parameters"] = encoded.parameters
    exceptions = encoded.exceptions
    if len(exceptions):
        positions = exceptions.numpy().astype("<u4").tobytes()
        values = raw_bytes(block.rows(exceptions.to(block.weight.device)))
        entry["exceptions"] = {
            "rows": len(exceptions),
            **sections.add(b"".join((positions, values))),
        }
    return entry


def may_be_compressed(block: RowBlock) -> bool:
    """Return whether readers accept these rows compressed; see ``chunk.DECODED_BYTES``."""
    values = block.weight[0].numel() * block.weight.element_size()
    values += sum(state[0].numel() * state.element_size() for state in block.optimizer.values())
    return len(block.ids) * (8 + values) <= DECODED_BYTES


def rows_header(entry: Entry) -> RowsHeader:
    """Check an index entry.

    Raises:
        CorruptCheckpoint: a field is missing, unknown, of a wrong type or out of range.
        UnsupportedFormat: the codec is unknown to this release.
    """
    try:
        return _header(check_object(entry, _FIELDS, "error", "offset", "length", "checksum"))
    except ValueError as error:
        raise CorruptCheckpoint(f"index entry of a rows chunk is malformed: {error}") from error


def _header(entry: Entry) -> RowsHeader:
    shape = TableShape(entry["table_rows"], entry["table_dim"])
    col_start, col_stop = _pair(entry["columns"])
    rectangle = Rectangle(entry["first"], entry["last"] + 1, col_start, col_stop)
    count, weight = entry["count"], entry["weight"]
    whole = Rectangle(0, shape.rows, 0, shape.dim)
    if rectangle.intersect(whole) != rectangle or not 1 <= count <= rectangle.rows:
        raise ValueError(f"{count} rows in {rectangle} of a table {shape}")
    exceptions = weight.get("exceptions", {"rows": 0})["rows"]
    if exceptions > count:
        raise ValueError(f"{exceptions} exact rows of {count}")
    sections = [entry["ids"], weight]
    sections += [weight["exceptions"]] if "exceptions" in weight else []
    optimizer = {s["name"]: (_DTYPES[s["dtype"]], s["rowwise"]) for s in entry["optimizer"]}
    if len(optimizer) != len(entry["optimizer"]):
        raise ValueError(f"optimizer: a name of {list(optimizer)} appears twice")
    header = RowsHeader(
        table=entry["table"],
        shape=shape,
        rectangle=rectangle,
        count=count,
        ids_encoding=entry["ids"]["encoding"],
        dtype=_DTYPES[weight["dtype"]],
        codec=codec_from_spec(weight["codec"]),
        parameters=dict(weight.get("parameters", {})),
        exceptions=exceptions,
        optimizer=optimizer,
        state_encodings={s["name"]: dict(s["encoding"]) for s in entry["optimizer"]},
        sections=tuple(Section.of(section) for section in (*sections, *entry["optimizer"])),
    )
    stored = sum(section.stored for section in header.sections)
    if entry.get("length", stored) != stored:
        raise ValueError(f"the sections have {stored} bytes, the chunk {entry['length']}")
    if header.decoded_bytes > decoded_most(stored):
        raise ValueError(
            f"{stored} bytes can't stand for {count} rows of {header.decoded_bytes} bytes: at most "
            f"{decoded_most(stored)} are read"
        )
    return header


def _pair(numbers: list[int]) -> tuple[int, int]:
    if len(numbers) != 2:
        raise ValueError(f"{numbers} is not a pair")
    return numbers[0], numbers[1]


def _as_dtype(value: object) -> str:
    if as_text(value) not in _DTYPES:
        raise ValueError(f"{value!r} is not a dtype of rows")
    return str(value)


def _as_parameters(value: object) -> Parameters:
    """Check parameters: options, or lists of them, one for each group of rows."""
    if type(value) is not dict:
        raise ValueError("parameters are not an object")
    groups = {name: item for name, item in value.items() if type(item) is list}
    as_options({name: item for name, item in value.items() if name not in groups})
    for group in groups.values():
        list_of(as_options)(group)
    return value


def _as_section(checks: dict[str, Check], *optional: str) -> Check:
    checks = {**checks, "bytes": as_count, "raw": as_count}
    return lambda value: check_object(value, checks, "raw", *optional)


_FIELDS: dict[str, Check] = {
    **dict.fromkeys(("kind", "table", "checksum"), as_text),
    **dict.fromkeys(("table_rows", "table_dim", "first", "last", "count"), as_count),
    **dict.fromkeys(("offset", "length"), as_count),
    "columns": list_of(as_count),
    "error": lambda value: check_object(
        value, {"mean": as_measure, "max": as_measure, "sampled_rows": as_count}
    ),
    "ids": lambda value: check_object(value, {"encoding": as_text, "bytes": as_count}),
    "weight": _as_section(
        {
            "codec": as_options,
            "dtype": _as_dtype,
            "value_bits": as_count,
            "parameters": _as_parameters,
            "exceptions": _as_section({"rows": as_count}),
        },
        "parameters",
        "exceptions",
    ),
    "optimizer": list_of(
        _as_section(
            {"name": as_text, "dtype": _as_dtype, "rowwise": as_flag, "encoding": as_options}
        )
    ),
}


def _relative_error(block: RowBlock, encoded: Encoded, codec: Codec) -> Entry:
    """Measure mean and maximum of ‖ŵ − w‖/‖w‖ over rows, or over evenly spaced ones of many."""
    n, weight = len(block.ids), block.weight
    sample = torch.arange(0, n, -(-n // _ERROR_SAMPLE_ROWS), device="cpu")
    rows = EncodedRows(
        codec=codec,
        parameters=encoded.parameters,
        data=encoded.data.view(-1),
        count=n,
        cols=weight.shape[1],
        dtype=weight.dtype,
        exceptions=np.empty(0, dtype=np.int64),
        exact=torch.empty((0, weight.shape[1]), dtype=weight.dtype, device="cpu"),
    )
    relative = []
    for start, decoded in rows.blocks(sample.numpy()):
        here = sample[start : start + len(decoded)]
        wanted = block.rows(here.to(weight.device)).cpu().to(torch.float64)
        norm = wanted.norm(dim=1)
        error = (decoded.to(torch.float64) - wanted).norm(dim=1)
        one = torch.where(norm > 0, error / norm, torch.where(error > 0, 1.0, 0.0))
        relative.append(torch.where(one.isfinite(), one, 1.0))  # beyond fp64, and JSON
    every = torch.cat(relative)
    every[torch.isin(sample, encoded.exceptions)] = 0.0  # stored exactly
    return {
        "mean": float(every.mean()),
        "max": float(every.max()),
        "sampled_rows": len(every),
    }
