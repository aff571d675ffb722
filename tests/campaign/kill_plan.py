"""Draw from a seed who is killed when: a trial is one run of several lives."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tests.distributed import lc_bound
from tests.distributed.models import CollectionSpec, ModelSpec, TableSpec, uniform_plan
from tests.distributed.references import STEP
from torchrec_checknrun import (
    Checkpointer,
    Consecutive,
    Full,
    Intermittent,
    OneShot,
    Quantization,
    Retention,
)
from torchrec_checknrun.root.policy import Policy

RANKS = 2
SPEC = ModelSpec(
    (CollectionSpec("c", (TableSpec("t0", 40, 8, ("f0",)), TableSpec("t1", 23, 4, ("f1", "f0")))),)
)
LIFE_STEPS = 4
"""Steps that a life trains unless killed."""
POLICIES: dict[str, Callable[[], Policy]] = {
    "full": Full,
    "one-shot": OneShot,
    "consecutive": Consecutive,
    "intermittent": Intermittent,
}
AGENT = -1
"""The victim that stands for the ranks' parent."""
WRITERS = (10, 11)
"""The victims that stand for the ranks' write processes."""
_OPERATIONS = 180
"""Storage operations of a rank in a life, rounded up."""


class Phase(IntEnum):
    """The phases of a rank's life."""

    BUILD = 0
    RESTORE = 1
    TRAIN = 2
    CLOSE = 3
    DONE = 4


@dataclass(frozen=True)
class Kill:
    """The end of a life.

    Attributes:
        victims: ranks, ``AGENT`` or one of ``WRITERS``.
        kind: ``moment``: some time after a rank has reached a phase and step; ``operation``: at a
            rank's ``number``-th storage operation on a name like ``target``.
        rank: the rank that triggers the kill.
        phase, step: to be reached: a phase, and the steps trained in this life.
        delay: seconds from there to the kill.
        how: ``before``, ``half`` or ``after``: relative to the operation.
        grace: seconds until the agent kills the remaining ranks.
    """

    victims: tuple[int, ...]
    kind: str
    rank: int = 0
    phase: Phase = Phase.TRAIN
    step: int = 0
    delay: float = 0.0
    number: int = 0
    target: str = ""
    how: str = "before"
    grace: float = 0.0


@dataclass(frozen=True)
class Trial:
    """A run of several lives.

    Attributes:
        kills: one for each life but the last.
        torchrun: tell the lives, by torchrun's variables, that they follow each other.
        elastic: use torchrun's own agent.
        wait_for_orphans: begin the life after a killed agent only when the agent's ranks have
            ended.
        links: the method that stores rows as differences; empty: rows are whole.
    """

    seed: str
    sharding: str
    options: dict[str, Any]
    policy: str
    keep: int | None
    every_steps: int
    explicit: bool
    kills: tuple[Kill, ...]
    torchrun: bool
    wait_for_orphans: bool
    elastic: bool
    links: str = ""

    def checkpointer(self, root: str, **given: Any) -> Checkpointer:
        """Make the Checkpointer of a rank."""
        if self.links:
            given["quantization"] = LINKS[self.links]()
        return Checkpointer(
            root,
            policy=POLICIES[self.policy](),
            retention=None if self.keep is None else Retention(keep=self.keep),
            every_steps=self.every_steps,
            timeout_seconds=30.0,
            chunk_bytes=1000,
            **self.options,
            **given,
        )

    def plan(self, ranks: int) -> dict[str, str]:
        """Return the sharding type of each table."""
        return uniform_plan(SPEC, self.sharding, ranks)


def delta_quantization() -> Quantization:
    """Return steps so small that a row without an update differs by far more."""
    return Quantization(method="delta", step=STEP, exact_below_rows=0)


def logdelta_quantization() -> Quantization:
    """Return steps as small, and row-wise optimizer state that is kept by references, too."""
    return Quantization(method="delta", step=STEP, optimizer="logdelta", exact_below_rows=0)


def lc_quantization() -> Quantization:
    """Return buckets so many that what they leave out is far smaller than a row's update."""
    return Quantization(method="lc", bits=lc_bound.BITS, exact_below_rows=0)


LINKS = {
    "delta": delta_quantization,
    "logdelta": logdelta_quantization,
    "lc": lc_quantization,
}
"""By the method that stores rows as differences; ``logdelta``: optimizer state, too."""


def draw(seed: str, kills: int, variant: str = "thread") -> Trial:
    """Draw a run with a given number of kills.

    Args:
        variant: ``process``: with ``background="process"``, which takes seconds to start; the write
            processes may be victims. ``agent``: under torchrun's agent, which is the victim more
            often than not. A method of ``LINKS``: rows are stored as differences.
    """
    rng = random.Random(seed)
    process, links = variant == "process", variant if variant in LINKS else ""
    options: dict[str, Any] = {
        "background": "process" if process else "thread",
        "staging": rng.choice(["copy_on_write", "copy_on_write", "auto", "copy", "encode"]),
        "when_busy": rng.choice(["skip", "wait"]),
    }
    if not process and rng.random() < 0.2:
        options["memory_budget"] = 40_000
    return Trial(
        seed=seed,
        sharding=rng.choice(["row_wise", "table_wise"]),
        options=options,
        policy=rng.choice(["consecutive"] * 5 + ["full"] if links else list(POLICIES)),
        keep=rng.choice([None, 1, 2]),
        every_steps=rng.choice([1, 1, 2]),
        explicit=rng.random() < 0.3,
        kills=tuple(_kill(rng, variant) for _ in range(kills)),
        elastic=variant == "agent",
        torchrun=rng.random() < 0.5,
        wait_for_orphans=rng.random() < 0.5,
        links=links,
    )


def _kill(rng: random.Random, variant: str) -> Kill:
    victims = rng.choice([(0,), (1,), (0, 1), (0,), (1,), (AGENT,)])
    if variant == "agent" and rng.random() < 0.7:
        victims = (AGENT,)
    if variant == "process" and rng.random() < 0.6:
        victims = (rng.choice(WRITERS),)
    grace = rng.choice([0.0, 0.0, 0.05, 0.3])
    rank = rng.randrange(RANKS)
    if victims[0] not in WRITERS and rng.random() < 0.5:
        number = rng.randint(1, _OPERATIONS if rank == 0 else _OPERATIONS // 4)
        target = rng.choice(["", "", "put manifest", "put claim", "delete", "fsync", "read"])
        if target:
            rank, number = (rank if target in ("fsync", "read") else 0), rng.randint(1, 8)
        how = rng.choice(["before", "half", "after"])
        return Kill(
            victims, "operation", rank=rank, number=number, target=target, how=how, grace=grace
        )
    phase = rng.choices(list(Phase)[:4], weights=[1, 3, 16, 2])[0]
    if victims[0] in WRITERS:
        phase = Phase.TRAIN
    delay = rng.uniform(0, 0.06) if phase is Phase.TRAIN else rng.uniform(0, 0.03)
    step = rng.randrange(LIFE_STEPS)
    return Kill(victims, "moment", rank=rank, phase=phase, step=step, delay=delay, grace=grace)
