"""Copies of what a checkpoint will hold, in staging memory: what the background encodes and writes.

Every object here says only where in the memory its bytes are, so that it can be sent to another
process that has mapped the same memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from torchrec_checknrun.codecs.quantization import TableEncoding
from torchrec_checknrun.format.chunk import EncodedChunk, Entry
from torchrec_checknrun.format.row_chunk import encode_rows
from torchrec_checknrun.native import can_copy, has_extension
from torchrec_checknrun.save.memory import ALIGNMENT
from torchrec_checknrun.shards import LocalShard, RowBlock, TableShape


@dataclass(frozen=True)
class StagedTensor:
    """A contiguous tensor at some offset of the memory."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.dtype.itemsize * math.prod(self.shape)

    def at(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor, a view of the memory."""
        if not self.size:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        # Not by views: each would give Python's lock away, and training wait to get it back.
        count = self.size // self.dtype.itemsize
        flat = torch.frombuffer(memory.numpy(), dtype=self.dtype, count=count, offset=self.offset)
        return flat if len(self.shape) == 1 else flat.view(self.shape)


def aligned(size: int) -> int:
    """Bytes of memory for so many bytes: the next piece begins where a view of it may begin."""
    return max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)


def rows_size(shard: LocalShard, rows: int) -> int:
    """Bytes of memory for so many rows of a shard, see ``StagedRows.plan``."""
    per_row = [torch.int64.itemsize]
    per_row += [tensor.stride(0) * tensor.element_size() for tensor in shard.tensors]
    return sum(aligned(rows * size) for size in per_row)


@dataclass(frozen=True)
class StagedRows:
    """Rows as they were in their table."""

    table: str
    shape: TableShape
    columns: tuple[int, int]
    ids: StagedTensor
    weight: StagedTensor
    optimizer: Mapping[str, StagedTensor]
    encoding: TableEncoding

    @classmethod
    def plan(cls, shard: LocalShard, rows: int, encoding: TableEncoding, offset: int) -> StagedRows:
        """Where so many rows of a shard will be, each part behind the other from ``offset`` on."""
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

    def copy(self, shard: LocalShard, positions: torch.Tensor, memory: torch.Tensor) -> None:
        """Fills the memory; copies from a GPU are left to its current stream.

        Args:
            positions: ``(n,)`` int64, sorted: which of the shard's rows.
        """
        parts = [(shard.weight, self.weight)]
        parts += [(shard.optimizer[name], state) for name, state in self.optimizer.items()]
        if has_extension() and all(can_copy(live, memory) for live, _ in parts):
            # One call: between several, Python's lock would go from thread to thread.
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
        """As a chunk; parts of it may be views of the memory."""
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
        """The chunk; its bytes are views of the memory."""
        return EncodedChunk(self.entry, [self.data.at(memory).numpy().data])


Staged = StagedRows | StagedChunk


@dataclass
class StagedJob:
    """Something staged that is to be written.

    Attributes:
        staged: where it is; a process that maps the memory can write it as well.
    """

    staged: Staged
    memory: torch.Tensor
    release: Callable[[], None]

    def encode(self) -> EncodedChunk:
        return self.staged.encode(self.memory)

    def close(self) -> None:
        self.release()


def with_encoding(staged: Staged, encoding: TableEncoding) -> Staged:
    """The same rows, to be encoded in another way; chunks stay as they are."""
    if isinstance(staged, StagedRows):
        return dataclasses.replace(staged, encoding=encoding)
    return staged
