"""Describe the rectangles of embedding tables that a rank holds, their memory, and their coverage.

Every kind of table appears to the rest of the package as a ``LocalShard``: a name, a rectangle, the
weight and the optimizer rows as views of memory, and global row ids. Shard-local ids end here.
Together the ranks' rectangles must make up each table: no value twice, none missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from torchrec_checknrun.errors import InvalidPlan

CHUNK_BYTES = 32 << 20
"""Memory for one chunk's rows while they are saved or restored, every copy of the rows included."""


@dataclass(frozen=True, order=True)
class Rectangle:
    """A block of a table: rows ``[row_start, row_stop)`` × columns ``[col_start, col_stop)``."""

    row_start: int
    row_stop: int
    col_start: int
    col_stop: int

    @property
    def rows(self) -> int:
        return self.row_stop - self.row_start

    @property
    def cols(self) -> int:
        return self.col_stop - self.col_start

    @property
    def area(self) -> int:
        return self.rows * self.cols

    def intersect(self, other: Rectangle) -> Rectangle | None:
        """Return the common block of two rectangles; None where there is none."""
        common = Rectangle(
            max(self.row_start, other.row_start),
            min(self.row_stop, other.row_stop),
            max(self.col_start, other.col_start),
            min(self.col_stop, other.col_stop),
        )
        return common if common.rows > 0 and common.cols > 0 else None

    def __str__(self) -> str:
        rows = f"{self.row_start}:{self.row_stop}"
        return f"[{rows}, {self.col_start}:{self.col_stop}]"


@dataclass(frozen=True)
class TableShape:
    """The size of a whole table, whatever its sharding."""

    rows: int
    dim: int


@dataclass
class Rows:
    """Some rows of a shard, copied: to be stored, published or restored.

    Attributes:
        ids: ``(n,)`` int64, global row ids.
        weight: ``(n, cols)``.
        optimizer: by state, ``(n,)`` or ``(n, cols)``: the rows' fused optimizer state.
    """

    ids: torch.Tensor
    weight: torch.Tensor
    optimizer: dict[str, torch.Tensor]


@dataclass
class RowBlock:
    """Some rows of a table that are to be encoded together.

    Attributes:
        columns: the half-open range of the table's columns that the rows have here.
        ids: ``(n,)`` int64, global, sorted.
        weight: ``(m, cols)``, contains the rows.
        positions: ``(n,)`` int64, the rows' places in ``weight``; None: ``weight`` is these rows.
        optimizer: by state, ``(n,)`` or ``(n, cols)``, these rows only.
    """

    table: str
    shape: TableShape
    columns: tuple[int, int]
    ids: torch.Tensor
    weight: torch.Tensor
    positions: torch.Tensor | None
    optimizer: Mapping[str, torch.Tensor]

    def rows(self, which: torch.Tensor | slice) -> torch.Tensor:
        """Copy some rows' weights, chosen by their place in ``ids``."""
        if self.positions is None:
            return self.weight[which]
        return self.weight.index_select(0, self.positions[which])


@dataclass
class LocalShard:
    """A rectangle of a table in this rank's memory.

    Attributes:
        table: the table's name in the state dict without ``.weight``, e.g.
            ``sparse.embedding_bag_collection.embedding_bags.t0``: equal table names in two
            collections stay apart.
        shape: rows and columns of the whole table.
        rectangle: the part of the table that the shard is.
        weight: ``(rows, cols)``, a view of the kernel's memory.
        optimizer: fused optimizer state by TorchRec's name (``momentum1``, ``exp_avg_sq`` …), each
            ``(rows,)`` (row-wise) or ``(rows, cols)`` (pointwise), views as well.
        replicated: every rank holds the whole table (data parallel).
        averaged: ranks of other sharding groups hold the same rectangle, and average it with this
            one from time to time (two-dimensional parallelism).
        name: the table with the rectangle.
    """

    table: str
    shape: TableShape
    rectangle: Rectangle
    weight: torch.Tensor
    optimizer: Mapping[str, torch.Tensor]
    replicated: bool = False
    averaged: bool = False
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"{self.table}{self.rectangle}"

    def __str__(self) -> str:
        return self.name

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return weight and optimizer states."""
        return [self.weight, *self.optimizer.values()]

    def part(self, start: int, stop: int) -> LocalShard:
        """Return rows ``[start, stop)``, as positions in the shard, as a shard of their own."""
        own = self.rectangle
        return LocalShard(
            table=self.table,
            shape=self.shape,
            rectangle=Rectangle(
                own.row_start + start, own.row_start + stop, own.col_start, own.col_stop
            ),
            weight=self.weight[start:stop],
            optimizer={name: state[start:stop] for name, state in self.optimizer.items()},
        )

    def empty_like(self) -> LocalShard:
        """Return a shard of the same rows with memory of its own, not yet filled."""
        return LocalShard(
            table=self.table,
            shape=self.shape,
            rectangle=self.rectangle,
            weight=torch.empty_like(self.weight, memory_format=torch.contiguous_format),
            optimizer={
                name: torch.empty_like(state, memory_format=torch.contiguous_format)
                for name, state in self.optimizer.items()
            },
            replicated=self.replicated,
            averaged=self.averaged,
        )

    def local_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Convert global to shard-local ids, ``(n,)`` int64 on the weight's device.

        Raises:
            IndexError: an id is not a row of this shard.
        """
        local = ids.to(device=self.weight.device, dtype=torch.int64) - self.rectangle.row_start
        if local.numel() and (int(local.min()) < 0 or int(local.max()) >= self.rectangle.rows):
            raise IndexError(
                f"{self} holds rows {self.rectangle.row_start} to {self.rectangle.row_stop - 1}, "
                f"but rows {int(ids.min())} to {int(ids.max())} were asked for"
            )
        return local

    def block(self, ids: torch.Tensor) -> RowBlock:
        """Refer to the rows with these global ids in place, for an encoder to gather."""
        local = self.local_ids(ids)
        return RowBlock(
            table=self.table,
            shape=self.shape,
            columns=(self.rectangle.col_start, self.rectangle.col_stop),
            ids=ids,
            weight=self.weight,
            positions=local,
            optimizer={n: state.index_select(0, local) for n, state in self.optimizer.items()},
        )

    def gather(self, ids: torch.Tensor) -> Rows:
        """Copy the rows with these global ids."""
        local = self.local_ids(ids)
        return Rows(
            ids=ids.to(torch.int64),
            weight=self.weight.index_select(0, local),
            optimizer={name: s.index_select(0, local) for name, s in self.optimizer.items()},
        )

    def scatter(self, rows: Rows) -> None:
        """Write rows into the kernel's memory; states that ``rows`` lacks are not changed."""
        local = self.local_ids(rows.ids)
        put_rows(self.weight, local, rows.weight)
        for name, state in rows.optimizer.items():
            put_rows(self.optimizer[name], local, state)


def put_rows(memory: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
    """Overwrite rows of a tensor, of any device and dtype; rows that follow each other as one.

    Args:
        places: ``(n,)`` int64, distinct, on the device of ``memory``.
        rows: n of them.
    """
    n = len(places)
    first = int(places[0]) if n else 0
    if torch.equal(places, torch.arange(first, first + n, device=places.device)):
        memory[first : first + n].copy_(rows)
    else:
        memory.index_copy_(0, places, rows.to(memory))


def check_coverage(name: str, whole: TableShape, held: Iterable[tuple[Rectangle, int]]) -> None:
    """Refuse parts that overlap or leave something of the whole out.

    Args:
        name: the whole's name in errors.
        held: the parts, each with its rank.

    Raises:
        InvalidPlan: names the ranks and parts.
    """
    parts = sorted(part for part in held if part[0].area)
    for i, (one, rank) in enumerate(parts):
        for j in range(i + 1, len(parts)):
            other, other_rank = parts[j]
            if other.row_start >= one.row_stop:
                break
            if one.intersect(other):
                raise InvalidPlan(
                    f"{name}: ranks {rank} and {other_rank} would both write {one} ∩ {other}"
                )
    covered = sum(part.area for part, _ in parts)
    if covered != whole.rows * whole.dim:
        raise InvalidPlan(
            f"{name}: the ranks hold {covered} of {whole.rows} × {whole.dim} values, as "
            f"{[str(part) for part, _ in parts]}; every rank must take part in the save, with the "
            "process group the model is sharded over"
        )


def row_memory(tensors: list[torch.Tensor]) -> int:
    """Bound the bytes that a row of a chunk takes while the chunk is saved or restored.

    A row is held as the kernel has it and as it is stored, at most as fp32; the allocator keeps up
    to three times as much of earlier chunks (``recipes.benchmarks.memory``). A row's id is held
    several times as int64, or as up to 32 bools of a sparse chunk's span.
    """
    values = sum(
        max(4, tensor.element_size()) * (tensor.shape[1] if tensor.dim() == 2 else 1)
        for tensor in tensors
    )
    return 5 * values + 48
