"""Emulate what failures cost under full, partial and in-memory recovery, after CPR (MLSys'21).

    python -m recipes.figures.partial_recovery [--part overhead] [--seeds 5] [--out figures]

Overhead: a job of 56 hours that fails every 28 on average, with eight ranks that hold tables and a
budget of PLS 0.1, as the paper's; 5 minutes each to save, to load and to restart are a fit to its
8.2 to 8.5 % for full recovery. Failures are drawn at random, many times, beside the expected cost
in closed form (`torchrec_checknrun.overhead`); once more for a job a hundred times as long, without
the effect of a last interval that is cut short. The rows with images are of tables in memory that
outlives its process: `survive=Images()`, and `partial=PartialRecovery(…)` where a row says partial.

Accuracy: see `lost_shards`; most of an hour. Seeds that the file has already are not trained again,
so that a run may be interrupted.

A PNG of each, and `partial_recovery.json` with all numbers. Exit code 1 where the long job's
emulation is more than 5 % (of PLS: 3 %) beside the closed form.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from recipes.benchmarks.machine import describe
from recipes.figures import lost_shards, plots, recovery_plots
from recipes.figures.failing_job import Outcome, Play
from recipes.figures.lost_shards import Change
from torchrec_checknrun.overhead import JOURNAL, Candidate, FailingJob, Recovery, choose

MAX_PLS = 0.1
CPR = FailingJob(
    job_hours=56,
    mtbf_hours=28,
    ranks=8,
    save_seconds=300,
    load_seconds=300,
    restart_seconds=300,
)
"""The paper's cluster; the three times are a fit."""
SHARES = (0.5, 0.9, 1.0)
"""Shares of the failures that end processes and leave memory as it is."""
LONG = 100
BUDGETS = (0.02, 0.05, 0.1, 0.2)
WITHIN, WITHIN_PLS = 0.05, 0.03


@dataclass(frozen=True)
class Runs:
    """The number of jobs to emulate, of 56 hours and of a hundred times as many."""

    short: int
    long: int


FULL = Runs(short=20_000, long=1000)
QUICK = Runs(short=200, long=10)


def overheads(runs: Runs) -> list[dict[str, Any]]:
    """Emulate all kinds of recovery beside the closed form."""
    jobs = [CPR, *(replace(CPR, process_deaths=p, journal=JOURNAL) for p in SHARES)]
    cases = []
    for job in jobs:
        for candidate in choose(job, MAX_PLS).candidates:
            stale = candidate.recovery is Recovery.IMAGES_PARTIAL and job.process_deaths == 1
            if candidate.recovery.keeps_images == (job.process_deaths > 0) and not stale:
                cases.append((job, candidate))
    return [
        {**_closed(job, candidate), **_emulated(job, candidate, runs)}
        for job, candidate in tqdm(cases, desc="overhead")
    ]


def _closed(job: FailingJob, candidate: Candidate) -> dict[str, Any]:
    parts = {k: v for k, v in asdict(candidate).items() if k not in ("recovery", "allowed")}
    return {
        "recovery": candidate.recovery.value,
        "process_deaths": job.process_deaths,
        **parts,
        "overhead": candidate.overhead,
    }


def _emulated(job: FailingJob, candidate: Candidate, runs: Runs) -> dict[str, Any]:
    """Return emulated overhead and PLS at this job's length, and at the long one's."""
    found = {}
    for name, hours, count in (
        ("emulated", job.job_hours, runs.short),
        ("long", LONG * job.job_hours, runs.long),
    ):
        played = replace(job, job_hours=hours)
        interval = candidate.interval_hours
        found[name] = _mean(
            [Play(played, candidate.recovery, interval, Random(n)).run() for n in range(count)],
            played,
            candidate.journal,
        )
    return found


def _mean(outcomes: Sequence[Outcome], job: FailingJob, journal: float) -> dict[str, Any]:
    """Average over jobs, with the standard error of the overhead and of the PLS."""
    overheads = [journal + (o.saving + o.lost + o.recovering) / job.job_hours for o in outcomes]
    lost = [outcome.pls for outcome in outcomes]
    return {
        "job_hours": job.job_hours,
        "jobs": len(outcomes),
        "saving": float(np.mean([o.saving for o in outcomes])) / job.job_hours,
        "lost": float(np.mean([o.lost for o in outcomes])) / job.job_hours,
        "recovering": float(np.mean([o.recovering for o in outcomes])) / job.job_hours,
        "journal": journal,
        "overhead": float(np.mean(overheads)),
        "overhead_error": float(np.std(overheads) / len(outcomes) ** 0.5),
        "pls": float(np.mean(lost)),
        "pls_error": float(np.std(lost) / len(outcomes) ** 0.5),
    }


def stale(runs: Runs) -> list[dict[str, Any]]:
    """Emulate the PLS of partial recovery at the interval that each budget allows."""
    rows = []
    for budget in tqdm(BUDGETS, desc="PLS"):
        job = replace(CPR, job_hours=LONG * CPR.job_hours)
        *_, partial = choose(job, budget).candidates
        assert partial.recovery is Recovery.PARTIAL
        plays = [
            Play(job, partial.recovery, partial.interval_hours, Random(n)).run()
            for n in range(runs.long)
        ]
        row = {"budget": budget, "interval_hours": partial.interval_hours, "pls": partial.pls}
        rows.append({**row, "long": _mean(plays, job, 0.0)})
    return rows


def judge(rows: Sequence[dict[str, Any]], lost: Sequence[dict[str, Any]]) -> list[str]:
    """Name the emulations of the long job that are not what the closed form says."""
    wrong = []
    for row in rows:
        difference = row["long"]["overhead"] / row["overhead"] - 1
        if abs(difference) > WITHIN:
            wrong.append(f"{row['recovery']}: overhead {difference:+.1%} of the closed form")
    for row in lost:
        difference = row["long"]["pls"] / row["pls"] - 1
        if abs(difference) > WITHIN_PLS:
            wrong.append(f"budget {row['budget']}: PLS {difference:+.1%} of the formula")
    return wrong


def accuracy(
    plan: lost_shards.Plan, seeds: int, known: dict[str, Any], path: Path
) -> dict[str, Any]:
    """Train the seeds that are not known, and keep each in the file as soon as it is done."""
    found = known.get("accuracy", {})
    if found.get("plan") != json.loads(json.dumps(asdict(plan))):
        found = {"plan": asdict(plan), "changes": []}
    done = {change["seed"] for change in found["changes"]}
    todo = [seed for seed in range(seeds) if seed not in done]
    with tqdm(total=plan.trained * len(todo), unit="step") as bar:
        for seed in todo:
            bar.set_description(f"seed {seed}")
            found["changes"] += [asdict(one) for one in lost_shards.measure(plan, seed, bar)]
            _write(path, {**known, "accuracy": found})
    changes = [Change(**change) for change in found["changes"] if change["seed"] < seeds]
    return {**found, "summary": lost_shards.summary(changes)}


def _write(path: Path, numbers: dict[str, Any]) -> None:
    path.write_text(json.dumps(numbers, indent=2) + "\n")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.figures.partial_recovery", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--part", choices=("overhead", "accuracy"), help="default: both")
    parser.add_argument("--seeds", type=int, default=5, help="of the accuracy")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder of the figures")
    parser.add_argument("--quick", action="store_true", help="few jobs, few steps")
    options = parser.parse_args()
    plots.require_matplotlib()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "partial_recovery.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    numbers = {**known, **describe()}
    console = Console(width=160)
    wrong = []
    if options.part != "accuracy":
        numbers |= {"job": asdict(CPR), "max_pls": MAX_PLS}
        runs = QUICK if options.quick else FULL
        numbers |= {"overhead": overheads(runs), "pls": stale(runs)}
        _write(path, numbers)
        recovery_plots.draw_overhead(numbers, options.out / "partial_recovery.png")
        console.print(_overhead_table(numbers["overhead"]))
        console.print(_pls_table(numbers["pls"]))
        wrong = judge(numbers["overhead"], numbers["pls"])
    if options.part != "overhead":
        plan = lost_shards.QUICK if options.quick else lost_shards.FULL
        numbers["accuracy"] = accuracy(plan, options.seeds, numbers, path)
        _write(path, numbers)
        found = numbers["accuracy"]["summary"]
        recovery_plots.draw_accuracy(found, options.out / "partial_recovery_accuracy.png")
        console.print(_accuracy_table(found))
    for line in wrong:
        print(line)
    return 1 if wrong else 0


def _overhead_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=f"overhead, in % of {CPR.job_hours:g} hours; emulated, beside closed form")
    columns = ("interval", "saves", "lost", "recovery", "journal", "overhead", "emulated")
    for column in ("recovery", "process deaths", *columns, f"{LONG} times as long", "PLS"):
        table.add_column(column, justify="left" if column == "recovery" else "right")
    for row in rows:
        table.add_row(
            row["recovery"],
            f"{row['process_deaths']:.0%}" if row["process_deaths"] else "",
            f"{row['interval_hours']:.1f} h",
            *(f"{100 * row[part]:.2f}" for part in recovery_plots.PARTS),
            f"{100 * row['overhead']:.2f}",
            *(
                f"{100 * row[name]['overhead']:.2f} "
                f"({row[name]['overhead'] / row['overhead'] - 1:+.1%})"
                for name in ("emulated", "long")
            ),
            f"{row['pls']:.4f}",
        )
    return table


def _pls_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=f"PLS of partial recovery, emulated in {LONG * CPR.job_hours:g} hours")
    for column in ("budget", "interval", "formula", "emulated"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row['budget']}",
            f"{row['interval_hours']:.1f} h",
            f"{row['pls']:.4f}",
            f"{row['long']['pls']:.4f} ({row['long']['pls'] / row['pls'] - 1:+.1%})",
        )
    return table


def _accuracy_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="change at the job's end, in %, with its standard error over the seeds")
    for column in ("scheme", "ranks lost", "PLS", "logloss", "AUC", "seeds"):
        table.add_column(column, justify="left" if column == "scheme" else "right")
    for row in rows:
        table.add_row(
            row["scheme"],
            str(row["lost"]),
            f"{row['pls']:.3f}",
            *(
                f"{100 * row[x]:+.4f} ± {100 * (row[f'{x}_error'] or 0):.4f}"
                for x in ("logloss", "auc")
            ),
            str(row["seeds"]),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
