"""A chunk: rows of one shard, a block of a sharded tensor or one state object, as one run of bytes.

Each chunk has an entry (JSON) in its rank file's index that describes the bytes; the rank file adds
position and checksum. The payload of a chunk of rows is a sequence of sections, each compressed
where that makes it smaller.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import zstandard
from msgspec import UNSET

from torchrec_checknrun.boxes import Box
from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format.entries import (
    UNWRITTEN,
    BlockEntry,
    CollisionsEntry,
    Entry,
    IdsSection,
    Section,
    StateEntry,
    content_bytes,
)
from torchrec_checknrun.values.keys import key_name
from torchrec_checknrun.values.limits import LARGEST
from torchrec_checknrun.values.state import (
    MOST_DEPTH,
    MOST_DIMENSIONS,
    TORCH_DTYPES,
    Tree,
    decode_state,
)

DECODED_BYTES = 64 << 20
"""The largest decoded chunk that may be compressed: a few bytes can expand to any number of zeros,
and readers need memory for them. Larger chunks are limited by their stored bytes, see
``decoded_most``.
"""

_LONGEST_NAME = 1000
"""Characters of a path in an error: an untrusted checkpoint may have longer ones."""

Path = tuple[str | int, ...]
"""The keys that lead to a tensor in a state dict."""

_EXPANSION = 64
"""The largest ratio of decoded to stored bytes of an uncompressed chunk; 2-bit fp64 has 32."""

_LEVEL = 1
"""Level of zstd: higher ones make quantized rows no smaller."""


class EncodedChunk(io.BytesIO):
    """A chunk's index entry and its bytes, in pieces: joining them would hold the bytes twice.

    A BytesIO because DCP's planners pass such objects; this package uses ``pieces``.
    """

    def __init__(self, entry: Entry, pieces: list[bytes | memoryview]) -> None:
        super().__init__()
        self.entry = entry
        self.pieces = pieces

    @cached_property
    def sizes(self) -> list[int]:
        """Return the bytes of each piece."""
        return [p.nbytes if type(p) is memoryview else len(p) for p in self.pieces]

    def encode(self) -> EncodedChunk:
        """Return this chunk: it takes the place of jobs that encode their chunk only when asked."""
        return self

    def getvalue(self) -> bytes:
        """Return all bytes, without a copy if there is a single piece."""
        return b"".join(self.pieces)


def state_chunk(
    name: str, rank: int | None, tree: Tree, pieces: list[bytes | memoryview]
) -> EncodedChunk:
    """Wrap an encoded state object as a chunk; ``rank`` is None for a replicated object."""
    return EncodedChunk(StateEntry(name=name, rank=rank, tree=tree), pieces)


def decode_state_chunk(entry: StateEntry | CollisionsEntry, payload: bytes | memoryview) -> Any:
    """Decode a chunk's state object.

    Raises:
        CorruptCheckpoint: tree and payload don't match.
    """
    try:
        return decode_state(entry.tree, payload)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CorruptCheckpoint(f"state {entry.name!r} can't be decoded: {error!r}") from error


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in index entries."""
    return str(dtype).removeprefix("torch.")


def decoded_most(stored: int) -> int:
    """Return the most bytes that a chunk of so many stored bytes may decode to: rows, row ids and
    optimizer state.
    """
    return max(DECODED_BYTES, _EXPANSION * stored)


def part_most(rows: int, cols: int) -> int:
    """Return the most bytes that a part of a chunk of so many rows may decompress to."""
    return min(rows * (8 * cols + 64), DECODED_BYTES)


class Sections:
    """A payload under construction.

    Args:
        most: the largest part to try zstd on, in bytes: readers refuse larger ones, see
            ``part_most``. 0: none is tried.
    """

    def __init__(self, most: int) -> None:
        self.pieces: list[bytes | memoryview] = []
        self._most = most
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL) if most else None

    def add(self, data: bytes | memoryview) -> Section:
        """Append a part; return its sizes for the index entry."""
        size = memoryview(data).nbytes
        if self._compressor is not None and size <= self._most:
            smaller = self._compressor.compress(data)
            if len(smaller) < size:
                self.pieces.append(smaller)
                return Section(bytes=len(smaller), raw=size)
        self.pieces.append(data)
        return Section(bytes=size)


def open_sections(
    sections: Sequence[Section | IdsSection], payload: memoryview, most: int
) -> Iterator[memoryview]:
    """Yield a payload's parts, each decompressed when the iterator reaches it.

    Args:
        most: the largest possible size of a decompressed part, see ``part_most``.

    Raises:
        ValueError: payload and sections don't match.
    """
    total = sum(section.bytes for section in sections)
    if total != len(payload):
        raise ValueError(f"the payload should have {total} bytes, not {len(payload)}")
    at = 0
    for section in sections:
        part = payload[at : at + section.bytes]
        at += section.bytes
        if isinstance(section, IdsSection) or section.raw is UNSET:
            yield part
        else:
            yield memoryview(decompress(part, section.raw, section.raw, most))


def decompress(part: bytes | memoryview, least: int, most: int, limit: int) -> bytes:
    """Decompress a zstd frame, allocating no more memory than the frame's stated, checked size.

    Args:
        least, most: the range of sizes expected.
        limit: the largest size allowed at all.

    Raises:
        ValueError: the size is out of range, or the part is not a frame.
    """
    if least > limit:
        raise ValueError(f"a part claims {least} bytes, more than the {limit} allowed")
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


@dataclass(frozen=True)
class BlockHeader:
    """A block's index entry, checked.

    Attributes:
        path: the keys that lead to the tensor.
        size: the whole tensor's.
        box: where the block lies in the tensor.
        shard: the box of the shard that the block is a piece of.
    """

    path: Path
    dtype: torch.dtype
    size: tuple[int, ...]
    box: Box
    shard: Box

    @property
    def kind(self) -> str:
        """Return the whole tensor's dtype and shape, for errors."""
        return f"{dtype_name(self.dtype)} {list(self.size)}"


def block_header(entry: BlockEntry) -> BlockHeader:
    """Check how the fields of an index entry agree.

    Raises:
        CorruptCheckpoint: a field is out of range.
    """
    try:
        size, box, shard = entry.size, Box(entry.part), Box(entry.shard)
        if not 1 <= len(entry.path) <= MOST_DEPTH:
            raise ValueError(f"a path of {len(entry.path)} keys")
        if len(size) > MOST_DIMENSIONS or math.prod(n or 1 for n in size) > LARGEST:
            raise ValueError(f"size {list(size)[:40]} is too large")
        if entry.dtype not in TORCH_DTYPES:
            raise ValueError(f"dtype {entry.dtype!r}")
        dtype = TORCH_DTYPES[entry.dtype]
        _check_within(shard, Box.whole(size))
        _check_within(box, shard)
        if content_bytes(entry) not in (UNWRITTEN, box.volume * dtype.itemsize):
            raise ValueError(f"{entry.length} bytes for {box} of {dtype}")
        return BlockHeader(entry.path, dtype, size, box, shard)
    except ValueError as error:
        raise CorruptCheckpoint(f"index entry of a block chunk is malformed: {error!r}") from error


def decode_block(header: BlockHeader, payload: memoryview) -> torch.Tensor:
    """Decode a block's bytes into a tensor of its box's shape."""
    if not len(payload):
        return torch.empty(header.box.shape, dtype=header.dtype, device="cpu")
    # A copy: tensors must be writable and aligned, and the payload may be neither.
    data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return data.view(header.dtype).view(header.box.shape)


def name_of(path: Path) -> str:
    """Return a path's name for errors."""
    name = ".".join(map(key_name, path))
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME // 2]}…"


def _check_within(box: Box, whole: Box) -> None:
    if len(box.spans) != len(whole.spans):
        raise ValueError(f"{len(box.spans)} spans for {len(whole.spans)} dimensions")
    for (start, stop), (first, last) in zip(box.spans, whole.spans, strict=True):
        if not first <= start <= stop <= last:
            raise ValueError(f"{start} to {stop} is not within {first} to {last}")
