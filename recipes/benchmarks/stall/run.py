"""Measure how long training waits for a checkpoint, beside the bare gather of the same rows.

    python -m recipes.benchmarks.stall [--json out.json] [--plot out.png] [--intervals 9]

The model and the rows of `side_by_side`, one rank: copy on write, with the cut's parts and the
protection of the training steps after it, beside copy mode, `dcp.save` and `dcp.async_save`, paired
in each interval (`modes`). Then whether the cut grows with the rows (`growth`).
`python -m recipes.benchmarks.side_by_side_markdown` prints the tables of the docs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from recipes.benchmarks.machine import describe
from recipes.benchmarks.side_by_side.model import Setting
from recipes.benchmarks.stall import growth, modes, tables
from recipes.benchmarks.stall.plot import draw
from recipes.benchmarks.stall.summary import raw, summarize
from recipes.figures import plots

T = TypeVar("T")


def _modes(
    setting: Setting, intervals: int, patience: float, folder: Path
) -> list[dict[str, modes.Stall]]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return modes.measure(setting, intervals, patience, folder)
    finally:
        dist.destroy_process_group()


def _alone(call: Callable[..., T], *arguments: object) -> T:
    """Run a call in a fresh process, with a folder as its last argument."""
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, mp_context=spawn) as process,
    ):
        return process.submit(call, *arguments, Path(folder)).result()


def _show(document: dict[str, Any]) -> None:
    console = Console(width=130)
    for head, *rows in tables.tables(document):
        table = Table(*head)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in rows:
            table.add_row(*row)
        console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmarks.stall",
        description=__doc__.split("\n", 1)[0] if __doc__ else None,
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, help="also draw them: a file whose name ends as png")
    parser.add_argument("--intervals", type=int, default=9)
    parser.add_argument("--rows", type=int, default=Setting.rows, help="of all tables together")
    parser.add_argument(
        "--patience",
        type=float,
        default=10.0,
        help="seconds to wait, before each measurement, until nothing else runs",
    )
    options = parser.parse_args(arguments)
    if options.plot is not None:
        plots.require_matplotlib()
    setting = Setting(rows=options.rows)
    load = os.getloadavg()[0]
    stalls = _alone(_modes, setting, options.intervals, options.patience)
    grown = _alone(growth.measure, setting.rows, options.intervals, options.patience)
    found = summarize(stalls, grown)
    document = {
        **describe(),
        "load_before": load,
        "setting": asdict(setting),
        **found,
        **raw(stalls, grown),
    }
    _show(document)
    quiet, intervals = found["quiet_intervals"], found["intervals"]
    print(f"{quiet} of {intervals} intervals were quiet; without any, all count")
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    if options.plot is not None:
        draw(document, options.plot)
