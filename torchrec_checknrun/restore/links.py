"""Build what tables stored as differences restore to, before a row of a model is touched.

Base and links of a chain are read in order into references: integers, each range of columns as it
was stored, whatever the shards are now. Their digests, added up over all ranks, must be the ones
that the checkpoint was committed with. Only then do rows go to the shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from torchrec_checknrun.delta.digest import WORD, text_of
from torchrec_checknrun.delta.references import References
from torchrec_checknrun.delta.rows import Grid, Kind, values_of
from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.reader import Columns
from torchrec_checknrun.format.row_chunk import RowsHeader
from torchrec_checknrun.format.row_reader import StoredRows
from torchrec_checknrun.native import Chosen
from torchrec_checknrun.shards import LocalShard, Rectangle

Counted = dict[str, tuple[int, int]]
"""By saved table, the sum of digests of one rank's rows, and their number (in each range of
columns).
"""


class LinkRestore:
    """The references that a chain's tables restore to, for some shards.

    Args:
        planned: by a chunk's key its header, the age of its checkpoint (0: the oldest), and the
            indexes of the shards that it overlaps; oldest first.
        shards: the shards.

    Attributes:
        keys: keys of the chunks to ``add``, in order.

    Raises:
        CorruptCheckpoint: some chunks of a table are differences, others can't be built upon.
    """

    def __init__(
        self,
        planned: Mapping[str, tuple[RowsHeader, int, list[int]]],
        shards: Sequence[LocalShard],
    ) -> None:
        self._shards = shards
        self._tables: dict[str, bool] = {}
        self._held: dict[tuple[int, Columns], References] = {}
        self._counted: dict[tuple[int, Columns], tuple[str, int]] = {}
        self.keys: list[str] = []
        for key, (header, _, into) in planned.items():
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

    def _prepare(self, i: int, header: RowsHeader) -> None:
        own, stored = self._shards[i].rectangle, header.rectangle
        columns = stored.col_start, stored.col_stop
        if (i, columns) in self._held:
            return
        place = replace(own, col_start=columns[0], col_stop=columns[1])
        self._held[i, columns] = References(self._shards[i].table, place)
        # Of the shards that split these columns among them the first counts.
        whole = Rectangle(0, header.shape.rows, *columns).intersect(place)
        counts = whole is not None and own.col_start <= columns[0] < own.col_stop
        self._counted[i, columns] = header.table, whole.rows if whole and counts else 0

    def __contains__(self, table: str) -> bool:
        """Tell whether a saved table is stored as differences."""
        return self._tables.get(table, False)

    def add(self, rows: StoredRows, into: Iterable[int]) -> None:
        """Add the next chunk; chunks of one table are added one at a time, in order.

        Raises:
            CorruptCheckpoint: the chunk is malformed, or doesn't follow what was added.
        """
        header = rows.header
        columns = header.rectangle.col_start, header.rectangle.col_stop
        for i in into:
            references, own = self._held[i, columns], self._shards[i].rectangle
            start, stop = map(int, np.searchsorted(rows.ids, (own.row_start, own.row_stop)))
            if start == stop:
                continue
            positions = rows.ids[start:stop] - own.row_start
            before = references.gather(positions) if header.is_link else None
            found = rows.grid(before, slice(start, stop))
            references.scatter(positions, found)

    def values(self, i: int, rows: StoredRows, chosen: Chosen) -> torch.Tensor:
        """Return what a shard's rows restore to in the end, ``(n, cols)`` of the stored type.

        Args:
            rows: a chunk, whose columns are meant.
            chosen: the rows, among the chunk's. Of rows that the chain's head holds bit for bit
                the right bits come from the newest chunk with such a row, zeros from others.
        """
        header = rows.header
        columns = header.rectangle.col_start, header.rectangle.col_stop
        return values_of(newest_rows(self._held[i, columns], rows, chosen), header.dtype)

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


def newest_rows(references: References, rows: StoredRows, chosen: Chosen) -> Grid:
    """Return what chosen rows of a chunk restore to in the end of a chain.

    References don't keep the bits of rows that are stored bit for bit: the newest chunk with such a
    row has these.
    """
    ids = rows.ids[chosen]
    found = references.gather(ids - references.rectangle.row_start)
    exact = np.flatnonzero(found.kind == Kind.VERBATIM)
    if len(exact):
        positions, bits = rows.verbatim()
        at = np.searchsorted(positions, np.arange(len(rows.ids))[chosen][exact])
        known = at < len(positions)
        known[known] = rows.ids[positions[at[known]]] == ids[exact[known]]
        found.codes[exact[known]] = bits[at[known]]
    return found


def check_digests(
    head: Manifest, ranges: Mapping[str, int], counted: Iterable[Mapping[str, tuple[int, int]]]
) -> None:
    """Compare the digests of what all ranks have built with a checkpoint's.

    Ranks that hold the same rows each count them. A model that lacks rows of a table can't compare
    that table.

    Args:
        ranges: by table, the number of ranges of columns that are stored.
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
        times, rest = divmod(rows, max(1, head.tables[table].rows * ranges.get(table, 1)))
        if rest or not times:
            continue
        said = head.deltas.get(table)
        expected = None if said is None else text_of(times * int(said.after, 16))
        if expected != text_of(digest):
            raise CorruptCheckpoint(
                f"{head.id}: the rows of {table} have digest {text_of(digest)} in the end, and not "
                f"{expected}: a checkpoint of the chain is not the one that the next was built on"
            )
