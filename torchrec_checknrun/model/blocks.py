"""Cut sharded tensors that are no tables into chunks: FSDP2 parameters, managed collisions.

Such tensors may change anywhere, so every checkpoint holds them whole: each rank writes its local
parts, in pieces, and a restore reads the pieces that overlap its parts. Any dtype, any number of
dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from torchrec_checknrun.boxes import Box, Span, overlap, tiles
from torchrec_checknrun.errors import InvalidPlan, UnsupportedState
from torchrec_checknrun.format.chunk import (
    BlockHeader,
    EncodedChunk,
    Path,
    decode_block,
    dtype_name,
    name_of,
)
from torchrec_checknrun.format.entries import BlockEntry
from torchrec_checknrun.values.state import TORCH_DTYPES
from torchrec_checknrun.values.tensor_bytes import raw_bytes


def is_step(path: Path) -> bool:
    """Return whether a sharded tensor is the step counter that TorchRec shows, a value for each
    shard, among the state of some fused optimizers; by its path in a state dict.
    """
    return len(path) > 1 and str(path[-1]).endswith(".iter") and str(path[-2]).endswith(".weight")


@dataclass
class Block:
    """A local part of a sharded tensor, or all of a plain one that some ranks lack, or that is
    restored from blocks.

    Attributes:
        path: of the tensor in the state dict.
        size: the whole tensor's shape.
        box: the part's place in the whole tensor.
        tensor: the live memory, of the box's shape.
        layout: the rows of the tensor's shards on all ranks, sorted; None if unknown.
        replica: whether another rank writes the same part.
        elsewhere: whether ranks outside of this one's device mesh may hold the same part.
        averaged: whether ranks of other sharding groups hold the same part, with values of their
            own from one average to the next, as ``LocalShard`` has it.
    """

    path: Path
    size: tuple[int, ...]
    box: Box
    tensor: torch.Tensor
    layout: tuple[Span, ...] | None = None
    replica: bool = False
    elsewhere: bool = False
    averaged: bool = False

    @property
    def rows(self) -> Span:
        """Return the part's span along the first dimension."""
        return self.box.spans[0]

    @property
    def summary(self) -> BlockSummary:
        """Return the summary for the global plan, without the digest."""
        dtype = dtype_name(self.tensor.dtype)
        return BlockSummary(self.path, dtype, self.size, self.box, averaged=self.averaged)

    def pieces(self, chunk_bytes: int) -> Iterator[Box]:
        """Cut the part into pieces, one for each chunk.

        Args:
            chunk_bytes: as for table rows; a piece has at most a fifth of these bytes.
        """
        return self.box.pieces(max(1, chunk_bytes // (5 * self.tensor.element_size())))

    def part(self, piece: Box) -> torch.Tensor:
        """Return the live memory of a box that lies within this one."""
        return self.tensor[piece.slices(self.box)]

    def encode(self, piece: Box) -> EncodedChunk:
        """Encode a piece as a chunk, whose bytes are the live memory where possible."""
        entry = BlockEntry(
            path=self.path,
            dtype=dtype_name(self.tensor.dtype),
            size=self.size,
            part=piece.spans,
            shard=self.box.spans,
        )
        return EncodedChunk(entry, [raw_bytes(self.part(piece))])

    def write(self, header: BlockHeader, payload: memoryview) -> None:
        """Write the values that a piece has of this part, converted to the tensor's dtype."""
        common = self.box.intersect(header.box)
        if common is not None:
            piece = decode_block(header, payload)
            self.part(common).copy_(piece[common.slices(header.box)])


def whole_block(path: Path, tensor: torch.Tensor) -> Block:
    """Return a plain tensor as a block that some ranks have, and others lack.

    Raises:
        UnsupportedState: it can't be stored.
    """
    require_storable(path, tensor)
    whole, size = Box.whole(tensor.shape), tuple(tensor.shape)
    return Block(path, size, whole, tensor.detach(), elsewhere=True)


def require_storable(path: Path, tensor: torch.Tensor) -> None:
    """Refuse a local tensor that no block can hold.

    Raises:
        UnsupportedState: it is sparse, has no data, or is of another dtype.
    """
    plain = tensor.layout == torch.strided and not tensor.is_meta
    if not plain or dtype_name(tensor.dtype) not in TORCH_DTYPES:
        raise UnsupportedState(
            f"{name_of(path)} is a {tensor.layout} {tensor.dtype} tensor on {tensor.device}, which "
            "is sharded or only some ranks have: only dense tensors with data can be stored"
        )


@dataclass(frozen=True)
class BlockSummary:
    """The facts about a block that rank 0 needs to check the whole tensor.

    Attributes:
        digest: of the block's values; None if no other rank may have the same part.
        averaged: as of ``Block``.
    """

    path: Path
    dtype: str
    size: tuple[int, ...]
    box: Box
    digest: str | None = None
    averaged: bool = False


def check_blocks(path: Path, parts: list[tuple[BlockSummary, int]]) -> set[int]:
    """Refuse a sharded tensor that ranks see differently, write twice or write only in part.

    Args:
        parts: the tensor's local parts on all ranks, each with its rank.

    Returns:
        Positions among ``parts`` of the duplicates of a lower rank's part, to be left out.

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
        if known is part:
            continue
        apart = part.box.volume > 0 and not (part.averaged and known.averaged)
        if apart and None in (part.digest, known.digest):
            continue  # refused below as an overlap
        if apart and part.digest != known.digest:
            raise InvalidPlan(
                f"{name}: ranks {known_rank} and {rank} hold {part.box} each on a mesh of its own, "
                "with different values. To save them all, give them different names; if they "
                "should be equal, the ranks have diverged"
            )
        again.add(i)
    held = [(part.box, rank) for i, (part, rank) in enumerate(parts) if i not in again]
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
