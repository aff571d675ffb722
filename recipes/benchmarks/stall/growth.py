"""Measure whether the cut grows with the number of rows: a narrow table, and one of eight times the
rows. Of both the same part is modified.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from recipes.benchmarks.one_table import TABLE, one_table, step
from recipes.benchmarks.quiet import wait_until_quiet
from recipes.benchmarks.side_by_side.trace import FIRST
from torchrec_checknrun import Checkpointer, CheckpointReport, Consecutive, Quantization

TIMES = 8
"""Rows of the large table for one of the small one."""
DIM = 8
_STEPS = 16
_LOOKUPS = 1 << 15
"""Rows that a step looks up."""


@dataclass(frozen=True)
class Cut:
    """The cut of a table, and the protection of the steps after it, in seconds."""

    rows: int
    modified: int
    cut: float
    protection: float


class _Run:
    """A table in training, and its Checkpointer."""

    def __init__(self, rows: int, folder: Path) -> None:
        self._rows = rows
        self._model = one_table(rows, DIM)
        self._random = torch.Generator().manual_seed(0)
        chosen = torch.rand(rows, generator=self._random) < FIRST
        self._modified = chosen.nonzero().squeeze(1)
        self._reports: list[CheckpointReport] = []
        self._checkpointer = Checkpointer(
            folder / str(rows),
            model=self._model,
            policy=Consecutive(),
            quantization=Quantization(bits=4),
            staging="copy_on_write",
            callbacks=[self._reports.append],
        )
        self._checkpointer.save()

    def turn(self, patience: float) -> Cut:
        """Modify rows, save, and train on the same rows until the checkpoint is durable."""
        self._checkpointer.mark(TABLE, self._modified)
        self._step()
        wait_until_quiet(patience)
        known = len(self._reports)
        started = time.perf_counter()
        self._checkpointer.save(wait=False)
        cut = time.perf_counter() - started
        steps = 0
        while steps < _STEPS or len(self._reports) == known:
            self._step()
            steps += 1
        report = self._reports[-1]
        return Cut(self._rows, report.modified_rows, cut, report.protection_seconds)

    def close(self) -> None:
        """Close the Checkpointer."""
        self._checkpointer.close()

    def _step(self) -> None:
        chosen = torch.randint(len(self._modified), (_LOOKUPS,), generator=self._random)
        step(self._model, self._modified[chosen])
        self._checkpointer.step()


def measure(rows: int, intervals: int, patience: float, folder: Path) -> list[list[Cut]]:
    """Measure in each of ``intervals`` intervals the cuts of both tables; the large one is last.

    This is for a process of its own: it makes the default process group.

    Args:
        patience: seconds to wait, before each cut, until nothing else runs.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    runs = [_Run(rows, folder), _Run(TIMES * rows, folder)]
    order = np.random.default_rng(0)
    found = []
    for _ in tqdm(range(intervals + 1), desc="growth", file=sys.stderr):
        cuts = {number: runs[number].turn(patience) for number in order.permutation(len(runs))}
        found.append([cuts[number] for number in range(len(runs))])
    for run in runs:
        run.close()
    dist.destroy_process_group()
    return found[1:]  # the first one touches memory that the others find warm
