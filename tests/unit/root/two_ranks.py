"""Stand in for rank 1 of two, of which rank 0 sees every file."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.root.shared_root import _View


class _RankOne(Ranks):
    world_size = 2

    def gather(self, value: Any) -> list[Any]:
        return [_View(True, "here"), value]

    def from_rank_0(self, act: Callable[[], Any]) -> Any:
        return act()


def seen_by_rank_0() -> Ranks:
    """Make ranks as rank 1 sees them."""
    return _RankOne(timedelta(seconds=5))
