"""Build what tables stored as differences restore to, before a row of a model is touched.

Base and links of a chain are read in order into references, each range of columns as it was stored,
whatever the shards are now. Their digests, added up over all ranks, must be the ones
that the checkpoint was committed with. Only then do rows go to the shards.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from torchrec_checknrun.codecs import Chained
from torchrec_checknrun.delta import log_levels
from torchrec_checknrun.delta.digest import WORD, text_of
from torchrec_checknrun.delta.references import References
from torchrec_checknrun.delta.rows import Grid, Kind, values_of
from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.reader import Columns
from torchrec_checknrun.format.row_chunk import RowsHeader
from torchrec_checknrun.format.row_reader import CONVERTED_BYTES, StoredRows
from torchrec_checknrun.native import Chosen, part_of
from torchrec_checknrun.shards import LocalShard, Rectangle, Rows

Counted = dict[str, tuple[int, int]]
"""By saved table, the sum of digests of one rank's rows, and their number (in each range of
columns).
"""


_CODE_BYTES = 4
"""Bytes of a value as ``Grid`` holds it."""
KEPT_BYTES = 256 << 20
"""Bytes of chunks that are kept from the first use for the second."""


class KeptChunks:
    """Copies of chunks that are needed twice, as many as fit. Thread-safe.

    Args:
        most: bytes to keep.
    """

    def __init__(self, most: int) -> None:
        self._left = most
        self._held: dict[str, memoryview] = {}
        self._lock = threading.Lock()

    def keep(self, key: str, payload: memoryview) -> None:
        """Copy a chunk's bytes, if they fit."""
        with self._lock:
            if len(payload) > self._left:
                return
            self._left -= len(payload)
        self._held[key] = memoryview(bytearray(payload))

    def take(self, key: str) -> memoryview | None:
        """Hand out a chunk's bytes, which are kept no longer; None if they were not kept."""
        return self._held.pop(key, None)


class LinkRestore:
    """The references that a chain's tables restore to, for some shards.

    Args:
        reached: by a chunk's key its header, and the indexes of the shards whose ``reach`` it
            overlaps; oldest first.
        shards: the shards.

    Attributes:
        keys: keys of the chunks to ``add``, in order.

    Raises:
        CorruptCheckpoint: some chunks of a table are differences, others can't be built upon.
    """

    def __init__(
        self,
        reached: Mapping[str, tuple[RowsHeader, list[int]]],
        shards: Sequence[LocalShard],
    ) -> None:
        self._shards = shards
        self._lock = threading.Lock()
        self._left = 0
        self._tables: dict[str, bool] = {}
        self._held: dict[tuple[int, Columns], References] = {}
        self._counted: dict[tuple[int, Columns], tuple[str, int]] = {}
        self.keys: list[str] = []
        for key, (header, into) in reached.items():
            chained = header.codec.chained
            if self._tables.setdefault(header.table, chained) != chained:
                raise CorruptCheckpoint(
                    f"some chunks of {header.table} hold differences to earlier rows, others hold "
                    "rows that nothing can build on"
                )
            if chained:
                self.keys.append(key)
                for i in into:
                    self._prepare(i, header)
        self._left = len(self.keys)

    def _prepare(self, i: int, header: RowsHeader) -> None:
        own, stored = self._shards[i].rectangle, header.rectangle
        columns = stored.col_start, stored.col_stop
        if (i, columns) in self._held:
            return
        rows = reach(self._shards[i], header)
        place = replace(rows, col_start=columns[0], col_stop=columns[1])
        assert isinstance(header.codec, Chained)
        table, states = self._shards[i].table, header.log_states
        self._held[i, columns] = header.codec.references(table, place, states)
        # Of the shards that split these columns among them the first counts.
        whole = Rectangle(0, header.shape.rows, *columns).intersect(place)
        counts = whole is not None and own.col_start <= columns[0] < own.col_stop
        self._counted[i, columns] = header.table, whole.rows if whole and counts else 0

    def __contains__(self, table: str) -> bool:
        """Tell whether a saved table is stored as differences."""
        return self._tables.get(table, False)

    def add(self, rows: StoredRows, into: Iterable[int]) -> None:
        """Add the next chunk. Thread-safe; chunks of one table come checkpoint by checkpoint.

        Raises:
            CorruptCheckpoint: the chunk is malformed, or doesn't follow what was added.
        """
        header = rows.header
        columns = header.rectangle.col_start, header.rectangle.col_stop
        with self._lock:
            self._left -= 1
        for i in into:
            references = self._held[i, columns]
            own = references.rectangle
            start, stop = map(int, np.searchsorted(rows.ids, (own.row_start, own.row_stop)))
            if start == stop:
                continue
            rows.add_to(references, slice(start, stop))

    def blocks(
        self, i: int, rows: StoredRows, chosen: Chosen, states: Iterable[str]
    ) -> Iterator[Rows]:
        """Return what a shard's rows restore to in the end, block by block.

        Args:
            rows: a chunk, whose columns are meant.
            chosen: the rows, among the chunk's. Of rows that the chain's head holds bit for bit
                the right bits come from the newest chunk with such a row, zeros from others.
            states: names of the optimizer states to return.
        """
        header = rows.header
        columns = header.rectangle.col_start, header.rectangle.col_stop
        assert self._left == 0, "rows are restored before all links were added"
        references, ids = self._held[i, columns], rows.ids[chosen]
        optimizer = {name: self._state(references, rows, name, chosen) for name in states}
        size = max(1, CONVERTED_BYTES // (_CODE_BYTES * header.cols))
        for start in range(0, len(ids), size):
            here = slice(start, min(start + size, len(ids)))
            found = newest_rows(references, rows, part_of(chosen, here.start, here.stop))
            yield Rows(
                torch.from_numpy(ids[here]),
                values_of(found, header.dtype),
                {name: state[here] for name, state in optimizer.items()},
            )

    def _state(
        self, references: References, rows: StoredRows, name: str, chosen: Chosen
    ) -> torch.Tensor:
        """Return an optimizer state of rows in the end: ``(n,)`` or ``(n, cols)``."""
        if name not in rows.header.log_states:
            return rows.state(name, chosen)
        return log_levels.values_of(newest_codes(references, rows, name, chosen))

    def digests(self) -> Counted:
        """Return the digests of this rank's rows, once all chunks are added."""
        found: Counted = {}
        for key, (table, rows) in self._counted.items():
            known = found.get(table, (0, 0))
            digest = self._held[key].digest if rows else 0
            found[table] = (known[0] + digest) % WORD, known[1] + rows
        return found

    def references(self) -> list[References]:
        """Return what shards with the stored columns restore to, for the next link."""
        own = {i: (s.rectangle.col_start, s.rectangle.col_stop) for i, s in enumerate(self._shards)}
        return [one for (i, columns), one in self._held.items() if columns == own[i]]


def reach(shard: LocalShard, header: RowsHeader) -> Rectangle:
    """Return the rows of a saved table that a shard builds: its own, and with a table's last rows
    those that the model drops, since digests are of all rows.
    """
    own = shard.rectangle
    if own.area and own.row_stop == shard.shape.rows < header.shape.rows:
        return replace(own, row_stop=header.shape.rows)
    return own


def newest_rows(references: References, rows: StoredRows, chosen: Chosen) -> Grid:
    """Return what chosen rows of a chunk restore to in the end of a chain.

    Where references don't keep the bits of rows that are stored bit for bit, the newest chunk with
    such a row has these.
    """
    ids = rows.ids[chosen]
    found = references.gather(ids - references.rectangle.row_start)
    exact = np.flatnonzero(found.kind == Kind.VERBATIM)
    if len(exact) and not references.keeps_bits:
        positions, bits = rows.verbatim()
        at = np.searchsorted(positions, np.arange(len(rows.ids))[chosen][exact])
        known = at < len(positions)
        known[known] = rows.ids[positions[at[known]]] == ids[exact[known]]
        found.codes[exact[known]] = bits[at[known]]
    return found


def newest_codes(
    references: References, rows: StoredRows, state: str, chosen: Chosen
) -> np.ndarray:
    """Return the codes that an optimizer state of chosen rows restores to in the end of a chain,
    ``(n,)`` int16.
    """
    return references.states[state].gather(rows.ids[chosen] - references.rectangle.row_start)


def check_digests(
    head: Manifest, ranges: Mapping[str, int], counted: Iterable[Mapping[str, tuple[int, int]]]
) -> None:
    """Compare the digests of what all ranks have built with a checkpoint's.

    Ranks that hold the same rows each count them. A model that lacks rows of a table can't compare
    that table.

    Args:
        ranges: by table whose columns are all known, the number of ranges of them that are stored.
        counted: by rank, see ``LinkRestore.digests``.

    Raises:
        CorruptCheckpoint: names the table.
    """
    sums: dict[str, tuple[int, int]] = {}
    for of_rank in counted:
        for table, (digest, rows) in of_rank.items():
            known = sums.get(table, (0, 0))
            sums[table] = known[0] + digest, known[1] + rows
    for table, (digest, rows) in sums.items():
        if table not in ranges:
            continue
        times, rest = divmod(rows, max(1, head.tables[table].rows * ranges[table]))
        if rest or not times:
            continue
        said = head.deltas.get(table)
        expected = None if said is None else text_of(times * int(said.after, 16))
        if expected != text_of(digest):
            raise CorruptCheckpoint(
                f"{head.id}: the rows of {table} have digest {text_of(digest)} in the end, and not "
                f"{expected}: a checkpoint of the chain is not the one that the next was built on"
            )
