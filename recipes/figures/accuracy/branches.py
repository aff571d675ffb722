"""Continue one state of a job in pairs: restored from checkpoints, and not.

A branch is `Checkpointer.save()` and `restore()`, some steps of training with checkpoints on the
way, and again, up to 20 times; its pair trains the same samples without. Both are evaluated on the
same held-out samples after the 1st, 3rd, 10th and 20th restore, and once more some steps later.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torchrec.datasets.utils import Batch

from recipes.dlrm_criteo.evaluate import auc
from recipes.figures.accuracy.methods import Method
from recipes.figures.accuracy.scale import Scale
from recipes.figures.accuracy.tasks import Task
from recipes.figures.small_job import SmallJob, State
from torchrec_checknrun import Checkpointer, CheckpointReport, Consecutive

FEW = 5
"""Lookups of an id that counts as rare."""
RARE = 0.2
"""Part of the held-out samples that is the slice of rare ids."""


class Quality(NamedTuple):
    """A model's figures on the held-out samples. ``rare``: the loss of those with rare ids."""

    loss: float
    auc: float
    rare: float


Scores = dict[tuple[int, int], Quality]
"""By number of restores, and steps after the last one."""


@dataclass(frozen=True)
class Change:
    """A restored branch against its pair; changes are relative, 0 is none."""

    method: str
    point: int
    restores: int
    after: int
    loss: float
    auc: float
    rare: float


@dataclass(frozen=True)
class Stored:
    """The bytes of a branch's checkpoints of one kind, all together.

    Attributes:
        kind: ``full``, the first one, or ``differential``, the others.
        rows: stored.
        state: rows of the optimizer.
        manifest: with indexes and footers.
    """

    method: str
    point: int
    kind: str
    checkpoints: int
    rows: int
    weights: int
    ids: int
    state: int
    dense: int
    manifest: int


class Restorer(Protocol):
    """The change that a branch makes to its job, and its pair does not."""

    def save(self) -> None:
        """Take a checkpoint."""

    def restore(self) -> None:
        """Take a checkpoint and restore it, or do what replaces that."""


class Nothing:
    """The pair's: no checkpoint."""

    def save(self) -> None:
        pass

    def restore(self) -> None:
        pass


class Disturbed(Nothing):
    """Change all values a little in place of a restore."""

    def __init__(self, job: SmallJob, level: float) -> None:
        self._job, self._level = job, level
        self._source = torch.Generator(device=job.shards[0].weight.device).manual_seed(0)

    def restore(self) -> None:
        self._job.disturb(self._level, self._source)


class Restored:
    """Save and restore by the public Checkpointer; keep the reports."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer
        self.reports: list[CheckpointReport] = []

    def save(self) -> None:
        report = self._checkpointer.save()
        assert report is not None, "a gradient is waiting between steps"
        self.reports.append(report)

    def restore(self) -> None:
        self.save()
        self._checkpointer.restore(self.reports[-1].id)

    def stored(self, method: str, point: int) -> Iterator[Stored]:
        """Yield the bytes of the full checkpoints and of the differential ones."""
        for kind in ("full", "differential"):
            own = [r for r in self.reports if (r.kind == "full") == (kind == "full")]
            parts = {
                name: sum(report.bytes[name] for report in own)
                for name in ("weights", "ids", "optimizer", "dense", "manifest", "other")
            }
            yield Stored(
                method=method,
                point=point,
                kind=kind,
                checkpoints=len(own),
                rows=sum(report.modified_rows for report in own),
                weights=parts["weights"],
                ids=parts["ids"],
                state=parts["optimizer"],
                dense=parts["dense"],
                manifest=parts["manifest"] + parts["other"],
            )


class Accesses:
    """The number of lookups of each row."""

    def __init__(self, job: SmallJob) -> None:
        self._features = list(job.reader.features)
        self._counts = {name: np.zeros(0, np.int64) for name in self._features}

    def add(self, batches: Sequence[Batch]) -> None:
        """Count trained samples."""
        for batch in batches:
            for name in self._features:
                ids = batch.sparse_features[name].values().cpu().numpy()
                counts = np.bincount(ids, minlength=len(self._counts[name]))
                counts[: len(self._counts[name])] += self._counts[name]
                self._counts[name] = counts

    def rare(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Return which samples have the most ids that were looked up at most ``FEW`` times, and
        among equals the rarest one; a part ``RARE`` of all.
        """
        of_samples = np.concatenate(
            [
                np.stack([self._of(name, batch) for name in self._features], axis=1)
                for batch in batches
            ]
        )
        order = np.lexsort((of_samples.min(axis=1), -(of_samples <= FEW).sum(axis=1)))
        chosen = torch.zeros(len(order), dtype=torch.bool)
        chosen[torch.from_numpy(order[: max(1, int(RARE * len(order)))].copy())] = True
        return chosen

    def _of(self, name: str, batch: Batch) -> np.ndarray:
        ids = batch.sparse_features[name].values().cpu().numpy()
        counts = self._counts[name]
        known = ids < len(counts)
        return np.where(known, counts[np.where(known, ids, 0)], 0)


def quality(job: SmallJob, task: Task, rare: torch.Tensor) -> Quality:
    """Evaluate a job."""
    logits, labels = job.predict()
    losses = task.loss(logits, labels)
    found = auc(logits, (labels > task.liked).double())
    assert found is not None, "held-out labels are all the same"
    return Quality(loss=losses.mean().item(), auc=found, rare=losses[rare].mean().item())


def branch(
    job: SmallJob,
    start: State,
    batches: Sequence[Batch],
    scale: Scale,
    restorer: Restorer,
    evaluate: Callable[[], Quality],
    progress: Callable[[], object],
) -> Scores:
    """Return the scores of a branch; the job's end state is undefined.

    Args:
        start: where the branch begins.
        batches: to train, ``scale.length`` of them.
    """
    job.put_back(start)
    scores: Scores = {}
    for number in range(1, scale.restores[-1] + 1):
        restorer.restore()
        if number in scale.restores:
            scores[number, 0] = evaluate()
        if number < scale.restores[-1]:
            done = (number - 1) * scale.gap
            ends = [done + scale.gap * (i + 1) // scale.saves for i in range(scale.saves)]
            for end in ends:
                job.train(batches[done:end], progress)
                done = end
                if end != ends[-1]:
                    restorer.save()
    if scale.after:
        job.train(batches[-scale.after :], progress)
        scores[scale.restores[-1], scale.after] = evaluate()
    return scores


@contextmanager
def _restorer(job: SmallJob, method: Method) -> Iterator[Nothing | Restored]:
    """Make what a method does at each restore, upon the job's present state."""
    if method.choose is None:
        yield Disturbed(job, method.noise)
        return
    state = {"optimizer": job.optimizer, "reader": job.reader}
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpointer(
            folder,
            model=job.model,
            state=state,
            policy=Consecutive(),
            quantization=method.choose(job),
            retention=None,
        ) as checkpointer,
    ):
        yield Restored(checkpointer)


def measure(
    job: SmallJob, task: Task, scale: Scale, methods: Sequence[Method], bar: Any
) -> tuple[list[Change], list[Stored]]:
    """Measure all methods at all branch points.

    Args:
        bar: shows the progress, a ``tqdm``.
    """
    changes: list[Change] = []
    stored: list[Stored] = []
    seen, step = Accesses(job), 0
    for point in scale.steps:
        bar.set_description(f"{task.title}, step {point}")
        way = job.batches(point - step)
        job.train(way, bar.update)
        seen.add(way)
        step, start, rare = point, job.keep(), seen.rare(job.held_out)
        batches = job.batches(scale.length)

        def evaluate(rare: torch.Tensor = rare) -> Quality:
            return quality(job, task, rare)

        control = branch(job, start, batches, scale, Nothing(), evaluate, bar.update)
        for method in methods:
            bar.set_description(f"{task.title}, step {point}, {method.name}")
            job.put_back(start)
            with _restorer(job, method) as restorer:
                scores = branch(job, start, batches, scale, restorer, evaluate, bar.update)
            for key, found in scores.items():
                relative = [new / old - 1 for new, old in zip(found, control[key], strict=True)]
                changes.append(Change(method.name, point, *key, *relative))
            if isinstance(restorer, Restored):
                stored += restorer.stored(method.name, point)
        job.put_back(start)
    return changes, stored
