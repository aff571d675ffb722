"""Track modified rows of a sharded model without checkpoints, for uses of your own."""

from torchrec_checknrun.marks.layers import Consumer
from torchrec_checknrun.model.tracked import TrackedModel, track
from torchrec_checknrun.model.tracked_shard import TrackedShard

__all__ = ["Consumer", "TrackedModel", "TrackedShard", "track"]
