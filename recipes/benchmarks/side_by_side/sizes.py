"""Measure the bytes of checkpoints and the capacity that they keep, by listing the store.

Without training: the rows of the trace's intervals are marked, and every checkpoint is awaited.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from recipes.benchmarks.side_by_side.model import Job, Setting
from recipes.benchmarks.side_by_side.store import committed, listed, split, superseded
from recipes.benchmarks.side_by_side.systems import (
    CHANGED_ROWS,
    DCP,
    PEERS,
    SNAPSHOT,
    Case,
    Ours,
    System,
)
from recipes.dlrm_criteo.distributed import process_group

DIFFERENTIALS = 10
"""Consecutive checkpoints upon the first one."""
_MOST = 24
"""Intervals within which an intermittent policy must have made a second baseline."""


@dataclass(frozen=True)
class Stored:
    """One checkpoint and its store, in bytes.

    Attributes:
        rows: of table rows with ids and optimizer state.
        full: whether the checkpoint needs no other.
        kept: of the store after deleting all that this checkpoint doesn't need.
        peak: of the store before that, with this checkpoint and those kept before.
    """

    tables: int
    optimizer: int
    dense: int
    manifest: int
    rows: int
    total: int
    full: bool
    kept: int
    peak: int


@dataclass(frozen=True)
class Series:
    """The checkpoints of one system, oldest first."""

    name: str
    trace: str
    stored: list[Stored]

    @property
    def cycle(self) -> list[Stored]:
        """Return the checkpoints to average: from the last full checkpoint but one to before the
        last, or, if there is but one, the differential ones upon it; of full ones the last.
        """
        full = [i for i, one in enumerate(self.stored) if one.full]
        if len(full) == 1:
            return self.stored[1:] or self.stored
        return self.stored[full[-2] : full[-1]]

    @property
    def over(self) -> str:
        """Describe ``cycle`` in words."""
        full = sum(one.full for one in self.cycle)
        if full == len(self.cycle):
            return "full"
        return "baseline to baseline" if full else f"{len(self.cycle)} differentials"

    def to_json(self) -> dict[str, Any]:
        """Return a row of the table."""
        names = ("tables", "optimizer", "dense", "manifest", "rows", "total")
        return {
            "name": self.name,
            "trace": self.trace,
            "checkpoints": [vars(one) for one in self.stored],
            "cycle": len(self.cycle),
            "over": self.over,
            **{name: fmean(getattr(one, name) for one in self.cycle) for name in names},
            "kept": max(one.kept for one in self.stored),
            "peak": max(one.peak for one in self.stored),
        }


def cases() -> Iterator[tuple[Case, str]]:
    """Yield the cases, each with its trace."""
    for case in PEERS:
        if case.name in (DCP, SNAPSHOT, CHANGED_ROWS):
            yield case, "skewed"
    for trace in ("skewed", "independent"):
        for bits in (None, 8, 4, 2) if trace == "skewed" else (4,):
            for policy in ("consecutive", "intermittent"):
                yield _ours(bits, policy), trace
    yield _ours(4, "consecutive", "bf16"), "skewed"
    for bits in (None, 8, 4, 2):
        yield _ours(bits, "full"), "skewed"


def _ours(bits: int | None, policy: str, optimizer: str = "fp32") -> Case:
    width = "fp32" if bits is None else f"{bits} bit"
    state = "" if optimizer == "fp32" else f", {optimizer} optimizer"
    options = {"bits": bits, "policy": policy, "optimizer": optimizer, "waiting": True}
    return Case(f"ours {width} {policy}{state}", Ours, options)


def series(case: Case, job: Job, root: Path) -> Series:
    """Save until the policy has shown all of its behaviour, and list the store each time."""
    system = case.make(job, root)
    stored: list[Stored] = []
    policy = case.options.get("policy", "consecutive" if case.name == CHANGED_ROWS else "full")
    while not _enough(policy, stored):
        if stored:
            mark(system, job, len(stored) - 1)
        system.save()
        system.wait()
        peak = listed(root)
        for path in superseded(root):
            shutil.rmtree(path)
        *older, newest = committed(root)
        found, full = split(newest).to_json(), not older  # the newest needs all that is left
        stored.append(Stored(**found, full=full, kept=listed(root), peak=peak))
    system.close()
    return Series(case.name, job.setting.trace, stored)


def mark(system: System, job: Job, interval: int) -> None:
    """Mark the rows of an interval in a system."""
    for shard, rows in job.modified(interval):
        system.mark(shard.table, rows)


def _enough(policy: str, stored: list[Stored]) -> bool:
    if policy == "full":
        return len(stored) == 2
    if policy == "consecutive":
        return len(stored) == 1 + DIFFERENTIALS
    return sum(one.full for one in stored) == 2 or len(stored) > _MOST


def measure(setting: Setting, folder: Path) -> list[dict[str, Any]]:
    """Measure all series, one after the other, in a process of this part's own."""
    rows = []
    with process_group(600):
        jobs: dict[str, Job] = {}
        for case, trace in tqdm(list(cases()), desc="bytes", unit="series"):
            if trace not in jobs:
                jobs.clear()  # one model at a time
                jobs[trace] = Job(Setting(**{**vars(setting), "trace": trace}))
            root = folder / "bytes"
            try:
                rows.append(series(case, jobs[trace], root).to_json())
            except Exception as error:  # a failing system gets a row with the error
                reason = f"{type(error).__name__}: {error}"
                rows.append({"name": case.name, "trace": trace, "error": reason})
            shutil.rmtree(root, ignore_errors=True)
    return rows
