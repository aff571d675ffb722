"""Write a version's rows and dense part into a copy of the model that nobody reads.

The newest checkpoint comes first: each row is written once. Rows of a table that training has split
by columns are put together first, since a quantized row has one scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from torchrec_checknrun.delta.rows import values_of
from torchrec_checknrun.errors import CorruptCheckpoint, IncompatibleCheckpoint
from torchrec_checknrun.format.manifest import TableTotals
from torchrec_checknrun.format.row_chunk import RowsHeader
from torchrec_checknrun.format.row_reader import StoredRows, as_range
from torchrec_checknrun.native import Chosen
from torchrec_checknrun.restore.chunks import RowChunk
from torchrec_checknrun.restore.links import newest_rows
from torchrec_checknrun.row_sets import DoneRows
from torchrec_checknrun.serve.content import Content
from torchrec_checknrun.serve.copies import Target
from torchrec_checknrun.serve.inference.names import Names
from torchrec_checknrun.serve.inference.replica import Replica
from torchrec_checknrun.serve.inference.row_form import RowForm
from torchrec_checknrun.serve.inference.tables import ServedTable
from torchrec_checknrun.tools.links import TableLinks
from torchrec_checknrun.values.tensor_bytes import raw_bytes

_BLOCK_BYTES = 1 << 18
"""Bytes of numbers that are written between two rests: encoded in less than a millisecond."""


@dataclass
class Memory:
    """The memory of a follower for the rows that it serves, by saved table.

    Attributes:
        touched: rows of differentials that were read since the full checkpoint.
        links: of tables stored as differences, what their rows restore to.
    """

    touched: dict[str, DoneRows] = field(default_factory=dict)
    links: dict[str, TableLinks] = field(default_factory=dict)


class Load:
    """One attempt to write a version.

    Args:
        content: the chunks of the version's chain.
        replica: a copy of the model, for its tables' forms.
        target: where rows go.
        memory: of the version before, empty if all rows are read; of this one afterwards.
        budget: bytes of rows to put together at a time.
        rest: called between blocks of rows.

    Attributes:
        rows: written so far.
        encoded: of these, encoded again.
    """

    def __init__(
        self,
        content: Content,
        replica: Replica,
        target: Target,
        memory: Memory,
        budget: int,
        rest: Callable[[], object],
    ) -> None:
        self._content = content
        self._plan = content.plan
        self._replica = replica
        self._target = target
        self._memory = memory
        self._budget = budget
        self._rest = rest
        self.rows = 0
        self.encoded = 0

    def run(self, names: Names, dense: Mapping[str, torch.Tensor]) -> None:
        """Write everything.

        Raises:
            CorruptCheckpoint: a chunk is missing or damaged, or rows are.
            IncompatibleCheckpoint: a table or a tensor doesn't fit; nothing was written.
        """
        self._check(names, dense)
        for name, saved in names.dense.items():
            self._target.put_dense(name, dense[saved])
        for name, saved in names.tables.items():
            self._table(name, self._replica.tables[name], saved)

    def _check(self, names: Names, dense: Mapping[str, torch.Tensor]) -> None:
        """Refuse tables and tensors of other sizes before a byte is written."""
        head = self._content.head
        for name, saved in names.tables.items():
            check_size(self._replica.tables[name], saved, head.tables[saved])
        for name, saved in names.dense.items():
            own, stored = self._replica.dense[name], dense[saved]
            if own.shape != stored.shape or own.is_complex() != stored.is_complex():
                raise IncompatibleCheckpoint(
                    f"{name!r} of the model is {own.dtype} {list(own.shape)}, and {saved!r} of "
                    f"{head.id} is {stored.dtype} {list(stored.shape)}: serve the model that is "
                    "trained"
                )
        self._check_ties(names, dense)

    def _check_ties(self, names: Names, dense: Mapping[str, torch.Tensor]) -> None:
        """Refuse names of the model that share memory, and that were saved with values of their own
        each: TorchRec's sharding unties a table from a layer that is given its weight.
        """
        first: dict[int, tuple[str, str]] = {}
        for name, saved in (*names.tables.items(), *names.dense.items()):
            address = self._replica.address(name)
            other, source = first.setdefault(address, (name, saved))
            if address and source != saved and not _are_same(dense.get(source), dense.get(saved)):
                raise IncompatibleCheckpoint(
                    f"{other!r} and {name!r} of the model share memory, and "
                    f"{self._content.head.id} has values of each, {source!r} and {saved!r}: "
                    "training has them apart (TorchRec's sharding does that), so untie them in the "
                    "model that is served"
                )

    def _table(self, name: str, table: ServedTable, saved: str) -> None:
        """Write a table's rows."""
        plan, total = self._plan, self._content.head.tables[saved]
        first = plan.common if plan.follows else 0
        chunks = list(self._content.rows(saved, first))
        if any(header.codec.chained for _, (_, header) in chunks):
            self._build(saved, total.rows, first)
        touched = self._memory.touched.setdefault(saved, DoneRows(total.rows))
        done = DoneRows(total.rows)
        if all(columns_of(header) == (0, total.dim) for _, (_, header) in chunks):
            self._whole(name, table, saved, chunks, touched, done)
        else:
            self._split(name, table, saved, chunks, touched, done)

    def _whole(
        self,
        name: str,
        table: ServedTable,
        saved: str,
        chunks: list[tuple[int, RowChunk]],
        touched: DoneRows,
        done: DoneRows,
    ) -> None:
        """Write the rows of a table whose chunks hold whole rows."""
        for place, (chunk, header) in chunks:
            held = header.rectangle
            if done.contains_range(held.row_start, held.row_stop):
                continue
            old = place < self._plan.common
            if old and touched.is_within(done):
                break
            rows = StoredRows(header, self._content.read(chunk))
            self._rest()
            if place:
                touched.add(rows.ids)
            chosen = np.arange(header.count)
            if old:
                chosen = chosen[touched.contains(rows.ids)]
            new = done.add(np.ascontiguousarray(rows.ids[chosen]))
            self._rest()
            self._put(name, table, saved, rows, chosen if new is None else chosen[new])
        self._require_all(saved, touched, done)

    def _require_all(self, saved: str, touched: DoneRows, done: DoneRows) -> None:
        plan = self._plan
        missing = not plan.common and not done.contains_range(0, done.rows)
        if missing or (plan.common and not plan.follows and not touched.is_within(done)):
            raise CorruptCheckpoint(
                f"{self._content.head.id} and its parents lack rows of {saved}: "
                f"{plan.chain.baseline.id} is not full"
            )

    def _put(
        self, name: str, table: ServedTable, saved: str, rows: StoredRows, chosen: np.ndarray
    ) -> None:
        """Write chosen rows of a chunk, a block at a time."""
        size = max(1, _BLOCK_BYTES // (4 * table.form.dim))
        for start in range(0, len(chosen), size):
            at = chosen[start : start + size]
            laid, again = self._laid(table.form, saved, rows, at)
            self._target.put(name, np.ascontiguousarray(rows.ids[at]), laid)
            self.rows += len(at)
            self.encoded += again
            self._rest()

    def _laid(
        self, form: RowForm, saved: str, rows: StoredRows, at: np.ndarray
    ) -> tuple[torch.Tensor, int]:
        """Return rows in a table's form, and how many of them were encoded again."""
        header = rows.header
        if form.takes(header.codec, header.parameters):
            stored = rows.select(at)
            assert stored is not None, "rows of this codec lie apart"
            laid = form.of_stored(stored.data.view(len(at), form.width))
            if len(stored.exceptions):
                laid[torch.from_numpy(stored.exceptions)] = form.of_values(stored.exact)
            return laid, len(stored.exceptions)
        again = len(at) if form.bits is not None and header.codec.lossy else 0
        if form.encodes(header.codec):
            with rows.refusing():
                laid, left = form.of_encoded(rows.weight, at)
            if len(left):
                laid[torch.from_numpy(left)] = form.of_values(rows.values(at[left]))
            return laid, again
        return form.of_values(self._values(saved, rows, as_range(at))), again

    def _values(self, saved: str, rows: StoredRows, at: Chosen) -> torch.Tensor:
        """Return rows as numbers, as a restore gives them."""
        if not rows.header.codec.chained:
            return rows.values(at)
        place = rows.header.rectangle
        references = self._memory.links[saved].by_columns[place.col_start, place.col_stop]
        return values_of(newest_rows(references, rows, at), rows.header.dtype)

    def _build(self, saved: str, rows: int, first: int) -> None:
        """Bring what a table's differences build on up to the chain's head.

        Raises:
            CorruptCheckpoint: a chunk is damaged, or the rows are not those of the head.
        """
        plan = self._plan
        links = self._memory.links.get(saved)
        if links is None:
            links = self._memory.links[saved] = TableLinks(self._content.root, saved, rows)
        links.read = self._content.read
        for place in range(first, len(plan.chain.manifests)):
            links.add(self._content.rows_of(place, saved))
        said = self._content.head.deltas.get(saved)
        if said is None or said.after != links.digest:
            raise CorruptCheckpoint(
                f"{self._content.head.id}: the rows of {saved} have digest {links.digest}, the "
                f"manifest says {None if said is None else said.after}"
            )

    def _split(
        self,
        name: str,
        table: ServedTable,
        saved: str,
        chunks: list[tuple[int, RowChunk]],
        touched: DoneRows,
        done: DoneRows,
    ) -> None:
        """Write the rows of a table that was split by columns: each from all its columns."""
        plan = self._plan
        for place, (chunk, header) in chunks:
            if place >= plan.common:
                ids = StoredRows(header, self._content.read(chunk)).ids
                done.add(ids)
                if place:
                    touched.add(ids)
        if plan.common and not plan.follows:
            for start in range(0, touched.rows, 1 << 20):
                done.add(touched.positions(start, min(touched.rows, start + (1 << 20))))
        self._require_all(saved, touched, done)
        every = [one for _, one in self._content.rows(saved)]
        most = max(1, self._budget // (8 * table.form.dim + 64))
        for start, stop, _ in done.spans(most):
            ids = done.positions(start, stop)
            values, lossy = self._gathered(saved, table.form.dim, every, ids)
            self._target.put(name, ids, table.form.of_values(values))
            self.rows += len(ids)
            self.encoded += len(ids) if lossy and table.form.bits is not None else 0
            self._rest()

    def _gathered(
        self, saved: str, dim: int, chunks: list[RowChunk], ids: np.ndarray
    ) -> tuple[torch.Tensor, bool]:
        """Put rows together; also return whether any was stored with a loss.

        Args:
            chunks: of the whole chain, the newest first.
            ids: the rows, sorted.
        """
        dtype = chunks[0][1].dtype
        values = torch.empty((len(ids), dim), dtype=dtype, device="cpu")
        missing = np.ones((len(ids), dim), dtype=bool)
        lossy = False
        for chunk, header in chunks:
            place = header.rectangle
            start, stop = map(int, np.searchsorted(ids, (place.row_start, place.row_stop)))
            columns = slice(place.col_start, place.col_stop)
            if not missing[start:stop, columns].any():
                continue
            for part in self._parts_missing(missing, columns):
                lossy |= self._gather(saved, (chunk, header), ids, part, values, missing)
        if missing.any():
            row = int(ids[np.flatnonzero(missing.any(axis=1))[0]])
            raise CorruptCheckpoint(
                f"{self._content.head.id} and its parents lack columns of row {row} of {saved}"
            )
        return values, lossy

    @staticmethod
    def _parts_missing(missing: np.ndarray, columns: slice) -> Iterator[slice]:
        """Yield the ranges of some columns within which each row has all values or none."""
        part = missing[:, columns]
        cuts = np.flatnonzero((part[:, 1:] != part[:, :-1]).any(axis=0)) + 1
        ends = [columns.start, *(int(cut) + columns.start for cut in cuts), columns.stop]
        for start, stop in pairwise(ends):
            yield slice(start, stop)

    def _gather(
        self,
        saved: str,
        chunk: RowChunk,
        ids: np.ndarray,
        columns: slice,
        values: torch.Tensor,
        missing: np.ndarray,
    ) -> bool:
        """Take the rows of a chunk that are missing; return whether any was stored with a loss."""
        stored, header = chunk
        rows = StoredRows(header, self._content.read(stored))
        where = np.flatnonzero(missing[:, columns.start])
        at = np.searchsorted(rows.ids, ids[where])
        found = at < len(rows.ids)
        found[found] = rows.ids[at[found]] == ids[where][found]
        where, at = where[found], at[found]
        if not len(at):
            return False
        first = header.rectangle.col_start
        got = self._values(saved, rows, at)[:, columns.start - first : columns.stop - first]
        values[torch.from_numpy(where), columns] = got.to(values.dtype)
        missing[where, columns] = False
        return header.codec.lossy


def _are_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Tell whether two dense values are the same, bit for bit; None, a table, is like no other."""
    if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return raw_bytes(one) == raw_bytes(other)


def check_size(table: ServedTable, saved: str, shape: TableTotals) -> None:
    """Refuse a table of another size than was saved, unless it was pruned."""
    pruned = table.pruned and table.rows < shape.rows
    if table.form.dim != shape.dim or (table.rows != shape.rows and not pruned):
        raise IncompatibleCheckpoint(
            f"table {table.path!r} of the model is {table.rows} × {table.form.dim}, and {saved!r} "
            f"is {shape.rows} × {shape.dim}: serve the model that is trained, or prune it with "
            "TorchRec's own means"
        )


def columns_of(header: RowsHeader) -> tuple[int, int]:
    """Return the range of a chunk's columns."""
    return header.rectangle.col_start, header.rectangle.col_stop
