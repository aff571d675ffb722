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
        if not isinstance(self.folder, str) or not self.folder.startswith("/"):
            raise ValueError(
                f"survive: folder must be an absolute path such as '/dev/shm', not {self.folder!r}"
            )
        if type(self.most_state_bytes) is not int or self.most_state_bytes < 1:
            raise ValueError(
                "survive: most_state_bytes must be a number of bytes such as 256 << 20, not "
                f"{self.most_state_bytes!r}"
            )
        if not isinstance(self.keep_hours, (int, float)) or not self.keep_hours >= 0:
            raise ValueError(
                f"survive: keep_hours must be 0 or more, such as 24, not {self.keep_hours!r}"
            )

    def path(self, root: str, rank: int, world_size: int) -> Path:
        """Return the file of a rank's image.

        Args:
            root: the URL of the run's checkpoints, which names the run.
        """
        run = hashlib.sha256(root.encode()).hexdigest()[:16]
        name = f"checknrun-{os.geteuid()}-{run}-{rank}of{world_size}.image"
        return Path(self.folder) / name
