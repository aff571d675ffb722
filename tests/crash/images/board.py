"""Share what the ranks of a life have done with their parent, in memory that outlives them."""

from __future__ import annotations

import mmap
import os

import numpy as np

from tests.crash.images.kills import RANKS

_FIELDS = ("pid", "begun", "done", "restored", "from_images", "rows", "changed", "ended")


class Board:
    """The progress of the ranks of one life; must be made before the ranks are forked."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096)
        self._all = np.frombuffer(self._memory, dtype=np.int64)
        self._ranks = self._all[16 : 16 + RANKS * len(_FIELDS)].reshape(RANKS, len(_FIELDS))
        self._ranks[:] = -1
        self._ranks[:, 0] = 0

    def start(self, rank: int) -> None:
        self._set(rank, "pid", os.getpid())

    def begins(self, rank: int, step: int) -> None:
        self._set(rank, "begun", step)

    def done(self, rank: int, step: int) -> None:
        self._set(rank, "done", step)

    def restored(self, rank: int, step: int, from_images: bool) -> None:
        self._set(rank, "from_images", int(from_images))
        self._set(rank, "done", step)
        self._set(rank, "restored", step)

    def rolled_back(self, rank: int, rows: int, changed: int) -> None:
        self._set(rank, "rows", rows)
        self._set(rank, "changed", changed)

    def ended(self, rank: int) -> None:
        self._set(rank, "ended", 1)

    def fire(self) -> None:
        self._all[0] = 1

    @property
    def fired(self) -> bool:
        return bool(self._all[0])

    def pid(self, rank: int) -> int:
        return self.get(rank, "pid")

    def step_begun(self, rank: int) -> int:
        return self.get(rank, "begun")

    def get(self, rank: int, field: str) -> int:
        return int(self._ranks[rank, _FIELDS.index(field)])

    def all(self, field: str) -> list[int]:
        return [self.get(rank, field) for rank in range(RANKS)]

    def _set(self, rank: int, field: str, value: int) -> None:
        self._ranks[rank, _FIELDS.index(field)] = value
