"""What checkpoints weigh and how much capacity they keep, from listing the store after each.

No training here: the rows of the trace's intervals are marked, and each checkpoint is waited for.
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
    """One checkpoint, and the store around it; bytes.

    Attributes:
        rows: of it that are table rows with ids and optimizer state.
        full: whether it needs no other.
        kept: what the store holds when all that this one doesn't need is deleted.
        peak: before that, when both it and what was kept before are there.
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
    """Checkpoints of one system, oldest first."""

    name: str
    trace: str
    stored: list[Stored]

    @property
    def cycle(self) -> list[Stored]:
        """What an average is taken over: from the last full checkpoint but one to before the last,
        or, if there is but one, the differential ones upon it; of full ones the last.
        """
        full = [i for i, one in enumerate(self.stored) if one.full]
        if len(full) == 1:
            return self.stored[1:] or self.stored
        return self.stored[full[-2] : full[-1]]

    @property
    def over(self) -> str:
        """What ``cycle`` is, in words."""
        full = sum(one.full for one in self.cycle)
        if full == len(self.cycle):
            return "full"
        return "baseline to baseline" if full else f"{len(self.cycle)} differentials"

    def to_json(self) -> dict[str, Any]:
        """A row of the table."""
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
    """What is listed, by trace."""
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
    """Saves as often as its policy needs to show what it does, and lists the store each time."""
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
        found, full = split(newest).to_json(), not older  # what is left, the newest needs
        stored.append(Stored(**found, full=full, kept=listed(root), peak=peak))
    system.close()
    return Series(case.name, job.setting.trace, stored)


def mark(system: System, job: Job, interval: int) -> None:
    """Tells a system the rows of an interval."""
    for shard, rows in job.modified(interval):
        system.mark(shard.table, rows)


def _enough(policy: str, stored: list[Stored]) -> bool:
    if policy == "full":
        return len(stored) == 2
    if policy == "consecutive":
        return len(stored) == 1 + DIFFERENTIALS
    return sum(one.full for one in stored) == 2 or len(stored) > _MOST


def measure(setting: Setting, folder: Path) -> list[dict[str, Any]]:
    """All series, one after the other; the process is this part's own."""
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
            except Exception as error:  # a system that can't is a row that says so
                reason = f"{type(error).__name__}: {error}"
                rows.append({"name": case.name, "trace": trace, "error": reason})
            shutil.rmtree(root, ignore_errors=True)
    return rows
