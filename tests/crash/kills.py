"""Plan the kills: drawn from a seed, read by the trainer that kills itself."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path

RANKS = 2

OUTSIDE = "outside"
"""Some milliseconds after some step, by another process."""
IN_RESTORE = "in the middle of a restore"
BEFORE_FILES = "in a save, before this rank's file"
IN_FILE = "in a save, in the middle of this rank's file"
AFTER_FILE = "in a save, after this rank's file"
BEFORE_MANIFEST = "in a save, between the rank files and the manifest"
IN_MANIFEST = "in a save, with the manifest under its temporary name"
AFTER_MANIFEST = "in a save, right after the manifest"

CLAIM = "while the root is claimed"
CUT = "in a save, right after the marks were cut"
STAGE = "in a save, in the middle of staging"
ENCODE = "in a save, when a chunk is to be encoded"
RETENTION = "in the middle of deleting a checkpoint"

LATE_COPIES = "in a save, while dense parameters and states are copied behind training"
HOOK = "in a save, in the hook that copies rows before they are overwritten"
STREAM = "in a save, in the middle of a chunk's rows"
BETWEEN_CHUNKS = "in a save, between two chunks of rows"
MERGE = "in a save, while a chunk takes rows that training has copied"

UNCOMMITTED = (BEFORE_FILES, IN_FILE, AFTER_FILE, BEFORE_MANIFEST, IN_MANIFEST)
_ON_RANK_0 = (BEFORE_MANIFEST, IN_MANIFEST, AFTER_MANIFEST, CLAIM, RETENTION)
WHILE_COPIED = (LATE_COPIES, HOOK, STREAM, BETWEEN_CHUNKS, MERGE)
"""Points after the cut, while training goes on and its rows are still being copied."""
_PHASES = (
    *(CLAIM, CUT, STAGE, *WHILE_COPIED, ENCODE, IN_FILE),
    RETENTION,  # of what the kill before it has left
    *(BEFORE_MANIFEST, IN_MANIFEST, AFTER_MANIFEST),
)
_TWICE = (CUT, STAGE, *WHILE_COPIED, ENCODE, IN_FILE)
"""Points at which both ranks die in their second save: the run must get on."""


@dataclass(frozen=True)
class Kill:
    """The end of one attempt.

    Attributes:
        save: inside which of the attempt's saves, counted from 1.
        part: how much of it is done, 0 to 1, for the points in the middle of something.
        steps: kills from outside: after so many steps of the attempt …
        delay: … and so many seconds more.
        victims: who dies when ``rank`` is at the point; none: that rank.
    """

    point: str
    rank: int
    save: int
    part: float
    steps: int = 0
    delay: float = 0.0
    victims: tuple[int, ...] = ()


def sweep() -> list[Kill]:
    """Plan each phase in turn with rank 0, rank 1 and both of them killed in it."""
    return [
        Kill(
            point=point,
            rank=0 if point in _ON_RANK_0 else victims[0],
            save=2 if len(victims) == 2 and point in _TWICE else 1,
            part=0.5,
            victims=victims,
        )
        for victims in ((0,), (1,), (0, 1))
        for point in _PHASES
    ]


def draw(seed: int, interval: int) -> list[Kill]:
    """Draw ten kills in random order, one per attempt: every point once, the rest from outside."""
    rng = random.Random(seed)
    points = [*UNCOMMITTED, AFTER_MANIFEST, IN_RESTORE, OUTSIDE, OUTSIDE, OUTSIDE]
    rng.shuffle(points)
    free_ranks = list(range(RANKS)) * len(points)  # in turns from a random one on: never all alike
    del free_ranks[: rng.randrange(RANKS)]
    kills = [
        Kill(
            point=point,
            rank=0 if point in _ON_RANK_0 else free_ranks.pop(0),
            save=rng.randint(1, 2),
            part=rng.random(),
            steps=rng.randint(1, 2 * interval),
            delay=rng.uniform(0, 0.05),
        )
        for point in points
    ]
    restore = points.index(IN_RESTORE)
    if restore == 0:  # nothing to restore yet
        kills.append(kills.pop(0))
        restore = len(kills) - 1
    # The attempt before it leaves a checkpoint in any case.
    before = kills[restore - 1]
    kills[restore - 1] = replace(before, save=2, steps=max(before.steps, interval + 1))
    return kills


def write_plan(run_dir: Path, kills: list[Kill]) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "kills.json").write_text(json.dumps([asdict(kill) for kill in kills]))


def read_plan(run_dir: Path) -> list[Kill]:
    plan = json.loads((run_dir / "kills.json").read_text())
    return [Kill(**{**kill, "victims": tuple(kill["victims"])}) for kill in plan]
