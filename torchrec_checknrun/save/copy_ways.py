"""Choose how the rows of each shard are copied: on write, at the cut, or whole behind training.

The answer follows from a shard's kernel, its memory and whether that was once written unannounced.
These stay the same from one cut to the next, and so does the answer: a model has many tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from torchrec_checknrun.model.tracked_shard import TrackedShard
from torchrec_checknrun.snapshot.cut_rows import why_copied_at_cut


class Way(NamedTuple):
    """The way of one shard's rows.

    Attributes:
        whole: whether the shard is copied whole, later: this rank's part of a data-parallel table.
        at_cut: the reason why rows are copied at the cut; None if they are copied later.
        weight, optimizer, spoils: of the shard and its kernel, when this was decided.
    """

    whole: bool
    at_cut: str | None
    weight: torch.Tensor
    optimizer: Mapping[str, torch.Tensor]
    spoils: bool

    def holds(self, shard: TrackedShard) -> bool:
        """Return whether nothing that this depends on has changed."""
        local = shard.local
        return (
            self.weight is local.weight
            and self.optimizer is local.optimizer
            and self.spoils is shard.writes.spoils
        )


class CopyWays:
    """The ways of all shards, decided once for the same memory.

    Args:
        later: whether anything is copied behind training.
        on_write: whether there is memory for rows that are copied on write.
    """

    def __init__(self, later: bool, on_write: bool) -> None:
        self._later, self._on_write = later, on_write
        self._known: dict[TrackedShard, Way] = {}

    def of(self, shards: Sequence[TrackedShard]) -> list[Way]:
        """Return the way of each shard; those of others are forgotten."""
        known, self._known = self._known, {}
        for shard in shards:
            way = known.get(shard)
            if way is None or not way.holds(shard):
                way = self._decide(shard)
            self._known[shard] = way
        return list(self._known.values())

    def _decide(self, shard: TrackedShard) -> Way:
        local, spoils = shard.local, shard.writes.spoils
        whole = self._later and local.replicated and local.weight.is_cpu
        why = why_copied_at_cut(shard) if self._on_write else "memory_budget is too small"
        return Way(whole, None if whole else why, local.weight, local.optimizer, spoils)
