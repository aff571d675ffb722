"""Decide when a chain is compacted behind training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_checknrun.format.manifest import Manifest


@dataclass(frozen=True)
class CompactAfter:
    """A rule for when a chain is compacted behind training: at whichever limit is reached first.

    Args:
        links: differential checkpoints that a restore of the last one reads.
        bytes: their bytes in storage, together.
        share: the same, relative to the full checkpoint's.

    Raises:
        ValueError: no limit is given, or one is out of range.
    """

    links: int | None = None
    bytes: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        for name in ("links", "bytes"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a whole number from 1 on, not {value!r}")
        share = self.share
        is_number = isinstance(share, (int, float)) and not isinstance(share, bool)
        if share is not None and not (is_number and 0 < share < float("inf")):
            raise ValueError(f"share must be positive, such as 0.5, not {share!r}")
        if self.links is None and self.bytes is None and share is None:
            raise ValueError("give at least one of links, bytes and share, such as links=8")

    def is_due(self, chain: Sequence[Manifest]) -> bool:
        """Tell whether a chain, oldest first, should be compacted."""
        baseline, *links = chain
        if not links:
            return False
        stored = sum(manifest.stored_bytes for manifest in links)
        limits = (
            self.links is not None and len(links) >= self.links,
            self.bytes is not None and stored >= self.bytes,
            self.share is not None and stored >= self.share * baseline.stored_bytes,
        )
        return any(limits)
