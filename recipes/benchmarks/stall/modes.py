"""Measure the stalls of one model's checkpoints: this package's modes beside stock checkpointing.

In every interval each mode has its turn, in random order. Rows of the interval are marked by hand
in place of its training. Then comes the save; and for copy on write real training steps, those of
the next interval, until the checkpoint is durable: only they make rows be copied before they
change.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from recipes.benchmarks.quiet import wait_until_quiet
from recipes.benchmarks.side_by_side.limits import Limits
from recipes.benchmarks.side_by_side.model import Job, Setting
from recipes.benchmarks.side_by_side.store import superseded
from recipes.benchmarks.side_by_side.systems import ASYNC, CASES, DCP, Case, Ours, System, ours

ON_WRITE, LINKS, COPY = "copy on write", "differences", "copy"
BEST_ASYNC = "dcp.async_save"
OURS = (ON_WRITE, LINKS, COPY)
"""The modes of this package, which have a model of their own, since training marks rows."""
CASE: dict[str, Case] = {
    ON_WRITE: ours(4, "consecutive", staging="copy_on_write"),
    LINKS: Case(LINKS, Ours, {"method": "delta", "policy": "consecutive"}),
    COPY: ours(4, "consecutive", staging="copy"),
    DCP: CASES[DCP],
    BEST_ASYNC: CASES[f"{ASYNC}, DTensor, shared stager"],
}
"""The modes by name; of `dcp.async_save` the variant that stalls least in `side_by_side`."""
REST = "the call's end"
"""The part of the cut after training's copies: the background is started, the call returns."""


@dataclass(frozen=True)
class Stall:
    """A stall of training, in seconds.

    Attributes:
        cut: the whole call that saves, from outside.
        parts: the same by part; empty for others' checkpoints.
        protection: all waits of later steps for copies of rows that they were about to change.
        longest: the longest of these waits.
        memory: the part of the protection spent waiting for memory.
        row: the longest wait for a row that the background was just copying.
        protected_rows, rows: numbers of rows copied before a step changed them, and of all rows.
        gather: the bare gather of the same rows just before; None where others save everything.
        steps: each training step from the save until the checkpoint was durable.
        copied_at_cut: tables whose rows were not copied on write.
        busy: cores that other programs kept busy just before.
    """

    cut: float
    busy: float
    parts: dict[str, float] = field(default_factory=dict)
    protection: float = 0.0
    longest: float = 0.0
    memory: float = 0.0
    row: float = 0.0
    protected_rows: int = 0
    rows: int = 0
    gather: float | None = None
    steps: list[float] = field(default_factory=list)
    copied_at_cut: list[str] = field(default_factory=list)

    @property
    def whole(self) -> float:
        return self.cut + self.protection


class _Turns:
    """The turns of one mode."""

    def __init__(self, name: str, job: Job, limits: Limits | None, folder: Path) -> None:
        self._job, self._limits = job, limits
        self._trains = name in (ON_WRITE, LINKS)
        self._root = folder / name.replace(" ", "_")
        self._system: System = CASE[name].make(job, self._root)
        self._system.save()  # touches memory that later ones find warm, and is the baseline
        self._system.wait()

    def turn(self, interval: int, patience: float) -> Stall:
        """Measure one stall."""
        busy = wait_until_quiet(patience)
        # First, since on all cores the gather leaves threads behind that spin for a moment.
        gather = None if self._limits is None else self._limits.gather(interval)
        for shard, rows in self._job.modified(interval):
            self._system.mark(shard.table, rows)
        batches = self._job.batches(interval + 1) if self._trains else []
        self._system.step()
        started = time.perf_counter()
        self._system.save()
        cut = time.perf_counter() - started
        steps = []
        for number in count() if batches else ():
            if number >= len(batches) and not self._system.busy:
                break
            started = time.perf_counter()
            self._job.step(batches[number % len(batches)])
            self._system.step()
            steps.append(time.perf_counter() - started)
        self._system.wait()
        for path in superseded(self._root):
            shutil.rmtree(path)
        if not isinstance(self._system, Ours):
            return Stall(cut, busy)
        stall = _of_report(self._system.reports[-1], cut, busy)
        return replace(stall, gather=gather, steps=steps)

    def close(self) -> None:
        """Close the mode's system."""
        self._system.close()


def measure(
    setting: Setting, intervals: int, patience: float, folder: Path
) -> list[dict[str, Stall]]:
    """Measure the stalls of all modes, by name, in each of ``intervals`` intervals.

    Args:
        patience: seconds to wait, before each turn, until nothing else runs.
    """
    turns = dict(_turns(setting, intervals + 1, folder))
    order = np.random.default_rng(0)
    found = []
    for interval in tqdm(range(intervals + 1), desc="stalls", file=sys.stderr):
        stalls = {
            name: turns[name].turn(interval, patience) for name in order.permutation(list(turns))
        }
        found.append({name: stalls[name] for name in turns})
    for mode in turns.values():
        mode.close()
    return found[1:]  # the first one touches memory that the others find warm


def _turns(setting: Setting, intervals: int, folder: Path) -> Iterator[tuple[str, _Turns]]:
    """Make the modes; `dcp.save` shares the model of copy mode, which isn't trained."""
    for name in OURS:
        job = Job(setting)
        yield name, _Turns(name, job, Limits(job, folder, intervals), folder)
    yield DCP, _Turns(DCP, job, None, folder)
    yield BEST_ASYNC, _Turns(BEST_ASYNC, Job(setting, dtensor=True), None, folder)


def _of_report(report: dict[str, Any], cut: float, busy: float) -> Stall:
    """Make a stall of a checkpoint's report; the cut is what the call took from outside."""
    parts: dict[str, float] = report["cut_parts"]
    return Stall(
        cut=cut,
        busy=busy,
        parts={**parts, REST: cut - sum(parts.values())},
        protection=report["protection_seconds"],
        longest=report["longest_protection_seconds"],
        memory=report["memory_wait_seconds"],
        row=report["row_wait_seconds"],
        protected_rows=report["protected_rows"],
        rows=report["modified_rows"],
        copied_at_cut=list(report["copied_at_cut"]),
    )
