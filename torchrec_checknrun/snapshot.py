"""What one checkpoint will hold, fixed at one instant between two training steps.

This is the seam between training and writing. Today a snapshot points at the live tables and is
written before training goes on; a copy into staging buffers can take its place without the planner,
codecs or storage noticing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from torchrec_checknrun.shards import FusedProgress, LocalShard, Rows, TableShape
from torchrec_checknrun.tracked import Cut, TrackedModel
from torchrec_checknrun.tracking import Consumer


@dataclass
class ShardSnapshot:
    """Rows of one local shard that are to be written.

    Attributes:
        shard: where they are.
        modified: ``(rows,)`` bool, or None for all rows.
    """

    shard: LocalShard
    modified: torch.Tensor | None
    _ids: np.ndarray | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.modified is not None:
            self._ids = np.flatnonzero(self.modified.cpu().numpy())

    @property
    def count(self) -> int:
        return self.shard.rectangle.rows if self._ids is None else len(self._ids)

    def spans(self, chunk_bytes: int) -> Iterator[tuple[int, int]]:
        """Half-open spans of row positions that make chunks of about ``chunk_bytes`` in memory."""
        rows = max(1, chunk_bytes // max(1, self.shard.row_bytes))
        for start in range(0, self.count, rows):
            yield start, min(start + rows, self.count)

    def read(self, start: int, stop: int) -> Rows:
        """The rows at these positions, global ids."""
        if self._ids is None:
            ids = torch.arange(start, stop, dtype=torch.int64)
        else:
            ids = torch.from_numpy(self._ids[start:stop])
        return self.shard.gather(ids + self.shard.rectangle.row_start)


@dataclass
class Snapshot:
    """Rows of the local shards, and the state objects.

    Attributes:
        shards: this rank's part of the tables.
        tables: all tables, the same on all ranks: what the ranks' parts must add up to.
        states: state dicts by name, without table rows.
        per_rank: names of states that each rank keeps its own of; the others are the same on all.
        progress: of the fused optimizers, by table with a shard here.
    """

    shards: list[ShardSnapshot]
    tables: dict[str, TableShape]
    states: Mapping[str, object]
    per_rank: frozenset[str] = frozenset()
    progress: Mapping[str, FusedProgress] = field(default_factory=dict)


def take_rows(tracked: TrackedModel, since: Consumer | None) -> tuple[list[ShardSnapshot], Cut]:
    """Cuts the marks and says which rows to write.

    Args:
        since: ``LAST`` or ``BASELINE`` for a differential checkpoint, None for a full one.

    Returns:
        Per shard what to write; and the cut, to ``merge`` back unless the checkpoint commits.
        Every checkpoint ends the interval since the last one; only a full one that since the
        baseline.
    """
    tracked.flush()
    modified: list[torch.Tensor | None] = [None] * len(tracked.shards)
    if since is not None:
        modified = [shard.marks.modified(since) for shard in tracked.shards]
    cut = tracked.cut(Consumer.LAST if since else Consumer.LAST | Consumer.BASELINE)
    shards = [
        _own_part(shard.local, mask) for shard, mask in zip(tracked.shards, modified, strict=True)
    ]
    return shards, cut


def _own_part(shard: LocalShard, modified: torch.Tensor | None) -> ShardSnapshot:
    """What this rank writes of a shard: all of it, or its share of one that every rank has."""
    if not shard.replicated or not dist.is_initialized():
        return ShardSnapshot(shard, modified)
    rank, world, rows = dist.get_rank(), dist.get_world_size(), shard.rectangle.rows
    start, stop = rows * rank // world, rows * (rank + 1) // world
    return ShardSnapshot(
        shard.part(start, stop), None if modified is None else modified[start:stop]
    )
