"""Restore a chain's rows into a rank's shards: each row once, in its newest version.

Checkpoints are read from the newest to the oldest. A row that has been restored is not written
again, and a chunk in whose range all rows have been restored is not even read. Only tables that
must be converted (to other columns, or optimizer state of another kind) are read in the chain's
order: parts of a row may come from different chunks then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from torchrec_checknrun.delta.references import References
from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format.row_chunk import RowForms, RowsHeader
from torchrec_checknrun.format.row_reader import StoredRows
from torchrec_checknrun.marks.layers import Consumer
from torchrec_checknrun.marks.marks import Marks
from torchrec_checknrun.native import Chosen
from torchrec_checknrun.restore.chunks import ChainContent, ReadableChunk
from torchrec_checknrun.restore.conversion import Conversion, is_converted
from torchrec_checknrun.restore.fit import Fit, check_rows, common_states, is_rounded
from torchrec_checknrun.restore.links import (
    KEPT_BYTES,
    Counted,
    KeptChunks,
    LinkRestore,
    check_digests,
    reach,
)
from torchrec_checknrun.row_sets import DoneRows
from torchrec_checknrun.shards import LocalShard, Rectangle

logger = logging.getLogger(__name__)


class RowRestore:
    """A restore of a chain's rows: call ``plan``, then ``load`` for each chunk, then ``finish``.

    If there are ``link_keys`` after ``plan``, call ``build`` for each of these chunks before any
    ``load``: tables stored as differences are built beside the shards first.

    Args:
        content: the chain.
        targets: the model's table for each saved table, by saved name.
        fit: allowed differences between checkpoint and model.
        keep: bytes of chunks to keep from ``build`` for ``load``, which doesn't read these again.

    Attributes:
        states: optimizer states stored with any rows, each with its type and whether it is one
            value a row, by name, by the model's table.
        converted: whether tables differ from the saved ones in more than the ranks that hold them.
        without_state: tables whose optimizer state is left out.
        skipped: descriptions of optimizer state on one side only.
    """

    def __init__(
        self,
        content: ChainContent,
        targets: Mapping[str, str],
        fit: Fit,
        keep: int = KEPT_BYTES,
    ) -> None:
        self._chain = content.chain
        self._kept = KeptChunks(keep)
        self._targets = targets
        self._fit = fit
        self._headers = [
            {chunk.key: chunk.header for chunk in chunks if isinstance(chunk.header, RowsHeader)}
            for chunks in content.chunks
        ]
        self.states: dict[str, RowForms] = {into: {} for into in targets.values()}
        for headers in self._headers:
            for header in headers.values():
                if header.table in targets:
                    self.states[targets[header.table]].update(header.optimizer)
        self.converted = False
        self.without_state: set[str] = set()
        self.skipped: list[str] = []
        self._shards: Sequence[LocalShard] = ()
        self._marks: Sequence[Marks] | None = None
        self._planned: dict[str, tuple[RowsHeader, int, list[int]]] = {}
        self._reached: dict[str, tuple[RowsHeader, list[int]]] = {}
        self._rounded: set[str] = set()
        self._in_order: set[str] = set()
        self._conversions: dict[int, Conversion] = {}
        self._links = LinkRestore({}, ())
        self._done: list[DoneRows] = []
        self._unmarked: set[int] = set()
        self._missing: list[int] = []
        self._lock = threading.Lock()

    def plan(self, shards: Sequence[LocalShard], marks: Sequence[Marks] | None) -> list[str]:
        """Check the chain against the local shards.

        Args:
            shards: the shards to restore.
            marks: marks of each shard, in which every row of a differential checkpoint is marked;
                None: the shards are not tracked.

        Returns:
            The keys of the chunks to read, in reading order.

        Raises:
            IncompatibleCheckpoint: rows don't fit a shard.
            CorruptCheckpoint: the full checkpoint is not full.
        """
        self._shards, self._marks = shards, marks
        of_table: dict[str, list[int]] = {}
        for i, shard in enumerate(shards):
            of_table.setdefault(shard.table, []).append(i)
        older: dict[str, set[str]] = {}
        for age, headers in enumerate(self._headers):
            seen: dict[str, set[str]] = {}
            for key, header in headers.items():
                target = self._targets.get(header.table, "")
                stored = header.rectangle
                reached = [
                    i
                    for i in of_table.get(target, ())
                    if reach(shards[i], header).intersect(stored)
                ]
                into = [i for i in reached if shards[i].rectangle.intersect(stored)]
                if reached:
                    self._reached[key] = header, reached
                if not into:
                    continue
                self._planned[key] = header, age, into
                for i in into:
                    self._check_rows(shards[i], header)
                    states = common_states(shards[i], header, self._fit)
                    seen.setdefault(target, set()).update(states)
                    if is_converted(shards[i], header):
                        self.converted = True
                        self._conversions.setdefault(i, Conversion(shards[i]))
                        self._in_order.add(target)
                    elif not states >= older.get(target, set()):
                        # Some state of these rows comes from an older checkpoint.
                        self._in_order.add(target)
            for target, states in seen.items():
                older.setdefault(target, set()).update(states)
        self._links = LinkRestore(self._reached, shards)
        self._check_baseline()
        self._done = [DoneRows(shard.rectangle.rows) for shard in shards]
        self._unmarked = set(range(len(shards)))
        in_order = [key for key in self._planned if self._comes_in_order(key)]
        others = [key for key in self._planned if not self._comes_in_order(key)]
        others.sort(key=lambda key: self._planned[key][1], reverse=True)  # the newest first
        return others + in_order

    @property
    def link_keys(self) -> list[str]:
        """Return the keys of the chunks to ``build`` from, in reading order."""
        return self._links.keys

    def build(self, chunk: ReadableChunk) -> None:
        """Build what the rows of a chunk of ``link_keys`` restore to; changes no shard.

        Raises:
            CorruptCheckpoint: the chunk is malformed, or doesn't follow the ones before.
        """
        key = chunk.stored.key
        header, into = self._reached[key]
        payload = chunk.payload()
        rows = StoredRows(header, payload)
        with chunk.turn:
            self._links.add(rows, into)
        if key in self._planned:
            self._kept.keep(key, payload)

    def digests(self) -> Counted:
        """Return the digests of what was built, for ``check_digests``."""
        return self._links.digests()

    def check_digests(self, counted: Iterable[Counted]) -> None:
        """Compare the digests of what all ranks have built with the chain's; see ``links``.

        Raises:
            CorruptCheckpoint: they differ.
        """
        ranges: dict[str, set[tuple[int, int]]] = {}
        for header in (header for headers in self._headers for header in headers.values()):
            columns = header.rectangle.col_start, header.rectangle.col_stop
            ranges.setdefault(header.table, set()).add(columns)
        head = self._chain.head
        counts = {
            table: len(columns)
            for table, columns in ranges.items()
            # Else these are the indexes of one rank alone, which has not all columns.
            if table in head.tables
            and sum(stop - start for start, stop in columns) == head.tables[table].dim
        }
        check_digests(head, counts, counted)

    @property
    def references(self) -> list[References]:
        """Return the values of the shards that were restored as stored, which later rows can be
        differences to.
        """
        return self._links.references()

    def load(self, chunk: ReadableChunk, dry_run: bool) -> None:
        """Write a chunk's rows, except rows with a newer version. Thread-safe.

        Args:
            dry_run: read and decode all rows, but change nothing.
        """
        header, age, into = self._planned[chunk.stored.key]
        in_order = self._comes_in_order(chunk.stored.key)
        kept = self._kept.take(chunk.stored.key)
        if not (dry_run or in_order) and all(self._has(i, header) for i in into):
            return
        rows = StoredRows(header, chunk.payload() if kept is None else kept)
        if dry_run:
            decode_all(rows)
        with chunk.turn:
            if in_order:
                for i in into:
                    self._next(i, rows, age, dry_run)
                return
            with self._lock:
                if age == 0 and not dry_run:
                    self._mark(into)
                new = [self._claim(i, rows) for i in into]
        if not dry_run:
            for i, chosen in zip(into, new, strict=True):
                self._write(i, rows, chosen)

    def finish(self, dry_run: bool) -> None:
        """Finish conversions and marks, once all chunks have been loaded.

        Raises:
            CorruptCheckpoint: rows are missing.
        """
        for shard, missing in zip(self._shards, self._missing, strict=True):
            if missing:
                raise CorruptCheckpoint(
                    f"{self._chain.head.id} and its parents lack {missing} values of {shard}, or "
                    f"have some twice: {self._chain.baseline.id} is not full"
                )
        if not dry_run:
            self._mark(range(len(self._shards)))
            for conversion in self._conversions.values():
                conversion.finish()

    def _comes_in_order(self, key: str) -> bool:
        return self._targets[self._planned[key][0].table] in self._in_order

    def _check_rows(self, shard: LocalShard, header: RowsHeader) -> None:
        """Refuse rows that don't fit a shard; note optimizer state that is left out."""
        other = check_rows(shard, header, self._fit, bool(self.states[shard.table]))
        if other is not None:
            if not common_states(shard, header, self._fit):
                self.without_state.add(shard.table)
            self.converted = True
            self.skipped.append(other)
        if self._fit.optimizer and shard.table not in self._rounded and is_rounded(shard, header):
            self._rounded.add(shard.table)
            logger.warning("%s: optimizer state is rounded to a narrower type", shard.table)

    def _check_baseline(self) -> None:
        """Refuse a chain whose full checkpoint can't have all rows of the local shards.

        Chunks of a compacted checkpoint may have gaps, so that their exact rows in a shard are
        known only once they are read.
        """
        saved = self._chain.head.tables
        self._missing = [0] * len(self._shards)
        for name, target in self._targets.items():
            whole = Rectangle(0, saved[name].rows, 0, saved[name].dim)
            for i, shard in enumerate(self._shards):
                common = shard.rectangle.intersect(whole) if shard.table == target else None
                self._missing[i] += common.area if common else 0
        least, most = [0] * len(self._shards), [0] * len(self._shards)
        for header, age, into in self._planned.values():
            for i in into if age == 0 else ():
                common = self._shards[i].rectangle.intersect(header.rectangle)
                assert common is not None
                gaps = header.rectangle.rows - header.count
                rows, columns = common.rows, common.cols
                least[i] += max(0, rows - gaps) * columns
                most[i] += min(rows, header.count) * columns
        for shard, low, area, high in zip(self._shards, least, self._missing, most, strict=True):
            if not low <= area <= high:
                raise CorruptCheckpoint(
                    f"{self._chain.baseline.id} holds {high if high < area else low} of the {area} "
                    f"values of {shard}: the full checkpoint is not full"
                )

    def _has(self, i: int, header: RowsHeader) -> bool:
        """Return whether all rows of a shard in a chunk's range have been restored."""
        own = self._shards[i].rectangle
        common = own.intersect(header.rectangle)
        assert common is not None
        return self._done[i].contains_range(
            common.row_start - own.row_start, common.row_stop - own.row_start
        )

    def _within(self, i: int, rows: StoredRows) -> slice:
        """Return the range of a chunk's rows that lie in a shard."""
        own = self._shards[i].rectangle
        return slice(*map(int, np.searchsorted(rows.ids, (own.row_start, own.row_stop))))

    def _claim(self, i: int, rows: StoredRows) -> Chosen:
        """Choose a chunk's rows in a shard that have not been restored yet, and note that they
        are.
        """
        own, within = self._shards[i].rectangle, self._within(i, rows)
        new = self._done[i].add(rows.ids[within] - own.row_start)
        chosen = within if new is None else new + within.start
        count = within.stop - within.start if new is None else len(new)
        self._missing[i] -= count * own.cols
        return chosen

    def _next(self, i: int, rows: StoredRows, age: int, dry_run: bool) -> None:
        """Write the next chunk of a table that is read in the chain's order."""
        shard, within = self._shards[i], self._within(i, rows)
        if not dry_run:
            self._write(i, rows, within)
        with self._lock:
            if age == 0:
                common = shard.rectangle.intersect(rows.header.rectangle)
                assert common is not None
                self._missing[i] -= (within.stop - within.start) * common.cols
            elif self._marks is not None and not dry_run:
                local = rows.ids[within] - shard.rectangle.row_start
                self._marks[i].add(torch.from_numpy(local), Consumer.BASELINE)

    def _write(self, i: int, rows: StoredRows, chosen: Chosen) -> None:
        shard, header = self._shards[i], rows.header
        states = common_states(shard, header, self._fit)
        linked, converted = header.table in self._links, is_converted(shard, header)
        if not (linked or converted):
            rows.write(shard, chosen, states)
            return
        blocks = (
            self._links.blocks(i, rows, chosen, states) if linked else rows.blocks(chosen, states)
        )
        for block in blocks:
            if converted:
                self._conversions[i].scatter(header, block)
            else:
                shard.scatter(block)

    def _mark(self, into: Iterable[int]) -> None:
        """Mark the rows of differential checkpoints, which have been restored before the first row
        of the full one.
        """
        for i in self._unmarked.intersection(into):
            self._unmarked.remove(i)
            if self._marks is not None:
                self._marks[i].merge(self._done[i], Consumer.BASELINE)


def decode_all(rows: StoredRows) -> None:
    """Decode all rows of a chunk, but differences to others: of these the optimizer state alone
    that is no difference.

    Raises:
        CorruptCheckpoint: the chunk is malformed.
    """
    whole = slice(0, rows.header.count)
    if not rows.header.is_link:
        for _ in rows.blocks(whole):
            pass
        return
    for name in rows.states.keys() - rows.header.log_states:
        rows.state(name, whole)
