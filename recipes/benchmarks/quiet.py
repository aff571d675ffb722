"""Wait for a moment in which nothing else keeps the machine busy."""

from __future__ import annotations

import os
import time
from pathlib import Path

QUIET = 0.1
"""Busy cores that count as none."""
_SAMPLE_SECONDS = 0.25


def wait_until_quiet(patience: float) -> float:
    """Write what the system has still to write, then wait until the machine is quiet.

    Args:
        patience: the longest wait in seconds.

    Returns:
        The number of cores that were busy in the end.
    """
    os.sync()
    end = time.monotonic() + patience
    while (busy := _busy()) > QUIET and time.monotonic() < end:
        pass
    return busy


def _busy() -> float:
    """Return the number of busy cores, over a moment in which this thread sleeps."""
    started, before = time.monotonic(), _ticks()
    time.sleep(_SAMPLE_SECONDS)
    ticks = _ticks() - before
    return ticks / os.sysconf("SC_CLK_TCK") / (time.monotonic() - started)


def _ticks() -> int:
    """Return the clock ticks that all cores together have worked, waits for disks excepted."""
    try:
        line = Path("/proc/stat").read_text().split("\n", 1)[0]
    except OSError:
        return 0
    user, nice, system, _idle, _waiting, *interrupts = map(int, line.split()[1:8])
    return user + nice + system + sum(interrupts)
