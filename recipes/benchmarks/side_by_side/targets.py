"""Evaluate the targets from the figures of a run, without any measurement."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

from recipes.benchmarks.side_by_side.restore import CHAIN, SINGLE
from recipes.benchmarks.side_by_side.systems import ASYNC, COPY, DCP, ON_WRITE, PROCESS

Rows = list[dict[str, Any]]

INTERVAL_SECONDS = 10.0
"""Seconds between two checkpoints, for costs as a share of training."""


@dataclass(frozen=True)
class Target:
    """A target and its measured value.

    Attributes:
        value: None where a needed figure is missing, which ``note`` names.
    """

    claim: str
    value: float | None
    limit: float
    at_most: bool
    note: str = ""

    @property
    def met(self) -> bool:
        if self.value is None:
            return False
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def to_json(self) -> dict[str, Any]:
        """Return all fields and the verdict."""
        return {**asdict(self), "met": self.met}


def evaluate(training: Rows, sizes: Rows, restores: Rows) -> list[Target]:
    """Evaluate the targets of the measured parts; they are for one rank and dim 64."""
    one_rank = [row for row in training if row["ranks"] == 1]
    restores = [row for row in restores if row["ranks"] == 1]
    by_ranks = [(n, [r for r in training if r["ranks"] == n]) for n in (1, 2)]
    return [
        *(_stalls(one_rank) if one_rank else []),
        *(_against_copy_mode(rows, ranks) for ranks, rows in by_ranks if rows),
        *(_sizes([r for r in sizes if r["trace"] == "skewed"]) if sizes else []),
        *(_restores(restores) if restores else []),
    ]


def _stalls(rows: Rows) -> Iterator[Target]:
    found = {row["name"]: row for row in rows if "error" not in row}
    behind = [row for name, row in found.items() if name.startswith(ASYNC)]
    yield _target(
        "copy on write's cut, times the bare gather (in the call)",
        0.1,
        True,
        partial(_paired, found, (ON_WRITE, "call"), (ON_WRITE, "gather")),
    )
    yield _target(
        "copy mode's stall, times the bare gather (in the call)",
        1.5,
        True,
        partial(_paired, found, (COPY, "call"), (COPY, "gather")),
    )
    for label, cost in (("in the call", "call"), ("wall difference", "extra")):
        # The best system by one cost need not be the best by the other.
        best = min((row["warm"][cost], row["name"]) for row in behind)[1] if behind else ASYNC
        for name, other in ((DCP, DCP), (f"the best {ASYNC}", best)):
            yield _target(
                f"{name}'s stall, times copy on write's ({label})",
                20,
                False,
                partial(_paired, found, (other, cost), (ON_WRITE, cost)),
                "" if other == name else other + _how(found, other, ON_WRITE),
            )
    for name in (ON_WRITE, PROCESS):
        yield _target(
            f"slow-down by a checkpoint every {INTERVAL_SECONDS:g} s, {name}",
            0.05,
            True,
            partial(_slow_down, found, name),
        )


def _against_copy_mode(rows: Rows, ranks: int) -> Target:
    """Compare the wall difference of copy on write with copy mode's, over paired intervals.

    The interval is of the mean of the pairs' differences, from 10,000 resamplings of the pairs.
    """
    claim = f"slow-down by copy on write beyond copy mode's, every 10 s, ranks: {ranks}"
    found = {row["name"]: row for row in rows if "error" not in row}
    if not {ON_WRITE, COPY} <= found.keys() or not _same_rounds(found[ON_WRITE], found[COPY]):
        return Target(claim, None, 0.0, True, "not measured in the same rounds")
    one, two = (
        [save["extra"] for save in found[name]["saves"] if save["label"] == "warm"]
        for name in (ON_WRITE, COPY)
    )
    differences = [a - b for a, b in zip(one, two, strict=True)]
    chance = random.Random(0)
    means = sorted(fmean(chance.choices(differences, k=len(differences))) for _ in range(10_000))
    low, high = means[250] / INTERVAL_SECONDS, means[-251] / INTERVAL_SECONDS
    note = f"95 % between {low:+.4f} and {high:+.4f}, of {len(differences)} pairs"
    return Target(claim, fmean(differences) / INTERVAL_SECONDS, 0.0, True, note)


def _slow_down(found: Mapping[str, dict[str, Any]], name: str) -> float:
    return float(found[name]["warm"]["extra"]) / INTERVAL_SECONDS


def _sizes(rows: Rows) -> Iterator[Target]:
    found = {row["name"]: row for row in rows if "error" not in row}
    for name, limit in (
        ("ours 4 bit consecutive", 24),
        ("ours 4 bit consecutive, bf16 optimizer", 25.5),
        ("ours 2 bit intermittent", 21),
        ("ours 8 bit intermittent", 6.8),
    ):
        yield _target(
            f"{DCP}'s table bytes, times those of {name}",
            limit,
            False,
            partial(_times_smaller, found, name),
        )


def _times_smaller(found: Mapping[str, dict[str, Any]], name: str) -> float:
    return float(found[DCP]["rows"] / found[name]["rows"])


def _restores(rows: Rows) -> Iterator[Target]:
    found = {row["name"]: row["seconds"] for row in rows if "error" not in row}
    for name, limit in (
        (f"ours fp32, {CHAIN}", 1.5),
        (f"ours 4 bit, {CHAIN}", 1.5),
        (f"ours 4 bit, {SINGLE}", 0.7),
    ):
        yield _target(
            f"restore of {name}, times dcp.load", limit, True, partial(_times_load, found, name)
        )


def _times_load(found: Mapping[str, list[float]], name: str) -> float:
    return median(own / its for own, its in zip(found[name], found[DCP], strict=True))


def _target(
    claim: str, limit: float, at_most: bool, value: Callable[[], float], note: str = ""
) -> Target:
    try:
        return Target(claim, value(), limit, at_most, note)
    except KeyError as error:  # the system was not chosen, or has failed
        return Target(claim, None, limit, at_most, f"not measured: {error.args[0]}")


def _paired(
    found: Mapping[str, dict[str, Any]], what: tuple[str, str], of: tuple[str, str]
) -> float:
    """Return a system's cost over another's, of warm saves: the median of the rounds' own ratios,
    or the ratio of the medians if they were measured in different rounds.
    """
    (name, cost), (other, its) = what, of
    if not _same_rounds(found[name], found[other]):
        return float(found[name]["warm"][cost] / found[other]["warm"][its])
    rounds = zip(_by_round(found[name], cost), _by_round(found[other], its), strict=True)
    return median(one / two for one, two in rounds)


def _by_round(row: Mapping[str, Any], cost: str) -> list[float]:
    """Return a cost of a system's warm saves in each round, the median of each."""
    rounds: list[list[float]] = []
    for save in row["saves"]:
        if save["label"] == "warm":
            rounds[-1].append(save[cost])
        else:  # the first save of a round
            rounds.append([])
    return [median(costs) for costs in rounds]


def _same_rounds(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    rounds = [sum(save["label"] != "warm" for save in row["saves"]) for row in (one, two)]
    return bool(one["group"] == two["group"] and rounds[0] == rounds[1])


def _how(found: Mapping[str, dict[str, Any]], name: str, other: str) -> str:
    """Return a note for a ratio from different rounds."""
    if name not in found or other not in found or _same_rounds(found[name], found[other]):
        return ""
    return "; of medians: other rounds"
