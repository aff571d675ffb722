"""Unite the ranks' marks of tables that every rank holds, before or behind a cut."""

from __future__ import annotations

from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.save.background import Background


def united_later(tracked: TrackedModel, background: Background, ranks: Ranks) -> bool:
    """Unite the marks of data-parallel tables now, or return True where the background can do it
    behind training; a collective.
    """
    replicas = [shard for shard in tracked.shards if shard.local.replicated]
    if background.copies_later and all(shard.local.weight.is_cpu for shard in replicas):
        return bool(replicas) and ranks.world_size > 1
    tracked.all_reduce_marks(ranks.group)
    return False
