"""Kill ranks at every point of a partial recovery: it is repeated, and ends as if none had died.

``python -m tests.crash.images.partial`` runs all; each run loses a rank's image first.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import tempfile
import warnings
from functools import partial
from pathlib import Path

import torch.distributed as dist

from tests.crash.images import life
from tests.crash.images.board import Board
from tests.crash.images.kills import ONE, RANKS, RECOVERY, Kill
from tests.crash.images.sweep import Sweep, warm
from torchrec_checknrun import PartialRecovery
from torchrec_checknrun.format.manifest import parse_manifest

LAST = 12
"""The step after which all ranks die: two after a checkpoint."""
PARTIAL = PartialRecovery(max_pls=0.5, total_steps=100)
ON_LOST = (
    "LostRank.plan_rows",
    "LostRank.receive",
    "LostRank.held",
    "LostRank.go_back",
    "HeldRestore.load",
    "LostRank.resume",
    "RankImage.begin",
)
ON_SURVIVOR = (
    "RankImage.go_back",
    "StepJournal.undo_to",
    "KeptDescent.recover",
    "HeldRestore.load",
    "Saver.recovered",
    "RankImage.resume",
    "StepJournal.drop",
)


def points(every: int = 1) -> list[tuple[int, Kill]]:
    """Return the rank whose image is gone with the kill, for every n-th point."""
    found: list[tuple[int, Kill]] = []
    for lost in range(RANKS):
        for names, rank in ((ON_LOST, lost), (ON_SURVIVOR, 1 - lost)):
            for name in names:
                for after in (False, True):
                    found.append((lost, Kill(RECOVERY, rank, ONE, 0, 0.0, name, after)))
    return found[::every]


class PartialSweep(Sweep):
    """Runs that lose an image at the same step, and are killed while they recover."""

    def reference(self, lost: int) -> None:
        """Run without a further kill: what the others must end in."""
        folder = self._begin(f"reference-{lost}", lost)
        self._require_end(folder, self._recover(folder, None))
        self._wanted = [life.load(folder / f"final-{rank}") for rank in range(RANKS)]
        self._ledger = ledger(folder)
        assert len(self._ledger) == 1, self._ledger
        self._compare(folder)

    def kill(self, number: int, lost: int, kill: Kill) -> None:
        """Kill a rank in a recovery, and if need be in the next one; let it end, and compare."""
        folder = self._begin(f"run-{number}", lost)
        first, second = self._recover(folder, kill), self._recover(folder, kill)
        self.outcome.counts["kills"] += first.fired + second.fired
        if not first.fired:
            self.outcome.failures.append(f"{folder.name}: no kill at {kill}")
        if second.fired:
            second = self._recover(folder, None)
        self._require_end(folder, second)
        if ledger(folder) != self._ledger:
            self.outcome.failures.append(f"{folder.name}: {ledger(folder)}, not {self._ledger}")
        self._compare(folder)

    def _begin(self, name: str, lost: int) -> Path:
        """Train until all ranks die, and remove one image."""
        folder = self._folder / name
        folder.mkdir()
        self._fork(folder, [partial(_train_and_die, folder, self._memory) for _ in range(RANKS)])
        (image,) = self._memory.glob(f"*-{lost}of{RANKS}.image")
        image.unlink()
        return folder

    def _recover(self, folder: Path, kill: Kill | None) -> Board:
        board = Board()
        acts = [partial(self._live_on, folder, rank, board, kill) for rank in range(RANKS)]
        self._fork(folder, acts, board, kill)
        return board

    def _require_end(self, folder: Path, board: Board) -> None:
        if board.all("ended") != [1] * RANKS:
            self.outcome.failures.append(f"{folder.name} did not end: {self._tails(folder)}")
        if board.all("restored") != [LAST] * RANKS:
            self.outcome.failures.append(f"{folder.name}: restored {board.all('restored')}")

    def _live_on(self, folder: Path, rank: int, board: Board, kill: Kill | None) -> None:
        board.start(rank)
        life.live(folder, self._memory, rank, board, kill, PARTIAL)


def _train_and_die(folder: Path, memory: Path) -> None:
    run = life.Run(folder, memory, PARTIAL)
    run.saver.restore()
    for _ in range(LAST):
        run.train()
        run.saver.step()
    run.saver.wait()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def ledger(folder: Path) -> list[str]:
    """Return the losses that the newest checkpoint knows of."""
    newest = max((folder / "root").glob("seq-*/manifest.json"))
    return list(map(str, parse_manifest(newest.read_bytes(), str(newest)).losses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="take every n-th point only")
    parser.add_argument("--json", type=Path, required=True, help="file for the outcome")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    warm()
    memory = Path(tempfile.mkdtemp(prefix="checknrun-test-", dir="/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="partial-") as folder:
        try:
            sweep = PartialSweep(Path(folder), memory)
            before: int | None = None
            for number, (lost, kill) in enumerate(points(chosen.every)):
                if lost != before:
                    sweep.reference(lost)
                    before = lost
                sweep.kill(number, lost, kill)
        finally:
            for path in memory.iterdir():
                path.unlink()
            memory.rmdir()
    outcome = sweep.outcome
    chosen.json.write_text(
        json.dumps({"counts": outcome.counts, "failures": outcome.failures}, indent=1) + "\n"
    )
    print(f"{outcome.counts['kills']} kills, {outcome.counts['runs compared']} runs compared")
    for failure in outcome.failures:
        print(failure)


if __name__ == "__main__":
    main()
