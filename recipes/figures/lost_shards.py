"""Measure what stale rows cost a model: the accuracy part of `partial_recovery`.

One process trains, and each table's rows count as those of eight ranks. At the failure some of the
ranks lose their rows (weights and optimizer state), which come back as they were saved last: at the
start, and, by a scheme's priority, a few of them more often. Tables other than the largest are then
saved whole. Dense parameters and the other ranks' rows stay. Branches are compared in pairs, with
the same samples, to the job's end. The failure comes in the middle between two priority saves.

`noise` is the floor: a branch without any loss whose table values change by a part in 10^7.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torchrec.datasets.utils import Batch
from tqdm import tqdm

from recipes.dlrm_criteo.evaluate import Score
from recipes.figures.small_job import SmallJob, State, relative, small_job
from torchrec_checknrun.marks.priorities import (
    LargestChange,
    LargestGrowth,
    MostUpdated,
    Priority,
    SubSampled,
)
from torchrec_checknrun.shards import LocalShard

NOISE = 1e-7


@dataclass(frozen=True)
class Plan:
    """The lengths of all parts, in steps, and what is lost."""

    steps: int = 1200
    failure: int = 700
    priority_every: int = 100
    fraction: float = 0.02
    """Part of a large table's rows that a priority save takes."""
    largest: int = 7
    """Tables that are saved by priority."""
    ranks: int = 8
    lost: tuple[tuple[int, ...], ...] = ((3,), (0, 2, 4, 6))
    batch: int = 512
    scale: float = 0.02
    eval_samples: int = 65536

    def pls(self, lost: Sequence[int]) -> float:
        """Return the portion of samples lost with these ranks: nothing was saved before."""
        return len(lost) * self.failure / (self.steps * self.ranks)

    @property
    def trained(self) -> int:
        """Return the steps of one seed, all branches together."""
        branches = 2 + len(self.lost) * len(SCHEMES)
        return self.failure + branches * (self.steps - self.failure)


FULL = Plan()
QUICK = Plan(steps=60, failure=35, priority_every=10, eval_samples=4096, scale=0.005)


@dataclass(frozen=True)
class Change:
    """A branch with lost rows against the one without, at the end. ``logloss``, ``auc``: relative,
    0 is none.
    """

    seed: int
    scheme: str
    lost: int
    pls: float
    logloss: float
    auc: float


class Random(Priority):
    """Rows at random: as many bytes as any priority, without a choice."""

    def __init__(self, capacity: int, weight: torch.Tensor, seed: int) -> None:
        super().__init__(capacity)
        self._rows = len(weight)
        self._random = torch.Generator().manual_seed(seed)

    def note(self, rows: torch.Tensor) -> None:
        """Do nothing: whether a row was updated makes no difference."""

    def take(self) -> torch.Tensor:
        return torch.randperm(self._rows, generator=self._random)[: self.capacity]


SCHEMES: Mapping[str, Callable[[int, LocalShard, int], Priority] | None] = {
    "nothing": None,
    "random rows": lambda count, shard, seed: Random(count, shard.weight, seed),
    "MFU": lambda count, shard, _: MostUpdated(count, shard.weight),
    "SSU": lambda count, shard, seed: SubSampled(count, shard.weight, seed),
    "SCAR": lambda count, shard, _: LargestChange(count, shard.weight),
    "Adagrad growth": lambda count, shard, _: LargestGrowth(count, shard.optimizer["momentum1"]),
}
"""By the rows that are saved between checkpoints."""


class Saved:
    """All rows as a scheme has saved them last."""

    def __init__(self, name: str, shards: Sequence[LocalShard], plan: Plan, seed: int) -> None:
        make = SCHEMES[name]
        self._shards = shards
        self._saves = make is not None
        self._copies = [[tensor.detach().clone() for tensor in shard.tensors] for shard in shards]
        self._priorities: dict[int, Priority] = {}
        by_size = sorted(range(len(shards)), key=lambda at: -len(shards[at].weight))
        for at in by_size[: plan.largest]:
            if make is not None:
                capacity = max(1, int(plan.fraction * len(shards[at].weight)))
                self._priorities[at] = make(capacity, shards[at], seed)

    def note(self, rows: Sequence[torch.Tensor]) -> None:
        """Note the rows that a step has updated, by shard."""
        for at, priority in self._priorities.items():
            priority.note(rows[at])

    @torch.no_grad()
    def save(self) -> None:
        """Save what the priorities choose, and small tables whole."""
        for at, shard in enumerate(self._shards if self._saves else ()):
            rows = self._priorities[at].take() if at in self._priorities else slice(None)
            for tensor, copied in zip(shard.tensors, self._copies[at], strict=True):
                copied[rows] = tensor[rows]

    @torch.no_grad()
    def bring_back(self, lost: Sequence[int], ranks: int) -> None:
        """Overwrite these ranks' rows as saved."""
        for shard, copies in zip(self._shards, self._copies, strict=True):
            count = len(shard.weight)
            for rank in lost:
                own = slice(rank * count // ranks, (rank + 1) * count // ranks)
                for tensor, copied in zip(shard.tensors, copies, strict=True):
                    tensor[own] = copied[own]


def measure(plan: Plan, seed: int, bar: tqdm[Any]) -> list[Change]:
    """Train one seed's job to the failure, and each branch to its end."""
    overrides = [
        f"seed={seed}",
        f"dataset.seed={seed}",
        f"dataset.samples={round(1.3 * plan.steps * plan.batch)}",
        f"trainer.batch_size={plan.batch}",
        f"trainer.eval_samples={plan.eval_samples}",
        f"model.scale={plan.scale}",
    ]
    with small_job(overrides) as job:
        saved = {name: Saved(name, job.shards, plan, seed) for name in SCHEMES}
        _train_to_failure(job, plan, saved.values(), bar)
        start, rest = job.keep(), job.batches(plan.steps - plan.failure)
        unharmed = _branch(job, start, rest, lambda: None, bar)
        source = torch.Generator().manual_seed(seed)
        noisy = _branch(job, start, rest, lambda: job.disturb(NOISE, source), bar)
        changes = [Change(seed, "noise", 0, 0.0, *relative(noisy, unharmed))]
        for lost in plan.lost:
            for name, one in saved.items():
                harm = partial(one.bring_back, lost, plan.ranks)
                change = relative(_branch(job, start, rest, harm, bar), unharmed)
                changes.append(Change(seed, name, len(lost), plan.pls(lost), *change))
    return changes


def _train_to_failure(job: SmallJob, plan: Plan, saved: Collection[Saved], bar: tqdm[Any]) -> None:
    features = [shard.table.rpartition(".t_")[2] for shard in job.shards]
    for step in range(1, plan.failure + 1):
        (batch,) = job.batches(1)
        job.train([batch], bar.update)
        rows = [batch.sparse_features[feature].values() for feature in features]
        for one in saved:
            one.note(rows)
            if step % plan.priority_every == plan.priority_every // 2:
                one.save()


def _branch(
    job: SmallJob,
    start: State,
    batches: Sequence[Batch],
    harm: Callable[[], object],
    bar: tqdm[Any],
) -> Score:
    """Return the score at the job's end after some harm at the failure."""
    job.put_back(start)
    harm()
    job.train(batches, bar.update)
    return job.evaluate()


def summary(changes: Sequence[Change]) -> list[dict[str, Any]]:
    """Average over the seeds, by ranks lost and scheme; with the standard error."""
    rows = []
    for lost, scheme in dict.fromkeys((c.lost, c.scheme) for c in changes):
        own = [c for c in changes if (c.lost, c.scheme) == (lost, scheme)]
        row: dict[str, Any] = {"scheme": scheme, "lost": lost, "pls": own[0].pls}
        row["seeds"] = len(own)
        for name in ("logloss", "auc"):
            values = np.array([getattr(change, name) for change in own])
            row[name] = float(values.mean())
            error = values.std(ddof=1) / np.sqrt(len(own)) if len(own) > 1 else np.nan
            row[f"{name}_error"] = None if np.isnan(error) else float(error)
        rows.append(row)
    return rows
