"""The names of checkpoints' directories, parsed once: all else compares what was found."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_ID = re.compile(r"seq-([0-9]{6,18})_step-([0-9]{8,18})_([0-9a-f]{8})")
_LOWEST_COPY = "8"
"""The least first digit of a compacted checkpoint's attempt; no other's is as high."""


@dataclass(frozen=True)
class CheckpointId:
    """A directory's name that this package has given.

    Attributes:
        sequence: the checkpoint's sequence number.
        is_copy: whether the name is a compacted checkpoint's.
    """

    name: str
    sequence: int
    is_copy: bool

    @property
    def age(self) -> tuple[int, bool, str]:
        """The key that sorts checkpoints: the newest has the highest. A compacted copy is newer
        than its original, even if a user named the original.
        """
        return self.sequence, self.is_copy, self.name


def parse_id(name: str) -> CheckpointId | None:
    """Parse a directory's name; None if the name is not a checkpoint id."""
    match = _ID.fullmatch(name)
    return CheckpointId(name, int(match[1]), match[3] >= _LOWEST_COPY) if match else None


def parse_ids(names: Iterable[str]) -> dict[str, CheckpointId]:
    """Parse names; return those that are checkpoint ids."""
    return {name: id for name in names if (id := parse_id(name)) is not None}
