"""Index entries: the description of each chunk in a rank file's index, typed and bounded.

An entry is made with the chunk and gets its place in the file, and its checksum, when the chunk is
written. Entries from storage are converted from untrusted JSON; ``row_chunk`` and ``chunk``
check how their fields agree.
"""

from __future__ import annotations

from reprlib import repr as shown
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
import torch
from msgspec import UNSET, Meta, UnsetType

from torchrec_checknrun.boxes import Span
from torchrec_checknrun.errors import CorruptCheckpoint, UnsupportedFormat
from torchrec_checknrun.format.checks import (
    LARGEST,
    Count,
    Measure,
    Number,
    Options,
    Record,
    Text,
    typed,
)

UNWRITTEN = -1
"""Offset and length of a chunk that is not written yet; no file holds it."""
_MOST_HISTORY = 1 << 31
"""The most ids that a module may have room for between evictions."""

Pair = tuple[Count, Count]
Checksum = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
"""An xxh3-64, in hex."""
RowsDtype = Literal["float64", "float32", "float16", "bfloat16", "int64", "int32"]
"""A dtype of rows; the integers are counters of some optimizers."""
ROWS_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in get_args(RowsDtype)}
GroupedOptions = dict[Text, Number | Text | bool | list[Options] | None]
"""Parameters of encoded rows: each for all of them, or a list with those of each group."""
_Step = Annotated[int, Meta(ge=-1, le=LARGEST)]


class Section(Record, frozen=True, kw_only=True):
    """A part of a payload.

    Attributes:
        bytes: in the payload.
        raw: bytes before compression; absent if the part is not compressed.
    """

    bytes: Count
    raw: Count | UnsetType = UNSET


class IdsSection(Record, frozen=True):
    """Row ids; see ``row_ids``."""

    encoding: Text
    bytes: Count


class ExactSection(Section, frozen=True, kw_only=True):
    """Rows that the codec can't represent: their positions and values."""

    rows: Count


class WeightSection(Section, frozen=True, kw_only=True):
    """Encoded weights, and how to decode them.

    Attributes:
        parameters: absent if there are none.
    """

    codec: Options
    dtype: RowsDtype
    value_bits: Count
    parameters: dict[Text, Number | Text | bool | list[Options] | None] | UnsetType = UNSET
    exceptions: ExactSection | UnsetType = UNSET


class OptimizerSection(Section, frozen=True, kw_only=True):
    """An optimizer state of rows."""

    name: Text
    dtype: RowsDtype
    rowwise: bool
    encoding: Options


class RowsError(Record, frozen=True):
    """The measured relative error of rows that a codec stores with a loss."""

    mean: Measure
    max: Measure
    sampled_rows: Count


class Difference(Record, frozen=True):
    """A payload that is a difference to the same chunk of the parent checkpoint.

    Attributes:
        parent, content: checksums of the parent's content and of this one's.
        raw: bytes of either.
        width: bytes of a value.
    """

    parent: Checksum
    content: Checksum
    raw: Count
    width: Count


class Placed(Record, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """The base of entries.

    Attributes:
        offset, length, checksum: of the chunk's bytes in the file, once written.
    """

    offset: Count = UNWRITTEN
    length: Count = UNWRITTEN
    checksum: Checksum = ""


class RowsEntry(Placed, frozen=True, tag="rows"):
    """A chunk of rows of a table; see ``RowsHeader``."""

    table: Text
    table_rows: Count
    table_dim: Count
    columns: Pair
    first: Count
    last: Count
    count: Count
    ids: IdsSection
    weight: WeightSection
    optimizer: tuple[OptimizerSection, ...]
    error: RowsError | UnsetType = UNSET


class BlockEntry(Placed, frozen=True, tag="block"):
    """A piece of a sharded tensor; see ``BlockHeader``."""

    path: tuple[Count | Text, ...]
    dtype: Text
    size: tuple[Count, ...]
    part: tuple[Pair, ...]
    shard: tuple[Pair, ...]
    difference: Difference | UnsetType = UNSET


class StateEntry(Placed, frozen=True, tag="state"):
    """A state object; ``rank`` is None for a replicated one."""

    name: Text
    rank: Count | None
    tree: dict[str, Any]
    difference: Difference | UnsetType = UNSET


class Facts(Record, frozen=True):
    """The configuration and counters of one managed-collision module.

    Attributes:
        rows: of its table, to which the module maps ids.
        input_hash_size: exclusive upper bound of raw ids; 0 for none.
        buckets: parts into which its rows are divided to be dealt to ranks; None if as many as
            ranks.
        eviction_interval: in steps; this and the following are for modules with a history.
        iteration, last_eviction: in steps; -1 before the first.
        history_size: ids that the module has room for between evictions; -1 before the first step.
    """

    rows: Span
    input_hash_size: _Step
    buckets: _Step | None
    eviction_interval: _Step | None = None
    iteration: _Step = -1
    last_eviction: _Step = -1
    history_size: Annotated[int, Meta(ge=-1, le=_MOST_HISTORY)] = -1


class CollisionsEntry(Placed, frozen=True, tag="collisions"):
    """The state of a rank's managed-collision modules, with facts by the module's path."""

    name: Text
    rank: Count
    modules: dict[Text, Facts]
    tree: dict[str, Any]
    difference: Difference | UnsetType = UNSET


Entry = RowsEntry | BlockEntry | StateEntry | CollisionsEntry
_E = TypeVar("_E", bound=Placed)
_KINDS: dict[object, type[Entry]] = {
    "rows": RowsEntry,
    "block": BlockEntry,
    "state": StateEntry,
    "collisions": CollisionsEntry,
}


def parse_entry(document: object) -> Entry:
    """Convert an entry from parsed JSON.

    Raises:
        CorruptCheckpoint: a field is missing, unknown, of a wrong type or out of range.
        UnsupportedFormat: the chunk's kind is unknown to this release.
    """
    if type(document) is not dict:
        raise CorruptCheckpoint(f"{shown(document)} is not an index entry")
    name = document.get("kind")
    kind = _KINDS.get(name) if type(name) is str else None
    if kind is None:
        raise UnsupportedFormat(
            f"chunks of kind {shown(name)} are unknown to this release: upgrade torchrec_checknrun"
        )
    try:
        entry = typed(document, kind)
        # Refuses lone surrogates: only values within a tree may have them.
        has_tree = isinstance(entry, (StateEntry, CollisionsEntry))
        msgspec.json.encode(msgspec.structs.replace(entry, tree={}) if has_tree else entry)
    except ValueError as error:
        raise CorruptCheckpoint(f"index entry of a {name} chunk is malformed: {error}") from error
    return entry


def unwritten(entry: _E) -> _E:
    """Return an entry without the chunk's place in a file."""
    return msgspec.structs.replace(entry, offset=UNWRITTEN, length=UNWRITTEN, checksum="")


def difference_of(entry: Entry) -> Difference | None:
    """Return what a chunk's payload is a difference to; None if the payload is the content."""
    known = UNSET if isinstance(entry, RowsEntry) else entry.difference
    return None if isinstance(known, UnsetType) else known


def content_bytes(entry: Entry) -> int:
    """Return the bytes of a chunk's content, once written."""
    known = difference_of(entry)
    return entry.length if known is None else known.raw


def content_checksum(entry: Entry) -> str:
    """Return the checksum of a chunk's content, once written."""
    known = difference_of(entry)
    return entry.checksum if known is None else known.content
