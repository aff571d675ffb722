"""Take rows out of chunks as they are stored, and join them to new chunks, undecoded.

Rows of one codec whose bytes stand for themselves are copied, each to its place among the others.
What only decoding could bring together stays apart, in a chunk of its own for the same range of
rows: another codec, or another factor of a block. Nothing is ever quantized again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from msgspec import UNSET, UnsetType
from msgspec.structs import replace as replaced

from torchrec_checknrun.codecs import Chained, Exact, row_state
from torchrec_checknrun.codecs.base import join_rows
from torchrec_checknrun.delta.references import References
from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format import row_ids
from torchrec_checknrun.format.checks import Options
from torchrec_checknrun.format.chunk import DECODED_BYTES, EncodedChunk, Sections, part_most
from torchrec_checknrun.format.entries import (
    ExactSection,
    GroupedOptions,
    IdsSection,
    OptimizerSection,
    RowsEntry,
    RowsError,
    Section,
    WeightSection,
    unwritten,
)
from torchrec_checknrun.format.row_chunk import add_exact
from torchrec_checknrun.format.row_reader import StoredRows
from torchrec_checknrun.format.row_values import EncodedRows, EncodedState, LogState
from torchrec_checknrun.restore.links import newest_codes, newest_rows
from torchrec_checknrun.values.tensor_bytes import raw_bytes


@dataclass(frozen=True)
class Piece:
    """Rows of one chunk, still encoded.

    Attributes:
        ids: ``(n,)`` int64, sorted, global.
        weight, states: of these rows, in their order.
        entry: of the chunk that they were taken from: table, columns, width, error.
        compressed: whether any part of that chunk was.
        decoded_row: bytes of a row in memory, with its id and optimizer state.
    """

    ids: np.ndarray
    weight: EncodedRows
    states: dict[str, EncodedState]
    entry: RowsEntry
    compressed: bool
    decoded_row: int

    @classmethod
    def of(
        cls, stored: StoredRows, chosen: np.ndarray | None, references: References | None = None
    ) -> Piece:
        """Take rows out of a chunk; where its codec can't separate them, they are decoded.

        Args:
            chosen: ``(n,)`` int64, sorted: positions in the chunk; None: all rows, which share the
                chunk's memory.
            references: what rows stored as differences restore to; they stand alone in the piece.

        Raises:
            CorruptCheckpoint: the chunk can't be decoded.
        """
        header = stored.header
        sections = header.sections
        whole = chosen is None
        positions = np.arange(header.count) if chosen is None else chosen
        weight: EncodedRows | None
        if references is not None:
            weight = _alone(stored, positions, references)
        else:
            weight = stored.weight if whole else stored.select(positions)
        if weight is None:
            weight = _decoded(stored, positions)
        states = stored.states
        if not whole or references is not None:
            states = {name: _state(stored, name, positions, references) for name in states}
        return cls(
            ids=stored.ids if whole else stored.ids[positions],
            weight=weight,
            states=states,
            entry=header.entry,
            compressed=any(isinstance(s, Section) and s.raw is not UNSET for s in sections),
            decoded_row=header.decoded_bytes // header.count,
        )

    @property
    def family(self) -> Hashable:
        """Return the properties that pieces must share to be joined undecoded; equal to nothing
        else for a piece that can't be joined at all.
        """
        weight = self.weight
        family = weight.codec.family(weight.parameters, weight.cols)
        states = tuple(
            (name, state.dtype, state.cols, row_state.family(state.parameters))
            for name, state in self.states.items()
        )
        return (id(self) if family is None else family), weight.dtype, states


def _decoded(stored: StoredRows, chosen: np.ndarray) -> EncodedRows:
    """Decode rows to exact ones."""
    rows, header = stored.rows(chosen).weight, stored.header
    return EncodedRows(
        codec=Exact(),
        parameters={},
        data=rows.view(-1).view(torch.uint8),
        count=len(chosen),
        cols=header.cols,
        dtype=header.dtype,
        exceptions=np.empty(0, dtype=np.int64),
        exact=rows[:0],
    )


def _alone(stored: StoredRows, chosen: np.ndarray, references: References) -> EncodedRows:
    """Encode what rows restore to in the end of their chain, upon nothing."""
    codec = stored.header.codec
    assert isinstance(codec, Chained)
    data, parameters = codec.alone(newest_rows(references, stored, chosen), stored.header.dtype)
    return replace(stored.weight, parameters=parameters, data=data, count=len(chosen))


def _state(
    stored: StoredRows, name: str, chosen: np.ndarray, references: References | None
) -> EncodedState:
    """Take an optimizer state of rows, still encoded, or as it restores in the end of its chain."""
    if name not in stored.header.log_states:
        return stored.states[name].select(chosen)
    assert references is not None, "such state is of tables stored as differences"
    return LogState.of(newest_codes(references, stored, name, chosen))


def chunks_of(pieces: Iterable[Piece]) -> Iterator[EncodedChunk]:
    """Join pieces without a row in common to as few chunks as hold them undecoded.

    Yields:
        A chunk for each family.

    Raises:
        CorruptCheckpoint: parts of a chunk don't belong together.
    """
    families: dict[Hashable, list[Piece]] = {}
    for piece in pieces:
        families.setdefault(piece.family, []).append(piece)
    while families:  # each is let go of as soon as its chunk is made
        yield _joined(families.pop(next(iter(families))))


def _joined(pieces: Sequence[Piece]) -> EncodedChunk:
    """Join pieces of one family to a chunk."""
    table = pieces[0].entry.table
    try:
        ids, places = _order([piece.ids for piece in pieces])
        weight = _join_weights([piece.weight for piece in pieces], places)
        states = [
            _join_states([piece.states[name] for piece in pieces], places)
            for name in pieces[0].states
        ]
    except (ValueError, TypeError, RuntimeError, LookupError, ArithmeticError) as error:
        raise CorruptCheckpoint(f"rows of {table} can't be joined: {error}") from error
    compress = any(piece.compressed for piece in pieces)
    small = len(ids) * pieces[0].decoded_row <= DECODED_BYTES
    sections = Sections(part_most(len(ids), weight.cols) if compress and small else 0)
    ids_encoding, ids_bytes = row_ids.encode(ids)
    sections.pieces.append(ids_bytes)
    most = max(pieces, key=lambda piece: len(piece.ids)).entry
    bits = min(piece.entry.weight.value_bits for piece in pieces)
    entry = replaced(
        unwritten(most),
        first=int(ids[0]),
        last=int(ids[-1]),
        count=len(ids),
        ids=IdsSection(ids_encoding, len(ids_bytes)),
        weight=_add_weight(sections, replaced(most.weight, value_bits=bits), weight),
        optimizer=tuple(
            _add_state(sections, of_chunk, state)
            for of_chunk, state in zip(most.optimizer, states, strict=True)
        ),
        error=_error([piece.entry.error for piece in pieces]),
    )
    return EncodedChunk(entry, sections.pieces)


def _order(ids: Sequence[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Sort the rows of several pieces; return all ids, and for each piece its rows' places."""
    if len(ids) == 1:
        return ids[0], [np.arange(len(ids[0]))]
    together = np.concatenate(ids)
    order = np.argsort(together, kind="stable")  # runs, which this merges
    places = np.empty(len(order), dtype=np.int64)
    places[order] = np.arange(len(order))
    ends = np.cumsum([len(each) for each in ids])
    return together[order], np.split(places, ends[:-1])


def _join_weights(parts: Sequence[EncodedRows], places: Sequence[np.ndarray]) -> EncodedRows:
    """Join encoded rows of one family.

    Args:
        places: for each part its rows' places among all, sorted.

    Raises:
        ValueError: parts and their descriptions don't match.
    """
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    data, parameters = first.codec.join(
        [(part.data, part.parameters, part.count) for part in parts],
        [torch.from_numpy(place) for place in places],
        first.cols,
    )
    at = np.concatenate([p[part.exceptions] for part, p in zip(parts, places, strict=True)])
    order = np.argsort(at)
    return replace(
        first,
        parameters=parameters,
        data=data,
        count=sum(part.count for part in parts),
        exceptions=at[order],
        exact=torch.cat([part.exact for part in parts])[torch.from_numpy(order)],
    )


def _join_states(parts: Sequence[EncodedState], places: Sequence[np.ndarray]) -> EncodedState:
    """Join encoded optimizer state of rows; decode state whose ranges of values differ."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    if isinstance(first, LogState):
        return first.joined(parts, places)
    if any(part.parameters != first.parameters for part in parts):
        parts = [_exact_state(part) for part in parts]
    blocks = [(part.data, part.count) for part in parts]
    joined = join_rows(blocks, [torch.from_numpy(place) for place in places])
    count = sum(part.count for part in parts)
    return replace(first, parameters=parts[0].parameters, data=joined, count=count).checked()


def _exact_state(state: EncodedState) -> EncodedState:
    values = state.decode(slice(0, state.count))
    return replace(state, parameters={"scheme": "fp32"}, data=values.view(-1).view(torch.uint8))


def _add_weight(sections: Sections, of_chunk: WeightSection, weight: EncodedRows) -> WeightSection:
    """Append weights and exceptions; return their part of the index entry."""
    part = sections.add(raw_bytes(weight.data))
    exact: ExactSection | UnsetType = UNSET
    if len(weight.exceptions):
        data = weight.exceptions.astype("<u4").tobytes() + bytes(raw_bytes(weight.exact))
        exact = add_exact(sections, len(weight.exceptions), data)
    return replaced(
        of_chunk,
        bytes=part.bytes,
        raw=part.raw,
        codec=cast(Options, weight.codec.spec()),
        parameters=cast(GroupedOptions, weight.parameters) or UNSET,
        exceptions=exact,
    )


def _add_state(
    sections: Sections, of_chunk: OptimizerSection, state: EncodedState
) -> OptimizerSection:
    part = sections.add(raw_bytes(state.data))
    encoding = cast(Options, state.parameters)
    return replaced(of_chunk, bytes=part.bytes, raw=part.raw, encoding=encoding)


def _error(errors: Sequence[RowsError | UnsetType]) -> RowsError | UnsetType:
    """Unite measured errors: a mean over all rows that were sampled."""
    measured = [error for error in errors if not isinstance(error, UnsetType)]
    if not measured:
        return UNSET
    rows = sum(error.sampled_rows for error in measured)
    mean = sum(error.mean * (error.sampled_rows / max(1, rows)) for error in measured)
    return RowsError(mean, max(error.max for error in measured), rows)
