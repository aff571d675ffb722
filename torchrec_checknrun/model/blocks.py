"""Sharded tensors that are no tables: FSDP2's dense parameters, TorchRec's managed collisions.

They may change anywhere, so that every checkpoint holds them wholly: each rank writes its local
parts, in pieces, and a restore takes from whichever pieces overlap the parts it has. Any dtype, any
number of dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from torchrec_checknrun.boxes import Box, Span, overlap, tiles
from torchrec_checknrun.errors import CorruptCheckpoint, InvalidPlan
from torchrec_checknrun.format.checks import LARGEST, as_count, as_text, list_of, optional, record
from torchrec_checknrun.format.chunk import EncodedChunk, Entry, dtype_name
from torchrec_checknrun.format.state import MOST_DEPTH, MOST_DIMENSIONS, TORCH_DTYPES, raw_bytes

KIND = "block"

Path = tuple[str | int, ...]
"""The keys that lead to a tensor in a state dict."""
_LONGEST_NAME = 1000
"""In an error: a stranger's checkpoint may have longer ones."""


@dataclass
class Block:
    """A local part of a sharded tensor, or all of a plain one that is restored from blocks.

    Attributes:
        size: the whole tensor's shape.
        box: which part of it this is.
        tensor: the live memory, of the box's shape.
        layout: the rows of all its shards on all ranks, sorted, if the tensor tells.
        replica: whether another rank writes the same.
        elsewhere: whether ranks that this one's mesh doesn't know may hold the same part.
    """

    path: Path
    size: tuple[int, ...]
    box: Box
    tensor: torch.Tensor
    layout: tuple[Span, ...] | None = None
    replica: bool = False
    elsewhere: bool = False

    @property
    def rows(self) -> Span:
        """Its span along the first dimension."""
        return self.box.spans[0]

    @property
    def summary(self) -> BlockSummary:
        """Tell the global plan what it must know, but for the digest."""
        return BlockSummary(self.path, dtype_name(self.tensor.dtype), self.size, self.box)

    def pieces(self, chunk_bytes: int) -> Iterator[Box]:
        """Parts of it that make chunks.

        Args:
            chunk_bytes: as for the rows of tables, of which a chunk holds a fifth.
        """
        return self.box.pieces(max(1, chunk_bytes // (5 * self.tensor.element_size())))

    def part(self, piece: Box) -> torch.Tensor:
        """The live memory of a box that lies within this one."""
        return self.tensor[piece.slices(self.box)]

    def encode(self, piece: Box) -> EncodedChunk:
        """Make a part a chunk; its bytes are the live memory's where that can be."""
        entry: Entry = {
            "kind": KIND,
            "path": list(self.path),
            "dtype": dtype_name(self.tensor.dtype),
            "size": list(self.size),
            "part": [list(span) for span in piece.spans],
            "shard": [list(span) for span in self.box.spans],
        }
        return EncodedChunk(entry, [raw_bytes(self.part(piece))])

    def write(self, header: BlockHeader, payload: memoryview) -> None:
        """Overwrite what a piece has of this part; floats become the tensor's type of float."""
        common = self.box.intersect(header.box)
        if common is not None:
            piece = decode_block(header, payload)
            self.part(common).copy_(piece[common.slices(header.box)])


@dataclass(frozen=True)
class BlockSummary:
    """What rank 0 needs of a block to check the whole.

    Attributes:
        digest: of its values; None if no other rank may have the same part.
    """

    path: Path
    dtype: str
    size: tuple[int, ...]
    box: Box
    digest: str | None = None


@dataclass(frozen=True)
class BlockHeader:
    """A piece's index entry, checked."""

    path: Path
    dtype: torch.dtype
    size: tuple[int, ...]
    box: Box
    shard: Box
    """The whole part that this is a piece of."""

    @property
    def kind(self) -> str:
        """Type and shape of the whole tensor, as errors give them."""
        return f"{dtype_name(self.dtype)} {list(self.size)}"


def block_header(entry: Entry) -> BlockHeader:
    """Check an index entry.

    Raises:
        CorruptCheckpoint: a field is missing, of a wrong type or out of range.
    """
    try:
        found = record(entry, _FIELDS, "offset", "length", "checksum")
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
    """Make a piece's bytes a tensor of its box's shape."""
    if not len(payload):
        return torch.empty(header.box.shape, dtype=header.dtype, device="cpu")
    # Of memory of its own: tensors must be writable, and the bytes may be anywhere.
    data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return data.view(header.dtype).view(header.box.shape)


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


_FIELDS = {
    **dict.fromkeys(("kind", "dtype"), as_text),
    **dict.fromkeys(("offset", "length"), as_count),
    "size": list_of(as_count),
    **dict.fromkeys(("part", "shard"), list_of(_as_span)),
    "checksum": optional(as_text),
    "path": list_of(_as_key),
}


def check_blocks(path: Path, parts: list[tuple[BlockSummary, int]]) -> set[int]:
    """Refuse a sharded tensor that ranks see differently, or write twice or in part.

    Args:
        parts: its local parts on all ranks, each with its rank.

    Returns:
        Positions among ``parts`` of those that a lower rank has as well, to be left out.

    Raises:
        InvalidPlan: names the tensor and the ranks.
    """
    first, first_rank = parts[0]
    name = name_of(path)
    writers: dict[Box, tuple[BlockSummary, int]] = {}
    again: set[int] = set()
    for i in sorted(range(len(parts)), key=lambda i: parts[i][1]):
        part, rank = parts[i]
        if (part.dtype, part.size) != (first.dtype, first.size):
            raise InvalidPlan(
                f"{name} is {first.dtype} {list(first.size)} on rank {first_rank} and "
                f"{part.dtype} {list(part.size)} on rank {rank}: save one model at a time"
            )
        known, known_rank = writers.setdefault(part.box, (part, rank))
        if known is part or not part.box.volume:
            again |= {i} if known is not part else set()
        elif part.digest is None or known.digest is None:
            continue  # an overlap, see below
        elif part.digest != known.digest:
            raise InvalidPlan(
                f"{name}: ranks {known_rank} and {rank} hold {part.box} each on a mesh of its own, "
                "with different values. Where all are to be saved give them names of their own; "
                "where they should be the same, the ranks have come apart"
            )
        else:
            again.add(i)
    held = [
        pair for i, pair in enumerate((part.box, rank) for part, rank in parts) if i not in again
    ]
    whole = Box.whole(first.size)
    if tiles(whole, (box for box, _ in held)):
        return again
    if common := overlap(held):
        one, rank, other, other_rank = common
        raise InvalidPlan(f"{name}: ranks {rank} and {other_rank} would both write {one} ∩ {other}")
    size = " × ".join(map(str, first.size))
    raise InvalidPlan(
        f"{name}: the ranks hold {sum(box.volume for box, _ in held)} of {size} values, as "
        f"{[str(box) for box, _ in held]}; every rank must take part in the save, with the process "
        "group the model is sharded over"
    )


def name_of(path: Path) -> str:
    """A path as errors call it."""
    name = ".".join(str(key) for key in path)
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME // 2]}…"
