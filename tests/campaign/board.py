"""Share memory between a trial's processes that outlives each of them."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from tests.campaign.kill_plan import AGENT, RANKS, WRITERS, Phase

_FIELDS = ("pid", "phase", "steps", "restored", "durable", "failed", "told", "refused", "compared")


class Board:
    """The progress of the ranks of one life; must be made before the ranks are forked.

    Attributes:
        agent: process number of the ranks' parent.
        fired: whether a rank has set off its kill.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096)
        self._all = np.frombuffer(self._memory, dtype=np.int64)
        self._ranks = self._all[16 : 16 + RANKS * len(_FIELDS)].reshape(RANKS, len(_FIELDS))
        self._ranks[:, _FIELDS.index("restored")] = -1

    @property
    def agent(self) -> int:
        return int(self._all[0])

    @agent.setter
    def agent(self, pid: int) -> None:
        self._all[0] = pid

    @property
    def fired(self) -> bool:
        return bool(self._all[1])

    @fired.setter
    def fired(self, fired: bool) -> None:
        self._all[1] = fired

    def get(self, rank: int, field: str) -> int:
        """Return one of a rank's numbers."""
        return int(self._ranks[rank, _FIELDS.index(field)])

    def set(self, rank: int, field: str, value: int) -> None:
        """Set one of a rank's numbers."""
        self._ranks[rank, _FIELDS.index(field)] = value

    def reached(self, rank: int, phase: Phase, steps: int) -> bool:
        """Return whether a rank has reached a phase and step, or passed them."""
        now = self.get(rank, "phase")
        return now > phase or (
            now == phase and (phase is not Phase.TRAIN or self.get(rank, "steps") >= steps)
        )

    def most(self, field: str) -> int:
        """Return the highest number of all ranks."""
        return max(self.get(rank, field) for rank in range(RANKS))

    def pids(self, victims: Iterable[int]) -> list[int]:
        """Return the process numbers of the victims that are alive."""
        found = []
        for victim in victims:
            if victim == AGENT:
                found.append(self.agent)
            elif victim in WRITERS:
                found += write_processes(self.get(WRITERS.index(victim), "pid"))
            else:
                found.append(self.get(victim, "pid"))
        return [pid for pid in found if pid > 0]


def write_processes(rank: int) -> list[int]:
    """Return the write processes of a rank's process."""
    found = []
    for children in Path(f"/proc/{rank}/task").glob("*/children"):
        try:
            found += [int(pid) for pid in children.read_text().split()]
        except OSError:
            continue  # the thread, or the rank, has ended
    return found
