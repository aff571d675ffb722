"""Reads everything a root holds and says what is wrong with it: no model, no rank of a training."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torchrec_checknrun.chain import check_sizes, committed, read_manifest, resolve
from torchrec_checknrun.chunks import decode_state_chunk
from torchrec_checknrun.errors import CheckNRunError, CheckpointNotFound
from torchrec_checknrun.filesystem import Folder
from torchrec_checknrun.manifest import Manifest
from torchrec_checknrun.rank_file import read_footer
from torchrec_checknrun.read_chunks import StoredChunk, read_chunk, read_indexes
from torchrec_checknrun.row_chunks import KIND, rows_header
from torchrec_checknrun.stored_rows import StoredRows


@dataclass(frozen=True)
class Verified:
    """What was found of one checkpoint.

    Attributes:
        bytes: of its rank files, as its manifest has them.
        chunks: how many were read, decoded, and found to be what was written.
        problems: what is wrong, each with the file it is in; none if a restore would succeed.
    """

    id: str
    bytes: int
    chunks: int
    problems: tuple[str, ...]


def verify(
    root: str | os.PathLike[str],
    checkpoints: Sequence[str] | None = None,
    *,
    progress: Callable[[int, int], object] | None = None,
) -> list[Verified]:
    """Reads every byte of checkpoints and of what they need, and decodes every chunk.

    Memory: one chunk at a time.

    Args:
        root: where the checkpoints are, a folder or any fsspec URL.
        checkpoints: ids; None for all that were committed. What they need is read as well.
        progress: called after every chunk with the bytes read so far and those of all.

    Returns:
        Newest first, each checkpoint once.

    Raises:
        CheckpointNotFound: there is no committed checkpoint of an id that was given.
        StorageFailed: the storage doesn't answer.
    """
    folder = Folder(root)
    wanted = committed(folder) if checkpoints is None else list(checkpoints)
    manifests: dict[str, Manifest] = {}
    problems: dict[str, list[str]] = {}
    for id in wanted:
        try:
            chain = resolve(folder, id)
        except CheckpointNotFound:
            if checkpoints is not None:
                raise
            continue
        except CheckNRunError as error:
            problems[id] = [str(error)]
            try:
                manifests[id] = read_manifest(folder, id)  # its own chunks may still be sound
            except CheckNRunError:
                continue
        else:
            manifests |= {manifest.id: manifest for manifest in chain.manifests}
    total = sum(manifest.stored_bytes for manifest in manifests.values())
    done = 0

    def step(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(done, total)

    verified = {id: _verify(folder, manifest, step) for id, manifest in manifests.items()}
    ordered = sorted(manifests.values(), key=lambda m: (m.sequence, m.id), reverse=True)
    found = []
    for id in dict.fromkeys([*(m.id for m in ordered), *problems]):
        own = verified.get(id, Verified(id, 0, 0, ()))
        texts = tuple(dict.fromkeys([*problems.get(id, ()), *own.problems]))
        found.append(Verified(id, own.bytes, own.chunks, texts))
    return found


def _verify(root: Folder, manifest: Manifest, step: Callable[[int], None]) -> Verified:
    problems: list[str] = []
    try:
        check_sizes(root, manifest)
        for file in manifest.files:
            read_footer(root / manifest.id, file)
        chunks = read_indexes(root, manifest)
    except CheckNRunError as error:
        return Verified(manifest.id, manifest.stored_bytes, 0, (str(error),))
    sound = 0
    for chunk in chunks:
        try:
            _decode(chunk, read_chunk(root, chunk))
            sound += 1
        except CheckNRunError as error:
            problems.append(f"{manifest.id}/{chunk.file}, chunk {chunk.number}: {error}")
        step(chunk.entry["length"])
    step(manifest.stored_bytes - sum(chunk.entry["length"] for chunk in chunks))
    problems += _gaps(manifest, chunks)
    return Verified(manifest.id, manifest.stored_bytes, sound, tuple(problems))


def _decode(chunk: StoredChunk, payload: memoryview) -> None:
    if chunk.entry["kind"] == KIND:
        StoredRows(rows_header(chunk.entry), payload).rows()
    elif chunk.entry["kind"] == "state":
        decode_state_chunk(chunk.entry, payload)


def _gaps(manifest: Manifest, chunks: Sequence[StoredChunk]) -> Iterator[str]:
    """Bytes that belong to no chunk, and rows that a manifest promises and no chunk holds."""
    for file in manifest.files:
        ends = 0
        for chunk in chunks:
            if chunk.file == file.name:
                if chunk.entry["offset"] != ends:
                    yield (
                        f"{manifest.id}/{file.name}: chunk {chunk.number} begins at "
                        f"{chunk.entry['offset']}, the one before ends at {ends}"
                    )
                ends = chunk.entry["offset"] + chunk.entry["length"]
        if ends != file.index_offset:
            yield f"{manifest.id}/{file.name}: {file.index_offset - ends} bytes are of no chunk"
    stored = dict.fromkeys(manifest.tables, 0)
    for chunk in chunks:
        if chunk.entry["kind"] == KIND:
            first, last = chunk.entry["columns"]
            name = chunk.entry["table"]
            stored[name] = stored.get(name, 0) + chunk.entry["count"] * (last - first)
    for name, values in stored.items():
        table = manifest.tables.get(name)
        if table is None or table.stored_values != values:
            said = None if table is None else table.stored_values
            yield f"{manifest.id}: {values} values of {name} are stored, the manifest says {said}"
        elif manifest.kind == "full" and values != table.rows * table.dim:
            yield (
                f"{manifest.id}: {values} of {table.rows} × {table.dim} values of {name} are there"
            )
