"""Check a rank file by itself, without the manifest: its footer, its index, and every chunk.

For copies of rank files that lie elsewhere than in their checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format.checks import INDEX_BYTES, parse_json
from torchrec_checknrun.format.entries import Entry
from torchrec_checknrun.format.manifest import RankFile
from torchrec_checknrun.format.rank_file import FOOTER, MAGIC, Header, parse_index
from torchrec_checknrun.store.folder import Folder

_PIECE = 8 << 20


def check_rank_file(folder: Folder, name: str) -> RankFile:
    """Read a rank file and check all of it; return what a manifest says of it.

    Raises:
        CorruptCheckpoint, UnsupportedFormat, OSError: see ``read_own_chunks``.
    """
    file, entries = _indexed(folder, name)
    for number, (entry, _) in enumerate(entries):
        found = xxhash.xxh3_64()
        for start in range(entry.offset, entry.offset + entry.length, _PIECE):
            stop = min(start + _PIECE, entry.offset + entry.length)
            found.update(folder.read(name, start, stop - start))
        _require(found.hexdigest(), entry, f"{folder}/{name}, chunk {number}")
    return file


def read_own_chunks(folder: Folder, name: str) -> Iterator[tuple[Entry, Header | None, memoryview]]:
    """Read a rank file's chunks, each with its entry and header, verified.

    Raises:
        CorruptCheckpoint: it is missing, cut off or damaged.
        UnsupportedFormat: a chunk's kind or codec is unknown to this release.
        OSError: the storage failed.
    """
    _, entries = _indexed(folder, name)
    for number, (entry, header) in enumerate(entries):
        data = bytearray(folder.read(name, entry.offset, entry.length))
        _require(xxhash.xxh3_64_hexdigest(data), entry, f"{folder}/{name}, chunk {number}")
        yield entry, header, memoryview(data)


def _indexed(folder: Folder, name: str) -> tuple[RankFile, list[tuple[Entry, Header | None]]]:
    where, size = f"{folder}/{name}", folder.size(name) or 0
    if size < FOOTER.size:
        raise CorruptCheckpoint(f"{where} is missing, or has only {size} bytes")
    offset, length, digest, magic = FOOTER.unpack(
        folder.read(name, size - FOOTER.size, FOOTER.size)
    )
    if magic != MAGIC or offset + length + FOOTER.size != size or length > INDEX_BYTES:
        raise CorruptCheckpoint(f"{where} has no footer of a rank file")
    index = folder.read(name, offset, length)
    checksum = xxhash.xxh3_64_hexdigest(index)
    if checksum.encode() != digest:
        raise CorruptCheckpoint(
            f"{where}: the index has checksum {checksum}, the footer {digest!r}"
        )
    try:
        count = len(parse_json(index, INDEX_BYTES)["chunks"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"{where}: the index is malformed: {error!r}") from error
    file = RankFile(name, size, offset, length, checksum, count)
    return file, parse_index(index, file, where)


def _require(checksum: str, entry: Entry, where: str) -> None:
    if checksum != entry.checksum:
        raise CorruptCheckpoint(f"{where}: its checksum is not the index's")
