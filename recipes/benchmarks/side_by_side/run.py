"""Compare this package with its peers: one model, one access trace, one run.

    python -m recipes.benchmarks.side_by_side --json out.json
    python -m recipes.benchmarks.side_by_side --only bytes,restore
    python -m recipes.benchmarks.side_by_side --only training --ranks 1 --systems ours dcp

A DLRM with Criteo Kaggle's 26 tables, scaled, row-wise Adagrad, on CPU; every system gets the same
steps. The parts:

training: the cost of a save, on one and on two ranks (`worker`); with the machine's
own limits, the time until a fresh process lists the checkpoint, and the peak of memory.
bytes: the bytes of checkpoints, and the capacity that they keep (`sizes`).
restore: the time of a restore, on one and on two ranks (`restore`).
instants: whether a save in the background is one instant (`restore`).

`python -m recipes.benchmarks.side_by_side_markdown out.json` prints the tables of the docs, and
`python -m recipes.benchmarks.side_by_side.shrink` reduces a result to their figures.

Parts and systems have processes of their own. Ratios are of the same rounds. Exits with 1 if a
target is missed; the targets are for two cores, one rank and dim 64.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from tqdm import tqdm

from recipes.benchmarks.machine import describe
from recipes.benchmarks.side_by_side import restore, sizes, tables, turns
from recipes.benchmarks.side_by_side.model import Setting, architecture
from recipes.benchmarks.side_by_side.systems import (
    ASYNC,
    CASES,
    COPY,
    DCP,
    NONE,
    ON_WRITE,
    OURS,
    PEERS,
    PROCESS,
)
from recipes.benchmarks.side_by_side.targets import Rows, Target, evaluate
from recipes.benchmarks.side_by_side.trace import Kind, Trace, promised

PARTS = ("training", "bytes", "restore", "instants")
ROUNDS = "turns of each system in training; twice as many of those that targets compare"
KINDS: tuple[Kind, ...] = ("skewed", "independent")
QUICK = Setting(rows=50_000, batch=128, steps=3)
# The systems that targets compare come first: they are measured in the same rounds, and on one
# rank, as the targets require, in more rounds than the others.
FIRST = [ON_WRITE, COPY, DCP, f"{ASYNC}, DTensor, kept stager"]
COMPARED = [*FIRST, PROCESS]
MORE_ROUNDS = 2
WARM = 20
"""Warm saves of copy on write and of copy mode, at least: enough for an interval of confidence."""
RESTORES = 5  # rounds; single restores of the same system differ by half
ON_TWO_RANKS = [
    *FIRST,
    *(case.name for case in PEERS),
    *(case.name for case in OURS if case.options["staging"] == "copy_on_write"),
]


def names(ranks: int, chosen: Sequence[str]) -> list[str]:
    """Return the names of the systems to train with on a number of ranks.

    Args:
        chosen: parts of names; none: all.
    """
    found = list(dict.fromkeys([*COMPARED, *CASES] if ranks == 1 else ON_TWO_RANKS))
    return [name for name in found if not chosen or any(part in name for part in chosen)]


def summary(result: dict[str, Any], ranks: int, batch: int) -> dict[str, Any]:
    """Summarize a worker's result as a row: medians by kind of save, and the figures from them."""
    row = {**result, "ranks": ranks}
    if "error" in result:
        return row
    saves = result["saves"]
    for label in ("first", "idle", "warm"):
        of_kind = [save for save in saves if save["label"] == label]
        if of_kind:
            columns = ("call", "extra", "longest", "listed", "gather")
            row[label] = {
                name: median(save[name] for save in of_kind)
                for name in columns
                if name in of_kind[0]  # without checkpoints there is nothing to list
            }
    later = saves[1:] or saves
    row["normal"] = median(save["normal"] for save in saves)
    # A block with a save has ``extra`` more than its steps.
    rates = [save["steps"] * save["normal"] for save in later]
    seconds = [rate + save["extra"] for rate, save in zip(rates, later, strict=True)]
    row["samples_per_second"] = batch * sum(save["steps"] for save in later) / sum(seconds)
    row["of_without"] = sum(rates) / sum(seconds)
    return row


def limits(rows: Rows) -> Rows:
    """Return the machine's limits by ranks: medians over the worker without checkpoints."""
    found = []
    for row in rows:
        if (row["name"], row["trace"]) == (NONE, "skewed") and "error" not in row:
            for name in row["limits"][0]:
                seconds = median(one[name] for one in row["limits"])
                size = row["limit_bytes"] * row["ranks"]
                found.append(
                    {
                        "ranks": row["ranks"],
                        "name": name,
                        "seconds": seconds,
                        "bytes": size,
                        "gbps": size / seconds / 1e9,
                    }
                )
    return found


def traces(setting: Setting, intervals: int = 12) -> dict[str, dict[str, list[float]]]:
    """Return the traces' promised and actual shares of rows, cumulative and in each interval."""
    tables = architecture(setting).num_embeddings_per_feature
    found: dict[str, dict[str, list[float]]] = {}
    for kind in KINDS:
        trace = Trace(tables, kind)
        single = [sum(map(len, trace.rows(i))) / sum(tables) for i in range(intervals)]
        found[kind] = {
            "promised": [promised(kind, i + 1) for i in range(intervals)],
            "since_baseline": trace.fractions(intervals),
            "since_last": single,
        }
    return found


def _alone(call: Callable[..., Rows], *arguments: object) -> Rows:
    """Run a call in a fresh process."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as process:
        return process.submit(call, *arguments).result()


@dataclass(frozen=True)
class Run:
    """A group of systems to train with, ``together`` of them at a time.

    Attributes:
        pairs: of blocks in a turn, of systems that have another number of them than ``PAIRS``.
    """

    ranks: int
    setting: Setting
    cases: list[str]
    rounds: int
    together: int
    pairs: Mapping[str, int] = field(default_factory=dict)


def runs(setting: Setting, options: argparse.Namespace) -> list[Run]:
    """Return all runs of training, for all chosen numbers of ranks; and on the other trace."""
    found = []
    for ranks in options.ranks:
        compared, cases = [], names(ranks, options.systems)
        for name in COMPARED if ranks == 1 else FIRST:
            if name in cases:
                compared.append(name)
                cases.remove(name)
        rounds = MORE_ROUNDS * options.rounds if ranks == 1 else options.rounds
        together = max(options.together, len(compared))
        pairs = dict.fromkeys((ON_WRITE, COPY), 1 + math.ceil(WARM / rounds))
        found.append(Run(ranks, setting, compared, rounds, together, pairs))
        found.append(Run(ranks, setting, cases, options.rounds, options.together))
    if 1 in options.ranks:
        other = [name for name in (ON_WRITE, DCP, NONE) if name in names(1, options.systems)]
        independent = replace(setting, trace="independent")
        found.append(Run(1, independent, other, options.rounds, options.together))
    return found


def training(setting: Setting, options: argparse.Namespace, folder: Path) -> Rows:
    """Measure the cost of saves for training."""
    rows: Rows = []
    planned = runs(setting, options)
    total = sum(run.rounds * len(run.cases) for run in planned)
    with tqdm(total=total, desc="training", unit="turn") as bar:
        for number, run in enumerate(planned):
            results = turns.run(
                run.cases,
                run.setting,
                run.ranks,
                run.rounds,
                folder / f"training-{number}",
                together=run.together,
                pairs=run.pairs,
                idle_seconds=options.idle,
                progress=bar.update,
            )
            trace = {"trace": run.setting.trace}
            rows += [{**summary(r, run.ranks, run.setting.batch), **trace} for r in results]
    beyond(rows)
    return rows


def beyond(rows: Rows) -> None:
    """Add ``memory_beyond``: a system's peak beyond that of training without checkpoints."""
    own = {
        (r["ranks"], r["trace"]): r["memory"] for r in rows if r["name"] == NONE and "memory" in r
    }
    for row in rows:
        if "memory" in row and (row["ranks"], row["trace"]) in own:
            row["memory_beyond"] = row["memory"] - own[row["ranks"], row["trace"]]


def restores(setting: Setting, ranks: Sequence[int], folder: Path, rounds: int) -> Rows:
    """Time restores, for all chosen numbers of ranks."""
    found: Rows = []
    for count in ranks:
        if count == 1:
            found += _alone(restore.measure, setting, folder, rounds)
        else:
            found += restore.measure_on(count, setting, folder, rounds)
    return found


def main() -> int:
    """Run the command."""
    options = _options()
    setting = QUICK if options.quick else Setting()
    setting = replace(
        setting,
        **{
            n: getattr(options, n) for n in ("rows", "dim", "steps", "batch") if getattr(options, n)
        },
        threads=options.threads,
    )
    # For parts without training beside
    calm = replace(setting, threads=len(os.sched_getaffinity(0)))
    holder = nullcontext(options.folder) if options.folder else tempfile.TemporaryDirectory()
    found: dict[str, Any] = {"setting": asdict(setting), "traces": traces(setting)}
    rounds = 1 if options.quick else RESTORES
    measures: dict[str, Callable[[Path], Rows]] = {
        "training": lambda folder: training(setting, options, folder),
        "bytes": lambda folder: _alone(sizes.measure, calm, folder),
        "restore": lambda folder: restores(calm, options.ranks, folder, rounds),
        "instants": lambda folder: _alone(restore.instants, calm, folder),
    }
    aims: list[Target] = []
    with holder as root:
        folder = Path(tempfile.mkdtemp(dir=root))
        for part in (part for part in PARTS if part in options.only):
            found[part] = measures[part](folder)
            if part == "training":
                found["limits"] = limits(found[part])
            parts = [found.get(name, []) for name in ("training", "bytes", "restore")]
            parts[0] = [row for row in parts[0] if row["trace"] == "skewed"]
            aims = evaluate(*parts)
            if options.json:  # after every part, so that a run that is ended early is not lost
                _write(options.json, {"quick": options.quick, **found}, aims)
        shutil.rmtree(folder)
    console = Console(width=190)
    for table in tables.tables(found, aims):
        console.print(table)
    missed = [aim for aim in aims if not aim.met]
    print(f"{len(aims) - len(missed)} of {len(aims)} targets met (they are for 2 cores and dim 64)")
    return 1 if missed else 0


def _write(path: Path, found: dict[str, Any], aims: Sequence[Target]) -> None:
    content = {**describe(), "targets": [aim.to_json() for aim in aims], **found}
    path.write_text(json.dumps(content, indent=2) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmarks.side_by_side", description=__doc__.split("\n")[0]
    )
    parts = ",".join(PARTS)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--only", default=parts, help=f"parts, with commas: {parts}")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2], help="of training, restores"
    )
    parser.add_argument("--systems", nargs="+", default=[], help="parts of names; of training")
    parser.add_argument("--rows", type=int, help="of all tables together")
    parser.add_argument("--dim", type=int, help="columns")
    parser.add_argument("--steps", type=int, help="between two checkpoints")
    parser.add_argument("--batch", type=int, help="samples of a step, over all ranks")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on each rank")
    parser.add_argument("--rounds", type=int, default=2, help=ROUNDS)
    parser.add_argument("--together", type=int, default=3, help="systems alive at the same time")
    parser.add_argument("--idle", type=float, default=15.0, help="seconds of a long idle, at least")
    parser.add_argument("--folder", type=Path, help="for the stores; default: a temporary one")
    parser.add_argument("--quick", action="store_true", help="tiny tables: figures mean nothing")
    options = parser.parse_args()
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(PARTS):
        parser.error(f"--only: {sorted(unknown)} is none of {', '.join(PARTS)}")
    if options.rounds < 1 or options.together < 1:
        parser.error("--rounds and --together must be at least 1")
    if options.quick:
        options.idle = min(options.idle, 0.5)
    return options
