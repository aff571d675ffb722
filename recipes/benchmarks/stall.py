"""Break one stall down into its parts, beside the bare gather of the same rows.

    python -m recipes.benchmarks.stall [--json out.json] [--intervals 9]

The model and the rows of `side_by_side`, one rank, rows copied out of the tables. Rows are marked
by hand in place of training, so that nothing else runs while training would wait.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from recipes.benchmarks.machine import describe
from recipes.benchmarks.side_by_side.limits import Limits
from recipes.benchmarks.side_by_side.model import Job, Setting
from torchrec_checknrun import Checkpointer, Consecutive, Quantization
from torchrec_checknrun.run import saver
from torchrec_checknrun.save import background

WHOLE, GATHER, REST = "the whole stall", "bare gather of the rows", "all else"
PARTS: dict[str, tuple[object, str]] = {
    "ranks agree on the next checkpoint": (saver.Saver, "_look"),
    "marks are taken, states are found": (saver, "take_snapshot"),
    "chunks are laid out": (background.Items, "of"),
    "the plan's summary": (background, "summarize"),
    "rows and states are copied": (background.Staging, "run"),
}
"""The parts of a stall, and the functions that do them."""


class Stopwatch:
    """A stopwatch that sums the seconds of calls by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        """Return a timed version of a function."""

        @functools.wraps(act)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return act(*args, **kwargs)
            finally:
                spent = time.perf_counter() - started
                self.seconds[name] = self.seconds.get(name, 0.0) + spent

        return timed


def measure(
    setting: Setting, intervals: int, folder: Path, staging: str = "copy_on_write"
) -> list[dict[str, float]]:
    """Measure the seconds of each part, for ``intervals`` checkpoints."""
    job = Job(setting)
    limits = Limits(job, folder, intervals)
    watch = Stopwatch()
    found = []
    with Checkpointer(
        folder / "store",
        model=job.model,
        state={"optimizer": job.optimizer},
        policy=Consecutive(),
        quantization=Quantization(bits=4),
        staging=staging,
    ) as checkpointer:
        checkpointer.save()
        with _timed(watch):
            for interval in tqdm(range(intervals), desc="stalls", file=sys.stderr):
                # First, since on all cores the gather leaves threads behind that spin for a moment.
                gather = limits.gather(interval)
                for shard, rows in job.modified(interval):
                    checkpointer.mark(shard.table, rows)
                watch.seconds.clear()
                checkpointer.steps += 1
                started = time.perf_counter()
                checkpointer.save(wait=False)
                whole = time.perf_counter() - started
                parts = {name: watch.seconds.get(name, 0.0) for name in PARTS}
                rest = whole - sum(parts.values())
                found.append({**parts, REST: rest, WHOLE: whole, GATHER: gather})
                checkpointer.wait()
    return found[1:]  # the first one touches memory that the others find warm


class _timed:
    """A patch that puts the stopwatch around every part."""

    def __init__(self, watch: Stopwatch) -> None:
        self._patches = []
        for name, (owner, attribute) in PARTS.items():
            act = getattr(owner, attribute)
            timed = watch.around(name, act)
            if attribute == "of":  # already bound to its class
                timed = staticmethod(timed)
            self._patches.append(mock.patch.object(owner, attribute, timed))

    def __enter__(self) -> None:
        for patch in self._patches:
            patch.start()

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--intervals", type=int, default=9)
    parser.add_argument("--rows", type=int, default=Setting.rows, help="of all tables together")
    options = parser.parse_args(arguments)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(rows=options.rows)
        stalls = measure(setting, options.intervals, Path(folder), "copy_on_write")
    medians = {name: median(stall[name] for stall in stalls) for name in stalls[0]}
    ratio = median(stall[WHOLE] / stall[GATHER] for stall in stalls)
    table = Table(title=f"a stall, median of {len(stalls)}")
    table.add_column("part")
    table.add_column("ms", justify="right")
    for name, seconds in medians.items():
        table.add_row(name, f"{seconds * 1e3:.1f}")
    table.add_row("stall, times the gather", f"{ratio:.2f}")
    Console(width=80).print(table)
    if options.json is not None:
        document = {**describe(), "medians": medians, "times_the_gather": ratio, "stalls": stalls}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
