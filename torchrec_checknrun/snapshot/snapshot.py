"""Snapshots: the content of one checkpoint, fixed at one instant between two training steps.

A snapshot points at the live tables and is staged, or written, before training goes on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from torchrec_checknrun.codecs import Codec
from torchrec_checknrun.codecs.base import SampledRows
from torchrec_checknrun.codecs.quantization import Quantization, TableEncoding
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.marks.cuts import Cut
from torchrec_checknrun.marks.layers import Consumer, Selected, union
from torchrec_checknrun.marks.row_copies import ShardCopies
from torchrec_checknrun.model.blocks import Block
from torchrec_checknrun.model.collisions import CollisionState
from torchrec_checknrun.model.dense_states import SnapshotOptimizers
from torchrec_checknrun.model.progress import OptimizerClock
from torchrec_checknrun.model.state_dict import MODEL, split_states
from torchrec_checknrun.model.tracked import TrackedModel, TrackedShard
from torchrec_checknrun.row_sets import RowSet
from torchrec_checknrun.shards import LocalShard, TableShape, row_memory
from torchrec_checknrun.snapshot.late_copies import LateCopies, Span, stepped_memory
from torchrec_checknrun.snapshot.left_out import LeftOut
from torchrec_checknrun.snapshot.replica_sample import ReplicaSample
from torchrec_checknrun.values.buffers import BUFFERS, PerRankBuffers
from torchrec_checknrun.values.state import Tree


class ShardSnapshot:
    """The rows of one local shard that are to be written.

    Args:
        shard: the shard.
        modified: positions of the rows to write, or a function that finds them, as late as they are
            needed; None: all rows.

    Attributes:
        shard: as given.
        tensors: the shard's weight and optimizer states, live.
        tracked, selected: of a tracked model, the whole shard, and the layers of its marks that
            hold the modified rows; None: all rows are to be written.
        copies: the rows as of the cut if they are copied on write.
        later: whether the rows are copied after training goes on, on write or whole.
        place: of a table that all ranks have, the half-open range of rows that is this rank's part.
        replica: a sample of rows that other ranks have, too, and should have alike.
        bind: makes the codec that encodes this shard's rows of the table's; None: the table's does.
    """

    tracked: TrackedShard | None = None
    selected: Selected | None = None
    copies: ShardCopies | None = None
    later = False
    place: tuple[int, int] | None = None
    replica: ReplicaSample | None = None
    bind: Callable[[Codec], Codec] | None = None

    def __init__(self, shard: LocalShard, modified: RowSet | Callable[[], RowSet] | None) -> None:
        self.shard = shard
        self.tensors: list[torch.Tensor] = shard.tensors
        self._modified = modified

    @property
    def modified(self) -> RowSet | None:
        """Return the positions of the rows to write; None: all rows.

        The thread that asks first finds them.
        """
        modified = self._modified
        if callable(modified):
            modified = self._modified = modified()  # which lets go of the marks' layers
        return modified

    def copy_whole(self, late: LateCopies | None) -> None:
        """Have the whole shard copied to memory of its own, late or at once, to be read from there.

        For data-parallel tables: other ranks' lookups change rows as well, and only the ranks
        together know which are modified.
        """
        assert self.tracked is not None
        live, self.shard = self.tensors, self.shard.empty_like()
        self.later, self.tensors = True, self.shard.tensors
        own = self.tensors
        if self.replica is not None:
            live, own = [*live, *self.replica.live], [*own, *self.replica.keep()]
        if late is not None and not any(tensor.is_inference() for tensor in live):
            late.add_table(self.tracked.writes, live, own)
            return
        for source, target in zip(live, own, strict=True):
            target.copy_(source)

    def own_rows(self) -> torch.Tensor | None:
        """Return the modified rows of a whole data-parallel table that this rank knows: bits,
        ``((rows + 7) // 8,)`` uint8. None: all rows are to be written.
        """
        if self.selected is None:
            return None
        assert self.tracked is not None
        return union(self.selected, self.tracked.rectangle.rows).packed

    def unite(self, rows: torch.Tensor) -> None:
        """Take the rows that any rank knows, as from ``own_rows``, for those to write."""
        assert self.tracked is not None
        found = RowSet.of_bits(rows.numpy(), self.tracked.rectangle.rows)
        self._modified = found if self.place is None else found.part(*self.place)

    def encoding(self, quantization: Quantization) -> TableEncoding:
        """Return the encoding of the shard's rows."""
        found = quantization.for_table(self.shard.table, self.shard.shape.rows)
        return found if self.bind is None else replace(found, codec=self.bind(found.codec))

    @functools.cached_property
    def count(self) -> int:
        """Return the number of rows to write."""
        return self.shard.rectangle.rows if self.modified is None else len(self.modified)

    def spans(self, chunk_bytes: int) -> list[tuple[int, int, int]]:
        """Cut the shard into chunks: return half-open ranges of positions, and the number
        of rows to write in each.

        Args:
            chunk_bytes: memory for all copies of a chunk that a save or a restore makes.
        """
        size = self.span_rows(chunk_bytes)
        if self.modified is not None:
            return self.modified.spans(size)
        rows = self.shard.rectangle.rows
        return [(at, min(at + size, rows), min(size, rows - at)) for at in range(0, rows, size)]

    def span_rows(self, chunk_bytes: int) -> int:
        """Return the number of rows of a chunk; see ``spans``."""
        return max(1, chunk_bytes // row_memory(self.tensors))

    def positions(self, start: int, stop: int) -> torch.Tensor:
        """Return the positions of the rows to write in a range: ``(n,)`` int64, sorted."""
        if self.modified is None:
            return torch.arange(start, stop, dtype=torch.int64, device="cpu")
        return torch.from_numpy(self.modified.positions(start, stop))

    def sample(self, size: int) -> tuple[torch.Tensor, int]:
        """Sample the rows to write.

        Returns:
            Positions of about ``size`` of the rows (``(n,)`` int64, evenly spaced; all if there are
            fewer), and the number of rows to write.
        """
        rows = self.count
        if self.modified is None:
            return torch.arange(0, rows, max(1, rows // size), device="cpu"), rows
        step, seen = max(1, rows // size), 0
        parts = [np.empty(0, dtype=np.int64)]
        for first, mask in self.modified.masks():
            positions = first + np.flatnonzero(mask)
            parts.append(positions[-seen % step :: step])
            seen += len(positions)
        return torch.from_numpy(np.concatenate(parts)), rows

    def sampled(self, size: int) -> SampledRows:
        """Copy a sample of the rows to write, of about ``size``; see ``sample``."""
        positions, count = self.sample(size)
        if self.copies is not None:
            weight, *states = self.copies.sample(positions)
        else:
            places = positions.to(self.shard.weight.device)
            weight, *states = (tensor.index_select(0, places) for tensor in self.tensors)
        return SampledRows(weight, dict(zip(self.shard.optimizer, states, strict=True)), count)


@dataclass
class Snapshot:
    """Rows of the local shards, and the state objects.

    Attributes:
        shards: this rank's part of the tables.
        tables: all tables, the same on all ranks; the ranks' parts must add up to them.
        states: state dicts by name, without table rows.
        per_rank: names of states of which each rank has its own; the other states are replicated.
        replicated: names of replicated states that are not compared: the lowest rank's is stored.
        models: names of a model's states: if the ranks' differ, the lowest rank's is stored.
        lasting: names of states whose tensors are the model's and known optimizers' own.
        buffers, broadcast: names of the model's buffers, and of those that DDP makes alike.
        progress: progress of the tables' optimizers, by table with a shard here.
        blocks: local parts, to be written by this rank, of sharded tensors other than tables.
        collisions: state of managed-collision modules beside tensors; None without such modules.
        stepped: large tensors in ``states`` that only optimizers' steps change, by place.
        by_hand: addresses of parameters that no optimizer steps.
        encoded: states that are encoded already, by name: trees, and pieces in the live memory.
    """

    shards: list[ShardSnapshot]
    tables: dict[str, TableShape]
    states: Mapping[str, object]
    per_rank: frozenset[str] = frozenset()
    replicated: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    lasting: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()
    broadcast: frozenset[str] = frozenset()
    progress: Mapping[str, OptimizerClock] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    collisions: CollisionState | None = None
    stepped: dict[Span, torch.Tensor] = field(default_factory=dict)
    by_hand: frozenset[int] = frozenset()
    encoded: Mapping[str, tuple[Tree, list[bytes | memoryview]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Declared:
    """State objects as a user has declared them for several ranks.

    Attributes:
        states: state objects by name.
        per_rank: names of states of which each rank has its own.
        replicated: names of states of which rank 0's is stored for all ranks.
        buffers: the model's buffers of which each rank has its own.
        left_out: tells of values that no state dict shows; None: nothing is told.
        optimizers: finds their states; None: all are asked.
    """

    states: Mapping[str, Stateful]
    per_rank: frozenset[str] = frozenset()
    replicated: frozenset[str] = frozenset()
    buffers: PerRankBuffers = field(default_factory=PerRankBuffers)
    left_out: LeftOut | None = None
    optimizers: SnapshotOptimizers | None = None

    def watching(self, model: nn.Module) -> Declared:
        """Return the same, with a look at modules as they are now."""
        made = LeftOut(model, self.states), SnapshotOptimizers(model, self.states)
        return replace(self, left_out=made[0], optimizers=made[1])


def take_snapshot(
    model: nn.Module, tracked: TrackedModel, declared: Declared, since: Consumer | None
) -> tuple[Snapshot, Cut]:
    """Take a snapshot of a model with all its states, and cut its marks; call ``tracked.refresh``
    right before, and see ``take_rows``.

    Raises:
        UnsupportedState, SaveFailed: see ``take_states``.
    """
    snapshot = take_states(model, tracked, declared, refreshed=True)
    if declared.left_out is not None:
        declared.left_out.look(snapshot.states)
    snapshot.shards, cut = take_rows(tracked, since)  # last: nothing may fail once marks are taken
    return snapshot, cut


def take_states(
    model: nn.Module, tracked: TrackedModel, declared: Declared, refreshed: bool = False
) -> Snapshot:
    """Take a snapshot without shards: of everything but table rows.

    Args:
        refreshed: ``tracked.refresh`` was called right before.

    Raises:
        UnsupportedState: a state can't be stored.
        SaveFailed: a state object's ``state_dict()`` raised an error.
    """
    of_model = tracked.dense.find(refreshed)
    finder = declared.optimizers or SnapshotOptimizers(model, declared.states)
    optimizers = finder.find(tracked, of_model)
    objects = state_dicts(declared.states, optimizers.states)
    rest, blocks, _ = split_states(objects, tracked.dense.stored())
    dense = {MODEL: of_model.dense, **optimizers.states, **rest}
    per_rank = declared.per_rank
    if declared.buffers.names:
        dense[MODEL] = dict(of_model.dense)
        if own := declared.buffers.take(dense[MODEL]):
            dense[BUFFERS] = own
            per_rank |= {BUFFERS}
    else:
        optimizers.encoded[MODEL] = of_model.encoded
    progress, collisions = tracked.beside_rows()
    return Snapshot(
        shards=[],
        tables=tracked.tables,
        states=dense,
        per_rank=per_rank,
        replicated=declared.replicated,
        models=frozenset({MODEL}),
        lasting=frozenset({MODEL, *optimizers.states}),
        buffers=of_model.buffers,
        broadcast=of_model.broadcast,
        progress=progress,
        blocks=[b for b in of_model.blocks if not b.replica] + optimizers.blocks + blocks,
        collisions=collisions,
        stepped=stepped_memory((*of_model.parameters, *optimizers.tensors)),
        by_hand=optimizers.unstepped,
        encoded=optimizers.encoded,
    )


def state_dicts(
    states: Mapping[str, Stateful], optimizers: Collection[object] = ()
) -> dict[str, Any]:
    """Return the state dicts of state objects by name, but those of optimizers.

    Raises:
        SaveFailed: an object's ``state_dict()`` raised an error.
    """
    found: dict[str, Any] = {}
    for name, state in states.items():
        if name not in optimizers:
            try:
                found[name] = state.state_dict()
            except Exception as error:
                rank = dist.get_rank() if dist.is_initialized() else 0
                raise SaveFailed(
                    f"state {name!r} can't be saved: its state_dict() raised on rank {rank} "
                    f"{type(error).__name__}: {error}. Rows are kept for the next checkpoint; fix "
                    "it and save again"
                ) from error
    return found


def take_rows(
    tracked: TrackedModel, since: Consumer | None, ends: Consumer | None = None
) -> tuple[list[ShardSnapshot], Cut]:
    """Cut the marks and select the rows to write; call ``tracked.refresh`` first.

    Every checkpoint ends the interval since the last one; only a full one also ends the interval
    since the baseline.

    Args:
        since: ``LAST`` or ``BASELINE`` for a differential checkpoint, None for a full one.
        ends: the consumers whose interval ends; None: a checkpoint's.

    Returns:
        The rows to write, by shard; and the cut, to ``merge`` back unless the checkpoint commits.
    """
    tracked.write_back()
    if ends is None:
        ends = Consumer.LAST if since else Consumer.LAST | Consumer.BASELINE
    cut = tracked.cut(ends)
    try:
        return [_own_part(shard, cut, since) for shard in tracked.shards], cut
    except BaseException:
        tracked.merge(cut)
        raise


def _own_part(shard: TrackedShard, cut: Cut, since: Consumer | None) -> ShardSnapshot:
    """Select this rank's part of a shard; the rows are found when they are first asked for."""
    local = shard.local
    selected = None if since is None else cut.selected(shard.marks, since)
    modified: Callable[[], RowSet] | None = None
    if selected is not None:
        modified = partial(union, selected, local.rectangle.rows)
    place = replica = None
    if local.replicated and dist.is_initialized():
        start, stop = own_range(local)
        replica = ReplicaSample(local) if dist.get_world_size() > 1 else None
        local, place = local.part(start, stop), (start, stop)
        if modified is not None:
            modified = partial(_part, modified, start, stop)
    elif local.averaged:
        replica = ReplicaSample(local)
        replica.copy()
    snapshot = ShardSnapshot(local, modified)
    snapshot.tracked, snapshot.selected = shard, selected
    snapshot.place, snapshot.replica = place, replica
    return snapshot


def own_range(shard: LocalShard) -> tuple[int, int]:
    """Return the half-open range of positions in a shard that this rank writes: all, or a share of
    a shard that every rank has.
    """
    rows = shard.rectangle.rows
    if not (shard.replicated and dist.is_initialized()):
        return 0, rows
    rank, world = dist.get_rank(), dist.get_world_size()
    return rows * rank // world, rows * (rank + 1) // world


def _part(modified: Callable[[], RowSet], start: int, stop: int) -> RowSet:
    return modified().part(start, stop)
