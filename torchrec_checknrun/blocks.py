"""Sharded tensors that are no tables: TorchRec's managed collisions keep such buffers.

They weigh little beside the tables and may change anywhere, so that every checkpoint holds them
wholly: each rank writes its local shards, in pieces, and a restore takes from whichever pieces
overlap the shards it has. Any dtype, one or two dimensions; of one dimension is one column.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchrec_checknrun.chunks import EncodedChunk, Entry, dtype_name
from torchrec_checknrun.coverage import check_coverage, tiles
from torchrec_checknrun.errors import CorruptCheckpoint, IncompatibleCheckpoint, InvalidPlan
from torchrec_checknrun.shards import Rectangle, TableShape
from torchrec_checknrun.state import TORCH_DTYPES, raw_bytes
from torchrec_checknrun.untrusted import LARGEST, as_count, as_text, list_of, optional, record

KIND = "block"

Path = tuple[str | int, ...]
"""The keys that lead to a tensor in a state dict."""
Span = tuple[int, int]
"""Rows ``[start, stop)``."""


@dataclass
class Block:
    """A local shard of a sharded tensor.

    Attributes:
        size: the whole tensor's, one or two numbers.
        rectangle: which part of it this is.
        tensor: the live memory.
        layout: the rows of all its shards on all ranks, sorted, if the tensor tells.
    """

    path: Path
    size: tuple[int, ...]
    rectangle: Rectangle
    tensor: torch.Tensor
    layout: tuple[Span, ...] | None = None

    @property
    def summary(self) -> BlockSummary:
        """What the global plan must know of it."""
        return BlockSummary(self.path, dtype_name(self.tensor.dtype), self.size, self.rectangle)

    def spans(self, chunk_bytes: int) -> Iterator[Span]:
        """Ranges of local rows that make chunks.

        Args:
            chunk_bytes: as for the rows of tables, of which a chunk holds a fifth.
        """
        row = max(1, self.tensor.element_size() * self.rectangle.cols)
        size = max(1, chunk_bytes // (5 * row))
        for start in range(0, self.rectangle.rows, size):
            yield start, min(start + size, self.rectangle.rows)

    def encode(self, start: int, stop: int) -> EncodedChunk:
        """A range of local rows as a chunk; its bytes are the live memory's where that can be."""
        own = self.rectangle
        entry: Entry = {
            "kind": KIND,
            "path": list(self.path),
            "dtype": dtype_name(self.tensor.dtype),
            "size": list(self.size),
            "rows": [own.row_start + start, own.row_start + stop],
            "columns": [own.col_start, own.col_stop],
            "shard_rows": [own.row_start, own.row_stop],
        }
        return EncodedChunk(entry, [raw_bytes(self.tensor[start:stop])])

    def write(self, header: BlockHeader, payload: memoryview) -> None:
        """Overwrites what a piece has of this shard."""
        own, piece = self.rectangle, header.rectangle
        common = own.intersect(piece)
        if common is None:
            return
        row = header.dtype.itemsize * piece.cols
        start, stop = common.row_start - piece.row_start, common.row_stop - piece.row_start
        part = bytearray(payload[start * row : stop * row])  # tensors must be writable
        rows = torch.frombuffer(part, dtype=torch.uint8).view(header.dtype).view(-1, piece.cols)
        target = self.tensor if self.tensor.dim() == 2 else self.tensor.unsqueeze(1)
        first, column = common.row_start - own.row_start, common.col_start - own.col_start
        column_in_piece = common.col_start - piece.col_start
        target[first : first + common.rows, column : column + common.cols].copy_(
            rows[:, column_in_piece : column_in_piece + common.cols]
        )


@dataclass(frozen=True)
class BlockSummary:
    """What rank 0 needs of a block to check the whole."""

    path: Path
    dtype: str
    size: tuple[int, ...]
    rectangle: Rectangle


@dataclass(frozen=True)
class BlockHeader:
    """A piece's index entry, checked."""

    path: Path
    dtype: torch.dtype
    size: tuple[int, ...]
    rectangle: Rectangle
    shard_rows: Span
    """The rows of the whole shard that this is a piece of."""


def block_header(entry: Entry) -> BlockHeader:
    """The entry, checked.

    Raises:
        CorruptCheckpoint: a field is missing, of a wrong type or out of range.
    """
    try:
        found = record(entry, _FIELDS, "offset", "length", "checksum")
        size = tuple(found["size"])
        (row_start, row_stop), (col_start, col_stop) = found["rows"], found["columns"]
        rectangle = Rectangle(row_start, row_stop, col_start, col_stop)
        whole = whole_of(size)
        if found["dtype"] not in TORCH_DTYPES:
            raise ValueError(f"dtype {found['dtype']!r}")
        dtype = TORCH_DTYPES[found["dtype"]]
        first, last = found["shard_rows"]
        if rectangle.intersect(Rectangle(0, whole.rows, 0, whole.dim)) != rectangle:
            raise ValueError(f"{rectangle} of {size}")
        if not first <= row_start <= row_stop <= last <= whole.rows:
            raise ValueError(f"rows {row_start} to {row_stop} of a shard of {first} to {last}")
        length = found.get("length", rectangle.area * dtype.itemsize)
        if length != rectangle.area * dtype.itemsize or whole.rows * whole.dim > LARGEST:
            raise ValueError(f"{length} bytes for {rectangle} of {dtype}")
        return BlockHeader(tuple(found["path"]), dtype, size, rectangle, (first, last))
    except ValueError as error:
        raise CorruptCheckpoint(f"index entry of a block is malformed: {error!r}") from error


def _as_key(value: object) -> str | int:
    return as_count(value) if type(value) is int else as_text(value)


_FIELDS = {
    **dict.fromkeys(("kind", "dtype"), as_text),
    **dict.fromkeys(("offset", "length"), as_count),
    **dict.fromkeys(("size", "rows", "columns", "shard_rows"), list_of(as_count)),
    "checksum": optional(as_text),
    "path": list_of(_as_key),
}


def whole_of(size: tuple[int, ...]) -> TableShape:
    """A sharded tensor's size as rows and columns.

    Raises:
        ValueError: it has no or more than two dimensions.
    """
    if len(size) not in (1, 2):
        raise ValueError(f"{len(size)} dimensions")
    return TableShape(size[0], math.prod(size[1:]))


def check_blocks(path: Path, parts: list[tuple[BlockSummary, int]]) -> None:
    """Refuses a sharded tensor that ranks see differently, or write twice or in part.

    Args:
        parts: its local shards on all ranks, each with its rank.

    Raises:
        InvalidPlan: names the tensor and the ranks.
    """
    (first, first_rank), *others = parts
    for other, rank in others:
        if (other.dtype, other.size) != (first.dtype, first.size):
            raise InvalidPlan(
                f"{name_of(path)} is {first.dtype} {list(first.size)} on rank {first_rank} and "
                f"{other.dtype} {list(other.size)} on rank {rank}: save one model at a time"
            )
    held = ((part.rectangle, rank) for part, rank in parts)
    check_coverage(name_of(path), whole_of(first.size), held)


class BlockRestore:
    """Restores sharded tensors from the pieces that a checkpoint has of them.

    Args:
        blocks: the local shards that are to be restored.
        strict: whether the checkpoint must have them; if not, they stay and are listed.

    Attributes:
        skipped: what was on one side only, or differs.
    """

    def __init__(self, blocks: Iterable[Block], strict: bool) -> None:
        self._wanted: dict[Path, list[Block]] = {}
        for block in blocks:
            self._wanted.setdefault(block.path, []).append(block)
        self._strict = strict
        self._saved: dict[Path, dict[str, BlockHeader]] = {}
        self.skipped: list[str] = []

    def plan(self, entries: Mapping[str, Entry], where: str, asked: Iterable[Any]) -> list[str]:
        """Checks the checkpoint's pieces against the local shards.

        Args:
            entries: index entries of the checkpoint's pieces, by the name of the chunk.
            where: what errors call the checkpoint.
            asked: the state dict's keys.

        Returns:
            The names of the chunks that are needed.

        Raises:
            IncompatibleCheckpoint: a tensor is missing there, or of another size or dtype.
            CorruptCheckpoint: a piece is missing or malformed.
        """
        for name, entry in entries.items():
            header = block_header(entry)
            self._saved.setdefault(header.path, {})[name] = header
        if not self._strict:
            keys = set(asked)
            self.skipped += [
                f"state {name_of(path)}: only in the checkpoint"
                for path in self._saved.keys() - self._wanted.keys()
                if path[0] in keys
            ]
        needed: dict[str, None] = {}
        for path, blocks in list(self._wanted.items()):
            problem = self._misfit(path, blocks[0], where)
            if problem and self._strict:
                raise IncompatibleCheckpoint(
                    f"{name_of(path)} {problem}: restore with the model and state objects it was "
                    "saved with, or keep what is there with strict=False"
                )
            if problem:
                self.skipped.append(f"state {name_of(path)} {problem}")
                del self._wanted[path]
                continue
            for block in blocks:
                needed.update(dict.fromkeys(self._needed(block, where)))
        return list(needed)

    def blocks(self) -> Iterator[tuple[Block, tuple[Span, ...]]]:
        """After ``plan``: the local shards that will be restored, with the shards' rows when they
        were saved, sorted.
        """
        for path, blocks in self._wanted.items():
            layout = tuple(sorted({header.shard_rows for header in self._saved[path].values()}))
            for block in blocks:
                yield block, layout

    def load(self, entry: Entry, payload: bytes | memoryview) -> None:
        """Writes a piece into the local shards that it is for."""
        header = block_header(entry)
        for block in self._wanted.get(header.path, ()):
            block.write(header, memoryview(payload))

    def _misfit(self, path: Path, block: Block, where: str) -> str | None:
        if path not in self._saved:
            return f"is not in {where}"
        for header in self._saved[path].values():
            if (header.size, header.dtype) != (block.size, block.tensor.dtype):
                return (
                    f"is {dtype_name(header.dtype)} {list(header.size)} in {where}, and "
                    f"{dtype_name(block.tensor.dtype)} {list(block.size)} in the model"
                )
        return None

    def _needed(self, block: Block, where: str) -> Iterator[str]:
        common = {
            name: part
            for name, header in self._saved[block.path].items()
            if (part := block.rectangle.intersect(header.rectangle))
        }
        if not tiles(block.rectangle, common.values()):
            found = sum(part.area for part in common.values())
            raise CorruptCheckpoint(
                f"{where} holds {found} of the {block.rectangle.area} values of "
                f"{name_of(block.path)}{block.rectangle}, or some twice: pieces are missing"
            )
        yield from common


def name_of(path: Path) -> str:
    """A path as errors call it."""
    return ".".join(str(key) for key in path)
