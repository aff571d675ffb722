"""Encode rows of a shard as a chunk, and check such index entries; ``row_reader`` decodes.

The payload is row ids, encoded weights, the rows that the codec can't represent, then each
optimizer state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from msgspec import UNSET, UnsetType

from torchrec_checknrun.codecs import (
    Chained,
    Codec,
    Encoded,
    Exact,
    Parameters,
    RowContext,
    codec_from_spec,
    row_state,
)
from torchrec_checknrun.codecs.quantization import TableEncoding
from torchrec_checknrun.errors import CorruptCheckpoint, InvalidPlan, UnsupportedTable
from torchrec_checknrun.format import row_ids
from torchrec_checknrun.format.checks import Options
from torchrec_checknrun.format.chunk import (
    DECODED_BYTES,
    EncodedChunk,
    Sections,
    decoded_most,
    dtype_name,
    part_most,
)
from torchrec_checknrun.format.entries import (
    ROWS_DTYPES,
    UNWRITTEN,
    ExactSection,
    GroupedOptions,
    IdsSection,
    OptimizerSection,
    RowsDtype,
    RowsEntry,
    RowsError,
    Section,
    WeightSection,
)
from torchrec_checknrun.format.row_values import EncodedRows
from torchrec_checknrun.shards import Rectangle, RowBlock, TableShape
from torchrec_checknrun.values.tensor_bytes import raw_bytes

_MOST_TOLD = 10
_ERROR_SAMPLE_ROWS = 1024
"""The most rows of a chunk on which the error is measured."""


RowForms = dict[str, tuple[torch.dtype, bool]]
"""A table's optimizer states by name, each with its type and whether it is one value a row."""


@dataclass(frozen=True)
class RowsHeader:
    """A chunk's index entry, checked.

    Attributes:
        entry: the index entry.
        shape: the whole table's.
        rectangle: the shard's columns, and the rows from the chunk's first to its last.
        count, cols: rows in the chunk, and columns.
        dtype: of the weights.
        exceptions: rows stored exactly, because the codec can't represent them.
        optimizer: by state name, dtype and whether the state is row-wise (one value a row).
        log_states: names of the states that references keep, see ``row_state.LOGDELTA``.
        sections: ids, weights, exceptions if there are any, optimizer states: in payload order.
        decoded_bytes: bytes of the rows in memory, with ids and optimizer state.
        is_link: whether rows may be differences to what the checkpoint before restores.
    """

    entry: RowsEntry
    table: str
    shape: TableShape
    rectangle: Rectangle
    count: int
    cols: int
    ids_encoding: str
    dtype: torch.dtype
    codec: Codec
    parameters: Parameters
    exceptions: int
    optimizer: RowForms
    state_encodings: dict[str, Parameters]
    sections: tuple[IdsSection | Section, ...]
    decoded_bytes: int
    is_link: bool = False
    log_states: frozenset[str] = frozenset()


def encode_rows(block: RowBlock, encoding: TableEncoding) -> EncodedChunk:
    """Encode rows; those that the codec can't represent (NaN, infinity, too large) are stored
    exactly, since a lost row is the worst error. So are all rows where the codec takes so few bytes
    that readers would refuse them, or more than the rows have. Where the block's weight is these
    rows, in CPU memory, parts of the chunk may be views of it.

    Raises:
        UnsupportedTable: weight or optimizer state is of a dtype that can't be stored.
        InvalidPlan: the codec returned what no reader would take.
    """
    weight, states = block.weight, block.optimizer
    for tensor in (weight, *states.values()):
        if tensor.dtype not in ROWS_DTYPES.values():
            raise UnsupportedTable(
                f"{block.table} or its optimizer state is of {tensor.dtype}: its rows can't be "
                f"stored; use one of {list(ROWS_DTYPES)}"
            )
    n = len(block.ids)
    codec = encoding.codec
    encoded = _encoded(block, codec)
    row_bytes = weight.shape[1] * weight.element_size()
    size = encoded.data.numel() + len(encoded.exceptions) * (row_bytes + 4)
    if codec.lossy and not codec.chained and size >= n * row_bytes:
        codec = Exact()
        encoded = _encoded(block, codec)
    compress = encoding.compress and may_be_compressed(block)
    sections = Sections(part_most(n, weight.shape[1]) if compress else 0)
    ids_encoding, ids_bytes = row_ids.encode(block.ids.cpu().numpy())
    sections.pieces.append(ids_bytes)  # compressed already
    weight_section = _add_weight(sections, block, encoded, codec)
    optimizer = tuple(_add_state(sections, block, name, encoding) for name in states)
    stored = sum(memoryview(piece).nbytes for piece in sections.pieces)
    if _decoded_bytes(block) > decoded_most(stored) and not (codec.verbatim or codec.chained):
        return encode_rows(block, replace(encoding, codec=Exact()))
    entry = RowsEntry(
        table=block.table,
        table_rows=block.shape.rows,
        table_dim=block.shape.dim,
        columns=block.columns,
        first=int(block.ids[0]),
        last=int(block.ids[-1]),
        count=n,
        ids=IdsSection(ids_encoding, len(ids_bytes)),
        weight=weight_section,
        optimizer=optimizer,
        error=_relative_error(block, encoded, codec) if codec.lossy else UNSET,
    )
    return EncodedChunk(entry, sections.pieces)


def _encoded(block: RowBlock, codec: Codec) -> Encoded:
    """Encode a block's weights, without a copy of those that are stored as they are: the allocator
    would keep many times a chunk's bytes.
    """
    weight = block.weight
    if codec.verbatim and block.positions is None and weight.is_cpu and weight.is_contiguous():
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        return Encoded(weight.detach().view(-1).view(torch.uint8), {}, none)
    encoded = codec.encode(weight, block.positions, RowContext(block.optimizer, block.ids))
    data, exceptions = encoded.data, encoded.exceptions
    sound = data.dtype == torch.uint8 and data.is_cpu and exceptions.dtype == torch.int64
    if len(exceptions):
        sound &= int(exceptions[0]) >= 0 and int(exceptions[-1]) < len(block.ids)
        sound &= bool((exceptions[1:] > exceptions[:-1]).all())
    if not sound:  # of a user's own codec: a restore would refuse the chunk, or read other values
        raise InvalidPlan(
            f"{block.table}: codec {codec.name!r} must return data as uint8 on the CPU, and "
            f"exceptions as sorted int64 positions of {len(block.ids)} rows, not {data.dtype} and "
            f"{exceptions.dtype} {exceptions.tolist()[:_MOST_TOLD]}"
        )
    return encoded


def _add_weight(
    sections: Sections, block: RowBlock, encoded: Encoded, codec: Codec
) -> WeightSection:
    """Append encoded weights and exceptions; return their part of the index entry."""
    part = sections.add(raw_bytes(encoded.data))
    exact: ExactSection | UnsetType = UNSET
    exceptions = encoded.exceptions
    if len(exceptions):
        positions = exceptions.numpy().astype("<u4").tobytes()
        values = raw_bytes(block.rows(exceptions.to(block.weight.device)))
        exact = add_exact(sections, len(exceptions), positions + bytes(values))
    return WeightSection(
        bytes=part.bytes,
        raw=part.raw,
        codec=cast(Options, codec.spec()),
        dtype=_name_of(block.weight.dtype),
        value_bits=codec.value_bits,
        parameters=cast(GroupedOptions, encoded.parameters) or UNSET,
        exceptions=exact,
    )


def _add_state(
    sections: Sections, block: RowBlock, name: str, encoding: TableEncoding
) -> OptimizerSection:
    """Append an optimizer state; return its part of the index entry."""
    state, codec = block.optimizer[name], encoding.codec
    if encoding.keeps(name, state):
        assert isinstance(codec, Chained)
        data, parameters = codec.encode_state(name, state, block.ids)
    else:
        scheme = row_state.scheme_of(name, encoding.state_scheme)
        data, parameters = row_state.encode_row_state(state, scheme)
    part = sections.add(raw_bytes(data))
    return OptimizerSection(
        bytes=part.bytes,
        raw=part.raw,
        name=name,
        dtype=_name_of(state.dtype),
        rowwise=state.dim() == 1,
        encoding=cast(Options, parameters),
    )


def add_exact(sections: Sections, rows: int, data: bytes) -> ExactSection:
    """Append rows that a codec can't represent: their positions, then their values."""
    part = sections.add(data)
    return ExactSection(bytes=part.bytes, raw=part.raw, rows=rows)


def may_be_compressed(block: RowBlock) -> bool:
    """Return whether readers accept these rows compressed; see ``chunk.DECODED_BYTES``."""
    return _decoded_bytes(block) <= DECODED_BYTES


def _decoded_bytes(block: RowBlock) -> int:
    """Return the bytes of rows in memory, with ids and optimizer state."""
    values = block.weight[0].numel() * block.weight.element_size()
    values += sum(state[0].numel() * state.element_size() for state in block.optimizer.values())
    return len(block.ids) * (8 + values)


def rows_header(entry: RowsEntry) -> RowsHeader:
    """Check how the fields of an index entry agree.

    Raises:
        CorruptCheckpoint: a field is out of range.
        UnsupportedFormat: the codec is unknown to this release.
    """
    try:
        return _header(entry)
    except ValueError as error:
        raise CorruptCheckpoint(f"index entry of a rows chunk is malformed: {error}") from error


def _header(entry: RowsEntry) -> RowsHeader:
    (first, last), count, weight = entry.columns, entry.count, entry.weight
    within = entry.first <= entry.last < entry.table_rows and first < last <= entry.table_dim
    if not within or not 1 <= count <= entry.last + 1 - entry.first:
        raise ValueError(
            f"{count} rows in {entry.first} to {entry.last}, columns {first} to {last - 1}, of a "
            f"table of {entry.table_rows} × {entry.table_dim}"
        )
    exact = () if weight.exceptions is UNSET else (weight.exceptions,)
    exceptions = exact[0].rows if exact else 0
    if exceptions > count:
        raise ValueError(f"{exceptions} exact rows of {count}")
    optimizer = {s.name: (ROWS_DTYPES[s.dtype], s.rowwise) for s in entry.optimizer}
    if len(optimizer) != len(entry.optimizer):
        raise ValueError(f"optimizer: a name of {list(optimizer)} appears twice")
    sections = (entry.ids, weight, *exact, *entry.optimizer)
    cols, dtype = last - first, ROWS_DTYPES[weight.dtype]
    row = 8 + cols * dtype.itemsize
    row += sum(state.itemsize * (1 if rowwise else cols) for state, rowwise in optimizer.values())
    stored = sum(section.bytes for section in sections)
    if entry.length not in (UNWRITTEN, stored):
        raise ValueError(f"the sections have {stored} bytes, the chunk {entry.length}")
    if count * row > (most := decoded_most(stored)):
        raise ValueError(
            f"{stored} bytes can't stand for {count} rows of {count * row} bytes: at most {most} "
            "are read"
        )
    codec = codec_from_spec({**weight.codec})
    parameters: Parameters = dict(weight.parameters or {})
    if codec.chained and exact:
        raise ValueError(f"codec {codec.name!r} has no rows that it can't hold")
    is_link = codec.needs_base(parameters)
    return RowsHeader(
        entry=entry,
        table=entry.table,
        shape=TableShape(entry.table_rows, entry.table_dim),
        rectangle=Rectangle(entry.first, entry.last + 1, first, last),
        count=count,
        cols=cols,
        ids_encoding=entry.ids.encoding,
        dtype=dtype,
        codec=codec,
        parameters=parameters,
        is_link=is_link,
        log_states=frozenset(s.name for s in entry.optimizer if _is_log(s, codec, is_link)),
        exceptions=exceptions,
        optimizer=optimizer,
        state_encodings={s.name: dict(s.encoding) for s in entry.optimizer},
        sections=sections,
        decoded_bytes=count * row,
    )


def _is_log(section: OptimizerSection, codec: Codec, is_link: bool) -> bool:
    """Return whether references keep a state, whose encoding is checked.

    Raises:
        ValueError: the encoding doesn't fit the state, or the chunk's weights.
    """
    if section.encoding.get("scheme") != row_state.LOGDELTA:
        return False
    rowwise = section.rowwise and section.dtype == "float32"
    link = row_state.is_log_link({**section.encoding})
    if not (rowwise and codec.chained) or (link and not is_link):
        raise ValueError(
            f"state {section.name!r} of {section.dtype} is stored by {row_state.LOGDELTA}, beside "
            f"{'a link' if is_link else 'rows that stand alone'} of codec {codec.name!r}"
        )
    return True


def _name_of(dtype: torch.dtype) -> RowsDtype:
    return cast(RowsDtype, dtype_name(dtype))


def _relative_error(block: RowBlock, encoded: Encoded, codec: Codec) -> RowsError:
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
    decoded_parts = (
        rows.blocks(sample.numpy())
        if encoded.restored is None
        else iter([(0, encoded.restored(sample))])
    )
    for start, decoded in decoded_parts:
        here = sample[start : start + len(decoded)]
        wanted = block.rows(here.to(weight.device)).cpu().to(torch.float64)
        norm = wanted.norm(dim=1)
        error = (decoded.to(torch.float64) - wanted).norm(dim=1)
        one = torch.where(norm > 0, error / norm, torch.where(error > 0, 1.0, 0.0))
        relative.append(torch.where(one.isfinite(), one, 1.0))  # beyond fp64, and JSON
    every = torch.cat(relative)
    every[torch.isin(sample, encoded.exceptions)] = 0.0  # stored exactly
    return RowsError(float(every.mean()), float(every.max()), len(every))
