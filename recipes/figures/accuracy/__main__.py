"""Measure what restores from lossy checkpoints cost: the paper's figure 14, beside the bytes.

    python -m recipes.figures.accuracy [--scale minutes|hour|gpu|FILE.yaml] [--task NAME ...]
        [--data train.txt] [--ratings FOLDER] [--methods PATTERN ...] [--out FOLDER] [--json FILE]

Four tasks: the DLRM of the main job at dim 16 and 64, on synthetic samples or a file in Criteo's
format (`--data`); matrix factorisation and a DeepFM of ratings, MovieLens-100k's (`--ratings`) or
synthetic ones of its shape. Two runs of a job differ by more than a restore does, so one state is
continued in pairs on the same samples, with saves and restores by the public Checkpointer and
without (`branches.py`), at eight states or more. Differences are relative: of the loss (logloss;
squared error of matrix factorisation), of the AUC, and of the loss of the fifth of the held-out
samples with the most ids that were looked up five times at most, for which a row that loses its
training shows first. ±: half the 95 % interval of the mean over the states.

`noise`, the floor: all values change by a part in 10^7 instead of a restore. `exact` must not
change anything, and so proves that the pairs match. Bytes are those of the objects in storage, by
kind of checkpoint: a stored row's weights, id and optimizer state, and a checkpoint's dense part
and manifest.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from recipes.benchmarks.machine import describe
from recipes.figures import plots
from recipes.figures.accuracy.branches import Change, Stored, measure
from recipes.figures.accuracy.methods import Method, methods_of
from recipes.figures.accuracy.pictures import draw
from recipes.figures.accuracy.scale import Scale
from recipes.figures.accuracy.summary import Effect, Interval, Size, effects, sizes, smallest
from recipes.figures.accuracy.tasks import TASKS, Sources

LIMIT = 5e-4
"""Relative change of the loss that a method may have to be called harmless."""


def main() -> int:
    """Run the command; return 1 if restoring exact rows changed anything."""
    options = _options()
    try:
        scale = Scale.read(options.scale)
        scale = replace(scale, methods=tuple(options.methods)) if options.methods else scale
        methods = methods_of(scale.methods)
        if options.out is not None:
            plots.require_matplotlib()
            options.out.mkdir(parents=True, exist_ok=True)
        found = {}
        for name in dict.fromkeys(options.task):
            found[name] = _measure(name, scale, methods, Sources(options.data, options.ratings))
            _report(name, scale, *found[name], options.out)
            # After each task, so that an hour's work is never lost.
            if options.json is not None:
                _write(options, scale, found)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    exact = [c for changes, _ in found.values() for c in changes if c.method == "exact"]
    if not exact:
        return 0
    most = max(max(abs(c.loss), abs(c.auc), abs(c.rare)) for c in exact)
    print(f"exact rows: loss and AUC change by {most:g}")
    return 0 if most == 0 else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.figures.accuracy", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--scale", default="minutes", help="of configs/accuracy, or a YAML file")
    parser.add_argument("--task", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--methods", nargs="+", help="patterns, in place of the scale's")
    parser.add_argument("--data", type=Path, help="a file in Criteo's format; else synthetic")
    parser.add_argument("--ratings", type=Path, help="a folder with MovieLens-100k; else synthetic")
    parser.add_argument("--out", type=Path, help="draw two figures of each task into this folder")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def _measure(
    name: str, scale: Scale, methods: Sequence[Method], sources: Sources
) -> tuple[list[Change], list[Stored]]:
    task = TASKS[name]
    each = scale.length * scale.points * (1 + len(methods))
    with (
        task.job(scale, sources) as job,
        tqdm(total=scale.steps[-1] + each, unit="step") as bar,
    ):
        return measure(job, task, scale, methods, bar)


def _report(
    name: str, scale: Scale, changes: list[Change], stored: list[Stored], out: Path | None
) -> None:
    """Print a task's tables, and draw its figures."""
    title, found, bytes_of = TASKS[name].title, effects(changes), sizes(stored)
    console = Console(width=190)
    console.print(_changes(f"{title}: change in %, {scale.points} states", found))
    console.print(_bytes(f"{title}: bytes", bytes_of))
    best = smallest(found, bytes_of, LIMIT)
    console.print(f"fewest bytes within {LIMIT:.2%} of the loss beyond noise: {best or 'none'}\n")
    if out is not None:
        draw(name, title, found, bytes_of, out)


def _changes(title: str, found: Sequence[Effect]) -> Table:
    moments = list(dict.fromkeys((effect.restores, effect.after) for effect in found))
    by_key = {(e.method, (e.restores, e.after)): e for e in found}
    table = Table(title=title)
    table.add_column("method")
    for restores, after in moments:
        label = f"R = {restores}" + (f", {after} steps later" if after else "")
        table.add_column(f"loss, {label}", justify="right")
    at_end = [key for key in moments if key[1] == 0][-1]
    table.add_column(f"AUC, R = {at_end[0]}", justify="right")
    table.add_column(f"rare ids, R = {at_end[0]}", justify="right")
    for method in dict.fromkeys(effect.method for effect in found):
        cells = [_percent(by_key[method, moment].loss) for moment in moments]
        end = by_key[method, at_end]
        table.add_row(method, *cells, _percent(end.auc), _percent(end.rare))
    return table


def _percent(value: Interval) -> str:
    return f"{100 * value.mean:+.4f} ± {100 * (value.high - value.mean):.4f}"


def _bytes(title: str, bytes_of: Sequence[Size]) -> Table:
    table = Table(title=title)
    columns = ("rows", "weights a row", "id", "state", "row in all", "dense", "manifest, indexes")
    for column in ("method", "checkpoint", *columns):
        table.add_column(column, justify="left" if column in ("method", "checkpoint") else "right")
    for size in bytes_of:
        table.add_row(
            size.method,
            size.kind,
            f"{size.rows:,.0f}",
            *(f"{value:.2f}" for value in (size.weights, size.ids, size.state, size.row)),
            *(f"{value:,.0f}" for value in (size.dense, size.manifest)),
        )
    return table


def _write(
    options: argparse.Namespace,
    scale: Scale,
    found: dict[str, tuple[list[Change], list[Stored]]],
) -> None:
    content: dict[str, Any] = {
        **describe(),
        "criteo": "synthetic" if options.data is None else options.data.name,
        "ratings": "synthetic" if options.ratings is None else "MovieLens-100k",
        "scale": asdict(scale),
        "tasks": {
            name: {
                "effects": [asdict(effect) for effect in effects(changes)],
                "sizes": [asdict(size) for size in sizes(stored)],
                "changes": [asdict(change) for change in changes],
            }
            for name, (changes, stored) in found.items()
        },
    }
    options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
