"""The parts of a chunk's payload, each compressed where that makes it smaller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import zstandard

from torchrec_checknrun.chunks import Entry, as_count

_LEVEL = 1
"""Of zstd: a higher one makes quantized rows no smaller."""


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
        yield part if section.raw is None else _decompress(part, section.raw, most)


def _decompress(part: memoryview, size: int, most: int) -> memoryview:
    if size > most:
        raise ValueError(f"a part claims {size} bytes, more than the {most} it can have")
    try:
        data = zstandard.ZstdDecompressor().decompress(part, max_output_size=size)
    except zstandard.ZstdError as error:
        raise ValueError(f"a part can't be decompressed: {error}") from error
    if len(data) != size:
        raise ValueError(f"a part has {len(data)} bytes, not {size}")
    return memoryview(data)
