"""Compact a chain into one full checkpoint, from storage to storage, without a model or ranks.

The newest version of every row is kept as stored, in chunks of whole runs of rows, as a full
checkpoint has them. So a restore of the new checkpoint gives the same bits as one of the chain, in
the time that a full one takes, and needs no other checkpoint. Every chunk of the chain is read at
most once; one whose rows go to many chunks leaves them in a ``Spool``.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from itertools import chain as joined
from itertools import groupby

import numpy as np
import torch
from msgspec import UNSET
from msgspec.structs import replace

from torchrec_checknrun.compaction.row_pieces import Piece, chunks_of
from torchrec_checknrun.compaction.row_ranges import RowRanges
from torchrec_checknrun.compaction.spool import Spool
from torchrec_checknrun.delta.references import References
from torchrec_checknrun.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    RootInUse,
)
from torchrec_checknrun.format.chunk import EncodedChunk
from torchrec_checknrun.format.entries import RowsEntry, unwritten
from torchrec_checknrun.format.manifest import Manifest, TableDigests, TableTotals, version_of
from torchrec_checknrun.format.names import MANIFEST_NAME, new_id
from torchrec_checknrun.format.rank_file import FileSummary, add_totals, write_rank_file
from torchrec_checknrun.format.reader import Columns, StoredChunk
from torchrec_checknrun.format.row_chunk import RowsHeader
from torchrec_checknrun.format.row_reader import StoredRows
from torchrec_checknrun.restore.chunks import ChainContent, overlap, read_content
from torchrec_checknrun.root.chain import Chain, newest_required, resolve
from torchrec_checknrun.root.checkpoints import check_sizes
from torchrec_checknrun.root.report import CheckpointReport, Progress, checkpoint_report
from torchrec_checknrun.row_sets import DoneRows
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.links import ByColumns, build_table
from torchrec_checknrun.version import __version__
from torchrec_checknrun.writers.claims import latest_claim
from torchrec_checknrun.writers.lease import Lease

logger = logging.getLogger(__name__)

FILE_BYTES = 4 << 30
"""Bytes after which another file is begun."""


def compact(
    root: str | os.PathLike[str] | Folder,
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

    Memory: a few chunks as they were written, up to 64 MiB of small ones read together, of one
    table at a time a bit for each row, and 64 MiB of rows that wait for their chunk; more of them
    wait in a temporary file of this machine, which takes at most what the chain's differential
    checkpoints do. Of a table stored as differences what its rows restore to as well, about a
    quarter of the table: its integers are added up, and no row is quantized again.

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
        ClaimDamaged: which checkpoints count can't be told.
        OSError: the storage failed. A copy that was committed just before is whole and counts.
    """
    return compact_in(Folder.of(root), checkpoint, file_bytes, progress)


def compact_in(
    folder: Folder,
    checkpoint: str | None,
    file_bytes: int = FILE_BYTES,
    progress: Callable[[int, int], object] | None = None,
) -> CheckpointReport | None:
    """Compact a chain of a root as ``compact`` does, which names arguments and errors."""
    started = time.perf_counter()
    chain = _find(folder, checkpoint)
    if chain.head.kind == "full":
        logger.info("%s is full already: nothing to compact", chain.head.id)
        return None
    chunks = _Compaction(folder, read_content(folder, chain), progress).chunks()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # pieces are small: to wake other threads takes longer than to copy
    try:
        manifest = _commit(folder, chain, chunks, file_bytes)
    finally:
        torch.set_num_threads(threads)
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
    # A run that prunes meanwhile sees that this directory is no leftover.
    lease = Lease(into, remakes=False)
    lease.acquire(lambda _: ())
    try:
        files = list(write_files(into, chunks, file_bytes))
        claim = latest_claim(folder)  # None also where a listing lags behind
        epoch = max(chain.head.epoch, 0 if claim is None else claim.epoch)
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


def write_files(
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
        self._read = content.reader(root)
        self._content = content
        self._links: dict[str, ByColumns] = {}
        self._chain = content.chain
        self._head = content.chunks[-1]
        self._progress = progress
        self._parts = content.rows_by_columns
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
                payload = self._read(chunk)  # whole, even where stored as a difference
                yield EncodedChunk(replace(unwritten(chunk.entry), difference=UNSET), [payload])
                self._step(chunk)

    def _rows(
        self, table: str, columns: Columns, chunks: list[tuple[StoredChunk, RowsHeader]]
    ) -> Iterator[EncodedChunk]:
        """Yield the new chunks of some columns of a table."""
        rows, baseline = self._chain.head.tables[table].rows, self._chain.baseline.id
        of_baseline = [header for chunk, header in chunks if chunk.checkpoint == baseline]
        ranges, done = RowRanges.of(rows, of_baseline), DoneRows(rows)
        references = self._built(table).get(columns)
        runs: dict[int, tuple[StoredChunk, RowsHeader]] = {}
        with Spool.opened() as spool:
            for chunk, header in chunks:
                if ranges.are_the_baseline and chunk.checkpoint == baseline:
                    runs[ranges.number(header.rectangle.row_start)] = chunk, header
                    continue
                self._divide(chunk, header, ranges, done, spool, references)
                self._step(chunk)
            for number in range(len(ranges)):
                pieces = spool.take(number)
                if number in runs:
                    yield from self._run(*runs[number], pieces, done, references)
                    self._step(runs[number][0])
                else:
                    yield from chunks_of(pieces)
                del pieces  # before the next ones are read
        if not done.contains_range(0, rows):
            raise CorruptCheckpoint(
                f"{baseline} and what builds on it hold {len(done)} of the {rows} rows of {table}, "
                f"columns {columns[0]} to {columns[1] - 1}: it is not full"
            )

    def _built(self, table: str) -> ByColumns:
        """Return what the rows of a table stored as differences restore to; empty of others."""
        if table not in self._chain.head.deltas:
            return {}
        if table not in self._links:  # one table at a time
            self._links = {table: build_table(self._root, self._content, table, self._read)}
        return self._links[table]

    def _divide(
        self,
        chunk: StoredChunk,
        header: RowsHeader,
        ranges: RowRanges,
        done: DoneRows,
        spool: Spool,
        references: References | None,
    ) -> None:
        """Take the rows of a chunk that no newer one has, for the ranges in which they lie."""
        if done.contains_range(header.rectangle.row_start, header.rectangle.row_stop):
            return
        stored = StoredRows(header, self._read(chunk))
        new = done.add(stored.ids)
        ids = stored.ids if new is None else stored.ids[new]
        if not len(ids):
            return
        for number, here in ranges.split(ids):
            if new is None and here.stop - here.start == header.count:
                spool.put(number, Piece.of(stored, None, references))
            else:
                chosen = np.arange(here.start, here.stop) if new is None else new[here]
                spool.put(number, Piece.of(stored, chosen, references))

    def _run(
        self,
        chunk: StoredChunk,
        header: RowsHeader,
        newer: list[Piece],
        done: DoneRows,
        references: References | None,
    ) -> Iterator[EncodedChunk]:
        """Yield what a run of the baseline's rows becomes, with those that replace some of them."""
        if done.contains_range(header.rectangle.row_start, header.rectangle.row_stop):
            yield from chunks_of(newer)
            return
        payload = self._read(chunk)
        stored = StoredRows(header, payload)
        new = done.add(stored.ids)
        if new is None:
            assert not newer, "rows that are new here are in no piece"
            yield EncodedChunk(unwritten(chunk.entry), [payload])
        else:
            yield from chunks_of([Piece.of(stored, new, references), *newer])

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
