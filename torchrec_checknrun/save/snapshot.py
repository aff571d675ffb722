"""What one checkpoint will hold, fixed at one instant between two training steps.

A snapshot points at the live tables: it is staged, or written, before training goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from torchrec_checknrun.dense.buffers import BUFFERS, PerRankBuffers, buffer_names
from torchrec_checknrun.errors import SaveFailed, UnsupportedState
from torchrec_checknrun.format.collision_chunk import CollisionState
from torchrec_checknrun.model.blocks import Block
from torchrec_checknrun.model.dense_states import DenseStates
from torchrec_checknrun.model.marks import Consumer, Cut
from torchrec_checknrun.model.progress import OptimizerClock
from torchrec_checknrun.model.state_dict import MODEL, StoredTables, drop_tables, find_blocks
from torchrec_checknrun.model.tracked import TrackedModel, TrackedShard
from torchrec_checknrun.row_sets import RowSet
from torchrec_checknrun.shards import LocalShard, TableShape


@dataclass
class ShardSnapshot:
    """Rows of one local shard that are to be written.

    Attributes:
        shard: where they are.
        modified: which of its rows, by position; None for all.
    """

    shard: LocalShard
    modified: RowSet | None

    def spans(self, chunk_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Half-open ranges of rows that make chunks, and how many of each are to be written.

        Args:
            chunk_bytes: memory for all copies of a chunk that saving it makes, or restoring it.
        """
        size = max(1, chunk_bytes // _row_memory(self.shard))
        if self.modified is not None:
            yield from self.modified.spans(size)
            return
        rows = self.shard.rectangle.rows
        for start in range(0, rows, size):
            stop = min(start + size, rows)
            yield start, stop, stop - start

    def positions(self, start: int, stop: int) -> torch.Tensor:
        """Those of the rows in this range that are to be written, sorted, int64."""
        if self.modified is None:
            return torch.arange(start, stop, dtype=torch.int64, device="cpu")
        return torch.from_numpy(self.modified.positions(start, stop))

    def sample(self, size: int) -> tuple[torch.Tensor, int]:
        """Positions in the shard of about so many of its rows that are to be written (int64, evenly
        spaced, all if there are fewer), and how many there are.
        """
        if self.modified is None:
            rows = self.shard.rectangle.rows
            return torch.arange(0, rows, max(1, rows // size), device="cpu"), rows
        rows = len(self.modified)
        step, seen = max(1, rows // size), 0
        parts = [np.empty(0, dtype=np.int64)]
        for first, mask in self.modified.masks():
            positions = first + np.flatnonzero(mask)
            parts.append(positions[-seen % step :: step])
            seen += len(positions)
        return torch.from_numpy(np.concatenate(parts)), rows


@dataclass
class Snapshot:
    """Rows of the local shards, and the state objects.

    Attributes:
        shards: this rank's part of the tables.
        tables: all tables, the same on all ranks: what the ranks' parts must add up to.
        states: state dicts by name, without table rows.
        per_rank: names of states that each rank keeps its own of; the others are the same on all.
        replicated: of these, names that are not compared: the lowest rank's is stored.
        models: names of a model's states: if they differ, the lowest rank's is stored.
        buffers: names of the model's buffers in its state dict.
        progress: of the tables' optimizers, by table with a shard here.
        blocks: local parts of sharded tensors that are no tables, which this rank is to write.
        collisions: what managed-collision modules know besides; None if there are none.
    """

    shards: list[ShardSnapshot]
    tables: dict[str, TableShape]
    states: Mapping[str, object]
    per_rank: frozenset[str] = frozenset()
    replicated: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()
    progress: Mapping[str, OptimizerClock] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    collisions: CollisionState | None = None


@dataclass(frozen=True)
class Declared:
    """State objects, and how they are on several ranks.

    Attributes:
        states: all of them by name.
        per_rank: names of those that each rank keeps its own of.
        replicated: names of those that rank 0's is stored of, for all.
        buffers: the model's that each rank keeps its own of.
    """

    states: Mapping[str, Stateful]
    per_rank: frozenset[str] = frozenset()
    replicated: frozenset[str] = frozenset()
    buffers: PerRankBuffers = field(default_factory=PerRankBuffers)


def take_snapshot(
    model: nn.Module, tracked: TrackedModel, declared: Declared, since: Consumer | None
) -> tuple[Snapshot, Cut]:
    """A snapshot of a model with all its states, and the marks it took; see ``take_rows``.

    Raises:
        UnsupportedState, SaveFailed: see ``take_states``.
    """
    snapshot = take_states(model, tracked, declared)
    snapshot.shards, cut = take_rows(tracked, since)  # last: nothing may fail once marks are taken
    return snapshot, cut


def take_states(model: nn.Module, tracked: TrackedModel, declared: Declared) -> Snapshot:
    """Take a snapshot of everything but the rows of tables: it has no shards.

    Raises:
        UnsupportedState: a state that can't be stored.
        SaveFailed: a state object has none.
    """
    states, content = declared.states, model.state_dict()
    buffers = buffer_names(model, content)
    live: dict[str, Any] = {MODEL: content}
    optimizers = DenseStates(model, states, tracked)
    live |= optimizers.stored()
    for name, state in states.items():
        if name not in optimizers:
            try:
                live[name] = state.state_dict()
            except Exception as error:
                rank = dist.get_rank() if dist.is_initialized() else 0
                raise SaveFailed(
                    f"state {name!r} can't be saved: its state_dict() raised on rank {rank} "
                    f"{type(error).__name__}: {error}. Rows are kept for the next checkpoint; mend "
                    "it and save again"
                ) from error
    stored = StoredTables(tracked.tables, (shard.local for shard in tracked.shards))
    dense = {name: drop_tables(value, stored) for name, value in live.items()}
    blocks = [block for block in find_blocks(live, stored, optimizers) if not block.replica]
    for name, value in dense[MODEL].items():
        if not isinstance(value, torch.Tensor):
            raise UnsupportedState(
                f"the model's state dict has {name!r}, a {type(value).__name__} (extra state), "
                "which can't be given back to it: put it into a state object of its own"
            )
    per_rank = declared.per_rank
    if own := declared.buffers.take(dense[MODEL]):
        dense[BUFFERS] = own
        per_rank |= {BUFFERS}
    return Snapshot(
        shards=[],
        tables=tracked.tables,
        states=dense,
        per_rank=per_rank,
        replicated=declared.replicated,
        models=frozenset({MODEL}),
        buffers=buffers,
        progress=tracked.progress(),
        blocks=blocks,
        collisions=tracked.collisions.state(),
    )


def take_rows(tracked: TrackedModel, since: Consumer | None) -> tuple[list[ShardSnapshot], Cut]:
    """Cuts the marks and says which rows to write, of shards that ``tracked.refresh`` has found.

    Args:
        since: ``LAST`` or ``BASELINE`` for a differential checkpoint, None for a full one.

    Returns:
        Per shard what to write; and the cut, to ``merge`` back unless the checkpoint commits.
        Every checkpoint ends the interval since the last one; only a full one that since the
        baseline.
    """
    tracked.write_back()
    if since is Consumer.BASELINE:
        shards = [_own_part(shard, RowSet(shard.marks.raw, int(since))) for shard in tracked.shards]
    cut = tracked.cut(Consumer.LAST if since else Consumer.LAST | Consumer.BASELINE)
    if since is not Consumer.BASELINE:
        taken = cut.taken[Consumer.LAST]
        try:
            shards = [
                _own_part(shard, taken[shard.marks] if since else None) for shard in tracked.shards
            ]
        except BaseException:
            tracked.merge(cut)
            raise
    return shards, cut


def _own_part(shard: TrackedShard, modified: RowSet | None) -> ShardSnapshot:
    """What this rank writes of a shard: all of it, or its share of one that every rank has."""
    local = shard.local
    if local.replicated and dist.is_initialized():
        rank, world, rows = dist.get_rank(), dist.get_world_size(), local.rectangle.rows
        start, stop = rows * rank // world, rows * (rank + 1) // world
        local = local.part(start, stop)
        modified = None if modified is None else modified.part(start, stop)
    return ShardSnapshot(local, modified)


def _row_memory(shard: LocalShard) -> int:
    """Bytes that a row of a chunk takes at most while it is saved or restored.

    It is there as the kernel has it and as it is stored, at most as fp32; and the allocator keeps
    up to three times as much of what chunks before it have left, whose places don't fit again
    (``recipes.benchmarks.memory`` measures it). And its id: int64 several times, or as up to 32
    bools of a sparse chunk's span.
    """
    values = sum(
        max(4, tensor.element_size()) * (tensor.shape[1] if tensor.dim() == 2 else 1)
        for tensor in shard.tensors
    )
    return 5 * values + 48
