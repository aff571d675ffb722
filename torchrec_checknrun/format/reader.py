"""What a chain holds, and its chunks' bytes: all that is read is checked against the checksums."""

from __future__ import annotations

from dataclasses import dataclass, field

import xxhash
from tenacity import (
    Retrying,
    retry_if_exception_type,
    retry_if_result,
    stop_after_delay,
    wait_fixed,
)

from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format.checks import INDEX_BYTES
from torchrec_checknrun.format.chunk import Entry
from torchrec_checknrun.format.manifest import Manifest, RankFile
from torchrec_checknrun.format.rank_file import FOOTER, parse_index
from torchrec_checknrun.format.row_chunk import RowsHeader
from torchrec_checknrun.store.folder import Folder

VISIBLE_SECONDS = 10.0
_LOOK_SECONDS = 0.25

Columns = tuple[int, int]
"""A half-open range."""


@dataclass(frozen=True)
class StoredChunk:
    """A chunk in storage: its index entry, where it is, and what a chunk of rows holds."""

    checkpoint: str
    file: str
    number: int
    entry: Entry = field(hash=False)
    header: RowsHeader | None = field(compare=False)

    @property
    def key(self) -> str:
        """Names the chunk within a chain (an offset would not: chunks may be empty)."""
        return f"{self.checkpoint}/{self.file}#{self.number}"


def read_indexes(root: Folder, manifest: Manifest) -> tuple[StoredChunk, ...]:
    """All chunks of one checkpoint.

    Raises:
        CorruptCheckpoint, UnsupportedFormat: as ``read_content``.
    """
    folder = root / manifest.id
    chunks: list[StoredChunk] = []
    for file in manifest.files:
        where = f"{folder}/{file.name}"
        _check_layout(file, where)
        data = bytearray(file.index_length)
        _fill(folder, memoryview(data), file.name, file.index_offset)
        checksum = xxhash.xxh3_64_hexdigest(data)
        if checksum != file.index_checksum:
            raise CorruptCheckpoint(
                f"{where}: its index at {file.index_offset} has checksum {checksum}, the manifest "
                f"says {file.index_checksum}"
            )
        chunks += [
            StoredChunk(manifest.id, file.name, number, entry, header)
            for number, (entry, header) in enumerate(parse_index(data, file, where))
        ]
    return tuple(chunks)


def _check_layout(file: RankFile, where: str) -> None:
    """Whether index and footer end the file, and the index is of a size that is read."""
    end = file.index_offset + file.index_length + FOOTER.size
    if end != file.size or file.index_length > INDEX_BYTES:
        raise CorruptCheckpoint(
            f"{where}: an index of {file.index_length} bytes at {file.index_offset} and a footer "
            f"don't end a file of {file.size} bytes, or it is larger than {INDEX_BYTES} bytes"
        )


def _fill(folder: Folder, memory: memoryview, name: str, offset: int) -> int:
    """Reads what rank 0 has seen in the storage already: on a network file system it may take this
    machine some seconds to see it, too.

    Returns:
        How many bytes there were, after all that waiting.
    """
    try:
        if (count := folder.read_into(memory, name, offset)) == len(memory):
            return count
    except FileNotFoundError:
        pass  # so far
    try:
        return Retrying(
            retry=retry_if_exception_type(FileNotFoundError)
            | retry_if_result(lambda count: count < len(memory)),
            stop=stop_after_delay(VISIBLE_SECONDS),
            wait=wait_fixed(_LOOK_SECONDS),
            retry_error_callback=lambda state: state.outcome and state.outcome.result(),
        )(lambda: folder.read_into(memory, name, offset))
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{folder}/{name} is missing") from None


def read_chunk(root: Folder, chunk: StoredChunk, memory: memoryview | None = None) -> memoryview:
    """A chunk's bytes, verified.

    Args:
        memory: where to put them, if there is room; else new memory is taken.

    Raises:
        CorruptCheckpoint: they are not what was written.
    """
    entry, folder = chunk.entry, root / chunk.checkpoint
    length = entry["length"]
    if memory is None or len(memory) < length:
        try:
            memory = memoryview(bytearray(length))
        except MemoryError:
            raise CorruptCheckpoint(
                f"{folder}/{chunk.file}: a chunk of {length} bytes, which this machine has no "
                "memory for"
            ) from None
    data = memory[:length]
    count = _fill(folder, data, chunk.file, entry["offset"])
    checksum = xxhash.xxh3_64_hexdigest(data[:count])
    if count != length or checksum != entry["checksum"]:
        raise CorruptCheckpoint(
            f"{folder}/{chunk.file} at offset {entry['offset']}: {count} bytes with checksum "
            f"{checksum}, expected {length} with {entry['checksum']}"
        )
    return data
