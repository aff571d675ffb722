"""Measure the cost of a background save for the training thread: thread beside process.

    python -m recipes.benchmarks.disturbance [--json out.json] [--saves 8] [--staging copy]

Twice. First the worst case for Python's lock: operations of a few microseconds, each of which
releases and retakes the lock, for which the system must put the training thread to sleep and wake
it up again. Then the model's own steps, intervals with a save in turn with others without: the time
is either waiting or computing. The model and the rows of `side_by_side`, one rank, 4 bit rows.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import get_args

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from recipes.benchmarks.machine import describe
from recipes.benchmarks.side_by_side.model import Job, Setting
from torchrec_checknrun import Checkpointer, Consecutive, Quantization
from torchrec_checknrun.save.background import BackgroundKind
from torchrec_checknrun.snapshot.encoded_at_cut import StagingMode

KINDS: tuple[BackgroundKind, ...] = ("thread", "process")
_UNDISTURBED_SECONDS = 1.0
_OPERATIONS = 200
"""Operations before the checkpointer is asked whether its save is done."""


@dataclass(frozen=True)
class Disturbance:
    """The cost of one save for training.

    Attributes:
        seconds: from the end of the stall until the save is done.
        lost: seconds that the same operations would have taken less without the save.
        waits: number of times that training went to sleep.
    """

    seconds: float
    lost: float
    waits: int


@dataclass(frozen=True)
class Interval:
    """Some training steps, after the stall if there was one.

    Attributes:
        call: the stall, seconds; None without a save.
        wall, processor: seconds of the steps, and of the training thread on a processor.
        waits: number of times that the thread went to sleep.
    """

    call: float | None
    wall: float
    processor: float
    waits: int


def checkpointer_of(
    job: Job, kind: BackgroundKind, root: Path, staging: StagingMode
) -> Checkpointer:
    """Make the checkpointer to measure."""
    return Checkpointer(
        root,
        model=job.model,
        state={"optimizer": job.optimizer},
        policy=Consecutive(),
        quantization=Quantization(bits=4),
        staging=staging,
        background=kind,
    )


def intervals(
    job: Job, kind: BackgroundKind, saves: int, root: Path, staging: StagingMode
) -> list[Interval]:
    """Run ``saves`` intervals with a save, each after one without."""
    found = []
    with checkpointer_of(job, kind, root, staging) as checkpointer:
        checkpointer.save()
        for number in tqdm(range(2 * saves + 2), desc=f"{kind}, steps", file=sys.stderr):
            batches, call = job.batches(number % 12), None
            if number % 2:
                started = time.perf_counter()
                checkpointer.save(wait=False)
                call = time.perf_counter() - started
            before, waits, started = time.thread_time(), _waits(), time.perf_counter()
            for batch in batches:
                job.step(batch)
                checkpointer.step()
            wall, processor = time.perf_counter() - started, time.thread_time() - before
            found.append(Interval(call, wall, processor, _waits() - waits))
            checkpointer.wait()
    return found[2:]  # the first ones touch memory that the others find warm


def measure(
    job: Job, kind: BackgroundKind, saves: int, root: Path, staging: StagingMode
) -> list[Disturbance]:
    """Run ``saves`` saves, each beside the same operations without one."""
    found = []
    with checkpointer_of(job, kind, root, staging) as checkpointer:
        checkpointer.save()
        for interval in tqdm(range(saves + 1), desc=kind, file=sys.stderr):
            for shard, rows in job.modified(interval):
                checkpointer.mark(shard.table, rows)
            undisturbed, _, _ = _train(checkpointer, _UNDISTURBED_SECONDS)
            checkpointer.save(wait=False)
            disturbed, seconds, waits = _train(checkpointer, None)
            found.append(Disturbance(seconds, seconds * (1 - disturbed / undisturbed), waits))
    return found[1:]  # the first one touches memory that the others find warm


def _train(checkpointer: Checkpointer, seconds: float | None) -> tuple[float, float, int]:
    """Return operations a second, seconds and waits, for a given time or until the save is done."""
    matrix = torch.randn(64, 64)
    before, started, done = _waits(), time.perf_counter(), 0
    while True:
        for _ in range(_OPERATIONS):
            torch.relu(matrix)
        done += _OPERATIONS
        report = checkpointer.step()
        spent = time.perf_counter() - started
        if report is not None or (seconds is not None and spent >= seconds):
            return done / spent, spent, _waits() - before


def _waits() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument("--rows", type=int, default=Setting.rows, help="of all tables together")
    parser.add_argument("--staging", choices=get_args(StagingMode), default="copy")
    options = parser.parse_args(arguments)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    job = Job(Setting(rows=options.rows))
    found: dict[str, list[Disturbance]] = {}
    steps: dict[str, list[Interval]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            saves, staging = options.saves, options.staging
            found[kind] = measure(job, kind, saves, Path(folder) / kind, staging)
            steps[kind] = intervals(job, kind, saves, Path(folder) / f"{kind}-steps", staging)
    for table in (_short_operations(found), _steps(steps)):
        Console(width=100).print(table)
    if options.json is not None:
        document = {
            **describe(),
            "staging": options.staging,
            "saves": {name: [asdict(save) for save in saves] for name, saves in found.items()},
            "intervals": {name: [asdict(one) for one in every] for name, every in steps.items()},
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def _short_operations(found: dict[str, list[Disturbance]]) -> Table:
    table = _table("short operations", "save, ms", "training lost, ms", "sleeps")
    for name, saves in found.items():
        seconds, lost = median(s.seconds for s in saves), median(s.lost for s in saves)
        sleeps = median(s.waits for s in saves)
        table.add_row(name, f"{seconds * 1e3:.0f}", f"{lost * 1e3:.0f}", f"{sleeps:.0f}")
    return table


def _steps(found: dict[str, list[Interval]]) -> Table:
    columns = ("stall, ms", "steps, ms", "least to most", "processor, ms", "waiting, ms", "sleeps")
    table = _table("training steps", *columns)
    for name, every in found.items():
        for what, with_save in (("no save", False), (name, True)):
            some = [one for one in every if (one.call is not None) == with_save]
            walls = [one.wall * 1e3 for one in some]
            table.add_row(
                what,
                f"{median(one.call or 0.0 for one in some) * 1e3:.0f}",
                f"{median(walls):.0f}",
                f"{min(walls):.0f} to {max(walls):.0f}",
                f"{median(one.processor for one in some) * 1e3:.0f}",
                f"{median(one.wall - one.processor for one in some) * 1e3:.0f}",
                f"{median(one.waits for one in some):.0f}",
            )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=f"{title}, medians")
    table.add_column("background")
    for column in columns:
        table.add_column(column, justify="right")
    return table


if __name__ == "__main__":
    main()
