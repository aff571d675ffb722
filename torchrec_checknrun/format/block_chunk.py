"""Blocks of sharded tensors that are not tables: describe and check their index entries."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchrec_checknrun.boxes import Box
from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format.checks import (
    LARGEST,
    Check,
    as_count,
    as_text,
    check_object,
    list_of,
    optional,
)
from torchrec_checknrun.format.chunk import Entry, dtype_name
from torchrec_checknrun.format.state import MOST_DEPTH, MOST_DIMENSIONS, TORCH_DTYPES

_LONGEST_NAME = 1000
"""Characters of a path in an error: an untrusted checkpoint may have longer ones."""

Path = tuple[str | int, ...]
"""The keys that lead to a tensor in a state dict."""


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
        """The whole tensor's dtype and shape, for errors."""
        return f"{dtype_name(self.dtype)} {list(self.size)}"


def block_header(entry: Entry) -> BlockHeader:
    """Check an index entry.

    Raises:
        CorruptCheckpoint: a field is missing, of a wrong type or out of range.
    """
    try:
        found = check_object(entry, _FIELDS, "offset", "length", "checksum")
        size = tuple(found["size"])
        if not 1 <= len(found["path"]) <= MOST_DEPTH:
            raise ValueError(f"a path of {len(found['path'])} keys")
        if len(size) > MOST_DIMENSIONS or Box.whole([n or 1 for n in size]).volume > LARGEST:
            raise ValueError(f"size {list(size)[:40]} is too large")
        if found["dtype"] not in TORCH_DTYPES:
            raise ValueError(f"dtype {found['dtype']!r}")
        dtype = TORCH_DTYPES[found["dtype"]]
        shard = _box_within(found["shard"], Box.whole(size))
        box = _box_within(found["part"], shard)
        length = found.get("length", box.volume * dtype.itemsize)
        if length != box.volume * dtype.itemsize:
            raise ValueError(f"{length} bytes for {box} of {dtype}")
        return BlockHeader(tuple(found["path"]), dtype, size, box, shard)
    except ValueError as error:
        raise CorruptCheckpoint(f"index entry of a block is malformed: {error!r}") from error


def decode_block(header: BlockHeader, payload: memoryview) -> torch.Tensor:
    """Decode a block's bytes into a tensor of its box's shape."""
    if not len(payload):
        return torch.empty(header.box.shape, dtype=header.dtype, device="cpu")
    # A copy: tensors must be writable and aligned, and the payload may be neither.
    data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return data.view(header.dtype).view(header.box.shape)


def name_of(path: Path) -> str:
    """Return a path's name for errors."""
    name = ".".join(str(key) for key in path)
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME // 2]}…"


def _box_within(spans: list[tuple[int, int]], whole: Box) -> Box:
    if len(spans) != len(whole.spans):
        raise ValueError(f"{len(spans)} spans for {len(whole.spans)} dimensions")
    for (start, stop), (first, last) in zip(spans, whole.spans, strict=True):
        if not first <= start <= stop <= last:
            raise ValueError(f"{start} to {stop} is not within {first} to {last}")
    return Box(tuple(spans))


def _as_key(value: object) -> str | int:
    return as_count(value) if type(value) is int else as_text(value)


def _as_span(value: object) -> tuple[int, int]:
    start, stop = list_of(as_count)(value)
    return start, stop


_FIELDS: dict[str, Check] = {
    **dict.fromkeys(("kind", "dtype"), as_text),
    **dict.fromkeys(("offset", "length"), as_count),
    "size": list_of(as_count),
    **dict.fromkeys(("part", "shard"), list_of(_as_span)),
    "checksum": optional(as_text),
    "path": list_of(_as_key),
}
