"""Read the indexes and chunks of a checkpoint, each verified against its checksum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

import msgspec
import xxhash
from tenacity import (
    Retrying,
    retry_if_exception_type,
    retry_if_result,
    stop_after_delay,
    wait_fixed,
)

from torchrec_checknrun.errors import CheckNRunError, CorruptCheckpoint
from torchrec_checknrun.format.checks import INDEX_BYTES
from torchrec_checknrun.format.difference import restored
from torchrec_checknrun.format.entries import (
    BlockEntry,
    Entry,
    RowsEntry,
    content_bytes,
    content_checksum,
    difference_of,
)
from torchrec_checknrun.format.manifest import DIFFERENCES_VERSION, Manifest, RankFile
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.format.rank_file import FOOTER, Header, parse_index
from torchrec_checknrun.store.coalescing import KEPT_BYTES, CoalescedReads, Place
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.threads import at_once

VISIBLE_SECONDS = 10.0
"""Seconds that a file that rank 0 has seen may take to appear on this machine."""
_READS = 2
_LOOK_SECONDS = 0.25
"""The pause between two looks for such a file."""

Columns = tuple[int, int]
"""A half-open range of columns."""


@dataclass(frozen=True)
class StoredChunk:
    """A chunk in storage: its place, its index entry, and the header of rows or of a block.

    Attributes:
        base: the parent's chunk that this one's payload is a difference to; None without one.
        key: the chunk's unique name in a chain, by number: empty chunks share their offset.
        place: where the bytes lie.
    """

    checkpoint: str
    file: str
    number: int
    entry: Entry = field(hash=False)
    header: Header | None = field(compare=False)
    base: StoredChunk | None = field(default=None, compare=False, repr=False)
    key: str = field(init=False, compare=False)
    place: Place = field(init=False, compare=False)

    def __post_init__(self) -> None:
        place = Place(self.checkpoint, self.file, self.entry.offset, self.entry.length)
        object.__setattr__(self, "place", place)
        object.__setattr__(self, "key", f"{self.checkpoint}/{self.file}#{self.number}")


Read = Callable[[StoredChunk], memoryview]
"""Returns a chunk's content, verified."""


IndexBytes = Mapping[tuple[str, str], bytearray]
"""Indexes that were read before, by checkpoint and name of the rank file."""


def read_indexes(
    root: Folder,
    manifest: Manifest,
    visible_seconds: float = VISIBLE_SECONDS,
    at_hand: IndexBytes = MappingProxyType({}),
) -> tuple[StoredChunk, ...]:
    """Read the index of each rank file; return all chunks of a checkpoint.

    Args:
        visible_seconds: how long to wait for a file that is missing, or too short.
        at_hand: indexes that need not be read, see ``read_index_bytes``.

    Raises:
        CorruptCheckpoint: a file is missing or too short, or its index is damaged.
        UnsupportedFormat: a chunk's kind or codec is unknown to this release.
    """
    missing = [(manifest.id, f) for f in manifest.files if (manifest.id, f.name) not in at_hand]
    read = read_index_bytes(root, missing, visible_seconds) if missing else {}
    found = []
    for file in manifest.files:
        key = manifest.id, file.name
        data = read[key] if key in read else at_hand[key]
        index = parse_index(data, file, f"{root}/{manifest.id}/{file.name}")
        found += [
            StoredChunk(manifest.id, file.name, number, entry, header)
            for number, (entry, header) in enumerate(index)
        ]
    return tuple(found)


def read_index_bytes(
    root: Folder,
    files: Sequence[tuple[str, RankFile]],
    visible_seconds: float = VISIBLE_SECONDS,
) -> IndexBytes:
    """Read the indexes of rank files of checkpoints, verified.

    Raises:
        CorruptCheckpoint: as ``read_indexes``.
    """
    reads = [partial(_index_bytes, root / id, file, visible_seconds) for id, file in files]
    keys = [(id, file.name) for id, file in files]
    return dict(zip(keys, at_once(reads, "checknrun-index"), strict=True))


def _index_bytes(folder: Folder, file: RankFile, visible_seconds: float) -> bytearray:
    """Read the index of a rank file, verified; see ``read_indexes``."""
    _check_layout(folder, file)
    data = bytearray(file.index_length)
    wanted = file.index_offset, file.index_checksum
    _, checksum = _checked(folder, memoryview(data), file.name, *wanted, visible_seconds)
    if checksum != file.index_checksum:
        raise _damage(
            folder,
            f"{folder}/{file.name}: the index at {file.index_offset} has checksum {checksum}, the "
            f"manifest says {file.index_checksum}",
        )
    return data


def _check_layout(folder: Folder, file: RankFile) -> None:
    """Check that index and footer end the file, and the size of the index."""
    end = file.index_offset + file.index_length + FOOTER.size
    if end != file.size or file.index_length > INDEX_BYTES:
        raise CorruptCheckpoint(
            f"{folder}/{file.name}: an index of {file.index_length} bytes at {file.index_offset} "
            f"and a footer don't end a file of {file.size} bytes, or the index exceeds "
            f"{INDEX_BYTES} bytes"
        )


def _checked(
    folder: Folder,
    memory: memoryview,
    name: str,
    offset: int,
    checksum: str,
    visible_seconds: float,
) -> tuple[int, str]:
    """Fill memory as ``_fill``; return the number of bytes, and their checksum.

    Bytes with another checksum than the wanted one are read again: they may have been damaged on
    their way, and a run would abandon the checkpoint.
    """
    for _ in range(_READS):
        count = _fill(folder, memory, name, offset, visible_seconds)
        found = xxhash.xxh3_64_hexdigest(memory[:count])
        if found == checksum or count < len(memory):
            break
    return count, found


def _fill(
    folder: Folder, memory: memoryview, name: str, offset: int, visible_seconds: float
) -> int:
    """Fill memory from a file that rank 0 has seen already. Wait for it if need be: on a network
    file system other machines may see a new file seconds later.

    Returns:
        The number of bytes read: fewer than asked for if the file stays too short.
    """
    try:
        if (count := folder.read_into(memory, name, offset)) == len(memory):
            return count
    except FileNotFoundError:
        pass  # perhaps not visible yet
    try:
        return Retrying(
            retry=retry_if_exception_type(FileNotFoundError)
            | retry_if_result(lambda count: count < len(memory)),
            stop=stop_after_delay(visible_seconds),
            wait=wait_fixed(_LOOK_SECONDS),
            retry_error_callback=lambda state: state.outcome and state.outcome.result(),
        )(lambda: folder.read_into(memory, name, offset))
    except FileNotFoundError:
        raise _damage(folder, f"{folder}/{name} is missing{_deletion(folder)}") from None


def _damage(folder: Folder, message: str) -> CorruptCheckpoint:
    """Return the error of a damaged file in a checkpoint's folder."""
    error = CorruptCheckpoint(message)
    error.checkpoint = folder.name
    return error


def _deletion(folder: Folder) -> str:
    """Say of a missing file what to do where the whole checkpoint was deleted meanwhile."""
    with suppress(CheckNRunError, OSError):
        if folder.size(MANIFEST_NAME) is None:
            return (
                ", and so is the manifest: the checkpoint was deleted while it was read, as a "
                "run's retention does. Read a newer one; `checknrun pin` keeps one that takes long"
            )
    return ""


def dense_key(entry: Entry) -> tuple[object, ...] | None:
    """Return what tells which chunk of the parent is the same content, earlier; None for rows."""
    if isinstance(entry, RowsEntry):
        return None
    if isinstance(entry, BlockEntry):
        return "block", entry.path, entry.dtype, entry.size, entry.part
    return type(entry).__name__, entry.name, entry.rank


def with_bases(
    manifest: Manifest, chunks: Iterable[StoredChunk], parents: Mapping[object, StoredChunk]
) -> tuple[StoredChunk, ...]:
    """Give each chunk that is a difference the parent's chunk.

    Args:
        parents: the parent's chunks by ``dense_key``, with their own bases.

    Raises:
        CorruptCheckpoint: the parent has no such chunk, or one of another content.
    """
    found = []
    for chunk in chunks:
        known = difference_of(chunk.entry)
        if known is None:
            found.append(chunk)
            continue
        where = f"{chunk.checkpoint}/{chunk.file}, chunk {chunk.number}"
        if manifest.format_version < DIFFERENCES_VERSION or manifest.parent is None:
            raise CorruptCheckpoint(f"{where}: a difference, where all chunks should be whole")
        base = parents.get(dense_key(chunk.entry))
        if base is None:
            raise CorruptCheckpoint(f"{where}: a difference to a chunk that its parent lacks")
        content = content_checksum(base.entry), content_bytes(base.entry)
        if content != (known.parent, known.raw):
            raise CorruptCheckpoint(
                f"{where}: a difference to {known.raw} bytes with checksum {known.parent}, where "
                f"{base.checkpoint} has {content[1]} with {content[0]}"
            )
        found.append(replace(chunk, base=base))
    return tuple(found)


def dense_chunks(chunks: Iterable[StoredChunk]) -> dict[object, StoredChunk]:
    """Return the chunks that are no rows, by ``dense_key``."""
    return {key: c for c in chunks if (key := dense_key(c.entry)) is not None}


def read_chain(
    root: Folder,
    chain: Iterable[Manifest],
    whole: bool = False,
    at_hand: IndexBytes = MappingProxyType({}),
) -> list[tuple[StoredChunk, ...]]:
    """Read the indexes of a chain's checkpoints, oldest first, each chunk with its base.

    Args:
        whole: keep the trees of all states; otherwise of the last checkpoint's alone, which has all
            states. Those of thousands of parameters take many megabytes, times the chain's length.
        at_hand: as of ``read_indexes``.

    Raises:
        CorruptCheckpoint: as ``read_indexes`` and ``with_bases``.
    """
    manifests = [*chain]
    files = ((manifest.id, file) for manifest in manifests for file in manifest.files)
    missing = [(id, file) for id, file in files if (id, file.name) not in at_hand]
    read = {**at_hand, **read_index_bytes(root, missing)}
    found: list[tuple[StoredChunk, ...]] = []
    for manifest in manifests:
        if found and not whole:
            found[-1] = tuple(map(_without_tree, found[-1]))
        parents = dense_chunks(found[-1]) if found else {}
        indexes = read_indexes(root, manifest, at_hand=read)
        found.append(with_bases(manifest, indexes, parents))
    return found


def _without_tree(chunk: StoredChunk) -> StoredChunk:
    entry = chunk.entry
    if isinstance(entry, (RowsEntry, BlockEntry)):
        return chunk
    return replace(chunk, entry=msgspec.structs.replace(entry, tree={}))


def read_chunk(
    root: Folder,
    chunk: StoredChunk,
    memory: memoryview | None = None,
    visible_seconds: float = VISIBLE_SECONDS,
    known: Mapping[str, memoryview] | None = None,
    at_hand: Callable[[Place], memoryview | None] = lambda place: None,
) -> memoryview:
    """Read a chunk's content and verify its checksum; of a difference, also what it is one to.

    Args:
        memory: receives the bytes if large enough; otherwise memory is allocated.
        visible_seconds: how long to wait for a file that is missing, or too short.
        known: contents that were read before, by the chunks' keys: what a difference is one to is
            not read again.
        at_hand: returns the bytes of a place that were read with others, or None.

    Raises:
        CorruptCheckpoint: the bytes are missing or not the ones written.
    """

    def payload(chunk: StoredChunk, memory: memoryview | None) -> memoryview:
        held = at_hand(chunk.place)
        if held is not None and xxhash.xxh3_64_hexdigest(held) == chunk.entry.checksum:
            return held
        return _read_payload(root, chunk, memory, visible_seconds)

    links, content = [chunk], None
    while (base := links[-1].base) is not None:
        if known and (content := known.get(base.key)) is not None:
            break
        links.append(base)
    if content is None:
        whole = links.pop()
        if (to := difference_of(whole.entry)) is not None:
            raise CorruptCheckpoint(f"{whole.key} is a difference to {to.parent}, which isn't here")
        content = payload(whole, None if links else memory)
    for link in reversed(links):
        difference = difference_of(link.entry)
        assert difference is not None, "only differences have a base"
        try:
            content = restored(payload(link, None), content, difference)
        except ValueError as error:
            raise CorruptCheckpoint(f"{link.key}: {error}") from error
    return content


def coalesced_reads(
    root: Folder, chunks: Iterable[StoredChunk], most: int = KEPT_BYTES, ahead: bool = False
) -> CoalescedReads:
    """Return the reads of chunks, and of all that they are differences to, for ``read_chunk``.

    Args: see ``CoalescedReads``.
    """
    found: dict[str, StoredChunk] = {}
    for chunk in chunks:
        link: StoredChunk | None = chunk
        while link is not None and link.key not in found:
            found[link.key] = link
            link = link.base
    return CoalescedReads(root, found.values(), most, ahead)


def _read_payload(
    root: Folder, chunk: StoredChunk, memory: memoryview | None, visible_seconds: float
) -> memoryview:
    """Read a chunk's bytes and verify their checksum; see ``read_chunk``."""
    entry, folder = chunk.entry, root / chunk.checkpoint
    length = entry.length
    if memory is None or len(memory) < length:
        try:
            memory = memoryview(bytearray(length))
        except MemoryError:
            raise CorruptCheckpoint(
                f"{folder}/{chunk.file}: a chunk of {length} bytes, more than this machine has "
                "memory for"
            ) from None
    data = memory[:length]
    wanted = entry.offset, entry.checksum
    count, checksum = _checked(folder, data, chunk.file, *wanted, visible_seconds)
    if count != length or checksum != entry.checksum:
        raise _damage(
            folder,
            f"{folder}/{chunk.file} at offset {entry.offset}: {count} bytes with checksum "
            f"{checksum}, expected {length} with {entry.checksum}",
        )
    return data
