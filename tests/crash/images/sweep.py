"""Kill runs with images again and again, and compare their end with that of an undisturbed run.

Processes are forked from one that has imported and warmed up everything, so that a life takes less
than a second. The parent acts as torchrun's agent: when one rank dies it ends the other by SIGTERM.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from tests.campaign import forks
from tests.campaign.kill_rank import join
from tests.crash.images import kills as plans
from tests.crash.images import life
from tests.crash.images.board import Board
from tests.crash.images.kills import RANKS, Kill

LIFE_SECONDS = 120.0
Ends = list[dict[str, object]]
"""Each rank's values at the end of a run."""


@dataclass
class Outcome:
    """The results of runs.

    Attributes:
        counts: kills by kind, lives, recoveries by images and others, torn updates.
        failures: what must not be, as text.
    """

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def warm() -> None:
    """Import and run once what every life needs; the process must have no threads afterwards."""
    torch.set_num_threads(1)
    from tests.campaign.warm import warm as build

    forks.warm_up(build)


class Sweep:
    """Runs, each killed several times, in a folder of their own.

    Args:
        folder: for checkpoints and logs.
        memory: for images; a folder in shared memory.
        sabotage: breaks something in every killed life; called in the rank's process.
        wanted: each rank's end of an undisturbed run, if another sweep has made one.
    """

    def __init__(
        self, folder: Path, memory: Path, sabotage: object = None, wanted: Ends | None = None
    ) -> None:
        self._folder, self._memory = folder, memory
        self._sabotage = sabotage
        self.outcome = Outcome()
        self._wanted: Ends = wanted or []
        self._number = 0

    def undisturbed(self) -> Ends:
        """Run once without kills; return what all others must end in.

        Without images, too, unless these settle the order in which gradients are summed.
        """
        folder = self._folder / "undisturbed"
        folder.mkdir()
        board = self._live(folder, self._memory if RANKS > 2 else None, None)
        assert board.all("ended") == [1] * RANKS, self._tails(folder)
        self._wanted = [life.load(folder / f"final-{rank}") for rank in range(RANKS)]
        return self._wanted

    def run(self, kills: Iterable[Kill]) -> None:
        """Run with one kill per life, then compare."""
        self._number += 1
        folder = self._folder / f"run-{self._number}"
        folder.mkdir()
        before: Board | None = None
        for kill in [*kills, None]:
            board = self._live(folder, self._memory, kill)
            self._judge(folder, board, before, kill)
            if board.all("ended") == [1] * RANKS:
                break
            before = self._latest(board, before)
        self._compare(folder)

    def _latest(self, board: Board, before: Board | None) -> Board:
        """Return the board that tells how far all ranks have come."""
        if before is not None and min(board.all("done")) < 0:
            return before
        return board

    def _judge(self, folder: Path, board: Board, before: Board | None, kill: Kill | None) -> None:
        outcome, counts = self.outcome, self.outcome.counts
        counts["lives"] += 1
        done = -1 if before is None else min(before.all("done"))
        if kill is None and board.all("ended") != [1] * RANKS:
            outcome.failures.append(f"the last life did not end: {self._tails(folder)}")
        if kill is not None and board.fired:
            counts[kill.kind] += 1
        for rank in range(RANKS):
            restored = board.get(rank, "restored")
            if restored < 0:
                continue
            if board.get(rank, "from_images") == 1:
                counts["recoveries of a rank by images"] += 1
                rows, changed = board.get(rank, "rows"), board.get(rank, "changed")
                counts["torn updates"] += 0 < changed < rows
                if not done <= restored <= done + 1:
                    outcome.failures.append(f"step {restored} after {done}: {folder.name} {kill}")
            elif done > 0:
                outcome.failures.append(
                    f"no images though step {done} was done: {folder.name} {kill}: "
                    f"{self._tails(folder)}"
                )

    def _compare(self, folder: Path) -> None:
        if any(not (folder / f"final-{rank}").exists() for rank in range(RANKS)):
            return
        final = [life.load(folder / f"final-{rank}") for rank in range(RANKS)]
        for rank, (found, wanted) in enumerate(zip(final, self._wanted, strict=True)):
            for name in life.differences(found, wanted):
                self.outcome.failures.append(f"{folder.name} rank {rank} differs in {name}")
        self._fork(folder, [partial(life.from_storage, folder, rank) for rank in range(RANKS)])
        for rank, wanted in enumerate(final):
            found = life.load(folder / f"restored-{rank}")
            for name in life.differences(found, wanted, "model"):
                self.outcome.failures.append(f"{folder.name} rank {rank}: chain lacks {name}")
            for name in life.differences(found, wanted, "optimizer"):
                self.outcome.failures.append(f"{folder.name} rank {rank}: chain lacks {name}")
        self.outcome.counts["runs compared"] += 1

    def _live(self, folder: Path, memory: Path | None, kill: Kill | None) -> Board:
        board = Board()
        acts = [partial(self._rank, folder, memory, rank, board, kill) for rank in range(RANKS)]
        self._fork(folder, acts, board, kill)
        return board

    def _rank(
        self, folder: Path, memory: Path | None, rank: int, board: Board, kill: Kill | None
    ) -> None:
        board.start(rank)
        if callable(self._sabotage) and memory is not None:
            self._sabotage(rank)
        life.live(folder, memory, rank, board, kill)

    def _fork(
        self,
        folder: Path,
        acts: list[partial[None]],
        board: Board | None = None,
        kill: Kill | None = None,
    ) -> None:
        """Run the ranks; when one is killed, end the other as torchrun's agent does."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(64)

            def work(rank: int) -> None:
                torch.set_num_threads(1)
                join(rank, RANKS, listener)
                acts[rank]()
                dist.barrier()

            logs = [folder / f"log-{rank}" for rank in range(RANKS)]
            left = {forks.child(partial(work, rank), logs[rank]): rank for rank in range(RANKS)}
        deadline = time.monotonic() + LIFE_SECONDS
        terminated = 0.0
        while left:
            if time.monotonic() > deadline:
                self.outcome.failures.append(f"{folder.name} hung: {kill} {self._tails(folder)}")
                _kill(left, signal.SIGKILL)
                deadline += 10
            if kill is not None and board is not None and _is_due(kill, board):
                time.sleep(kill.delay)
                board.fire()
                _kill([board.pid(rank) for rank in _victims(kill)], _signal(kill))
                kill = None
            if terminated and time.monotonic() > terminated + 0.2:
                _kill(left, signal.SIGKILL)
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                time.sleep(0.0005)
                continue
            left.pop(pid, None)
            if status and left and not terminated:
                time.sleep(0.01)
                terminated = time.monotonic()
                _kill(left, signal.SIGTERM)

    def _tails(self, folder: Path) -> str:
        return "\n".join(forks.tail(log) for log in sorted(folder.glob("log-*")))


def _is_due(kill: Kill, board: Board) -> bool:
    """Tell whether it is for the parent to kill, now."""
    return kill.kind == plans.MOMENT and max(board.all("begun")) >= kill.step


def _victims(kill: Kill) -> list[int]:
    return [kill.rank] if kill.who == plans.ONE else list(range(RANKS))


def _signal(kill: Kill) -> signal.Signals:
    return signal.SIGTERM if kill.who == plans.TERMINATED else signal.SIGKILL


def _kill(pids: Iterable[int], by: signal.Signals) -> None:
    for pid in pids:
        if pid > 0:
            with suppress(ProcessLookupError):
                os.kill(pid, by)


@dataclass
class Plan:
    """The task of a sweep.

    Attributes:
        kills: how many of each kind, six to a run.
        sabotage: see ``Sweep``.
        every_point: whether to kill at each point of a recovery as well.
    """

    kills: dict[str, int]
    sabotage: object = None
    every_point: bool = False


def run(sweeps: Iterable[Plan], seed: int) -> list[Outcome]:
    """Run sweeps one after the other, with one undisturbed run for all."""
    outcomes: list[Outcome] = []
    wanted: Ends = []
    for plan in sweeps:
        memory = Path(tempfile.mkdtemp(prefix="checknrun-test-", dir="/dev/shm"))
        with tempfile.TemporaryDirectory(prefix="images-") as folder:
            try:
                sweep = Sweep(Path(folder), memory, plan.sabotage, wanted)
                wanted = wanted or sweep.undisturbed()
                _run(sweep, plan, seed)
                left = [path.name for path in memory.iterdir()]
                if left:
                    sweep.outcome.failures.append(f"images left behind: {left}")
                outcomes.append(sweep.outcome)
            finally:
                for path in memory.iterdir():
                    path.unlink()
                memory.rmdir()
    return outcomes


def _run(sweep: Sweep, plan: Plan, seed: int) -> None:
    for kind, number in plan.kills.items():
        for first in range(0, number, 6):
            sweep.run(plans.draw(kind, seed + first, min(6, number - first)))
    points = plans.every_point() if plan.every_point else []
    for first in range(0, len(points), 12):
        sweep.run(points[first : first + 12])
