"""Measure the overall reduction by differential and quantized checkpoints: the paper's figure 17.

    python -m recipes.figures.overall [--dim 16 64 128] [--data train.txt] [--json out.json]
        [--png out.png] [--quick]

The main job trains with a checkpoint at the end of every interval, as long as it takes to modify
26 % of the rows, the paper's figure. All bytes are those of the objects in storage, as the
Checkpointer reports them. `written`: a full fp32 checkpoint over the mean of all, from baseline to
baseline if there are two (the paper's write bandwidth). `kept`: the same over the most that a
restore of the newest needs (the paper's capacity). `tables`: both without the dense part, which is
below 1 % of a production model, but not of this one: the fewer bytes the tables take, the more it
counts. The paper gives figures for the first and the last L, the number of restores that a job
expects; its tables have 64 columns and more.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from recipes.benchmarks.machine import describe
from recipes.figures import plots
from recipes.figures.lookups import batches_until
from recipes.figures.small_job import SmallJob, small_job
from torchrec_checknrun import (
    Checkpointer,
    CheckpointReport,
    Consecutive,
    Intermittent,
    Quantization,
    Retention,
)
from torchrec_checknrun.policy import Policy

RESTORES = {"L <= 1": 1.0, "L <= 3": 3.0, "L <= 20": 20.0, "L > 20": 21.0}
"""Expected restores by the paper's name of each case."""
PAPER = {"L <= 1": (17.0, 8.0), "L > 20": (6.0, 2.5)}
"""The paper's factors of bandwidth and capacity; those between are not given."""


@dataclass(frozen=True)
class Way:
    """A policy, and the storage of rows for so many expected restores."""

    policy: Policy
    quantization: Callable[[float], Quantization]
    by_restores: bool = True
    """True if the quantization depends on the expected restores."""


WAYS: dict[str, Way] = {
    "exact": Way(Intermittent(), lambda _: Quantization(), by_restores=False),
    "widths": Way(
        Intermittent(), lambda restores: Quantization(bits="auto", expected_restores=restores)
    ),
    "widths, log8": Way(
        Intermittent(),
        lambda restores: Quantization(
            bits="auto", expected_restores=restores, optimizer="log8", compress=True
        ),
    ),
    "delta, log8": Way(
        Consecutive(),
        lambda _: Quantization(method="delta", mean_bits=3, optimizer="log8"),
        by_restores=False,
    ),
}


@dataclass(frozen=True)
class Plan:
    """The size of the measurement."""

    intervals: int
    overrides: tuple[str, ...]
    fraction: float = 0.26
    """The portion of the rows to be modified in the first interval."""


FULL = Plan(12, ("model.scale=0.005", "trainer.batch_size=4096"))
QUICK = Plan(3, ("model.scale=0.0005", "trainer.batch_size=128"))


@dataclass(frozen=True)
class Factors:
    """The factors by which less is written and kept than by full fp32 checkpoints."""

    written: float
    kept: float
    tables_written: float
    tables_kept: float


@dataclass(frozen=True)
class Row:
    """One run."""

    dim: int
    way: str
    restores: str
    bits: int | None
    rows: int
    interval_steps: int
    baselines: list[int]
    full_fp32_bytes: int
    dense_bytes: int
    written_bytes: list[int]
    factors: Factors


def factors(reports: Sequence[CheckpointReport]) -> Factors:
    """Compute the factors of a run from its checkpoints, the first one full."""
    full = [i for i, report in enumerate(reports) if report.kind == "full"]
    cycle = reports[: full[-1]] if len(full) > 1 else reports
    by_id = {report.id: report for report in reports}

    def chain(report: CheckpointReport) -> list[CheckpointReport]:
        found = [report]
        while found[-1].parent is not None:
            found.append(by_id[found[-1].parent])
        return found

    fp32 = reports[0].full_fp32_bytes
    dense = reports[0].bytes["dense"]

    def pair(part: Callable[[CheckpointReport], int], of_full: int) -> tuple[float, float]:
        written = sum(part(report) for report in cycle) / len(cycle)
        kept = max(sum(part(one) for one in chain(report)) for report in reports)
        return of_full / written, of_full / kept

    everything = pair(lambda report: report.total_bytes, fp32)
    tables = pair(lambda report: report.total_bytes - report.bytes["dense"], fp32 - dense)
    return Factors(*everything, *tables)


def run(
    job: SmallJob, way: Way, restores: float, steps: int, intervals: int, bar: Any
) -> list[CheckpointReport]:
    """Train a job from its present state; return the reports of its checkpoints."""
    reports = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpointer(
            folder,
            model=job.model,
            state={"optimizer": job.optimizer, "reader": job.reader},
            policy=way.policy,
            quantization=way.quantization(restores),
            retention=Retention(keep=1),
        ) as checkpointer,
    ):
        for _ in range(intervals):
            job.train(job.batches(steps), bar.update)
            report = checkpointer.save()
            assert report is not None, "a gradient is waiting between steps"
            reports.append(report)
    return reports


def measure(dim: int, plan: Plan, data: Path | None) -> list[Row]:
    """Measure all ways at one width of the tables."""
    source = [] if data is None else ["dataset=criteo_tsv", f"dataset.path='{data}'"]
    overrides = [
        *(source or ["dataset.vocabulary_start=1.0"]),
        *plan.overrides,
        f"model.embedding_dim={dim}",
        f"model.bottom_mlp=[64,{dim}]",
        "trainer.eval_samples=1024",
    ]
    cases = [
        (name, way, case, restores)
        for name, way in WAYS.items()
        for case, restores in (RESTORES.items() if way.by_restores else [("any", 0.0)])
    ]
    rows = []
    with small_job(overrides) as job:
        tables = [shard.shape.rows for shard in job.shards]
        batch = job.reader.global_batch
        # In the shards' order: the reader's features are the tables', one each.
        names = [shard.table.rpartition(".t_")[2] for shard in job.shards]
        sizes = [tables[names.index(feature)] for feature in job.reader.features]
        steps = batches_until(job.reader.dataset, sizes, batch, plan.fraction)
        start = job.keep()
        total = len(cases) * plan.intervals * steps
        with tqdm(total=total, unit="step") as bar:
            for name, way, case, restores in cases:
                bar.set_description(f"dim {dim}, {name}, {case}")
                job.put_back(start)
                reports = run(job, way, restores, steps, plan.intervals, bar)
                chosen = way.quantization(restores).resolved(0)
                rows.append(
                    Row(
                        dim=dim,
                        way=name,
                        restores=case,
                        bits=chosen.width,
                        rows=sum(sizes),
                        interval_steps=steps,
                        baselines=[i for i, r in enumerate(reports) if r.kind == "full"],
                        full_fp32_bytes=reports[0].full_fp32_bytes,
                        dense_bytes=reports[0].bytes["dense"],
                        written_bytes=[report.total_bytes for report in reports],
                        factors=factors(reports),
                    )
                )
    return rows


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.figures.overall", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--dim", type=int, nargs="+", default=[16, 64, 128], help="of the tables")
    parser.add_argument("--data", type=Path, help="a file in Criteo's format; else synthetic")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--png", type=Path, help="draw them there")
    parser.add_argument("--quick", action="store_true", help="few intervals, small tables")
    options = parser.parse_args()
    if options.png:
        plots.require_matplotlib()
    plan = QUICK if options.quick else FULL
    rows: list[Row] = []
    try:
        for dim in dict.fromkeys(options.dim):
            rows += measure(dim, plan, options.data)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    Console(width=130).print(_table(rows, plan))
    if options.json:
        source = "synthetic" if options.data is None else options.data.name
        content = {
            **describe(),
            "source": source,
            "plan": asdict(plan),
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if options.png:
        _draw(rows, options.png)
    return 0


def _table(rows: Sequence[Row], plan: Plan) -> Table:
    table = Table(title=f"times less than full fp32 checkpoints, {plan.intervals} intervals")
    left = ("rows", "restores")
    columns = ("written", "kept", "tables written", "tables kept", "paper written", "paper kept")
    for column in ("dim", *left, "bits", "baselines", *columns):
        table.add_column(column, justify="left" if column in left else "right")
    for row in rows:
        table.add_row(
            str(row.dim),
            row.way,
            row.restores,
            "" if row.bits is None else str(row.bits),
            ", ".join(map(str, row.baselines)),
            *(f"{value:.1f}" for value in asdict(row.factors).values()),
            *(f"{value:g}" for value in PAPER.get(row.restores, ())),
        )
    return table


def _draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the paper's bars beside ours: written and kept, tables alone."""
    dims = list(dict.fromkeys(row.dim for row in rows))
    ways = [name for name in dict.fromkeys(row.way for row in rows) if name != "exact"]
    bars = [(dim, way) for dim in dims for way in ways]
    wide = 0.8 / (len(bars) + 1)
    with plots.figure(path, panels=2, width=13, sharey=False) as axes:
        for ax, at, key in zip(axes, (0, 1), ("tables_written", "tables_kept"), strict=True):
            for number, case in enumerate(RESTORES):
                if case in PAPER:
                    label = "the paper" if number == 0 else ""
                    ax.bar(number - 0.4, PAPER[case][at], wide, color="black", label=label)
                for i, (dim, way) in enumerate(bars):
                    at_all = (case, "any")
                    own = next(
                        r for r in rows if (r.dim, r.way) == (dim, way) and r.restores in at_all
                    )
                    ax.bar(
                        number - 0.4 + (i + 1) * wide,
                        getattr(own.factors, key),
                        wide,
                        color=plots.COLOURS[i % len(plots.COLOURS)],
                        label=f"dim {dim}, {way}" if number == 0 else "",
                    )
            ax.set_xticks(range(len(RESTORES)), list(RESTORES))
            ax.set_ylabel(f"times less {'written' if at == 0 else 'kept'}")
        axes[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


if __name__ == "__main__":
    sys.exit(main())
