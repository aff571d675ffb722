"""Read rows of a chain's tables as a restore gives them, without a model, a part at a time.

The rows go through the same code as a restore's, into memory that stands for a shard. Rows of a
table that was split by columns are whole; their row-wise optimizer state is the mean over the
columns, as in a restore to an unsplit table. Rows that were stored before the optimizer had any
state have zeros there, as a new optimizer does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.format.reader import Read, StoredChunk, read_chunk
from torchrec_checknrun.restore.chunks import ChainContent, ReadableChunk
from torchrec_checknrun.restore.fit import Fit
from torchrec_checknrun.restore.rows import RowRestore
from torchrec_checknrun.shards import LocalShard, Rectangle, Rows, TableShape
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.scratch import file_tensor

CACHE_BYTES = 512 << 20
"""Bytes of chunks to keep for the rows that follow."""

StateKinds = Mapping[str, tuple[torch.dtype, bool]]
"""By optimizer state: its type, and whether there is one value for each row."""


class ChunkCache:
    """A cache of the chunks used last, which windows of rows share.

    Args:
        most: bytes to keep; one chunk is kept in any case.
        read: reads the chunks; None: each is read by itself.
    """

    def __init__(self, root: Folder, most: int = CACHE_BYTES, read: Read | None = None) -> None:
        self._read = partial(read_chunk, root) if read is None else read
        self._most = most
        self._held: OrderedDict[str, memoryview] = OrderedDict()
        self._bytes = 0

    def read(self, chunk: StoredChunk) -> memoryview:
        """Return a chunk's bytes, verified.

        Raises:
            CorruptCheckpoint: the bytes differ from what was written.
        """
        if chunk.key in self._held:
            self._held.move_to_end(chunk.key)
            return self._held[chunk.key]
        while self._held and self._bytes + chunk.entry.length > self._most:
            self._bytes -= len(self._held.popitem(last=False)[1])
        payload = self._read(chunk)
        self._held[chunk.key] = payload
        self._bytes += len(payload)
        return payload


class TableReader:
    """A reader of one table of a chain.

    Args:
        content: the chain.
        table: the table's full name, see ``fit.full_name``.
        cache: a cache shared with other readers of the same root.

    Attributes:
        shape: rows and columns of the whole table.
        dtype: data type of the weights.
        states: the fused optimizer's states.
    """

    def __init__(self, content: ChainContent, table: str, cache: ChunkCache) -> None:
        totals = content.chain.head.tables[table]
        self.table = table
        self.shape = TableShape(totals.rows, totals.dim)
        self._chain = content.chain
        self._cache = cache
        self._chunks = tuple(tuple(by_table.get(table, ())) for by_table in content.by_table)
        self.dtype, self.states = self._kinds()

    def _kinds(self) -> tuple[torch.dtype, StateKinds]:
        """Return the weights' type, and the states of the newest rows that have any."""
        dtype = torch.float32
        for chunks in reversed(self._chunks):
            for _, header in chunks:
                if header.optimizer:
                    return header.dtype, header.optimizer
                dtype = header.dtype
        return dtype, {}

    @property
    def row_bytes(self) -> int:
        """Return the bytes in memory of a row with its optimizer state."""
        states = sum(
            dtype.itemsize * (1 if rowwise else self.shape.dim)
            for dtype, rowwise in self.states.values()
        )
        return self.shape.dim * self.dtype.itemsize + states

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        """Return the half-open range of rows that each chunk may have, by the chunk's key."""
        return {
            chunk.key: (header.rectangle.row_start, header.rectangle.row_stop)
            for chunks in self._chunks
            for chunk, header in chunks
        }

    def window(self, start: int, stop: int) -> Rows:
        """Read rows ``[start, stop)`` with their optimizer state, on the CPU.

        Raises:
            CorruptCheckpoint, UnsupportedFormat, IncompatibleCheckpoint: as a restore does.
        """
        shard = self.empty(start, stop)
        self.restore([shard])
        return Rows(torch.arange(start, stop), shard.weight, dict(shard.optimizer))

    def rows(self, ids: Sequence[int]) -> Rows:
        """Read any rows with their optimizer state, in the order of ``ids``.

        Raises:
            IncompatibleCheckpoint: the table has no such row.
            CorruptCheckpoint, UnsupportedFormat: as a restore does.
        """
        outside = [id for id in ids if not 0 <= id < self.shape.rows]
        if outside:
            raise IncompatibleCheckpoint(
                f"table {self.table!r} has rows 0 to {self.shape.rows - 1}: there is no row "
                + ", ".join(map(str, outside[:8]))
            )
        wanted = sorted(set(ids))
        shards = [self.empty(start, stop) for start, stop in _runs(wanted)]
        self.restore(shards)
        places = {id: place for place, id in enumerate(wanted)}
        at = torch.tensor([places[id] for id in ids], dtype=torch.int64)

        def joined(parts: Iterable[torch.Tensor], empty: torch.Tensor) -> torch.Tensor:
            return torch.cat([empty, *parts])[at]

        none = self.empty(0, 0)
        return Rows(
            torch.tensor(ids, dtype=torch.int64),
            joined((shard.weight for shard in shards), none.weight),
            {
                name: joined((shard.optimizer[name] for shard in shards), none.optimizer[name])
                for name in self.states
            },
        )

    def empty(self, start: int, stop: int, scratch: Path | None = None) -> LocalShard:
        """Allocate memory for rows ``[start, stop)``.

        Args:
            scratch: a folder for files that hold the memory; None: no files.
        """

        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            if scratch is None:
                return torch.zeros(shape, dtype=dtype)
            return scratch_tensor(scratch, shape, dtype)

        n, dim = stop - start, self.shape.dim
        weight = zeros(self.dtype, n, dim)
        states = {
            name: zeros(dtype, n) if rowwise else zeros(dtype, n, dim)
            for name, (dtype, rowwise) in self.states.items()
        }
        place = Rectangle(start, stop, 0, dim)
        return LocalShard(self.table, self.shape, place, weight, states)

    def restore(self, shards: Sequence[LocalShard]) -> None:
        """Restore some shards of the table.

        Raises:
            CorruptCheckpoint, UnsupportedFormat, IncompatibleCheckpoint: as a restore does.
        """
        places = [shard.rectangle for shard in shards if shard.rectangle.area]
        if not places:
            return
        start, stop = min(p.row_start for p in places), max(p.row_stop for p in places)
        content = ChainContent(self._chain, self._within(start, stop))
        rows = RowRestore(content, {self.table: self.table}, Fit(), keep=0)  # the cache does
        rows.states = {self.table: dict(self.states)}  # of the table, not only of these chunks
        chunks = {chunk.key: chunk for part in content.chunks for chunk in part}
        keys = rows.plan(shards, None)

        def readable(key: str) -> ReadableChunk:
            return ReadableChunk(chunks[key], partial(self._cache.read, chunks[key]), nullcontext())

        for key in rows.link_keys:
            rows.build(readable(key))
        rows.check_digests([rows.digests()])  # if these are all rows
        for key in keys:
            rows.load(readable(key), dry_run=False)
        rows.finish(dry_run=False)

    def _within(self, start: int, stop: int) -> tuple[tuple[StoredChunk, ...], ...]:
        return tuple(
            tuple(
                chunk
                for chunk, header in chunks
                if header.rectangle.row_start < stop and header.rectangle.row_stop > start
            )
            for chunks in self._chunks
        )


def scratch_tensor(folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros in a new file of a folder."""
    return file_tensor(folder / str(len(list(folder.iterdir()))), shape, dtype)


def _runs(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Return sorted distinct ids as half-open ranges."""
    runs: list[tuple[int, int]] = []
    for id in ids:
        if runs and runs[-1][1] == id:
            runs[-1] = runs[-1][0], id + 1
        else:
            runs.append((id, id + 1))
    return runs
