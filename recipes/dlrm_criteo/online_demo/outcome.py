"""Check what the demo promises of every answer, and put scores, lags and bytes into a table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from rich.table import Table

from recipes.dlrm_criteo.demo import check
from recipes.dlrm_criteo.evaluate import score
from recipes.dlrm_criteo.online_demo.served import Answer
from recipes.dlrm_criteo.online_demo.watch import Moment, lags

FOLLOWED, FIRST, RELOADED = "followed", "first checkpoint", "reloaded"
TRUTH = "best possible"
PARTS = 5
"""Equal parts of the stream that are scored one by one, too."""


@dataclass(frozen=True)
class Question:
    """Samples that every model was asked about, and what each answered.

    Attributes:
        first: the number of the first of them in the stream.
        truth: the probabilities that the labels were drawn with; None where nobody knows them.
    """

    first: int
    labels: np.ndarray
    answers: Mapping[str, Answer]
    truth: np.ndarray | None


@dataclass(frozen=True)
class Versions:
    """The history of a model.

    Attributes:
        shown: when each version was served for the first time.
        bytes_read: by all of them.
        committed: when each checkpoint or publication that it could serve was committed, by id.
        follows: whether it is to become newer.
    """

    shown: Sequence[Moment]
    bytes_read: int
    committed: Mapping[str, Moment]
    follows: bool = True


def check_answers(
    questions: Sequence[Question],
    versions: Mapping[str, Versions],
    trained_until: Callable[[int], int | None],
) -> None:
    """Check that every answer is of a version that exists, and that had not seen the samples.

    Args:
        trained_until: how many of the stream's samples were trained at a step; None: no such step.

    Raises:
        Unmet: names the model, and the answer.
    """
    for name, each in versions.items():
        answers = [question.answers[name] for question in questions]
        for question, answer in zip(questions, answers, strict=True):
            trained = trained_until(answer.step)
            where = f"{name}, samples from {question.first} on: {answer.id}"
            check(len(answer.predictions) == len(question.labels), f"{where} answers for all")
            check(answer.id in each.committed, f"{where} was committed")
            check(each.committed[answer.id].step == answer.step, f"{where} is of {answer.step}")
            check(trained is not None, f"{where} is of a step that was trained, {answer.step}")
            check(
                trained is not None and trained <= question.first,
                f"{where} had not seen them, but {trained} samples",
            )
        steps = [answer.step for answer in answers]
        check(
            all(earlier <= later for earlier, later in pairwise(steps)),
            f"{name}: versions never go back",
        )


def measure(
    questions: Sequence[Question],
    versions: Mapping[str, Versions],
    trained: Sequence[Moment],
    since: float,
) -> dict[str, Any]:
    """Score the models, and measure how far each was behind.

    Args:
        trained: when each step was trained.
        since: when the first question was asked: lags are those of what came after.
    """
    labels = np.concatenate([question.labels for question in questions])
    found: dict[str, Any] = {}
    for name, each in versions.items():
        predictions = np.concatenate([q.answers[name].predictions for q in questions])
        found[name] = {
            **_scores(predictions, labels),
            "versions": len({question.answers[name].id for question in questions}),
            "bytes_read": each.bytes_read,
        }
        if each.follows:
            commits = [moment for moment in each.committed.values() if moment.time >= since]
            steps = [moment for moment in trained if moment.time >= since]
            found[name]["step_to_visible"] = _spread(lags(steps, each.shown))
            found[name]["commit_to_visible"] = _spread(lags(commits, each.shown))
    truths = [question.truth for question in questions]
    known = [truth for truth in truths if truth is not None]
    if len(known) == len(truths):
        found[TRUTH] = _scores(np.concatenate(known), labels)
    return found


def _scores(predictions: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Score probabilities: all of them, and the logloss of each part of the stream."""
    logits = torch.logit(torch.from_numpy(predictions).double(), eps=1e-7)
    truth = torch.from_numpy(labels).double()
    whole = score(logits, truth)
    parts = [
        score(some, labels_of).logloss
        for some, labels_of in zip(
            logits.tensor_split(PARTS), truth.tensor_split(PARTS), strict=True
        )
        if len(some)
    ]
    return {
        "samples": whole.eval_samples,
        "logloss": whole.logloss,
        "auc": whole.auc,
        "logloss_by_part": parts,
    }


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    return {
        "median": statistics.median(seconds),
        "worst": max(seconds),
        "count": len(seconds),
    }


HEADINGS = (
    "model",
    "versions",
    "logloss",
    "its first fifth",
    "its last fifth",
    "AUC",
    "step to visible: median, worst",
    "commit to visible: median, worst",
    "MB read",
)


def rows(models: Mapping[str, Any]) -> list[list[str]]:
    """Return the cells of the table, a row a model."""
    return [
        [
            name,
            str(found.get("versions", "")),
            f"{found['logloss']:.4f}",
            f"{found['logloss_by_part'][0]:.4f}",
            f"{found['logloss_by_part'][-1]:.4f}",
            "" if found["auc"] is None else f"{found['auc']:.4f}",
            _seconds(found.get("step_to_visible")),
            _seconds(found.get("commit_to_visible")),
            f"{found['bytes_read'] / 1e6:.1f}" if "bytes_read" in found else "",
        ]
        for name, found in models.items()
    ]


def _seconds(spread: Mapping[str, float] | None) -> str:
    return "" if spread is None else f"{spread['median']:.2f} s, {spread['worst']:.2f} s"


def table(models: Mapping[str, Any]) -> Table:
    """Make the table for a terminal."""
    made = Table(title="models that predicted the same samples, before training saw them")
    for heading in HEADINGS:
        made.add_column(heading, justify="left" if heading == "model" else "right")
    for row in rows(models):
        made.add_row(*row)
    return made


def markdown(models: Mapping[str, Any]) -> str:
    """Make the table for a page."""
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" + "|---:" * (len(HEADINGS) - 1) + "|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows(models)])
