"""Plan who is killed when in a run with images: drawn from a seed, the same for the same seed."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

RANKS = int(os.environ.get("CHECKNRUN_TEST_RANKS", "2"))
STEPS = 24
"""Steps of a whole run."""
EVERY = 5
"""Steps from one checkpoint to the next."""

MOMENT = "at a random instant"
BACKWARD = "inside backward, while rows are being updated"
UNCOMMITTED = "between a differential checkpoint's cut and its commit"
UNHEARD = "after such a commit, before any rank has heard of it"
RECOVERY = "in the middle of a recovery"

POINTS = (
    "RankImage.go_back",
    "ShardMemory.move",
    "StepJournal.undo_to",
    "KeptDescent.recover",
    "HeldRestore.load",
    "HeldRestore.hand_back",
    "Saver.recovered",
    "RankImage.resume",
    "StepJournal.drop",
)
"""Methods of a recovery, before and after each of which a rank is killed."""

_UPDATE = 0.0008
"""Seconds that updates take, about."""

ONE, BOTH, TERMINATED = "one", "both", "terminated"


@dataclass(frozen=True)
class Kill:
    """The end of one life.

    Attributes:
        kind: one of the above.
        rank: the rank that is at the point.
        who: that rank alone (the agent then ends the other one), both at once, or both by SIGTERM,
            as an agent does it.
        step: to be reached before, counted from the run's start.
        delay: seconds from there.
        point, after: of a recovery: before or after which method.
    """

    kind: str
    rank: int
    who: str = ONE
    step: int = 0
    delay: float = 0.0
    point: str = ""
    after: bool = False


def draw(kind: str, seed: int, number: int) -> list[Kill]:
    """Draw the kills of a run: one per life, until none is left."""
    rng = random.Random(f"{kind} {seed}")
    kills: list[Kill] = []
    for i in range(number):
        rank = rng.randrange(RANKS)
        step = 2 + i * (STEPS - 3) // number + rng.randrange(2)
        if kind == MOMENT:
            who = rng.choice([ONE, ONE, BOTH, TERMINATED])
            kills.append(Kill(kind, rank, who, step, rng.uniform(0, 0.06)))
        elif kind == BACKWARD:
            kills.append(Kill(kind, rank, ONE, step, rng.uniform(0, _UPDATE)))
        elif kind == RECOVERY:
            # A recovery needs something to recover from: a kill inside backward comes first, and
            # two kills in a row hit recoveries.
            point, after = rng.choice(POINTS), rng.random() < 0.5
            if i % 3 == 0:
                kills.append(Kill(BACKWARD, rank, ONE, step, rng.uniform(0, _UPDATE)))
            else:
                kills.append(Kill(kind, rank, rng.choice([ONE, BOTH]), 0, 0.0, point, after))
        else:
            kills.append(Kill(kind, 0, ONE, step))
    return kills


def every_point() -> list[Kill]:
    """Return kills at every point of a recovery, on either rank in turn."""
    kills: list[Kill] = []
    for i, point in enumerate(POINTS):
        for after in (False, True):
            rank = (i + after) % RANKS
            step = 2 + 3 * ((2 * i + after) % 6)  # six pairs to a run
            kills.append(Kill(BACKWARD, rank, ONE, step, 0.0004))
            kills.append(Kill(RECOVERY, rank, ONE, 0, 0.0, point, after))
    return kills
