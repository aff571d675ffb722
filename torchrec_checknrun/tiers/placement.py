"""Choose whose memory holds a rank's copies: a rank of another machine, where there is one."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_of(folder: Path) -> tuple[str, int, int]:
    """Name what is lost together: the memory that a folder lies in, on this machine."""
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        boot = os.uname().nodename
    try:
        found = os.stat(folder)
    except OSError:  # the image has looked at it already
        return boot, 0, 0
    return boot, found.st_dev, found.st_ino


def holders(machines: Sequence[Hashable]) -> list[int]:
    """Return for each rank the rank that holds its copies.

    Ranks of one machine have theirs on the next one, each on another rank as far as that has so
    many. Of one machine alone, the next rank holds them.

    Args:
        machines: of each rank.
    """
    members: dict[Hashable, list[int]] = {}
    for rank, machine in enumerate(machines):
        members.setdefault(machine, []).append(rank)
    groups = list(members.values())
    if len(groups) == 1:
        return [(rank + 1) % len(machines) for rank in range(len(machines))]
    found = [0] * len(machines)
    for number, group in enumerate(groups):
        others = groups[(number + 1) % len(groups)]
        for place, rank in enumerate(group):
            found[rank] = others[place % len(others)]
    return found
