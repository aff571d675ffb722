"""Take snapshots for serving: all that a prediction depends on, and nothing else."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from torchrec_checknrun.marks.cuts import Cut
from torchrec_checknrun.marks.layers import Consumer
from torchrec_checknrun.model.state_dict import MODEL
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.snapshot.late_copies import stepped_memory
from torchrec_checknrun.snapshot.snapshot import ShardSnapshot, Snapshot, take_rows


def take_publication(
    tracked: TrackedModel, tables: Container[str], whole: bool
) -> tuple[Snapshot, Cut]:
    """Take a snapshot of rows' weights, parameters and buffers, and cut the publications' marks;
    call ``tracked.refresh`` right before.

    Args:
        tables: names of the tables to publish.
        whole: whether all rows are, or those modified since the last publication.

    Returns:
        The snapshot; and the cut, to ``merge`` back unless the publication is committed.
    """
    of_model = tracked.dense.find(refreshed=True)
    snapshot = Snapshot(
        shards=[],
        tables={name: shape for name, shape in tracked.tables.items() if name in tables},
        states={MODEL: dict(of_model.dense)},
        models=frozenset({MODEL}),
        buffers=of_model.buffers,
        blocks=[block for block in of_model.blocks if not block.replica],
        stepped=stepped_memory(of_model.parameters),
    )
    # Last: nothing may fail once marks are taken.
    shards, cut = take_rows(tracked, None if whole else Consumer.PUBLISHED, Consumer.PUBLISHED)
    snapshot.shards = [_weights(shard) for shard in shards if shard.shard.table in tables]
    return snapshot, cut


def _weights(snapshot: ShardSnapshot) -> ShardSnapshot:
    """Leave optimizer state out of a shard's rows."""
    snapshot.shard = replace(snapshot.shard, optimizer={})
    snapshot.tensors = snapshot.shard.tensors
    return snapshot
