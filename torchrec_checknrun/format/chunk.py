"""A chunk: some rows of one shard, or one state object, as one run of bytes with its index entry.

The entry (JSON, in the rank file's index) says what the bytes are; the storage layer adds where
they are and their checksum.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import zstandard

from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format.checks import as_count
from torchrec_checknrun.format.state import Tree, decode_state

Entry = dict[str, Any]


class EncodedChunk(io.BytesIO):
    """A chunk's index entry and its bytes, which stay in pieces: joined, they would be there twice.

    A BytesIO because DCP's planners hand those over; this package uses ``pieces``.
    """

    def __init__(self, entry: Entry, pieces: list[bytes | memoryview]) -> None:
        super().__init__()
        self.entry = entry
        self.pieces = pieces

    def encode(self) -> EncodedChunk:
        """Itself: what is to be written may also be something that is yet to be encoded."""
        return self

    def getvalue(self) -> bytes:
        """All bytes; no copy of a single piece."""
        return b"".join(self.pieces)


def state_chunk(
    name: str, rank: int | None, tree: Tree, pieces: list[bytes | memoryview]
) -> EncodedChunk:
    """An encoded state object as a chunk; ``rank`` is None for one that all ranks have alike."""
    return EncodedChunk({"kind": "state", "name": name, "rank": rank, "tree": tree}, pieces)


def state_tree(entry: Entry) -> Tree:
    """A state chunk's tree.

    Raises:
        CorruptCheckpoint: there is none.
    """
    tree = entry.get("tree")
    if not isinstance(tree, dict):
        raise CorruptCheckpoint(f"index entry of state {entry.get('name')!r} has no tree")
    return tree


def decode_state_chunk(entry: Entry, payload: bytes | memoryview) -> Any:
    """The state object again.

    Raises:
        CorruptCheckpoint: tree and payload don't fit each other.
    """
    try:
        return decode_state(state_tree(entry), payload)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        name = entry.get("name")
        raise CorruptCheckpoint(f"state {name!r} can't be decoded: {error!r}") from error


def dtype_name(dtype: torch.dtype) -> str:
    """A data type as index entries have it."""
    return str(dtype).removeprefix("torch.")


DECODED_BYTES = 64 << 20
"""Up to which size a chunk's rows may be compressed: a few bytes can stand for any number of zeros,
and whoever reads them must have the memory. Larger chunks have bytes of their own, as many as
``decoded_most`` says.
"""


_EXPANSION = 64
"""A 64th part of a decoded chunk is stored at least; in 2 bit of fp64 it is a 32nd part."""


_LEVEL = 1
"""Of zstd: a higher one makes quantized rows no smaller."""


def decoded_most(stored: int) -> int:
    """Bytes that a chunk's rows may have, ids and optimizer state included, by those stored."""
    return max(DECODED_BYTES, _EXPANSION * stored)


@dataclass(frozen=True)
class Section:
    """A part of a payload.

    Attributes:
        stored: bytes in the payload.
        raw: bytes before compression; None if it isn't compressed.
    """

    stored: int
    raw: int | None

    @classmethod
    def of(cls, entry: Entry) -> Section:
        """What ``Sections.add`` has put into an index entry.

        Raises:
            KeyError, ValueError: it isn't that.
        """
        return cls(as_count(entry["bytes"]), as_count(entry["raw"]) if "raw" in entry else None)


class Sections:
    """A payload that is made.

    Args:
        compress: whether zstd is tried.
    """

    def __init__(self, compress: bool) -> None:
        self.pieces: list[bytes | memoryview] = []
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL) if compress else None

    def add(self, data: bytes | memoryview) -> Entry:
        """Appends a part; returns what reading needs to know of it."""
        size = memoryview(data).nbytes
        if self._compressor is not None:
            smaller = self._compressor.compress(data)
            if len(smaller) < size:
                self.pieces.append(smaller)
                return {"bytes": len(smaller), "raw": size}
        self.pieces.append(data)
        return {"bytes": size}


def open_sections(
    sections: Sequence[Section], payload: memoryview, most: int
) -> Iterator[memoryview]:
    """The parts again, each decompressed when it is asked for.

    Args:
        most: bytes that no part can have.

    Raises:
        ValueError: payload and sections don't fit each other.
    """
    total = sum(section.stored for section in sections)
    if total != len(payload):
        raise ValueError(f"it should have {total} bytes, not {len(payload)}")
    at = 0
    for section in sections:
        part = payload[at : at + section.stored]
        at += section.stored
        if section.raw is None:
            yield part
        else:
            yield memoryview(decompress(part, section.raw, section.raw, min(most, DECODED_BYTES)))


def decompress(part: bytes | memoryview, least: int, most: int, limit: int) -> bytes:
    """The content of a zstd frame that says how large it is; no memory for one of another size.

    Args:
        least, most: how many bytes it should have.
        limit: how many it can have at all.

    Raises:
        ValueError: it has others, or isn't a frame.
    """
    if least > limit:
        raise ValueError(f"a part claims {least} bytes, more than the {limit} it can have")
    try:
        size = zstandard.get_frame_parameters(part).content_size
        if not least <= size <= most:
            raise ValueError(f"a frame of {size} bytes, where {least} to {most} are possible")
        if not size:
            raise ValueError("an empty frame")
        data = zstandard.ZstdDecompressor().decompress(part, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise ValueError(f"a part can't be decompressed: {error}") from error
    if len(data) != size:
        raise ValueError(f"{len(data)} bytes in a frame that states {size}")
    return data
