"""Choose how the rows of each shard are copied: on write, at the cut, or whole behind training.

The answer follows from a shard's kernel, its memory and whether that was once written unannounced.
These stay the same from one cut to the next, and so does the answer: a model has many tables.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from torchrec_checknrun.model.tracked_shard import TrackedShard
from torchrec_checknrun.snapshot.cut_rows import why_copied_at_cut


class Way(NamedTuple):
    """The way of one shard's rows.

    Attributes:
        whole: whether the shard is copied whole, later: this rank's part of a data-parallel table.
        at_cut: the reason why rows are copied at the cut; None if they are copied later.
        depends_on: how often the kernel's memory had moved when this was decided, and whether that
            had been written unannounced.
    """

    whole: bool
    at_cut: str | None
    depends_on: tuple[int, bool]


class CopyWays:
    """The ways of all shards, decided once for the same memory.

    Args:
        later: whether anything is copied behind training.
        on_write: whether there is memory for rows that are copied on write.
    """

    def __init__(self, later: bool, on_write: bool) -> None:
        self._later, self._on_write = later, on_write
        self._known: dict[weakref.ref[TrackedShard], Way] = {}
        """Held weakly: a shard that is gone must not keep its table."""

    def of(self, shards: Sequence[TrackedShard]) -> list[Way]:
        """Return the way of each shard; those of others are forgotten."""
        known, self._known = self._known, {}
        for shard in shards:
            key, watch = weakref.ref(shard), shard.writes
            depends_on = watch.kernel.moves, watch.spoils
            way = known.get(key)
            if way is None or way.depends_on != depends_on:
                way = self._decide(shard, depends_on)
            self._known[key] = way
        return list(self._known.values())

    def _decide(self, shard: TrackedShard, depends_on: tuple[int, bool]) -> Way:
        local = shard.local
        whole = self._later and local.replicated and local.weight.is_cpu
        why = why_copied_at_cut(shard) if self._on_write else "memory_budget is too small"
        return Way(whole, None if whole else why, depends_on)
