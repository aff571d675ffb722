"""Staged items: copies in staging memory, which the background encodes and writes.

Staged items hold offsets rather than bytes, so that they can be sent to another process that has
mapped the same memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from torchrec_checknrun.codecs.quantization import TableEncoding
from torchrec_checknrun.format.chunk import EncodedChunk
from torchrec_checknrun.format.entries import Entry
from torchrec_checknrun.format.row_chunk import encode_rows
from torchrec_checknrun.marks.row_copies import ShardCopies
from torchrec_checknrun.native import can_copy, has_extension
from torchrec_checknrun.shards import LocalShard, RowBlock, TableShape
from torchrec_checknrun.snapshot.memory import ALIGNMENT


@dataclass(frozen=True)
class StagedTensor:
    """A contiguous tensor at an offset of the memory."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return the size in bytes."""
        return self.dtype.itemsize * math.prod(self.shape)

    def at(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of the memory (``(size,)`` uint8)."""
        if not self.size:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        # Not by views: each would release Python's lock, and training wait to get it back.
        count = self.size // self.dtype.itemsize
        flat = torch.frombuffer(memory.numpy(), dtype=self.dtype, count=count, offset=self.offset)
        return flat if len(self.shape) == 1 else flat.view(self.shape)


def aligned(size: int) -> int:
    """Round a size in bytes up, so that the next piece begins where a view may begin."""
    return max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)


def rows_size(shard: LocalShard, rows: int) -> int:
    """Return the bytes of memory that a number of rows of a shard takes in ``StagedRows``."""
    return tensors_size(shard.tensors, rows)


def tensors_size(tensors: Iterable[torch.Tensor], rows: int) -> int:
    """Return the bytes of memory that rows of a shard's tensors take; see ``rows_size``."""
    per_row = [torch.int64.itemsize]
    per_row += [tensor.stride(0) * tensor.element_size() for tensor in tensors]
    return sum(aligned(rows * size) for size in per_row)


@dataclass(frozen=True)
class StagedRows:
    """Rows copied as they are in their table.

    Attributes:
        ids: global row ids, ``(n,)`` int64.
        weight: ``(n, columns)``, of the table's dtype.
        optimizer: optimizer state by name, ``(n,)`` or ``(n, columns)``.
        encoding: the encoding to be written.
    """

    table: str
    shape: TableShape
    columns: tuple[int, int]
    ids: StagedTensor
    weight: StagedTensor
    optimizer: Mapping[str, StagedTensor]
    encoding: TableEncoding

    @classmethod
    def plan(cls, shard: LocalShard, rows: int, encoding: TableEncoding, offset: int) -> StagedRows:
        """Lay out a number of rows of a shard in memory, part after part from ``offset`` on."""
        at = offset

        def place(shape: tuple[int, ...], dtype: torch.dtype) -> StagedTensor:
            nonlocal at
            staged = StagedTensor(at, dtype, shape)
            at += aligned(staged.size)
            return staged

        return cls(
            table=shard.table,
            shape=shard.shape,
            columns=(shard.rectangle.col_start, shard.rectangle.col_stop),
            ids=place((rows,), torch.int64),
            weight=place((rows, *shard.weight.shape[1:]), shard.weight.dtype),
            optimizer={
                name: place((rows, *state.shape[1:]), state.dtype)
                for name, state in shard.optimizer.items()
            },
            encoding=encoding,
        )

    def copy(
        self,
        shard: LocalShard,
        positions: torch.Tensor,
        memory: torch.Tensor,
        copies: ShardCopies | None = None,
    ) -> None:
        """Copy rows into the memory; copies from a GPU are queued on its current stream.

        Args:
            positions: positions of the rows in the shard, ``(n,)`` int64, sorted.
            copies: the rows as of the cut; None: the live ones are.
        """
        parts = [(shard.weight, self.weight)]
        parts += [(shard.optimizer[name], state) for name, state in self.optimizer.items()]
        if copies is not None:
            offsets = [self.ids.offset, *(staged.offset for _, staged in parts)]
            copies.stage(positions, shard.rectangle.row_start, memory, offsets)
            return
        if has_extension() and can_copy(memory, *(live for live, _ in parts)):
            # One call: between several calls, Python's lock would go from thread to thread.
            torch.ops.checknrun.stage_rows(
                positions,
                shard.rectangle.row_start,
                [live for live, _ in parts],
                memory,
                [self.ids.offset, *(staged.offset for _, staged in parts)],
            )
            return
        torch.add(positions, shard.rectangle.row_start, out=self.ids.at(memory))
        n, first = len(positions), int(positions[0])
        whole = int(positions[-1]) - first == n - 1  # a run of rows needs no gather
        here = positions if whole else positions.to(shard.weight.device)
        for live, staged in parts:
            into = staged.at(memory)
            if whole:
                into.copy_(live[first : first + n], non_blocking=True)
            elif live.is_cpu:
                torch.index_select(live, 0, here, out=into)
            else:
                into.copy_(live.index_select(0, here), non_blocking=True)

    def encode(self, memory: torch.Tensor) -> EncodedChunk:
        """Encode the rows as a chunk; parts of it may be views of the memory."""
        block = RowBlock(
            table=self.table,
            shape=self.shape,
            columns=self.columns,
            ids=self.ids.at(memory),
            weight=self.weight.at(memory),
            positions=None,
            optimizer={name: state.at(memory) for name, state in self.optimizer.items()},
        )
        return encode_rows(block, self.encoding)


@dataclass(frozen=True)
class StagedChunk:
    """A chunk that is encoded already."""

    entry: Entry
    data: StagedTensor

    def encode(self, memory: torch.Tensor) -> EncodedChunk:
        """Return the chunk; its bytes are views of the memory."""
        return EncodedChunk(self.entry, self.pieces(memory))

    def pieces(self, memory: torch.Tensor) -> list[bytes | memoryview]:
        """Return the chunk's bytes: views of the memory."""
        return [self.data.at(memory).numpy().data]


Staged = StagedRows | StagedChunk


@dataclass
class StagedJob:
    """A staged item that is to be written.

    Attributes:
        staged: the item; a process that maps the memory can encode it, too.
        memory: the staging memory, ``(size,)`` uint8.
        release: called once the item is written: its memory becomes free.
    """

    staged: Staged
    memory: torch.Tensor
    release: Callable[[], None]

    def encode(self) -> EncodedChunk:
        return self.staged.encode(self.memory)

    def close(self) -> None:
        self.release()


def with_encoding(staged: Staged, encoding: TableEncoding) -> Staged:
    """Replace the encoding of staged rows; return a staged chunk as it is."""
    if isinstance(staged, StagedRows):
        return dataclasses.replace(staged, encoding=encoding)
    return staged
