"""Look at how much memory an image may take, before the kernel kills the process for it.

Shared memory has a size of its own (64 MB in Docker, unless told otherwise), and its pages count
for the process's control group.
"""

from __future__ import annotations

import os
from pathlib import Path

from torchrec_checknrun.errors import ImagesRefused

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def require_space(folder: Path, size: int, freed: int = 0) -> None:
    """Require that a folder in memory can take more bytes.

    Args:
        freed: bytes of this process's own memory that are given back meanwhile.

    Raises:
        ImagesRefused: names what is too small, and the remedy.
    """
    try:
        found = os.statvfs(folder)
    except OSError as error:
        raise ImagesRefused(
            f"{folder} can't be used for images or copies ({error.strerror}): name a folder in "
            "shared memory, as folder='/dev/shm', which is the default"
        ) from error
    free = found.f_bavail * found.f_frsize
    if size > free:
        raise ImagesRefused(
            f"an image needs {_text(size)} more in {folder}, which has {_text(free)} free: give it "
            "more (`docker run --shm-size`, `mount -o remount,size=…`), remove what others left "
            "there, or run without survive=Images()"
        )
    left = _left_in_groups()
    if left is not None and size - freed > left:
        raise ImagesRefused(
            f"an image needs {_text(size - freed)} more memory, and this process's control group "
            f"has {_text(left)} left below its memory.max, which shared memory counts for: raise "
            "that limit (`docker run --memory`), or run without survive=Images()"
        )


def _left_in_groups() -> int | None:
    """Return the bytes left below the tightest limit of this process's groups; None without one."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return None
    left: int | None = None
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            files, base = ("memory.max", "memory.current"), _CGROUPS
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            base = _CGROUPS / "memory"
        else:
            continue
        for group in _upwards(path):
            most, used = (_number(base / group / name) for name in files)
            if most is not None and used is not None:
                room = most - used + _reclaimable(base / group)
                left = room if left is None else min(room, left)
    return left


def _upwards(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return ["/".join(parts[:n]) for n in range(len(parts), -1, -1)]


def _reclaimable(group: Path) -> int:
    """Return the bytes of a group's page cache, which the kernel gives back when memory is short;
    shared memory is not among them. 0 if unknown.
    """
    names = ("inactive_file", "active_file")
    try:
        lines = (group / "memory.stat").read_text().splitlines()
        found = {name: int(size) for name, size in (line.split() for line in lines)}
    except (OSError, ValueError):
        return 0
    return sum(found.get(f"total_{name}", found.get(name, 0)) for name in names)


def _number(file: Path) -> int | None:
    """Read a number; None if the file is missing or says ``max``."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _text(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def bytes_at(path: Path) -> int:
    """Return the memory that a file takes already; nothing where there is none."""
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0
