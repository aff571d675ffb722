"""Publish a run that doesn't: copy its newest chain, as far as predictions depend on it, elsewhere.

Each checkpoint of the chain becomes a publication of the same sequence number, step and age, with
the rows that it holds, encoded anew without optimizer state, and the model's dense part. Run again,
it adds what was committed since. No process group, model or trainer is needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from msgspec import UNSET
from msgspec.structs import replace

from torchrec_checknrun.codecs.quantization import Quantization
from torchrec_checknrun.compaction.compact import FILE_BYTES, write_files
from torchrec_checknrun.delta.rows import values_of
from torchrec_checknrun.errors import CorruptCheckpoint, IncompatibleCheckpoint
from torchrec_checknrun.format.chunk import EncodedChunk
from torchrec_checknrun.format.entries import (
    BlockEntry,
    CollisionsEntry,
    RowsEntry,
    StateEntry,
    unwritten,
)
from torchrec_checknrun.format.manifest import Header, Manifest
from torchrec_checknrun.format.names import new_id
from torchrec_checknrun.format.rank_file import sum_tables
from torchrec_checknrun.format.reader import StoredChunk, coalesced_reads, read_chunk
from torchrec_checknrun.format.row_chunk import RowsHeader, encode_rows
from torchrec_checknrun.format.row_reader import StoredRows
from torchrec_checknrun.restore.chunks import ChainContent, read_content
from torchrec_checknrun.restore.links import newest_rows
from torchrec_checknrun.root.chain import Chain, newest, newest_required
from torchrec_checknrun.root.counting import require_apart, require_publications
from torchrec_checknrun.root.lineage import Lineage, Proposal
from torchrec_checknrun.root.policy import Decision
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.root.writer import RootWriter, commit
from torchrec_checknrun.shards import RowBlock, TableShape
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.dense import MODEL, DenseReader
from torchrec_checknrun.tools.links import TableLinks
from torchrec_checknrun.values.buffers import BUFFERS
from torchrec_checknrun.version import __version__

WIDTHS = (2, 4, 8)


@dataclass(frozen=True)
class Done:
    """The result of a publication.

    Attributes:
        head: the id of the source's newest checkpoint, which the target now stands for.
        published: the manifests that were added, oldest first; none: the target had it already.
        deleted: ids of old publications that were deleted.
    """

    head: str
    published: tuple[Manifest, ...]
    deleted: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Return the bytes that were added."""
        return sum(manifest.stored_bytes for manifest in self.published)


def publish(
    root: str | os.PathLike[str] | Folder,
    target: str | os.PathLike[str] | Folder,
    *,
    bits: int | None = None,
    keep: int | None = None,
    every_hours: float | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Done:
    """Bring a root of publications to the newest checkpoint of a run.

    Any process may call this while the run goes on, again and again.

    Args:
        root: the run's folder or fsspec URL.
        target: that of the publications, for followers; new, or filled by this function.
        bits: of a value: 8, 4 or 2, as TorchRec quantizes; None, 32: rows as a restore gives them.
        keep: publications to keep in the target, with what they build on; others are deleted, once
            no follower reads them. None: all.
        every_hours: also keep the first publication of every so many hours, by the checkpoints'
            times; needs ``keep``.
        progress: called with the bytes of the source that are done, and all there are.

    Raises:
        CheckpointNotFound, ChainBroken, CorruptCheckpoint, UnsupportedFormat: the run's newest
            chain can't be read; whole publications that were added stay.
        IncompatibleCheckpoint: the run has what can't be followed, or the target holds other
            publications; names which.
        RootInUse: another process publishes there.
        ValueError: ``bits`` is no width, ``keep`` is below 1, ``every_hours`` is no number of
            hours, or without ``keep``, or one root lies in the other.
    """
    if keep is None and every_hours is not None:
        raise ValueError("every_hours needs keep, the number of newest publications to keep")
    retention = None if keep is None else Retention(keep, every_hours)
    bits = None if bits == 32 else bits
    if bits is not None and (type(bits) is not int or bits not in WIDTHS):
        raise ValueError(f"bits must be one of {WIDTHS}, or 32 for rows as they are, not {bits!r}")
    source, into = Folder.of(root), Folder.of(target)
    head, published = _add(source, into, bits, progress)
    deleted = () if retention is None else tuple(prune(into, retention).verdict.delete)
    return Done(head, published, deleted)


def _add(
    source: Folder,
    into: Folder,
    bits: int | None,
    progress: Callable[[int, int], object] | None,
) -> tuple[str, tuple[Manifest, ...]]:
    """Publish what the target lacks; return the source's newest id, and what was added."""
    chain = newest_required(source, answers=True)
    held, problems = newest(into, answers=True)
    if held is None and problems:
        raise IncompatibleCheckpoint(
            f"{into} can't be added to: {'; '.join(problems)}. Publish to another folder"
        )
    if held is not None and held.head.id in {m.id for m in chain.manifests}:
        raise IncompatibleCheckpoint(
            f"{into} holds the run's own checkpoints, which --keep would delete: publish to a "
            "folder of its own"
        )
    require_publications(into)
    require_apart(source, into)
    copies = _copies(chain, held)
    _check_target(into, held, copies, bits)
    missing = [place for place, m in enumerate(chain.manifests) if m.id not in copies]
    first = max((p for p, m in enumerate(chain.manifests) if m.id in copies), default=-1) + 1
    if first == len(chain.manifests):
        return chain.head.id, ()
    content = read_content(source, chain, whole=True)
    _refuse_unfollowed(content)
    lineage = Lineage()
    if held is not None:
        lineage.restored(held, converted=False, forks=False)
    writer = RootWriter(into, lineage, None, publishes=True)
    writer.claim()
    try:
        copying = _Copying(source, into, content, bits, writer, lineage, copies, progress)
        done = [copying.copy(place) for place in missing if place >= first]
    finally:
        writer.close()
    return chain.head.id, tuple(done)


def _copies(chain: Chain, held: Chain | None) -> dict[str, Manifest]:
    """Return what the target has of a chain, by the source's ids."""
    known = {} if held is None else {_state(copy): copy for copy in held.manifests}
    return {m.id: known[_state(m)] for m in chain.manifests if _state(m) in known}


def _state(manifest: Manifest) -> tuple[int, int, str, str]:
    """Tell a checkpoint's state from others: a compacted copy is of its original's."""
    return manifest.sequence, manifest.step, manifest.lineage, manifest.created_at


def _check_target(
    into: Folder, held: Chain | None, copies: Mapping[str, Manifest], bits: int | None
) -> None:
    """Refuse a target of another width.

    Raises:
        IncompatibleCheckpoint: names both.
    """
    if held is not None and copies and held.head.bits != bits:
        own = f"in {held.head.bits or 32} bits"
        raise IncompatibleCheckpoint(
            f"{into} holds rows {own}: give the same --bits, or publish to another folder"
        )


def _refuse_unfollowed(content: ChainContent) -> None:
    """Refuse a run whose predictions depend on something that can't be followed.

    Raises:
        IncompatibleCheckpoint: names it.
    """
    head = content.chain.head
    for chunk in content.chunks[-1]:
        entry = chunk.entry
        if isinstance(entry, StateEntry) and entry.name == BUFFERS and head.world_size > 1:
            raise IncompatibleCheckpoint(
                f"{head.id} has buffers of each rank's own (per_rank_buffers), and a served model "
                "has one: save without them to publish rank 0's"
            )


@dataclass
class _Copying:
    """The copy of a chain's checkpoints, oldest first.

    Attributes:
        copies: what the target has, by the source's ids.
    """

    source: Folder
    into: Folder
    content: ChainContent
    bits: int | None
    writer: RootWriter
    lineage: Lineage
    copies: dict[str, Manifest]
    progress: Callable[[int, int], object] | None
    _links: dict[str, TableLinks] = field(default_factory=dict)
    _linked: int = 0
    """Checkpoints whose links were added."""
    _gone: int = 0

    def __post_init__(self) -> None:
        self._quantization = Quantization()
        if self.bits is not None:
            self._quantization = Quantization(bits=self.bits, method="asymmetric")
        self._held, self._dense = self.lineage.previous, DenseReader(self.source)
        chunks = [chunk for of_one in self.content.chunks for chunk in of_one]
        self._whole = sum(chunk.entry.length for chunk in chunks)
        self._reads = coalesced_reads(self.source, chunks)
        self._read = partial(read_chunk, self.source, at_hand=self._reads.part)

    def copy(self, place: int) -> Manifest:
        """Publish one of the chain's checkpoints.

        Raises:
            IncompatibleCheckpoint: the target holds newer publications of another run.
        """
        manifest = self.content.chain.manifests[place]
        hidden = self._is_hidden(manifest)
        proposal = self._proposal(manifest)
        folder = self.into / proposal.id
        folder.create(durable=True)
        files = list(write_files(folder, self._chunks(place), FILE_BYTES))
        header = proposal.header
        shapes = {name: TableShape(t.rows, t.dim) for name, t in manifest.tables.items()}
        settings = {name: {"fp32_bytes": 4 * s.rows * s.dim} for name, s in shapes.items()}
        assert header.sequence is not None
        assert header.epoch is not None
        published = Manifest.of(
            header,
            id=proposal.id,
            sequence=header.sequence,
            epoch=header.epoch,
            world_size=1,
            created_at=manifest.created_at,  # the state's age
            created_by=f"torchrec_checknrun {__version__} (publish)",
            tables=sum_tables(shapes, [summary.tables for summary in files], settings),
            states={n: own for n, own in manifest.states.items() if n in (MODEL, BUFFERS)},
            dense_bytes=sum(summary.dense_bytes for summary in files),
            files=tuple(summary.file for summary in files),
        )
        commit(
            self.into,
            folder,
            published,
            before=[partial(self.writer.before_commit, proposal, hidden)],
            after=partial(self.writer.after_commit, proposal),
        )
        self.lineage.committed(published)
        self.copies[manifest.id] = published
        return published

    def _is_hidden(self, manifest: Manifest) -> bool:
        """Return whether the target held a newer publication of the run: a compacted copy, or what
        a fork has left. The checkpoint is published for those that build on it.

        Raises:
            IncompatibleCheckpoint: the target holds newer publications of another run.
        """
        held, chain = self._held, self.content.chain
        if held is None or held.sequence < manifest.sequence:
            return False
        of_the_run = held.lineage in {each.lineage for each in chain.manifests}
        if not of_the_run or held.sequence >= chain.head.sequence:
            raise IncompatibleCheckpoint(
                f"{self.into} holds {held.id}, which is no older than {manifest.id}: it is of "
                "another run. Publish to another folder"
            )
        return True

    def _proposal(self, manifest: Manifest) -> Proposal:
        parent = None
        if manifest.parent is not None:
            parent = self.copies[manifest.parent.id].link
        link = manifest.previous
        previous = None if link is None else self.copies.get(link.id)
        header = Header(
            kind=manifest.kind,
            step=manifest.step,
            sequence=manifest.sequence,
            parent=parent,
            previous=parent if previous is None else previous.link,
            lossy_restores=manifest.lossy_restores,
            bits=self.bits,
            earlier_fractions=manifest.earlier_fractions,
            lineage=manifest.lineage,
            epoch=self.writer.epoch,
        )
        decision = Decision.FULL if parent is None else Decision.SINCE_LAST
        return Proposal(new_id(manifest.sequence, manifest.step), header, decision)

    def _chunks(self, place: int) -> Iterator[EncodedChunk]:
        """Yield a publication's chunks."""
        while self._linked <= place:
            self._link(self._linked)
            self._linked += 1
        for chunk in self.content.chunks[place]:
            entry, header = chunk.entry, chunk.header
            if isinstance(header, RowsHeader):
                yield self._rows(chunk, header)
            elif not isinstance(entry, RowsEntry) and _is_of_model(entry):
                # Whole, even where it is a difference.
                payload = self._dense.read(chunk, self._reads.part)
                yield EncodedChunk(replace(unwritten(entry), difference=UNSET), [payload])
            self._gone += chunk.entry.length
            if self.progress is not None:
                self.progress(self._gone, self._whole)

    def _link(self, place: int) -> None:
        """Add up the links of a checkpoint's tables that are stored as differences.

        Raises:
            CorruptCheckpoint: the rows are not those of the checkpoint.
        """
        manifest = self.content.chain.manifests[place]
        for table, said in manifest.deltas.items():
            if table not in self._links:
                rows = manifest.tables[table].rows
                self._links[table] = TableLinks(self.source, table, rows)
                self._links[table].read = self._read
            links = self._links[table]
            links.add(self.content.by_table[place].get(table, ()))
            if links.digest != said.after:
                raise CorruptCheckpoint(
                    f"{manifest.id}: the rows of {table} have digest {links.digest}, the manifest "
                    f"says {said.after}"
                )

    def _rows(self, chunk: StoredChunk, header: RowsHeader) -> EncodedChunk:
        """Encode a chunk's rows anew, without optimizer state."""
        place = header.rectangle
        stored = StoredRows(header, self._read(chunk))
        columns = place.col_start, place.col_stop
        every = slice(0, header.count)
        if header.codec.chained:
            references = self._links[header.table].by_columns[columns]
            weight = values_of(newest_rows(references, stored, every), header.dtype)
        else:
            weight = stored.values(every)
        shape = self.content.chain.head.tables[header.table]
        block = RowBlock(
            table=header.table,
            shape=TableShape(shape.rows, shape.dim),
            columns=columns,
            ids=torch.from_numpy(stored.ids),
            weight=weight,
            positions=None,
            optimizer={},
        )
        return encode_rows(block, self._quantization.for_table(header.table, shape.rows))


def _is_of_model(entry: StateEntry | BlockEntry | CollisionsEntry) -> bool:
    if isinstance(entry, BlockEntry):
        return entry.path[0] == MODEL
    return isinstance(entry, StateEntry) and entry.name in (MODEL, BUFFERS)
