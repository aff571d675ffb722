"""What a save behind training costs a thread whose operations are short: thread beside process.

    python -m recipes.benchmarks.disturbance [--json out.json] [--saves 8]

The worst case for Python's lock. Each of these operations, of a few microseconds, gives it away and
has to get it back, for which the system must put the training thread to sleep and wake it up again;
a model's own operations are longer. The model and the rows of `side_by_side`, one rank, 4 bit rows.
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

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from recipes.benchmarks.machine import describe
from recipes.benchmarks.side_by_side_model import Job, Setting
from torchrec_checknrun import Checkpointer, Consecutive, Quantization
from torchrec_checknrun.background import BackgroundKind

KINDS: tuple[BackgroundKind, ...] = ("thread", "process")
_UNDISTURBED_SECONDS = 1.0
_OPERATIONS = 200
"""Before the checkpointer is asked whether its save is done."""


@dataclass(frozen=True)
class Disturbance:
    """Of training by one save.

    Attributes:
        seconds: from the end of the stall until the save is done.
        lost: seconds that the same operations would have taken less without it.
        waits: how often training was put to sleep: it waited for the lock.
    """

    seconds: float
    lost: float
    waits: int


def measure(job: Job, kind: BackgroundKind, saves: int, root: Path) -> list[Disturbance]:
    """So many saves, each beside the same operations without one."""
    found = []
    with Checkpointer(
        root,
        model=job.model,
        state={"optimizer": job.optimizer},
        policy=Consecutive(),
        quantization=Quantization(bits=4),
        staging="copy",
        background=kind,
    ) as checkpointer:
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
    """Operations a second, seconds and waits, for so long or until the save is done."""
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
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument("--rows", type=int, default=Setting.rows, help="of all tables together")
    options = parser.parse_args(arguments)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    job = Job(Setting(rows=options.rows))
    found: dict[str, list[Disturbance]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            found[kind] = measure(job, kind, options.saves, Path(folder) / kind)
    table = Table(title=f"a save behind short operations, median of {options.saves}")
    table.add_column("background")
    for column in ("save, ms", "training lost, ms", "waits for the lock"):
        table.add_column(column, justify="right")
    for name, saves in found.items():
        seconds, lost = median(s.seconds for s in saves), median(s.lost for s in saves)
        waits = median(s.waits for s in saves)
        table.add_row(name, f"{seconds * 1e3:.0f}", f"{lost * 1e3:.0f}", f"{waits:.0f}")
    Console(width=80).print(table)
    if options.json is not None:
        saves_of = {name: [asdict(save) for save in saves] for name, saves in found.items()}
        options.json.write_text(json.dumps({**describe(), "saves": saves_of}, indent=1) + "\n")


if __name__ == "__main__":
    main()
