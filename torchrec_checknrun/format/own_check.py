"""Check a rank file by itself, without the manifest: its footer, its index, and every chunk.

For copies of rank files that lie elsewhere than in their checkpoint.
"""

from __future__ import annotations

import json

import xxhash

from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format.checks import INDEX_BYTES
from torchrec_checknrun.format.manifest import RankFile
from torchrec_checknrun.format.rank_file import FOOTER, MAGIC, parse_index
from torchrec_checknrun.store.folder import Folder

_PIECE = 8 << 20


def check_rank_file(folder: Folder, name: str) -> RankFile:
    """Read a rank file and check all of it; return what a manifest says of it.

    Raises:
        CorruptCheckpoint: it is missing, cut off or damaged.
        UnsupportedFormat: a chunk's kind or codec is unknown to this release.
        OSError: the storage failed.
    """
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
    file = RankFile(name, size, offset, length, checksum, len(json.loads(index)["chunks"]))
    for number, (entry, _) in enumerate(parse_index(index, file, where)):
        found = xxhash.xxh3_64()
        for start in range(entry.offset, entry.offset + entry.length, _PIECE):
            stop = min(start + _PIECE, entry.offset + entry.length)
            found.update(folder.read(name, start, stop - start))
        if found.hexdigest() != entry.checksum:
            raise CorruptCheckpoint(f"{where}, chunk {number}: its checksum is not the index's")
    return file
