"""Say what a place is that a rank can be brought back from: image, a peer's memory, the storage.

All hold the bytes of one rank, as of certain steps. What is in them has checksums: a part is there
whole, or counts as missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

Piece = bytes | memoryview


class Version(NamedTuple):
    """The state that a part belongs to.

    Attributes:
        step: the step at whose end the state was.
        id: of the checkpoint that it belongs to; empty for an image, which belongs to none.
    """

    step: int
    id: str = ""


class NotHeld(Exception):
    """A part that a tier does not hold, or not whole; the reason as text."""


class Tier(Protocol):
    """A place that holds parts of one rank."""

    def put(self, version: Version, pieces: Iterable[Piece]) -> None:
        """Keep a part. If this fails, what was kept before is as it was.

        Args:
            pieces: the part's bytes.

        Raises:
            ImagesRefused, OSError: there is no room, or the place can't be written to.
        """

    def newest(self) -> Version | None:
        """Return the newest version that is held; None without one."""

    def get(self, version: Version) -> Iterator[memoryview]:
        """Return a part's bytes, verified, piece by piece.

        Raises:
            NotHeld: the part is missing or damaged.
        """
