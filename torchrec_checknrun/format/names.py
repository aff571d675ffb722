"""Checkpoints' directory names: draw, parse once, and refuse those that are no plain names."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from torchrec_checknrun.errors import CorruptCheckpoint

MANIFEST_NAME = "manifest.json"
PRIORITY_SAVES = ".priority"
"""The folder of saves between checkpoints; the name of each begins with a checkpoint's."""
LAST_SEQUENCE = 10**18 - 1
"""The highest sequence number that fits into an id."""
_PLAIN_NAME = re.compile(r"\A(?!\.{1,2}\Z)(?!.*::)[^/\\\x00-\x1f\ud800-\udfff]{1,255}\Z")
PlainName = Annotated[str, Meta(pattern=_PLAIN_NAME.pattern)]
"""The name of a file or a directory; see ``is_plain_name``."""
_ID = re.compile(r"seq-([0-9]{6,18})_step-([0-9]{8,18})_([0-9a-f]{8})")
_LOWEST_COPY = "8"
"""The least first digit of a compacted checkpoint's attempt; no other's is as high."""


@dataclass(frozen=True)
class CheckpointId:
    """A directory's name that this package has given.

    Attributes:
        sequence: the checkpoint's sequence number.
        step: the checkpoint's step.
        is_copy: whether the name is a compacted checkpoint's.
    """

    name: str
    sequence: int
    step: int
    is_copy: bool

    @property
    def age(self) -> tuple[int, bool, str]:
        """Return the key that sorts checkpoints: the newest has the highest. A compacted copy is
        newer than its original, even if a user named the original.
        """
        return self.sequence, self.is_copy, self.name


def parse_id(name: str) -> CheckpointId | None:
    """Parse a directory's name; None if the name is not a checkpoint id."""
    match = _ID.fullmatch(name)
    if match is None:
        return None
    return CheckpointId(name, int(match[1]), int(match[2]), match[3] >= _LOWEST_COPY)


def parse_ids(names: Iterable[str]) -> dict[str, CheckpointId]:
    """Parse names; return those that are checkpoint ids."""
    return {name: id for name in names if (id := parse_id(name)) is not None}


def sequence_of(name: str) -> int | None:
    """Parse the sequence number from a directory name; None if the name is not a checkpoint id."""
    id = parse_id(name)
    return id.sequence if id is not None else None


def checkpoint_id(sequence: int, step: int, attempt: str) -> str:
    """Build a directory name, never used twice.

    Args:
        attempt: eight hex digits unique to the attempt.
    """
    return f"seq-{sequence:06d}_step-{step:08d}_{attempt}"


def new_id(sequence: int, step: int, *, compacted: bool = False) -> str:
    """Draw an id for a new attempt; a compacted checkpoint's sorts after its chain's head's.

    Raises:
        CorruptCheckpoint: see ``require_sequence``.
    """
    require_sequence(sequence)
    upper_half = 1 << 31
    return checkpoint_id(sequence, step, f"{secrets.randbits(31) + compacted * upper_half:08x}")


def require_sequence(sequence: int) -> None:
    """Refuse a number that ``sequence_of`` can't parse: such a save would never be cleaned up.

    Raises:
        CorruptCheckpoint: a directory in the root has used up the numbers.
    """
    if sequence > LAST_SEQUENCE:
        raise CorruptCheckpoint(
            f"no checkpoint can have the sequence number {sequence}: {LAST_SEQUENCE} is the last, "
            "which no run reaches. Look in the root for a directory with that number or a higher "
            f"one, in its name or as `sequence` in its {MANIFEST_NAME}, and move it away"
        )


def is_plain_name(name: object) -> bool:
    """Return whether a name stays within its folder, on disk and in stores (no ``/``, ``..``)."""
    return isinstance(name, str) and _PLAIN_NAME.match(name) is not None
