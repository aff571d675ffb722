"""Rows of a shard as a chunk; ``stored_rows`` has the way back.

The payload is row ids, then encoded weights, then the rows that the codec can't hold, then each
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

KIND = "rows"

_ERROR_SAMPLE_ROWS = 1024
_DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32),  # counters of some optimizers
    )
}


@dataclass(frozen=True)
class RowsHeader:
    """What a restore must know of a rows chunk before it reads it."""

    table: str
    shape: TableShape
    rectangle: Rectangle
    """The shard's columns, and the rows from the chunk's first to its last."""
    count: int
    ids_encoding: str
    dtype: torch.dtype
    codec: Codec
    parameters: Parameters
    exceptions: int
    """How many rows are stored exactly, beside the codec."""
    optimizer: dict[str, tuple[torch.dtype, bool]]
    """By state name: dtype, and whether it is row-wise (one value a row)."""
    state_encodings: dict[str, Parameters]
    sections: tuple[Section, ...]
    """Ids, weights, exceptions if there are any, optimizer states: as they lie in the chunk."""

    @property
    def decoded_bytes(self) -> int:
        """What its rows take in memory, with their ids and optimizer state."""
        cols = self.rectangle.cols
        row = 8 + cols * self.dtype.itemsize
        for dtype, rowwise in self.optimizer.values():
            row += dtype.itemsize * (1 if rowwise else cols)
        return self.count * row


def encode_rows(block: RowBlock, encoding: TableEncoding) -> EncodedChunk:
    """Encodes rows; one that the codec can't hold (NaN, infinity, too large) is stored exactly
    beside the others, since a lost row is the worst error.

    Raises:
        UnsupportedTable: weight or optimizer state is of a data type that can't be read again.
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
    exceptions = encoded.exceptions
    row_bytes = weight.shape[1] * weight.element_size()
    size = encoded.data.numel() + len(exceptions) * (row_bytes + 4)
    if codec.lossy and size >= n * row_bytes:
        codec = Exact()
        encoded = codec.encode(weight, block.positions)
        exceptions = encoded.exceptions
    sections = Sections(encoding.compress and may_be_compressed(block))
    ids_encoding, ids_bytes = row_ids.encode(block.ids.cpu().numpy())
    sections.pieces.append(ids_bytes)  # compressed already
    weight_entry: Entry = {
        "codec": codec.spec(),
        "dtype": dtype_name(weight.dtype),
        "value_bits": codec.value_bits,
        **sections.add(raw_bytes(encoded.data)),
    }
    if encoded.parameters:
        weight_entry["parameters"] = encoded.parameters
    if len(exceptions):
        positions = exceptions.numpy().astype("<u4").tobytes()
        values = raw_bytes(block.rows(exceptions.to(weight.device)))
        weight_entry["exceptions"] = {
            "rows": len(exceptions),
            **sections.add(b"".join((positions, values))),
        }
    optimizer = []
    for name, state in states.items():
        scheme = encoding.optimizer if state.dim() == 1 else "fp32"
        data, parameters = row_state.encode_row_state(state.reshape(-1), scheme)
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
        "kind": KIND,
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


def may_be_compressed(block: RowBlock) -> bool:
    """Whether readers take these rows from fewer bytes; see ``sections.DECODED_BYTES``."""
    values = block.weight[0].numel() * block.weight.element_size()
    values += sum(state[0].numel() * state.element_size() for state in block.optimizer.values())
    return len(block.ids) * (8 + values) <= DECODED_BYTES


def rows_header(entry: Entry) -> RowsHeader:
    """The entry, checked.

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
        raise ValueError(f"optimizer: a name of {list(optimizer)} is there twice")
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
        raise ValueError(f"its parts have {stored} bytes, the chunk {entry['length']}")
    if header.decoded_bytes > decoded_most(stored):
        raise ValueError(
            f"{stored} bytes can't stand for {count} rows of {header.decoded_bytes} bytes: at most "
            f"{decoded_most(stored)} are read"
        )
    return header


def _pair(numbers: list[int]) -> tuple[int, int]:
    if len(numbers) != 2:
        raise ValueError(f"{numbers} is no pair")
    return numbers[0], numbers[1]


def _as_dtype(value: object) -> str:
    if as_text(value) not in _DTYPES:
        raise ValueError(f"{value!r} is no dtype of rows")
    return str(value)


def _as_parameters(value: object) -> Parameters:
    """Options, or lists of them: one for each group of rows."""
    if type(value) is not dict:
        raise ValueError("parameters are no object")
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
    """Mean and maximum over rows of ‖ŵ − w‖/‖w‖, from evenly spaced rows where there are many."""
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
