"""Average the changes over the branch points, with intervals; count bytes a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from recipes.figures.accuracy.branches import Change, Stored

_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160),
    *(2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
"""97.5 % quantiles of Student's distribution with 1, 2, ... degrees of freedom."""
FLOOR = "noise 1e-07"


class Interval(NamedTuple):
    """A mean over branch points and its 95 % interval; NaN bounds from one point."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Average values that are taken for independent and normal."""
        mean, count = float(np.mean(values)), len(values)
        if count == 1:
            return cls(mean, math.nan, math.nan)
        wide = _STUDENT[min(count - 1, len(_STUDENT)) - 1]
        half = float(wide * np.std(values, ddof=1) / math.sqrt(count))
        return cls(mean, mean - half, mean + half)


@dataclass(frozen=True)
class Effect:
    """The changes of one method after some restores, relative to the pair."""

    method: str
    restores: int
    after: int
    loss: Interval
    auc: Interval
    rare: Interval


@dataclass(frozen=True)
class Size:
    """The bytes of one method's checkpoints of one kind: a stored row's, and a checkpoint's."""

    method: str
    kind: str
    rows: float
    weights: float
    ids: float
    state: float
    dense: float
    manifest: float

    @property
    def row(self) -> float:
        """Return the bytes of a stored row with id and optimizer state."""
        return self.weights + self.ids + self.state


def effects(changes: Sequence[Change]) -> list[Effect]:
    """Average by method, number of restores and steps after, in their order."""
    groups: dict[tuple[str, int, int], list[Change]] = {}
    for change in changes:
        groups.setdefault((change.method, change.restores, change.after), []).append(change)
    return [
        Effect(*key, *(Interval.of([getattr(c, x) for c in own]) for x in ("loss", "auc", "rare")))
        for key, own in groups.items()
    ]


def sizes(stored: Sequence[Stored]) -> list[Size]:
    """Average by method and kind, in their order."""
    groups: dict[tuple[str, str], list[Stored]] = {}
    for one in stored:
        if one.checkpoints:
            groups.setdefault((one.method, one.kind), []).append(one)
    found = []
    for (method, kind), own in groups.items():
        rows = max(1, sum(one.rows for one in own))
        count = sum(one.checkpoints for one in own)
        found.append(
            Size(
                method,
                kind,
                rows / count,
                *(sum(getattr(one, x) for one in own) / rows for x in ("weights", "ids", "state")),
                *(sum(getattr(one, x) for one in own) / count for x in ("dense", "manifest")),
            )
        )
    return found


def smallest(found: Sequence[Effect], bytes_of: Sequence[Size], limit: float) -> str | None:
    """Name the method of the fewest bytes a modified row whose loss after all restores is below a
    limit: the upper bound of its interval, less what noise alone changes.
    """
    last = max(effect.restores for effect in found)
    at_end = {e.method: e.loss for e in found if (e.restores, e.after) == (last, 0)}
    noise = max(0.0, at_end[FLOOR].high) if FLOOR in at_end else 0.0
    allowed = [
        size
        for size in bytes_of
        if size.kind == "differential" and at_end[size.method].high - noise <= limit
    ]
    return min(allowed, key=lambda size: size.row).method if allowed else None
