"""Save some rows between checkpoints, so that a lost rank's rows are less stale (CPR, MLSys'21).

A save is a rank file of the usual format in a directory of its own, ``.priority/ID.RUN.step-N``:
rows of rank files there are newer than the checkpoint ID. Its name is no checkpoint's, it has no
manifest, and only a partial recovery reads it: the rows are of different steps. Each rank chooses,
writes and removes its own, and waits for no other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from torchrec_checknrun.codecs import Exact
from torchrec_checknrun.codecs.quantization import TableEncoding
from torchrec_checknrun.errors import CheckNRunError
from torchrec_checknrun.format.chunk import EncodedChunk
from torchrec_checknrun.format.entries import RowsEntry
from torchrec_checknrun.format.names import PRIORITY_SAVES, parse_id
from torchrec_checknrun.format.rank_file import rank_file_name, write_rank_file
from torchrec_checknrun.format.row_chunk import RowsHeader, encode_rows
from torchrec_checknrun.format.row_reader import StoredRows
from torchrec_checknrun.marks.layers import Consumer
from torchrec_checknrun.marks.marks import Marks
from torchrec_checknrun.marks.priorities import (
    LargestChange,
    LargestGrowth,
    MostUpdated,
    Priority,
    SubSampled,
)
from torchrec_checknrun.memory.partial import PrioritySaves
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.model.tracked_shard import TrackedShard
from torchrec_checknrun.shards import CHUNK_BYTES, LocalShard, RowBlock
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.threads import Threads
from torchrec_checknrun.tiers.own_check import read_own_chunks

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

_LAST, _PRIORITY = int(Consumer.LAST), int(Consumer.PRIORITY)
_SUMS = "momentum1"
_EXACT = TableEncoding(Exact())


@dataclass(frozen=True)
class _Chunk:
    """Copied rows that are still to be encoded."""

    block: RowBlock

    def encode(self) -> EncodedChunk:
        return encode_rows(self.block, _EXACT)

    def close(self) -> None:
        pass


class PriorityRows:
    """The priority saves of one rank.

    Args:
        root: of the checkpoints.
    """

    def __init__(
        self, wanted: PrioritySaves, root: Folder, rank: int, tracked: TrackedModel
    ) -> None:
        self._wanted, self._root, self._tracked = wanted, root, tracked
        self._rank, self._file = rank, rank_file_name(rank)
        self._since: str | None = None
        self._after: int | None = None
        """Saves of later steps go, once the root is claimed; None: they are gone."""
        self._priorities: dict[int, Priority] = {}
        self._shards: list[TrackedShard] = []
        self._worker = Threads(1, "checknrun-priority")
        self._running: Future[bool] | None = None
        self._taken: list[tuple[Marks, torch.Tensor]] = []
        """By shard, the rows of the last save, until it is known to be written."""
        self._told = False

    def restart(self, step: int) -> None:
        """Begin anew, with the rows as they are now: a restore or a recovery has written them.

        Args:
            step: at which the run goes on; saves of later ones were another run's.
        """
        self._since = None
        for shard in self._local():
            shard.marks.live.bitwise_and_(~_PRIORITY & 255)
        self._after = step  # not yet: the root may be a live run's, and these its newest

    def step(self, step: int, head: str | None, run: str) -> None:
        """Save rows at the end of a step, if some are due. Call it once the root is claimed.

        Args:
            head: the newest checkpoint; None: there is none, which rows could be newer than.
            run: the name of the images that were begun together.
        """
        if self._after is not None:
            self._worker.submit(partial(self._prune, None, self._after))
            self._after = None
        if head != self._since:
            self._begin(head)
        if head is None or step % self._wanted.every_steps:
            return
        if self._running is not None and not self._running.done():
            self._tell("the one before is still being written")
            return
        self._give_back()
        chunks = list(self._take())
        if chunks:
            name = directory_of(head, run, step)
            self._running = self._worker.submit(partial(self._write, name, head, chunks))

    def close(self, over: bool) -> None:
        """Stop; remove this rank's saves if the run is over, unless the storage hangs.

        Args:
            over: the run is over, and had the root to itself.
        """
        for shard in self._shards:
            shard.marks.noted = None
        if over:
            self._worker.submit(partial(self._prune, self._since or "", -1))
        self._worker.close(cancel=not over, seconds=self._root.patience.seconds if over else 0)

    def _local(self) -> list[TrackedShard]:
        return [shard for shard in self._tracked.shards if not shard.local.replicated]

    def _begin(self, head: str | None) -> None:
        """Count from now on: the checkpoint has all rows as they were at its cut. What was saved
        since then goes with the checkpoint before, and is saved again.
        """
        before, self._since, self._taken = self._since, head, []
        for shard in self._shards:
            shard.marks.noted = None
        self._shards = self._local()
        self._priorities = {}
        for at, shard in enumerate(self._shards):
            if before is not None:
                live = shard.marks.live
                live.bitwise_or_((live.bitwise_and(_LAST) != 0).to(live.dtype) * _PRIORITY)
            rows = shard.local.rectangle.rows
            if rows:
                capacity = max(1, int(self._wanted.fraction * rows))
                priority = make_priority(self._wanted.by, capacity, shard.local)
                self._priorities[at] = priority
                shard.marks.noted = priority.note

    def _give_back(self) -> None:
        """Mark the rows of the last save again, unless it was written."""
        taken, self._taken = self._taken, []
        running = self._running
        if running is not None and (running.exception() or not running.result()):
            for marks, rows in taken:
                marks.live[rows] = marks.live[rows] | _PRIORITY

    def _take(self) -> Iterator[_Chunk]:
        """Choose and copy rows: all that were modified, or so many of the highest priority."""
        for at, priority in self._priorities.items():
            shard = self._shards[at]
            live = shard.marks.live
            marked = live.bitwise_and(_PRIORITY) != 0
            chosen = priority.take()
            if int(marked.sum()) > priority.capacity:
                rows = chosen[marked[chosen]].sort().values
            else:
                rows = marked.nonzero().reshape(-1)
            self._taken.append((shard.marks, rows))
            live[rows] = live[rows] & (~_PRIORITY & 255)
            yield from _chunks(shard.local, rows)

    def _write(self, name: str, head: str, chunks: Sequence[_Chunk]) -> bool:
        written = False
        try:
            folder = self._root / PRIORITY_SAVES / name
            folder.create()
            write_rank_file(folder, self._rank, iter(chunks))
            written = True
        except (CheckNRunError, OSError) as error:
            self._tell(str(error))
        self._prune(head, None)
        return written

    def _prune(self, head: str | None, after: int | None) -> None:
        """Remove this rank's saves that are of no use. Those of checkpoints after the newest that
        this run knows are of a run that has replaced this one, and stay.

        Args:
            head: the newest checkpoint: saves of others go; None: they stay.
            after: saves of later steps go; None: they stay.
        """
        with suppress(CheckNRunError, OSError):
            folder = self._root / PRIORITY_SAVES
            for name in folder.names():
                of, _, step = parse_directory(name)
                older = head is not None and of != head
                if _is_after(of, head) or not (older or (after is not None and step > after)):
                    continue
                (folder / name).delete(self._file)
                (folder / name).remove()
            folder.remove()  # unless there are others

    def _tell(self, why: str) -> None:
        if not self._told:
            self._told = True
            logger.warning("a priority save was left out: %s", why)


def _is_after(of: str, head: str | None) -> bool:
    """Tell whether a checkpoint is known by its id to come after another one."""
    one, other = parse_id(of), parse_id(head or "")
    return one is not None and other is not None and one.sequence > other.sequence


def directory_of(head: str, run: str, step: int) -> str:
    """Return the name of a priority save's directory."""
    return f"{head}.{run[:16]}.step-{step:08d}"


def parse_directory(name: str) -> tuple[str, str, int]:
    """Return checkpoint, run and step of a directory's name; step -1 where it is no such name."""
    rest, _, step = name.rpartition(".step-")
    of, _, run = rest.rpartition(".")  # a user's own name of a checkpoint may have dots
    return of, run, int(step) if step.isdecimal() else -1


def make_priority(by: str, capacity: int, shard: LocalShard) -> Priority:
    """Make the priority of a shard's rows; ``growth`` needs row-wise Adagrad, and is ``updates``
    for tables without.
    """
    if by == "change":
        return LargestChange(capacity, shard.weight)
    if by == "sampled":
        return SubSampled(capacity, shard.weight)
    sums = shard.optimizer.get(_SUMS)
    is_adagrad = list(shard.optimizer) == [_SUMS]
    if by == "growth" and sums is not None and is_adagrad and sums.numel() == len(sums):
        return LargestGrowth(capacity, sums)
    return MostUpdated(capacity, shard.weight)


def _chunks(shard: LocalShard, rows: torch.Tensor) -> Iterator[_Chunk]:
    place = shard.rectangle
    each = sum(t.element_size() * max(1, t.numel() // max(1, len(t))) for t in shard.tensors)
    for part in rows.split(max(1, CHUNK_BYTES // each)):
        if not len(part):
            continue
        yield _Chunk(
            RowBlock(
                table=shard.table,
                shape=shard.shape,
                columns=(place.col_start, place.col_stop),
                ids=part + place.row_start,
                weight=shard.weight.detach()[part],
                positions=None,
                optimizer={name: t.detach()[part] for name, t in shard.optimizer.items()},
            )
        )


@torch.no_grad()
def apply_saves(
    root: Folder, head: str, run: str, step: int, rank: int, shards: Sequence[TrackedShard]
) -> int:
    """Overwrite a lost rank's rows by those that were saved since a checkpoint, oldest first, and
    mark them as modified since; return how many were written.

    Args:
        step: the step that the rank goes on at: saves of later ones count for nothing.
    """
    folder, written, file = root / PRIORITY_SAVES, 0, rank_file_name(rank)
    try:
        saves = sorted((parse_directory(name)[2], name) for name in folder.names())
    except OSError as error:
        logger.warning("priority saves can't be listed, older rows stay: %s", error)
        return 0
    for of_step, name in saves:
        if parse_directory(name)[:2] != (head, run[:16]) or not 0 <= of_step <= step:
            continue
        try:
            if (folder / name).size(file) is None:
                continue  # the rank had nothing to save then
            # All of the file is verified before a row of it is used.
            for entry, header, payload in [*read_own_chunks(folder / name, file)]:
                if isinstance(entry, RowsEntry) and isinstance(header, RowsHeader):
                    written += _apply(StoredRows(header, payload), shards)
        except (CheckNRunError, OSError) as error:
            logger.warning("a priority save can't be used, older rows stay: %s", error)
    return written


def _apply(rows: StoredRows, shards: Sequence[TrackedShard]) -> int:
    header = rows.header
    for shard in shards:
        own, place = shard.local, shard.local.rectangle
        of = header.rectangle
        if (
            own.table == header.table
            and (place.col_start, place.col_stop) == (of.col_start, of.col_stop)
            and place.row_start <= of.row_start
            and of.row_stop <= place.row_stop
            and set(header.optimizer) == set(own.optimizer)
        ):
            rows.write(own, slice(0, header.count), own.optimizer)
            ids = torch.from_numpy(rows.ids - place.row_start)
            shard.marks.add(ids, Consumer.LAST | Consumer.BASELINE)
            return header.count
    return 0
