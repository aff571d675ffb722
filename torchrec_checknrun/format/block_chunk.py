"""Blocks of sharded tensors that are not tables: describe and check their index entries."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from torchrec_checknrun.boxes import Box
from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format.checks import LARGEST
from torchrec_checknrun.format.chunk import dtype_name
from torchrec_checknrun.format.entries import UNWRITTEN, BlockEntry
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
        if entry.length not in (UNWRITTEN, box.volume * dtype.itemsize):
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
    name = ".".join(str(key) for key in path)
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME // 2]}…"


def _check_within(box: Box, whole: Box) -> None:
    if len(box.spans) != len(whole.spans):
        raise ValueError(f"{len(box.spans)} spans for {len(whole.spans)} dimensions")
    for (start, stop), (first, last) in zip(box.spans, whole.spans, strict=True):
        if not first <= start <= stop <= last:
            raise ValueError(f"{start} to {stop} is not within {first} to {last}")
