"""Compact a chain into one full checkpoint, from storage to storage, without a model or ranks.

The newest version of every row is kept as stored: chunks of which all rows survive are copied byte
by byte; from other chunks the surviving rows' bytes are extracted. So a restore of the new
checkpoint gives the same bits as one of the chain, reads each row once, and needs no other
checkpoint.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from itertools import chain as joined
from itertools import groupby
from typing import cast

import numpy as np
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from torchrec_checknrun.codecs import Exact
from torchrec_checknrun.delta.references import References
from torchrec_checknrun.delta.rows import encode_grid
from torchrec_checknrun.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    RootInUse,
)
from torchrec_checknrun.format import row_ids
from torchrec_checknrun.format.checks import Options
from torchrec_checknrun.format.chunk import DECODED_BYTES, EncodedChunk, Sections
from torchrec_checknrun.format.entries import (
    ExactSection,
    GroupedOptions,
    IdsSection,
    RowsEntry,
    Section,
    WeightSection,
    unwritten,
)
from torchrec_checknrun.format.manifest import Manifest, TableDigests, TableTotals, version_of
from torchrec_checknrun.format.names import MANIFEST_NAME, new_id
from torchrec_checknrun.format.rank_file import FileSummary, add_totals, write_rank_file
from torchrec_checknrun.format.reader import Columns, StoredChunk, read_chunk
from torchrec_checknrun.format.row_chunk import RowsHeader, add_exact
from torchrec_checknrun.format.row_reader import StoredRows
from torchrec_checknrun.format.state import raw_bytes
from torchrec_checknrun.restore.chunks import ChainContent, overlap, read_content
from torchrec_checknrun.restore.links import newest_rows
from torchrec_checknrun.root.chain import Chain, check_sizes, newest_required, resolve
from torchrec_checknrun.root.claims import latest_claim
from torchrec_checknrun.root.lease import Lease
from torchrec_checknrun.root.report import CheckpointReport, Progress, checkpoint_report
from torchrec_checknrun.row_sets import DoneRows
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.links import ByColumns, build_table
from torchrec_checknrun.version import __version__

logger = logging.getLogger(__name__)

FILE_BYTES = 4 << 30
"""Bytes after which another file is begun."""


def compact(
    root: str | os.PathLike[str],
    checkpoint: str | None = None,
    *,
    file_bytes: int = FILE_BYTES,
    progress: Callable[[int, int], object] | None = None,
) -> CheckpointReport | None:
    """Write a full checkpoint that restores to the same bits as a chain does.

    Any process may call this function, on one rank, while the run goes on: a checkpoint is only
    added. The new checkpoint has the head's step and sequence number and is found before the head,
    so that restores choose it where they would have chosen the head. A running job goes on with its
    own chain, which still needs its own parents; a job that is restored from the new checkpoint
    builds on that.

    Memory: a few chunks as they were written, and of one table at a time a bit for each row; of a
    table stored as differences what its rows restore to, about a quarter of the table. Its integers
    are added up: no row is quantized again.

    Args:
        root: the checkpoints' folder or fsspec URL.
        checkpoint: id of the chain's head; None for the newest complete chain.
        file_bytes: bytes after which another file is begun.
        progress: called after every chunk of the chain with the bytes processed so far and the
            bytes of the whole chain.

    Returns:
        The new checkpoint's report; None if the checkpoint is full already.

    Raises:
        CheckpointNotFound: there is no checkpoint, or none of that id.
        ChainBroken, CorruptCheckpoint, UnsupportedFormat: the chain can't be read; nothing was
            committed.
        IncompatibleCheckpoint: rows of the chain are stored in other columns, or with less
            optimizer state, than older rows that they replace only in part: take a full checkpoint.
            Or the checkpoint's writer had been replaced.
        RootInUse: a writer claimed the root at that moment: compact again.
        ClaimDamaged: which checkpoints count can't be told; nothing was committed.
        OSError: the storage failed; nothing was committed.
    """
    started = time.perf_counter()
    folder = Folder(root)
    chain = _find(folder, checkpoint)
    if chain.head.kind == "full":
        logger.info("%s is full already: nothing to compact", chain.head.id)
        return None
    chunks = _Compaction(folder, read_content(folder, chain), progress).chunks()
    manifest = _commit(folder, chain, chunks, file_bytes)
    seconds = time.perf_counter() - started
    report = checkpoint_report(manifest, 1, Progress(committed=seconds))
    logger.info("compacted %d checkpoints: %s", len(chain.manifests), report)
    return report


def _commit(
    folder: Folder, chain: Chain, chunks: Iterator[EncodedChunk], file_bytes: int
) -> Manifest:
    """Write the files and the manifest of a new checkpoint.

    Raises:
        RootInUse: a writer claimed the root meanwhile.
    """
    into = folder / new_id(chain.head.sequence, chain.head.step, compacted=True)
    into.create()
    into.sync()
    lease = Lease(into)  # a run that prunes meanwhile sees that this directory is no leftover
    lease.acquire(lambda _: ())
    try:
        files = list(_write(into, chunks, file_bytes))
        epoch = claim.epoch if (claim := latest_claim(folder)) else 0
        manifest = _manifest(chain, into.name, epoch, files)
        lease.check()
        check_sizes(folder, manifest)  # a pruning that took this process for dead has deleted files
        into.put(MANIFEST_NAME, manifest.to_bytes(), new=True)
        lease.check()
        check_sizes(folder, manifest)
        claim = latest_claim(folder)
        if claim is not None and not claim.admits(into.name, epoch):
            raise RootInUse(
                f"a writer claimed {folder} while {into.name} was committed, so that it doesn't "
                "count: compact again"
            )
    finally:
        lease.release(forget=True)
    return manifest


def _find(root: Folder, checkpoint: str | None) -> Chain:
    if checkpoint is not None:
        asked_for, claim = resolve(root, checkpoint), latest_claim(root)
        if claim is not None and not claim.admits(checkpoint, asked_for.head.epoch):
            raise IncompatibleCheckpoint(
                f"{checkpoint} was committed by a writer that had been replaced by then: no "
                "restore chooses it, and none should choose a copy; `export` it if needed"
            )
        return asked_for
    # A copy of an older checkpoint would replace a newer one that can't be read just now.
    try:
        return newest_required(root, answers=True)
    except CheckpointNotFound as error:
        raise CheckpointNotFound(f"{error}: nothing to compact") from None


def _write(
    folder: Folder, chunks: Iterator[EncodedChunk], file_bytes: int
) -> Iterator[FileSummary]:
    """Write all chunks to files, at least one file."""
    number, first = 0, next(chunks, None)
    while first is not None or not number:
        left = file_bytes

        def of_file(first: EncodedChunk | None = first) -> Iterator[EncodedChunk]:
            nonlocal left
            for chunk in joined([first] if first is not None else [], chunks):
                left -= sum(memoryview(piece).nbytes for piece in chunk.pieces)
                yield chunk
                if left <= 0:
                    return

        yield write_rank_file(folder, number, of_file())
        number, first = number + 1, next(chunks, None)


class _Compaction:
    """The source of the new checkpoint's chunks, one after the other."""

    def __init__(
        self,
        root: Folder,
        content: ChainContent,
        progress: Callable[[int, int], object] | None,
    ) -> None:
        self._root = root
        self._content = content
        self._links: dict[str, ByColumns] = {}
        self._chain = content.chain
        self._head = content.chunks[-1]
        self._progress = progress
        self._parts = content.rows_by_columns()
        rows = (chunks for parts in self._parts.values() for chunks in parts.values())
        self._bytes = sum(chunk.entry.length for chunk, _ in joined.from_iterable(rows))
        self._bytes += sum(c.entry.length for c in self._head if not isinstance(c.entry, RowsEntry))
        self._gone_through = 0
        for table, parts in self._parts.items():
            self._check(table, parts)

    def chunks(self) -> Iterator[EncodedChunk]:
        """Yield the chunks of the new checkpoint.

        Raises:
            CorruptCheckpoint: a chunk differs from what was written, or rows are missing.
        """
        for table, parts in self._parts.items():
            for columns, chunks in parts.items():
                yield from self._rows(table, columns, chunks)
        for chunk in self._head:
            if not isinstance(chunk.entry, RowsEntry):
                payload = read_chunk(self._root, chunk)
                yield EncodedChunk(unwritten(chunk.entry), [payload])
                self._step(chunk)

    def _rows(
        self, table: str, columns: Columns, chunks: list[tuple[StoredChunk, RowsHeader]]
    ) -> Iterator[EncodedChunk]:
        rows = self._chain.head.tables[table].rows
        done = DoneRows(rows)
        references = self._built(table).get(columns)
        for chunk, header in chunks:
            start, stop = header.rectangle.row_start, header.rectangle.row_stop
            if not done.contains_range(start, stop):
                payload = read_chunk(self._root, chunk)
                stored = StoredRows(header, payload)
                new = done.add(stored.ids)
                if new is None and not header.is_link:
                    yield EncodedChunk(unwritten(chunk.entry), [payload])
                elif new is None or len(new):
                    chosen = np.arange(header.count) if new is None else new
                    yield select(stored, chosen, references)
            self._step(chunk)
        if not done.contains_range(0, rows):
            raise CorruptCheckpoint(
                f"{self._chain.baseline.id} and what builds on it hold {len(done)} of the {rows} "
                f"rows of {table}, columns {columns[0]} to {columns[1] - 1}: it is not full"
            )

    def _built(self, table: str) -> ByColumns:
        """Return what the rows of a table stored as differences restore to; empty of others."""
        if table not in self._chain.head.deltas:
            return {}
        if table not in self._links:  # one table at a time
            self._links = {table: build_table(self._root, self._content, table)}
        return self._links[table]

    def _step(self, chunk: StoredChunk) -> None:
        self._gone_through += chunk.entry.length
        if self._progress is not None:
            self._progress(self._gone_through, self._bytes)

    def _check(
        self, table: str, parts: dict[Columns, list[tuple[StoredChunk, RowsHeader]]]
    ) -> None:
        """Refuse rows that newer ones replace only in part.

        ``read_content`` has checked that the full checkpoint has as many rows of each column as
        the table. So ranges of columns that don't overlap have no gap, and memory of a bit for
        each row may be taken.
        """
        if overlap(parts):
            raise IncompatibleCheckpoint(
                f"{table}: rows of {self._chain.head.id} and what it builds on lie in "
                f"overlapping columns {sorted(parts)}: restore it and take a full checkpoint"
            )
        for chunks in parts.values():
            newer: set[str] | None = None
            for _, group in groupby(chunks, lambda chunk: chunk[0].checkpoint):
                states = [set(header.optimizer) for _, header in group]
                if newer is not None and not newer.issuperset(set().union(*states)):
                    raise IncompatibleCheckpoint(
                        f"{table}: some rows have optimizer state {sorted(set().union(*states))}, "
                        f"newer ones {sorted(newer)}: restore {self._chain.head.id} and take a "
                        "full checkpoint"
                    )
                newer = set.intersection(*states, *([] if newer is None else [newer]))


def select(
    stored: StoredRows, chosen: np.ndarray, references: References | None = None
) -> EncodedChunk:
    """Return some rows of a chunk as a chunk that decodes to the same bits.

    Where the codec can't extract rows of a chunk, they are stored decoded; the entry still records
    their former width and error.

    Args:
        chosen: ``(n,)`` int64, sorted: positions of the chosen rows, at least one.
        references: what rows stored as differences restore to; they stand alone in the new chunk.

    Raises:
        CorruptCheckpoint: the chunk can't be decoded.
    """
    ids, header = stored.ids[chosen], stored.header
    compressed = any(isinstance(s, Section) and s.raw is not UNSET for s in header.sections)
    sections = Sections(compressed and header.decoded_bytes <= DECODED_BYTES)
    ids_encoding, ids_bytes = row_ids.encode(ids)
    sections.pieces.append(ids_bytes)
    weight = _select_weight(stored, chosen, sections, references)
    optimizer = []
    for state in header.entry.optimizer:
        part = sections.add(raw_bytes(stored.states[state.name].select(chosen).data))
        optimizer.append(replace(state, bytes=part.bytes, raw=part.raw))
    entry = replace(
        unwritten(header.entry),
        first=int(ids[0]),
        last=int(ids[-1]),
        count=len(ids),
        ids=IdsSection(ids_encoding, len(ids_bytes)),
        weight=weight,
        optimizer=tuple(optimizer),
    )
    return EncodedChunk(entry, sections.pieces)


def _select_weight(
    stored: StoredRows, chosen: np.ndarray, sections: Sections, references: References | None
) -> WeightSection:
    """Append chosen rows' weights; return their part of the index entry."""
    old = stored.header.entry.weight
    if references is not None:
        part = sections.add(raw_bytes(encode_grid(newest_rows(references, stored, chosen))))
        new = replace(old, parameters=UNSET, exceptions=UNSET)
        return replace(new, bytes=part.bytes, raw=part.raw)
    encoded = stored.select(chosen)
    if encoded is None:
        part = sections.add(raw_bytes(stored.rows(chosen).weight))
        spec = cast(Options, Exact().spec())
        new = replace(old, codec=spec, parameters=UNSET, exceptions=UNSET)
        return replace(new, bytes=part.bytes, raw=part.raw)
    part = sections.add(raw_bytes(encoded.data))
    exact: ExactSection | UnsetType = UNSET
    if len(encoded.exceptions):
        data = encoded.exceptions.astype("<u4").tobytes() + bytes(raw_bytes(encoded.exact))
        exact = add_exact(sections, len(encoded.exceptions), data)
    return replace(
        old,
        bytes=part.bytes,
        raw=part.raw,
        parameters=cast(GroupedOptions, encoded.parameters) or UNSET,
        exceptions=exact,
    )


def _manifest(chain: Chain, name: str, epoch: int, summaries: list[FileSummary]) -> Manifest:
    head = chain.head
    deltas = {name: TableDigests(None, said.after) for name, said in head.deltas.items()}
    tables: dict[str, TableTotals] = {}
    for table, of_head in head.tables.items():
        total = TableTotals(of_head.rows, of_head.dim)
        for summary in summaries:
            if table in summary.tables:
                total = add_totals(total, summary.tables[table])
        tables[table] = replace(
            total,
            fp32_bytes=of_head.fp32_bytes,
            optimizer_step=of_head.optimizer_step,
            learning_rate=of_head.learning_rate,
            optimizer_options=of_head.optimizer_options,
        )
    return Manifest(
        id=name,
        sequence=head.sequence,
        step=head.step,
        kind="full",
        parent=None,
        previous=head.link,
        world_size=head.world_size,  # the ranks whose states these are, not the number of files
        created_at=head.created_at,  # the state's age is what retention asks for
        created_by=f"torchrec_checknrun {__version__} (compact)",
        lossy_restores=head.lossy_restores,
        bits=head.bits,
        tables=tables,
        states=head.states,
        dense_bytes=sum(summary.dense_bytes for summary in summaries),
        files=tuple(summary.file for summary in summaries),
        lineage=head.lineage,
        epoch=epoch,
        losses=head.losses,
        deltas=deltas,
        format_version=version_of(deltas),
    ).sealed()
