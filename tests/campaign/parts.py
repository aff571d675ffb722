"""Define the parts of the campaign: their attacks, their sizes and their pieces."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.campaign import damage, faults, hostile, kills
from tests.campaign.kill_plan import LINKS
from tests.campaign.outcome import Outcome


@dataclass(frozen=True)
class Piece:
    """The trials of one process.

    Attributes:
        first: number of the first trial.
    """

    part: str
    first: int
    count: int


@dataclass(frozen=True)
class Part:
    """A kind of attack.

    Attributes:
        act: called with seed, first number, count, an empty folder and the prepared folder.
        trials: of the whole campaign; None: all there are.
        piece: trials per process.
        seconds: time limit of a trial, on a busy machine.
        unit: the count that the table shows, and its name there.
        goal: value of that count that the campaign promises.
        says: description of the attack, for the table.
        slice: trials in `make test`.
    """

    act: Callable[[int, int, int, Path, Path], Outcome]
    trials: int | None
    piece: int
    seconds: float
    unit: tuple[str, str]
    goal: int
    says: str
    slice: int


PREPARED = {"damage": "whole", "hostile": "whole", "damage-delta": "delta", "damage-lc": "lc"}
"""Parts that need a root that ``damage.prepare`` makes, and the folder of it: the method of
``kill_plan.LINKS`` that stores rows there, or ``whole``."""


def _kills(
    seed: int, first: int, count: int, folder: Path, prepared: Path, variant: str
) -> Outcome:
    outcome = Outcome()
    for number in range(first, first + count):
        (own := folder / str(number)).mkdir()
        outcome.add(kills.run(seed, number, own, variant))
    return outcome


def _faults(
    seed: int,
    first: int,
    count: int,
    folder: Path,
    prepared: Path,
    ranks: int,
    links: str = "",
) -> Outcome:
    return faults.run(seed, first, count, folder, ranks, links)


def _damage(
    seed: int, first: int, count: int, folder: Path, prepared: Path, links: str = ""
) -> Outcome:
    return damage.run(seed, first, count, folder, prepared / (links or "whole"), links)


def _hostile(seed: int, first: int, count: int, folder: Path, prepared: Path) -> Outcome:
    return hostile.run(seed, first, count, folder, prepared / PREPARED["hostile"])


PARTS: dict[str, Part] = {
    "kills-thread": Part(
        partial(_kills, variant="thread"),
        *(330, 1, kills.TRIAL_SECONDS, ("kills", "kills"), 1000),
        "SIGKILL to ranks and their agent, at any moment and at any operation of the storage",
        slice=2,
    ),
    "kills-process": Part(
        partial(_kills, variant="process"),
        *(11, 1, kills.TRIAL_SECONDS, ("kills", "kills"), 30),
        'The same with `background="process"`: write processes are among the victims',
        slice=0,
    ),
    "kills-agent": Part(
        partial(_kills, variant="agent"),
        *(15, 1, kills.TRIAL_SECONDS, ("kills", "kills"), 30),
        "SIGKILL to torchrun's agent, and to ranks under it",
        slice=0,
    ),
    "kills-delta": Part(
        partial(_kills, variant="delta"),
        *(110, 1, kills.TRIAL_SECONDS, ("kills", "kills"), 300),
        "The same where rows are stored as differences to the last checkpoint",
        slice=1,
    ),
    "kills-logdelta": Part(
        partial(_kills, variant="logdelta"),
        *(110, 1, kills.TRIAL_SECONDS, ("kills", "kills"), 300),
        "The same with differences of optimizer state, too",
        slice=0,
    ),
    "kills-lc": Part(
        partial(_kills, variant="lc"),
        *(40, 1, kills.TRIAL_SECONDS, ("kills", "kills"), 100),
        "The same with the links of LC-Checkpoint",
        slice=0,
    ),
    "faults-1-rank": Part(
        partial(_faults, ranks=1),
        *(1950, 50, 5.0, ("faults", "faults"), 5000),
        "Storage that fails, hangs, lags and lies while a job saves, restores, prunes or compacts",
        slice=16,
    ),
    "faults-2-ranks": Part(
        partial(_faults, ranks=2),
        *(240, 25, 10.0, ("faults", "faults"), 300),
        "The same on one of two ranks",
        slice=4,
    ),
    "faults-delta": Part(
        partial(_faults, ranks=1, links="delta"),
        *(500, 25, 5.0, ("faults", "faults"), 1000),
        "The same on one rank that stores rows as differences to the last checkpoint",
        slice=4,
    ),
    "faults-delta-2-ranks": Part(
        partial(_faults, ranks=2, links="delta"),
        *(100, 25, 10.0, ("faults", "faults"), 100),
        "The same with two ranks",
        slice=0,
    ),
    "faults-lc": Part(
        partial(_faults, ranks=1, links="lc"),
        *(250, 25, 5.0, ("faults", "faults"), 500),
        "The same on one rank with the links of LC-Checkpoint",
        slice=2,
    ),
    "damage": Part(
        _damage,
        *(None, 60, 5.0, ("damages", "damages"), 1500),
        "Every file of a root, control records included, damaged in every way",
        slice=16,
    ),
    "damage-delta": Part(
        partial(_damage, links="delta"),
        *(None, 60, 5.0, ("damages", "damages"), 1500),
        "The same where rows are stored as differences to the last checkpoint",
        slice=8,
    ),
    "damage-lc": Part(
        partial(_damage, links="lc"),
        *(None, 60, 5.0, ("damages", "damages"), 1500),
        "The same with the links of LC-Checkpoint",
        slice=2,
    ),
    "hostile": Part(
        _hostile,
        *(105_000, 2500, 0.1, ("inputs", "inputs"), 100_000),
        "Hostile manifests, indexes, payloads, claims, pins and state trees",
        slice=500,
    ),
}


class Prepared:
    """A folder with the inputs of some parts, made once and removed at the end."""

    def __init__(self, seed: int, parts: list[str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="campaign-prepared-"))
        self._damages: dict[str, int] = {}
        for place in {PREPARED[part] for part in parts if part in PREPARED}:
            folder = self.folder / place
            folder.mkdir(exist_ok=True)
            damage.prepare(seed, folder, links=place if place in LINKS else "")
            self._damages[place] = damage.count(folder)

    def trials(self, part: str) -> int:
        """Return the number of a part's trials."""
        trials = PARTS[part].trials
        return self._damages[PREPARED[part]] if trials is None else trials

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def pieces(part: str, first: int, end: int) -> Iterator[Piece]:
    """Cut the trials from ``first`` to before ``end`` into pieces."""
    size = PARTS[part].piece
    for start in range(first, end, size):
        yield Piece(part, start, min(size, end - start))
