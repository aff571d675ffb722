"""A checkpoint's manifest: small, JSON, and written last, which makes the checkpoint exist.

The file is ``{"checksum": …, "manifest": {…}}``; the checksum (xxh3, 128 bit) covers the manifest's
canonical bytes: keys sorted, no spaces, UTF-8. A child names its parent by id *and* checksum, so
that no chain contains a checkpoint that was replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from reprlib import repr as shown
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from torchrec_checknrun.errors import CorruptCheckpoint, UnsupportedFormat
from torchrec_checknrun.format.checks import (
    MANIFEST_BYTES,
    Count,
    Measure,
    Number,
    Options,
    Record,
    Text,
    parse_json,
    require_fields,
    require_limits,
    require_time,
    seal,
    typed,
)
from torchrec_checknrun.format.checks import checksum as _checksum
from torchrec_checknrun.format.losses import MOST, Loss
from torchrec_checknrun.format.names import PlainName

FORMAT_VERSION = 2
"""The highest version that is read. A checkpoint gets the lowest one that holds all of it."""
PLAIN_VERSION = 1
DIFFERENCES_VERSION = 2
"""The version of checkpoints with tables stored as differences, or other chunks that are
differences to the parent's.
"""
_UNSTORED = frozenset({"checksum"})
_LATER = frozenset({"optimizer_options"})
"""Fields of tables that the first manifests lack."""
_PARTIAL = frozenset({"losses"})
"""Fields that only manifests of runs with partial recoveries have."""
_CHAINED = frozenset({"deltas"})
"""Fields that only manifests with tables stored as differences have."""

Kind = Literal["full", "differential"]
Word = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
"""64 bits, in hex."""


class Link(Record, frozen=True):
    """A reference to another checkpoint of the root, by id and manifest checksum."""

    id: PlainName
    checksum: Text


@dataclass(frozen=True)
class Header:
    """The part of a manifest that is decided before writing, the same on all ranks.

    The fields are as in ``Manifest``, but for two that may be left open:

    Attributes:
        sequence: None for one more than the highest in the root.
        epoch: None for the latest that was claimed in the root.
    """

    kind: Kind = "full"
    step: int = 0
    sequence: int | None = None
    parent: Link | None = None
    previous: Link | None = None
    lossy_restores: int = 0
    bits: int | None = None
    earlier_fractions: tuple[float, ...] = ()
    lineage: str = ""
    epoch: int | None = None
    losses: tuple[Loss, ...] = ()


class TableDigests(Record, frozen=True):
    """The rows that a table stored as differences restores to, as sums of row digests in hex.

    Attributes:
        before: what the links of this checkpoint build on; None: all rows stand alone.
        after: what this checkpoint restores to.
    """

    before: Word | None
    after: Word


class RankFile(Record, frozen=True):
    """One rank's file, and the position of its chunk index."""

    name: PlainName
    size: Count
    index_offset: Count
    index_length: Count
    index_checksum: Text
    chunks: Count


class TableTotals(Record, frozen=True):
    """Sizes, errors and optimizer settings of one table in a checkpoint, summed over ranks.

    Attributes:
        rows, dim: the whole table's size.
        stored_values: weight values stored; ``stored_values / dim`` is the number of rows.
        weight_bytes, ids_bytes, optimizer_bytes: in storage.
        fp32_bytes: of all rows and their optimizer state in a full fp32 checkpoint.
        modified_bytes: of the stored rows and their optimizer state in memory.
        encoded_bytes: of the stored rows, optimizer state and ids before compression.
        value_bits: of the narrowest codec among the chunks.
        error_mean, error_max: measured relative l2 error of rows, None if exact.
        error_rows: rows on which the error was measured.
        optimizer_step, learning_rate: of the table's optimizer, fused or dense; None if unknown.
        optimizer_options: further options of a fused optimizer, see ``kernel_options``.
        codecs: of the chunks, each once: name, version and parameters.
    """

    rows: Count
    dim: Count
    stored_values: Count = 0
    weight_bytes: Count = 0
    ids_bytes: Count = 0
    optimizer_bytes: Count = 0
    fp32_bytes: Count = 0
    value_bits: Count = 32
    error_mean: Measure | None = None
    error_max: Measure | None = None
    error_rows: Count = 0
    modified_bytes: Count = 0
    encoded_bytes: Count = 0
    optimizer_step: Count | None = None
    learning_rate: Number | None = None
    optimizer_options: Options = msgspec.field(default_factory=dict)
    codecs: list[Options] = msgspec.field(default_factory=list)


class Manifest(Record, frozen=True, dict=True):
    """A committed checkpoint.

    Attributes:
        id: its directory's name.
        sequence: grows with every attempt in a root: the newest checkpoint has the highest. A
            compacted checkpoint has the number of its chain's head.
        step: optimizer steps done; after a fallback it may be smaller than an older checkpoint's.
        kind: ``full``, or ``differential`` to ``parent``.
        parent: the checkpoint that this one needs; None if full.
        previous: the checkpoint that the process last restored or committed; None at a run's start.
        lossy_restores: restores from lossy checkpoints in this lineage so far.
        bits: the requested width; None for exact.
        states: the names of the state objects, each with whether it is per rank.
        dense_bytes: in storage, of everything but tables: state objects and sharded buffers.
        earlier_fractions: of the differential checkpoints between the last full one and this one,
            which may have been deleted since; see ``fraction_of``.
        lineage: the predecessor's, unless an older checkpoint than the newest was restored before:
            that starts a fork with a lineage of its own.
        epoch: the writer's; see ``lease``.
        losses: what partial recoveries have cost this lineage so far; a file has the field only if
            there were any. Such a run can't be repeated bit for bit.
        deltas: digests of the tables that are stored as differences; a file has the field only if
            there are any, and is of format version 2 then: a reader that takes each row's newest
            version would restore something else.
    """

    id: PlainName
    sequence: Count
    step: Count
    kind: Kind
    parent: Link | None
    previous: Link | None
    world_size: Count
    created_at: Text
    created_by: Text
    lossy_restores: Count
    bits: Count | None
    tables: dict[Text, TableTotals]
    states: dict[Text, bool]
    dense_bytes: Count
    files: tuple[RankFile, ...]
    earlier_fractions: tuple[Measure, ...] = ()
    lineage: Text = ""
    epoch: Count = 0
    losses: Annotated[tuple[Loss, ...], Meta(min_length=1, max_length=MOST)] = ()
    deltas: Annotated[dict[Text, TableDigests], Meta(min_length=1)] = msgspec.field(
        default_factory=dict
    )
    format_version: Count = PLAIN_VERSION
    checksum: str = ""

    @classmethod
    def of(
        cls,
        header: Header,
        *,
        id: str,
        sequence: int,
        epoch: int,
        world_size: int,
        created_at: str,
        created_by: str,
        tables: dict[str, TableTotals],
        states: dict[str, bool],
        dense_bytes: int,
        files: tuple[RankFile, ...],
        deltas: dict[str, TableDigests] | None = None,
        differences: bool = False,
    ) -> Manifest:
        """Make the manifest of a checkpoint that was written as its header says."""
        return cls(
            id=id,
            sequence=sequence,
            step=header.step,
            kind=header.kind,
            parent=header.parent,
            previous=header.previous,
            world_size=world_size,
            created_at=created_at,
            created_by=created_by,
            lossy_restores=header.lossy_restores,
            bits=header.bits,
            tables=tables,
            states=states,
            dense_bytes=dense_bytes,
            files=files,
            earlier_fractions=header.earlier_fractions,
            lineage=header.lineage,
            epoch=epoch,
            losses=header.losses,
            deltas=deltas or {},
            format_version=version_of(deltas or {}, differences),
        ).sealed()

    @property
    def link(self) -> Link:
        """Return a reference to this checkpoint."""
        return Link(self.id, self.checksum)

    @property
    def lossy(self) -> bool:
        """Return whether rows were stored with a loss."""
        return any(table.error_rows > 0 for table in self.tables.values())

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of all rank files in storage."""
        return sum(file.size for file in self.files)

    @property
    def full_fp32_bytes(self) -> int:
        """Return the bytes of a full fp32 checkpoint: all rows, optimizer state and dense part."""
        return sum(table.fp32_bytes for table in self.tables.values()) + self.dense_bytes

    @property
    def modified_fraction(self) -> float:
        """Return the number of stored values over that of all values of the tables."""
        total = sum(table.rows * table.dim for table in self.tables.values())
        stored = sum(table.stored_values for table in self.tables.values())
        return stored / total if total else 0.0

    @cached_property
    def table_sizes(self) -> str:
        """Return a digest of the tables' names and sizes: of a chain, each pair is compared."""
        return _checksum({name: [table.rows, table.dim] for name, table in self.tables.items()})

    def fraction_of(self, full: Manifest) -> float:
        """Return the bytes in storage over those of a full checkpoint (Check-N-Run, section 5.1:
        S). If the two differ in width, return the modified fraction instead.
        """
        widths = {name: t.value_bits for name, t in full.tables.items()}
        if any(t.stored_values and t.value_bits != widths[n] for n, t in self.tables.items()):
            return self.modified_fraction
        return self.stored_bytes / max(1, full.stored_bytes)

    def to_bytes(self) -> bytes:
        """Encode the manifest file.

        Raises:
            ValueError: readers would refuse the file: a field is out of range, or there are too
                many.
        """
        content = self._content()
        _checked(content)
        data = seal("manifest", content)
        require_limits(data, MANIFEST_BYTES)
        vars(self)["size"] = len(data)  # reports ask for the size: not encoded again for that
        return data

    @cached_property
    def size(self) -> int:
        """Return the bytes of the manifest file."""
        return len(self.to_bytes())

    def sealed(self) -> Manifest:
        """Return the manifest with its checksum filled in."""
        return msgspec.structs.replace(self, checksum=_checksum(self._content()))

    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = msgspec.to_builtins(self)
        del content["checksum"]
        for name in _PARTIAL | _CHAINED:
            if not content[name]:
                del content[name]
        return content


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Parse and check a manifest file.

    Args:
        where: the file's name in errors.

    Raises:
        UnsupportedFormat: the format version is unknown to this release.
        CorruptCheckpoint: the file is damaged, or not a manifest.
    """
    try:
        document = parse_json(data, MANIFEST_BYTES)
        content = document["manifest"]
        version = content["format_version"]
        checksum = _checksum(content)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CorruptCheckpoint(f"{where} is not a manifest: {what}") from error
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise UnsupportedFormat(
            f"{where} has format version {shown(version)}; this release reads 1 to "
            f"{FORMAT_VERSION}: upgrade torchrec_checknrun"
        )
    if document.get("checksum") != checksum:
        raise CorruptCheckpoint(
            f"{where}: the checksum is {shown(document.get('checksum'))}, the content's is "
            f"{checksum!r}"
        )
    try:
        manifest = _checked(content)
        require_time("created_at", manifest.created_at)
    except ValueError as error:
        raise CorruptCheckpoint(f"{where}: a field is missing or wrong: {error}") from error
    return msgspec.structs.replace(manifest, checksum=checksum)


def _checked(content: Any) -> Manifest:
    """Check a manifest's content; return the manifest, without its checksum.

    Raises:
        ValueError: a field is missing, unknown or malformed.
    """
    require_fields(content, Manifest, elsewhere=_UNSTORED, optional=_PARTIAL | _CHAINED)
    manifest = typed(content, Manifest)
    for table in content["tables"].values():
        require_fields(table, TableTotals, optional=_LATER)
    kind, parent = manifest.kind, manifest.parent
    if (kind == "full") != (parent is None):
        raise ValueError(f"kind {kind!r} with parent {parent!r}")
    _check_deltas(manifest)
    names = [file.name for file in manifest.files]
    if len(set(names)) != len(names):
        raise ValueError(f"files: {shown(names)} has a name twice")
    return manifest


def version_of(deltas: dict[str, TableDigests], differences: bool = False) -> int:
    """Return the format version of a manifest.

    Args:
        deltas: its digests.
        differences: whether any chunk beside rows is a difference to the parent's.
    """
    return DIFFERENCES_VERSION if deltas or differences else PLAIN_VERSION


def _check_deltas(manifest: Manifest) -> None:
    """Check that digests belong to tables of the manifest, and to its kind and version.

    Raises:
        ValueError: they don't.
    """
    # Only a child can hold differences beside rows; which chunks these are, the index says.
    differences = manifest.parent is not None and manifest.format_version > PLAIN_VERSION
    if manifest.format_version != version_of(manifest.deltas, differences):
        found = "with" if manifest.deltas else "without"
        raise ValueError(f"{manifest.kind} {found} deltas, in version {manifest.format_version}")
    for name, digests in manifest.deltas.items():
        if name not in manifest.tables:
            raise ValueError(f"deltas: there is no table {shown(name)}")
        if (digests.before is None) != (manifest.kind == "full"):
            raise ValueError(
                f"deltas: {shown(name)} builds on {digests.before}, in a {manifest.kind}"
            )
