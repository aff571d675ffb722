"""Compare a checkpoint's chunks with its manifest; tell damage from what can't be read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchrec_checknrun.format.entries import RowsEntry, StateEntry
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.reader import StoredChunk
from torchrec_checknrun.store.retry import tells_nothing


class Unread(str):
    """A problem that tells only that this process can't read something, which may be sound."""


def problem_of(error: Exception, where: str = "") -> str:
    """Return an error's text, after where it was met."""
    text = where + str(error)
    return Unread(text) if tells_nothing(error) else text


def all_unread(problems: Sequence[str]) -> bool:
    """Return whether there are problems, none of which tells of damage."""
    return bool(problems) and all(isinstance(problem, Unread) for problem in problems)


def missing_states(manifest: Manifest, chunks: Sequence[StoredChunk]) -> Iterator[str]:
    """Yield state objects that a manifest lists and no chunk holds."""
    ranks: dict[str, set[int | None]] = {name: set() for name in manifest.states}
    for chunk in chunks:
        entry = chunk.entry
        if isinstance(entry, StateEntry) and entry.name in ranks:
            ranks[entry.name].add(entry.rank)
    for name, of_ranks in ranks.items():
        if not manifest.states[name]:
            if None not in of_ranks:
                yield f"{manifest.id} lacks state {name!r}"
            continue
        held = sum(rank is not None and rank < manifest.world_size for rank in of_ranks)
        if held < manifest.world_size:
            yield f"{manifest.id} has state {name!r} of {held} of {manifest.world_size} ranks"


def gaps(manifest: Manifest, chunks: Sequence[StoredChunk]) -> Iterator[str]:
    """Yield bytes that belong to no chunk, and rows that a manifest lists and no chunk holds."""
    by_file: dict[str, list[StoredChunk]] = {file.name: [] for file in manifest.files}
    for chunk in chunks:
        by_file[chunk.file].append(chunk)
    for file in manifest.files:
        ends = 0
        for chunk in by_file[file.name]:
            if chunk.entry.offset != ends:
                yield (
                    f"{manifest.id}/{file.name}: chunk {chunk.number} begins at "
                    f"{chunk.entry.offset}, the one before ends at {ends}"
                )
            ends = chunk.entry.offset + chunk.entry.length
        if ends != file.index_offset:
            yield f"{manifest.id}/{file.name}: {file.index_offset - ends} bytes are of no chunk"
    stored = dict.fromkeys(manifest.tables, 0)
    for chunk in chunks:
        entry = chunk.entry
        if isinstance(entry, RowsEntry):
            first, last = entry.columns
            stored[entry.table] = stored.get(entry.table, 0) + entry.count * (last - first)
    for name, values in stored.items():
        table = manifest.tables.get(name)
        if table is None or table.stored_values != values:
            said = None if table is None else table.stored_values
            yield f"{manifest.id}: {values} values of {name} are stored, the manifest says {said}"
