"""Verify everything a root holds, without a model or training ranks, and report all damage."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np

from torchrec_checknrun.errors import (
    CheckNRunError,
    CheckpointNotFound,
    CorruptCheckpoint,
    StorageFailed,
    StorageUnreachable,
)
from torchrec_checknrun.format.chunk import BlockHeader, decode_block, decode_state_chunk
from torchrec_checknrun.format.entries import (
    CollisionsEntry,
    RowsEntry,
    StateEntry,
    difference_of,
)
from torchrec_checknrun.format.losses import portion
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.rank_file import read_footer
from torchrec_checknrun.format.reader import (
    StoredChunk,
    coalesced_reads,
    dense_chunks,
    read_indexes,
    with_bases,
)
from torchrec_checknrun.format.row_chunk import RowsHeader
from torchrec_checknrun.format.row_reader import StoredRows
from torchrec_checknrun.restore.chunks import table_problems
from torchrec_checknrun.restore.rows import decode_all
from torchrec_checknrun.root.chain import resolve
from torchrec_checknrun.root.checkpoints import check_sizes, committed, read_manifest
from torchrec_checknrun.row_sets import DoneRows
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.completeness import (
    Unread,
    all_unread,
    gaps,
    missing_states,
    problem_of,
)
from torchrec_checknrun.tools.control_records import find_damage
from torchrec_checknrun.tools.dense import DenseReader, piece_problems
from torchrec_checknrun.tools.links import digest_problems
from torchrec_checknrun.writers.claims import FOLDER


@dataclass(frozen=True)
class Verified:
    """The result for one checkpoint, or for a damaged control record.

    Attributes:
        id: the checkpoint's id; for a claim that can't be read, its path in ``writers/``.
        bytes: bytes of the rank files, by the manifest.
        chunks: number of chunks that were read, decoded, and found unchanged.
        problems: the damage, each with its file; none if a restore would succeed.
        pls: the portion of samples that partial recoveries have lost, by the manifest.
        reproducible: whether the run could be repeated bit for bit: False after such a recovery.
        unread: whether the problems tell only that this process can't read it: it may be sound.
    """

    id: str
    bytes: int
    chunks: int
    problems: tuple[str, ...]
    pls: float = 0.0
    reproducible: bool = True
    unread: bool = False


def verify(
    root: str | os.PathLike[str] | Folder,
    checkpoints: Sequence[str] | None = None,
    *,
    progress: Callable[[int, int], object] | None = None,
) -> list[Verified]:
    """Read every byte of checkpoints and of their parents, decode every chunk, check the claims.

    Pins are checked, too. Unreadable content is a problem in the result, and stops nothing else.

    Memory: one chunk at a time, or 64 MiB of small ones, up to 1 GiB of what lies beside tables,
    and of one table at a time a bit for each row and range of columns; of a table stored as
    differences what its rows restore to, about a quarter of the table.

    Args:
        root: the checkpoints' folder or fsspec URL.
        checkpoints: ids; None for all committed checkpoints. Their parents are read as well.
        progress: called after every chunk with the bytes read so far and all bytes.

    Returns:
        Newest first, each checkpoint once; then the damaged claims, if any.

    Raises:
        CheckpointNotFound: there is no committed checkpoint of a given id.
        StorageFailed: the root can't be listed.
        StorageUnreachable: the storage doesn't answer.
    """
    folder = Folder.of(root)
    wanted = committed(folder) if checkpoints is None else list(checkpoints)
    manifests, parents, problems = _manifests(folder, wanted, named=checkpoints is not None)
    total = sum(manifest.stored_bytes for manifest in manifests.values())
    done = 0

    def step(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(done, total)

    oldest_first = sorted(manifests.values(), key=lambda m: (m.sequence, m.id))
    verification = _Verification(folder, parents, step)
    verified = {manifest.id: verification.verify(manifest) for manifest in oldest_first}
    for id, problem in digest_problems(folder, manifests, parents):
        problems.setdefault(id, []).append(problem)
    records = _control_records(folder, manifests)
    found = []
    for id in dict.fromkeys([*reversed(verified), *problems]):
        problems.setdefault(id, []).extend(records.pop(id, ()))
        own = verified.get(id, Verified(id, 0, 0, ()))
        texts = tuple(dict.fromkeys([*problems.get(id, ()), *own.problems]))
        found.append(replace(own, problems=texts, unread=all_unread(texts)))
    if checkpoints is not None:  # without problems of other checkpoints
        records = {id: texts for id, texts in records.items() if id.startswith(FOLDER)}
    return [
        *found,
        *(Verified(id, 0, 0, (*texts,), unread=all_unread(texts)) for id, texts in records.items()),
    ]


def _manifests(
    root: Folder, wanted: Sequence[str], named: bool
) -> tuple[dict[str, Manifest], dict[str, str], dict[str, list[str]]]:
    """Read the manifests of checkpoints and their parents.

    Args:
        named: whether a missing checkpoint is an error.

    Returns:
        By id, the manifests, the ids of what they build on, and the problems of checkpoints whose
        chain can't be read.
    """
    manifests: dict[str, Manifest] = {}
    parents: dict[str, str] = {}
    problems: dict[str, list[str]] = {}
    resolved: set[str] = set()  # with all their parents
    known: dict[str, Manifest] = {}
    for id in wanted:
        if id in resolved:
            continue
        try:
            chain = resolve(root, id, known)
        except CheckpointNotFound:
            if named:
                raise
        except StorageUnreachable:
            raise
        except (CheckNRunError, StorageFailed) as error:
            problems[id] = [problem_of(error)]
            with suppress(CheckNRunError, StorageFailed):
                manifests[id] = read_manifest(root, id)  # its own chunks may still be sound
        else:
            resolved.update(manifest.id for manifest in chain.manifests)
            manifests |= {manifest.id: manifest for manifest in chain.manifests}
            parents |= {child.id: parent.id for parent, child in pairwise(chain.manifests)}
    return manifests, parents, problems


def _control_records(root: Folder, known: Mapping[str, Manifest]) -> dict[str, list[str]]:
    """Return the problems of claims and pins, by the claim's path or the checkpoint's id."""
    try:
        damage = find_damage(root, known)
    except StorageUnreachable:
        raise
    except (CheckNRunError, StorageFailed) as error:
        return {FOLDER: [problem_of(error)]}
    repair = (
        f"`checknrun repair {root}` settles what counts, or removes it where it decides nothing"
    )
    found = {path: [f"{what}; {repair}"] for path, what in damage.claims.items()}
    for path, what in damage.forbidden.items():
        owner = path if path.startswith(FOLDER) else path.partition("/")[0]  # of a pin
        found.setdefault(owner, []).append(Unread(what))
    if damage.undecided is not None and not found:
        found[FOLDER] = [damage.undecided]
    if damage.hidden:
        found[FOLDER] = [
            f"none of the {len(damage.will_count)} committed checkpoints counts: their writers had "
            f"been replaced when they were committed. `checknrun adopt {root} ID` makes one count"
        ]
    return found | {id: [problem] for id, problem in damage.pins.items()}


def _verified(manifest: Manifest, chunks: int, problems: Sequence[str]) -> Verified:
    lost = manifest.losses
    size = manifest.stored_bytes
    return Verified(manifest.id, size, chunks, tuple(problems), portion(lost), not lost)


class _Verification:
    """The verification of a root's checkpoints, older ones of a chain first.

    Args:
        parents: by id the id of what a checkpoint builds on, as a restore finds it.
        step: called with the bytes of each processed chunk.
    """

    def __init__(
        self, root: Folder, parents: Mapping[str, str], step: Callable[[int], None]
    ) -> None:
        self._root = root
        self._reader = DenseReader(root)
        self._parents = parents
        self._step = step
        self._kinds: dict[str, dict[str, _Kinds]] = {}
        self._dense: dict[str, dict[object, StoredChunk]] = {}
        """By checkpoint, the chunks that differences of its children may need."""
        self._causes: dict[str, str] = {}
        """By checkpoint, why its children don't have these."""

    def verify(self, manifest: Manifest) -> Verified:
        """Read and decode a checkpoint's own chunks."""
        problems: list[str] = []
        parent = self._parents.get(manifest.id, "")
        lost = manifest.parent is not None and parent not in self._dense
        self._kinds[manifest.id] = self._kinds.get(parent, {})
        try:
            check_sizes(self._root, manifest)
            for file in manifest.files:
                read_footer(self._root / manifest.id, file)
            chunks = read_indexes(self._root, manifest)
            if not lost:
                chunks = with_bases(manifest, chunks, self._dense.get(parent, {}))
                self._dense[manifest.id] = dense_chunks(chunks)
        except StorageUnreachable:
            raise
        except (CheckNRunError, StorageFailed) as error:
            self._causes[manifest.id] = problem_of(error)
            return _verified(manifest, 0, [self._causes[manifest.id]])
        if lost:
            problems += self._of_lost_parent(manifest, parent, chunks)
        of_tables = list(table_problems(manifest, chunks))
        full = (
            manifest.kind == "full" and not of_tables
        )  # only then is a bit for each row worth its memory
        sound = 0
        reads = coalesced_reads(self._root, chunks)
        # By table, in their order in the files, so that bits of one table are held at a time.
        places: dict[str, int] = {}
        for chunk in chunks:
            places.setdefault(_table_of(chunk), len(places))
        by_table = sorted(chunks, key=lambda chunk: places[_table_of(chunk)])
        for name, of_table in groupby(by_table, _table_of):
            part = list(of_table)
            table = manifest.tables[name].rows if full and name in manifest.tables else None
            held = _Held(part, table)
            for chunk in filter(_has_base, part):
                try:
                    ids = _decode(chunk, self._reader.read(chunk, reads.part))
                    if ids is not None:
                        held.add(chunk, ids)
                    sound += 1
                except StorageUnreachable:
                    raise
                except (CheckNRunError, StorageFailed) as error:
                    where = f"{manifest.id}/{chunk.file}, chunk {chunk.number}: "
                    problems.append(problem_of(error, where))
                self._step(chunk.entry.length)
        self._step(manifest.stored_bytes - sum(chunk.entry.length for chunk in chunks))
        problems += [*gaps(manifest, chunks), *of_tables, *piece_problems(chunks)]
        problems += [*self._other_kinds(manifest, chunks), *missing_states(manifest, chunks)]
        return _verified(manifest, sound, problems)

    def _of_lost_parent(
        self, manifest: Manifest, parent: str, chunks: Sequence[StoredChunk]
    ) -> Iterator[str]:
        """Yield why chunks that are differences can't be restored, unless it is told already: the
        chain can't be read.
        """
        cause = self._causes.get(parent)
        if cause is not None:
            self._causes[manifest.id] = cause
            if not all(map(_has_base, chunks)):
                yield type(cause)(f"{manifest.id} needs {parent}, which can't be used: {cause}")

    def _other_kinds(self, manifest: Manifest, chunks: Sequence[StoredChunk]) -> Iterator[str]:
        """Yield rows that don't fit the others of their table: another type or optimizer state.

        Rows from before the optimizer's first step may have no state.
        """
        kinds = dict(self._kinds[manifest.id])
        told = set()
        for chunk in chunks:
            entry = chunk.entry
            if not isinstance(entry, RowsEntry):
                continue
            name, dtype = entry.table, entry.weight.dtype
            states = frozenset(state.name for state in entry.optimizer)
            known = kinds.setdefault(name, _Kinds(dtype, states))
            if not known.states:
                known = kinds[name] = _Kinds(known.dtype, states)
            if name not in told and (dtype != known.dtype or (states and states != known.states)):
                told.add(name)
                yield (
                    f"{manifest.id}/{chunk.file}, chunk {chunk.number}: rows of {name} are "
                    f"{dtype} with optimizer state {sorted(states)}, others of the chain "
                    f"{known.dtype} with {sorted(known.states)}"
                )
        self._kinds[manifest.id] = kinds


@dataclass(frozen=True)
class _Kinds:
    """The stored parts of each row of a table."""

    dtype: str
    states: frozenset[str]


class _Held:
    """The rows of a table that a full checkpoint holds.

    Args:
        chunks: all chunks of the table.
        rows: the table's number of rows; None to skip the check.
    """

    def __init__(self, chunks: Sequence[StoredChunk], rows: int | None) -> None:
        self._rows = rows
        self._cuts: list[int] = []
        self._done: dict[int, DoneRows] = {}
        if rows is not None:
            entries = [chunk.entry for chunk in chunks if isinstance(chunk.entry, RowsEntry)]
            self._cuts = sorted({cut for entry in entries for cut in entry.columns})

    def add(self, chunk: StoredChunk, ids: np.ndarray) -> None:
        """Add a chunk's rows.

        Raises:
            CorruptCheckpoint: some rows are there already, so that as many others are missing.
        """
        entry = chunk.entry
        if self._rows is None or not isinstance(entry, RowsEntry):
            return
        first, last = entry.columns
        again = False
        for start in self._cuts[bisect_left(self._cuts, first) : bisect_left(self._cuts, last)]:
            if start not in self._done:
                self._done[start] = self._none_done()
            again |= self._done[start].add(ids) is not None
        if again:
            raise CorruptCheckpoint(
                f"the chunk holds rows of {entry.table}, columns {first} to {last - 1}, "
                "that are in another chunk as well, so that others are missing: "
                f"{chunk.checkpoint} is not full"
            )

    def _none_done(self) -> DoneRows:
        assert self._rows is not None
        try:
            return DoneRows(self._rows)
        except (MemoryError, RuntimeError):
            raise CorruptCheckpoint(
                f"the table has {self._rows} rows: this machine has no memory for a bit for each"
            ) from None


def _decode(chunk: StoredChunk, payload: memoryview) -> np.ndarray | None:
    """Decode a whole chunk; return the row ids of a chunk of rows, else None."""
    entry, header = chunk.entry, chunk.header
    if isinstance(header, RowsHeader):
        rows = StoredRows(header, payload)
        decode_all(rows)
        return rows.ids
    if isinstance(header, BlockHeader):
        decode_block(header, payload)
    if isinstance(entry, (StateEntry, CollisionsEntry)):
        decode_state_chunk(entry, payload)
    return None


def _has_base(chunk: StoredChunk) -> bool:
    """Return whether all is known that a chunk is to be restored with."""
    return chunk.base is not None or difference_of(chunk.entry) is None


def _table_of(chunk: StoredChunk) -> str:
    """Return a chunk's table; an empty string if the chunk holds no rows."""
    return chunk.entry.table if isinstance(chunk.entry, RowsEntry) else ""
