"""Mark, read and write the rows of the local shards of tracked tables, by global ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from torchrec_checknrun.codecs import Rowwise
from torchrec_checknrun.errors import UnsupportedTable
from torchrec_checknrun.marks.layers import Consumer
from torchrec_checknrun.model.hand_written import WriteWatch, announced
from torchrec_checknrun.ranks import Ranks, listed
from torchrec_checknrun.shards import LocalShard, Rectangle, Rows, TableShape

RowIds = torch.Tensor | np.ndarray | Sequence[int]
"""Global row ids, ``(n,)`` of any integer dtype."""


class TrackedShard:
    """One local shard with its marks; all row ids that go in or out are global.

    Args:
        writes: notices what is written to the tables of the shard's kernel by hand.
        index: position among the kernel's shards.

    Attributes:
        local: the shard's memory.
        marks: which of the shard's rows are modified.
        writes, index: as given.
    """

    def __init__(self, writes: WriteWatch, index: int) -> None:
        self.local: LocalShard = writes.kernel.shards[index]
        self.marks = writes.marks[index]
        self._kernel = writes.kernel
        self.index = index
        self.writes = writes

    @property
    def table(self) -> str:
        """Return the table's state-dict name without ``.weight``."""
        return self.local.table

    @property
    def rectangle(self) -> Rectangle:
        """Return the shard's rows and columns of the table."""
        return self.local.rectangle

    @property
    def kernel_module(self) -> object:
        """Return the TorchRec kernel module that holds the shard, perhaps among other shards."""
        return self._kernel.module

    def mark(self, rows: RowIds, everywhere: bool = False) -> None:
        """Mark those of ``rows`` that are in the shard; ignore all others.

        Args:
            everywhere: for all trackers of the shard, not only for this one.
        """
        ids = as_ids(rows) - self.rectangle.row_start
        ids = ids[(ids >= 0) & (ids < self.rectangle.rows)]
        for writes in self._watches() if everywhere else [self.writes]:
            writes.before_write(self.index, ids.to(self.local.weight.device))

    def mark_all(self, everywhere: bool = False) -> None:
        """Mark every row of the shard; ``everywhere`` as for ``mark``, before all are written."""
        for writes in self._watches() if everywhere else [self.writes]:
            if everywhere:
                writes.before_overwriting()
            writes.marks[self.index].mark_all()

    def modified_rows(self, consumer: Consumer = Consumer.USER) -> torch.Tensor:
        """Return the rows modified since ``clear(consumer)``.

        Returns:
            Sorted global ids ``(n,)`` int64, on the CPU.
        """
        self.writes.check()
        mask = self.marks.modified(consumer).cpu().numpy()
        return torch.from_numpy(np.flatnonzero(mask)) + self.rectangle.row_start

    def read_rows(self, rows: RowIds) -> Rows:
        """Copy weight and optimizer rows.

        Raises:
            IndexError: a row is not in this shard.
        """
        self.writes.flush()
        return self.local.gather(as_ids(rows))

    def encode_rows(self, rows: RowIds, bits: int = 8) -> torch.Tensor:
        """Encode the rows' weights in FBGEMM's fused rowwise layout.

        Args:
            rows: global ids in this shard.
            bits: 8, 4 or 2.

        Returns:
            ``(n, row_bytes)`` uint8.

        Raises:
            IndexError: a row is not in this shard.
            ValueError: other ``bits``, or a row holds a value that the layout can't hold (NaN,
                infinity, or beyond fp16 or too small for it at 4 and 2 bit).
        """
        if bits not in (8, 4, 2):
            raise ValueError(f"bits must be 8, 4 or 2, FBGEMM's widths, not {bits!r}")
        self.writes.flush()
        ids = self.local.local_ids(as_ids(rows))
        encoded = Rowwise(bits, "asymmetric").encode(self.local.weight, ids)
        if len(encoded.exceptions) or encoded.parameters:
            raise ValueError(
                f"{self.local}: a row holds a value that {bits}-bit rows can't hold (NaN, "
                "infinity, too large or too small): find it with read_rows, or read the rows "
                "unencoded"
            )
        return encoded.data

    def write_rows(
        self,
        rows: RowIds,
        weight: torch.Tensor,
        optimizer: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Overwrite rows in place and mark them for every consumer, of all trackers.

        Args:
            rows: global ids in this shard, ``(n,)``.
            weight: ``(n, cols)``.
            optimizer: states by name as ``read_rows`` returns them; those left out stay.

        Raises:
            IndexError: a row is not in this shard.
            ValueError: a shape doesn't match, or a state has an unknown name.
        """
        ids = as_ids(rows)
        states = dict(optimizer or {})
        expected = {"weight": (len(ids), self.rectangle.cols)}
        for name, state in self.local.optimizer.items():
            expected[name] = (len(ids), *state.shape[1:])
        for name, tensor in {"weight": weight, **states}.items():
            if name not in expected or tuple(tensor.shape) != expected[name]:
                raise ValueError(
                    f"{self.local}: {name} of shape {tuple(tensor.shape)} doesn't fit; expected "
                    f"{expected}"
                )
        self.writes.flush()
        self.local.local_ids(ids)  # raises before anything is marked
        with announced([self._kernel.module]):
            self.mark(ids, everywhere=True)  # before the write: no row is written unmarked
            self.local.scatter(Rows(ids, weight, states))
        self.writes.purge()

    def _watches(self) -> list[WriteWatch]:
        """Return all trackers' watches on the shard's kernel."""
        return WriteWatch.of([self._kernel.module])


class TrackedTables:
    """The local shards of all tables of a model, to be marked by hand.

    Attributes:
        tables: every sharded table's whole shape; after ``agree`` the same on all ranks.
        elsewhere: those that only other ranks know.
        shards: this rank's parts of the tables.
    """

    tables: dict[str, TableShape]
    elsewhere: dict[str, TableShape]
    shards: list[TrackedShard]

    def agree(self, ranks: Ranks) -> None:
        """Learn of the tables of modules that other ranks alone have, as embedding towers are those
        of one node; a collective.

        Raises:
            UnsupportedTable: only some ranks have a data-parallel table.
        """
        replicas = {shard.table for shard in self.shards if shard.local.replicated}
        every = ranks.on_all_ranks(lambda: (self.tables, replicas))
        of_all = set().union(*(of_rank for _, of_rank in every))
        for rank, (tables, _) in enumerate(every):
            if missing := sorted(of_all - tables.keys()):
                raise UnsupportedTable(
                    f"rank {rank} lacks the data-parallel table {missing[0]!r}, whose rows all "
                    "ranks save together: shard it row_wise or table_wise among the ranks that "
                    "have it"
                )
            self.elsewhere |= {name: tables[name] for name in tables.keys() - self.tables.keys()}
        self.tables = {**self.elsewhere, **self.tables}

    def mark(self, table: str, rows: RowIds) -> None:
        """Mark rows written by hand; call on every rank.

        Args:
            rows: global ids, ``(n,)``.

        Raises:
            KeyError: no such table.
            IndexError: an id is no row of the table; nothing is marked.
            TypeError: the ids are no integers.
        """
        shards, ids = self._shards_of(table), as_ids(rows)
        count = self.tables[table].rows
        outside = ids[(ids < 0) | (ids >= count)]
        if len(outside):
            raise IndexError(
                f"{table} has rows 0 to {count - 1}, but {len(outside)} of the ids to mark are "
                f"outside, the first {int(outside[0])}: pass the table's own row ids"
            )
        for shard in shards:
            shard.mark(ids)

    def mark_all(self, table: str | None = None) -> None:
        """Mark every row of a table, or of all tables; call on every rank."""
        for shard in self.shards if table is None else self._shards_of(table):
            shard.mark_all()

    @contextmanager
    def writing(self, table: str, rows: RowIds) -> Iterator[None]:
        """Mark rows (global ids) that the block writes by hand; enter on every rank.

        Writes inside the block don't mark any other rows, so the block must write no others.

        Raises:
            KeyError, IndexError, TypeError: see ``mark``.
        """
        shards = self._shards_of(table)
        with announced(shard.kernel_module for shard in shards):
            self.mark(table, rows)
            for shard in shards:
                shard.mark(rows, everywhere=True)
            yield

    def modified_rows(self, consumer: Consumer = Consumer.USER) -> dict[str, torch.Tensor]:
        """Return the rows modified since ``clear(consumer)``.

        Returns:
            By table with a shard on this rank, sorted global ids ``(n,)`` int64.
        """
        found: dict[str, list[torch.Tensor]] = {}
        for shard in self.shards:
            found.setdefault(shard.table, []).append(shard.modified_rows(consumer))
        return {table: torch.unique(torch.cat(ids)) for table, ids in found.items()}

    def _shards_of(self, table: str) -> list[TrackedShard]:
        if table not in self.tables:
            known = listed(sorted(self.tables))
            raise KeyError(f"no sharded table {table!r}; the model has {known}")
        return [shard for shard in self.shards if shard.table == table]


def as_ids(rows: RowIds) -> torch.Tensor:
    """Return row ids as a vector ``(n,)`` int64, on their device.

    Raises:
        TypeError: the ids are no integers.
    """
    device = rows.device if isinstance(rows, torch.Tensor) else "cpu"
    ids = torch.as_tensor(rows, device=device).reshape(-1)
    if len(ids) and (ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex()):
        raise TypeError(f"expected integer row ids, not {ids.dtype}; of a mask, pass its nonzero()")
    return ids.to(torch.int64)
