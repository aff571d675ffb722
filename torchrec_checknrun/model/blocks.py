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
from torchrec_checknrun.errors import InvalidPlan
from torchrec_checknrun.format.block_chunk import BlockHeader, Path, decode_block, name_of
from torchrec_checknrun.format.chunk import BLOCK, EncodedChunk, Entry, dtype_name
from torchrec_checknrun.format.state import raw_bytes


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
            "kind": BLOCK,
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
