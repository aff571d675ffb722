"""Live one life of a rank with images: restore, train, be killed or come to the end.

Everything that the next step depends on is there: fused tables whole and in parts, a data-parallel
table, dense parameters under Adam, dropout from the global generator, a reader's position, an
object of each rank's own and one that all share.
"""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.campaign.kill_rank import Dice, History
from tests.crash.images.arming import arm
from tests.crash.images.board import Board
from tests.crash.images.kills import EVERY, STEPS, Kill
from tests.distributed.models import CollectionSpec, Job, ModelSpec, TableSpec
from tests.distributed.states import local_parts
from torchrec_checknrun import Checkpointer, Consecutive, Images, PartialRecovery, PerRank

ROWS = 30_000
TABLES = (
    TableSpec("parts", ROWS, 32, ("f0",)),
    TableSpec("first", ROWS, 16, ("f1", "f0")),
    TableSpec("second", ROWS // 2, 16, ("f2",)),
    TableSpec("copies", 50, 8, ("f3",)),
)
SPEC = ModelSpec((CollectionSpec("c", TABLES),), dense="adam")
PLAN = {
    "c.parts": "row_wise",
    "c.first": "table_wise:0",
    "c.second": "table_wise:1",
    "c.copies": "data_parallel",
}
SAMPLES = 3000
"""So many that an update takes long enough to be killed in its middle."""


@dataclass
class Run:
    """A job with all its state, and its checkpointer.

    Args:
        folder: holds the checkpoints.
        memory: holds the images; None: no images.
        partial: whether a rank whose image is gone goes back alone.
    """

    folder: Path
    memory: Path | None
    partial: PartialRecovery | None = None

    def __post_init__(self) -> None:
        self.job = Job.build(SPEC, PLAN, samples=SAMPLES)
        self.dropout = nn.Dropout(0.2)
        self.history, self.dice = History(), Dice()
        self.dice.generator.manual_seed(17 + dist.get_rank())
        torch.manual_seed(5 + dist.get_rank())
        np.random.seed(6)
        random.seed(7)
        survive = Images(folder=str(self.memory)) if self.memory else None
        self.saver = Checkpointer(
            self.folder / "root",
            model=self.job.model,
            state={
                "optimizer": self.job.optimizer,
                "job": self.job,
                "history": self.history,
                "dice": PerRank(self.dice, lost="copy"),
            },
            policy=Consecutive(),
            every_steps=EVERY,
            when_busy="wait",
            timeout_seconds=60,
            chunk_bytes=200_000,
            survive=survive,
            partial=self.partial,
        )

    def train(self) -> None:
        """Train a step, whose result depends on all generators."""
        job = self.job
        job.optimizer.zero_grad()
        dense, sparse = job.batch(job.steps)
        sparse = moved(sparse, job.steps)
        noise = (
            np.random.rand() + random.random() + float(torch.rand(1, generator=self.dice.generator))
        )
        job.loss(self.dropout(dense) * (1 + 0.01 * noise), sparse).backward()
        job.optimizer.step()
        job.steps += 1
        self.history.steps.append(job.steps)

    def values(self) -> dict[str, Any]:
        """Copy all of this rank's state, as bytes."""
        parts = {f"{p.name}@{p.offset}": p.tensor.numpy().tobytes() for p in local_parts(self.job)}
        return {
            **parts,
            "torch": torch.get_rng_state().numpy().tobytes(),
            "numpy": np.random.rand(4).tobytes(),
            "python": [random.random() for _ in range(4)],
            "dice": self.dice.generator.get_state().numpy().tobytes(),
            "history": list(self.history.steps),
            "steps": (self.job.steps, self.saver.steps),
        }


def moved(features: KeyedJaggedTensor, step: int) -> KeyedJaggedTensor:
    """Map ids to a quarter of the rows that moves on with each step.

    So a row is changed in some steps only, and a mark that is lost is not made good by later ones.
    """
    offsets, values = features.offset_per_key(), features.values()
    parts = []
    for i, name in enumerate(features.keys()):
        rows = SPEC.features[name]
        part = values[offsets[i] : offsets[i + 1]]
        parts.append((part // 4 + step * rows // STEPS) % rows)
    return KeyedJaggedTensor(features.keys(), torch.cat(parts), lengths=features.lengths())


def live(
    folder: Path,
    memory: Path | None,
    rank: int,
    board: Board,
    kill: Kill | None,
    partial: PartialRecovery | None = None,
) -> None:
    """Restore, and train to the end of the run; a kill ends this before."""
    if kill is not None and kill.rank == rank:
        arm(kill, board)
    run = Run(folder, memory, partial)
    with run.saver:
        report = run.saver.restore()
        board.restored(rank, run.saver.steps, report is not None and report.source == "images")
        print("restored", run.saver.steps, run.saver._survival.reasons, flush=True)
        own = run.saver._survival._image
        if own is not None:
            board.rolled_back(rank, own.rows, own.changed)
        while run.job.steps < STEPS:
            board.begins(rank, run.job.steps + 1)
            run.train()
            run.saver.step()
            board.done(rank, run.saver.steps)
        run.saver.save()
        keep(folder / f"final-{rank}", run.values())
    board.ended(rank)


def from_storage(folder: Path, rank: int) -> None:
    """Restore the newest checkpoint without images, and keep the rows and dense state."""
    run = Run(folder, None)
    run.saver.restore(required=True)
    keep(folder / f"restored-{rank}", run.values())
    run.saver.close()


def keep(file: Path, values: dict[str, Any]) -> None:
    temporary = file.with_suffix(".new")
    temporary.write_bytes(pickle.dumps(values))
    temporary.rename(file)


def load(file: Path) -> dict[str, Any]:
    values: dict[str, Any] = pickle.loads(file.read_bytes())
    return values


def differences(found: dict[str, Any], wanted: dict[str, Any], only: str = "") -> list[str]:
    """Name what differs between two states of one rank, of the values whose name begins so."""
    names = [name for name in sorted(found.keys() | wanted.keys()) if name.startswith(only)]
    return [name for name in names if found.get(name) != wanted.get(name)]
