"""Choose what survives the death of a process: the argument ``survive`` of the Checkpointer."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Images:
    """Keep tables, fused optimizer state and marks of each rank in a file in shared memory, with an
    undo journal, and all other state as of the last two steps. When a process dies, the restarted
    ranks go on at the step that was last done, as if nothing had happened.

    Attributes:
        folder: where the files are: memory that outlives processes, not a disk.
        most_state_bytes: bytes of everything beside sharded tables that each step copies; more of
            it is refused, since every step would wait for the copy.
        keep_hours: how long the images of other runs that have ended, or were given up, stay.
    """

    folder: str = "/dev/shm"
    most_state_bytes: int = 256 << 20
    keep_hours: float = 24.0

    def __post_init__(self) -> None:
        _require_place(self.folder, self.keep_hours)
        if type(self.most_state_bytes) is not int or self.most_state_bytes < 1:
            raise ValueError(
                "survive: most_state_bytes must be a number of bytes such as 256 << 20, not "
                f"{self.most_state_bytes!r}"
            )

    def path(self, root: str, rank: int, world_size: int) -> Path:
        """Return the file of a rank's image.

        Args:
            root: the place of the run's checkpoints (``Folder.place``), which names the run.
        """
        return _path(self.folder, root, rank, world_size, "image")


@dataclass(frozen=True)
class HostCopies:
    """Keep what each rank has written for the newest checkpoint and its chain in this machine's
    shared memory as well. When processes die, the restarted ranks go back to that checkpoint
    without reading from the storage what this machine has written. For tables on a GPU, whose
    memory goes with the process, and all else that can't have images.

    Attributes:
        folder: where the copies are: memory that outlives processes, not a disk.
        most_bytes: the most that a rank's copies take; while a checkpoint is written, its own file
            comes on top. What would exceed it is not copied, and the log says so. None: twice the
            bytes of the rank's tables with their optimizer state, and of everything else.
        keep_hours: how long the copies of other runs that have ended, or were given up, stay.
    """

    folder: str = "/dev/shm"
    most_bytes: int | None = None
    keep_hours: float = 24.0

    def __post_init__(self) -> None:
        _require_place(self.folder, self.keep_hours)
        most = self.most_bytes
        if most is not None and (type(most) is not int or most < 1):
            raise ValueError(
                "survive: most_bytes must be a number of bytes such as 8 << 30, or None, not "
                f"{most!r}"
            )

    def path(self, root: str, rank: int, world_size: int) -> Path:
        """Return the folder of a rank's copies; arguments as ``Images.path``."""
        return _path(self.folder, root, rank, world_size, "copies")


def _require_place(folder: object, keep_hours: object) -> None:
    if not isinstance(folder, str) or not folder.startswith("/"):
        raise ValueError(
            f"survive: folder must be an absolute path such as '/dev/shm', not {folder!r}"
        )
    if not isinstance(keep_hours, (int, float)) or not keep_hours >= 0:
        raise ValueError(f"survive: keep_hours must be 0 or more, such as 24, not {keep_hours!r}")


def _path(folder: str, root: str, rank: int, world_size: int, kind: str) -> Path:
    run = hashlib.sha256(root.encode()).hexdigest()[:16]
    return Path(folder) / f"checknrun-{os.geteuid()}-{run}-{rank}of{world_size}.{kind}"
