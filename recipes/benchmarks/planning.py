"""Measure rank 0's cost of a checkpoint of many tables on many ranks: time, memory, manifest.

    python -m recipes.benchmarks.planning [--json out.json] [--tables 1000] [--ranks 1024]

No rows are made: every rank's plan is a real one's, of tables that are split by rows over all
ranks, and rank 0 handles the plans as in a save. Sizes grow up to the largest, each in a process of
its own, to show the growth: no cost may grow faster than ranks × tables.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import resource
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from recipes.benchmarks import machine
from torchrec_checknrun.format.manifest import Header, RankFile, TableTotals
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.format.rank_file import FileSummary
from torchrec_checknrun.model.progress import OptimizerClock
from torchrec_checknrun.save.commit import CheckpointWriter
from torchrec_checknrun.save.plan import LocalPlan, PlanSummary, make_global_plan
from torchrec_checknrun.save.rank_differences import RankDifferences
from torchrec_checknrun.shards import Rectangle, TableShape
from torchrec_checknrun.store.folder import Folder

MOST_MANIFEST_BYTES = 4_000_000
DIM, ROWS_PER_RANK = 64, 4096
_STATE_BYTES = 4 << 20
_SLACK = 1.25
"""Factor of proportional growth that timing on a busy machine may add."""


@dataclass(frozen=True)
class Size:
    """The amount of work for rank 0."""

    tables: int
    ranks: int


@dataclass(frozen=True)
class Cost:
    """The costs of a checkpoint for rank 0.

    Attributes:
        received_bytes: of all ranks' plans, as sent to rank 0.
        plan_seconds: to check the plans and to make the global one.
        commit_seconds: to make the manifest of all ranks' results and to write it.
        memory_bytes: peak of the process above its level before the first plan came.
        manifest_bytes: in storage.
    """

    size: Size
    received_bytes: int
    plan_seconds: float
    commit_seconds: float
    memory_bytes: int
    manifest_bytes: int


def measure(size: Size) -> Cost:
    """Plan and commit one checkpoint of a size, in this process."""
    names = [f"model.sparse_arch.embedding_bags.table_{i:04d}" for i in range(size.tables)]
    before = _peak()
    plans, received = [], 0
    for rank in range(size.ranks):
        sent = pickle.dumps(_plan(names, rank, size.ranks))
        received += len(sent)
        plans.append(pickle.loads(sent))
    started = time.perf_counter()
    _, whole = make_global_plan(plans, RankDifferences())
    planned = time.perf_counter()
    results = []
    for rank in range(size.ranks):
        summary = pickle.loads(pickle.dumps(_summary(names, rank, size.ranks)))
        results.append(summary)
    ready = time.perf_counter()
    folder = Folder("memory://planning/run/seq-000001_step-00000001_00000000")
    folder.create()
    files = {summary.file.name: summary.file.size for summary in results}
    with mock.patch.object(Folder, "sizes", return_value=files):  # without rows there are no files
        CheckpointWriter(folder).commit(whole, results)
    done = time.perf_counter()
    manifest = folder.size(MANIFEST_NAME)
    assert manifest is not None
    return Cost(size, received, planned - started, done - ready, _peak() - before, manifest)


def _rows_of(name: str, rank: int) -> Rectangle:
    return Rectangle(rank * ROWS_PER_RANK, (rank + 1) * ROWS_PER_RANK, 0, DIM)


def _plan(names: Sequence[str], rank: int, ranks: int) -> LocalPlan:
    shape = TableShape(ROWS_PER_RANK * ranks, DIM)
    summary = PlanSummary(
        header=Header(sequence=1, step=1, epoch=1),
        tables={name: TableShape(shape.rows, shape.dim) for name in names},
        shards=[(name, _rows_of(name, rank)) for name in names],
        fp32_bytes=dict.fromkeys(names, 4 * ROWS_PER_RANK * (DIM + 1)),
        progress={name: OptimizerClock(1, 0.1) for name in names},
        replicated={"model": _STATE_BYTES, "optimizer": _STATE_BYTES},
        per_rank=(),
    )
    items = tuple(f"{name}{_rows_of(name, rank)}#0" for name in names)
    return LocalPlan(items, summary)


def _summary(names: Sequence[str], rank: int, ranks: int) -> FileSummary:
    one = TableTotals(
        rows=ROWS_PER_RANK * ranks,
        dim=DIM,
        stored_values=ROWS_PER_RANK * DIM,
        weight_bytes=ROWS_PER_RANK * 36,
        optimizer_bytes=ROWS_PER_RANK * 4,
        modified_bytes=ROWS_PER_RANK * 260,
        encoded_bytes=ROWS_PER_RANK * 40,
        value_bits=4,
        error_mean=0.0712345678 + rank / 1e6,
        error_max=0.1123456789 + rank / 1e6,
        error_rows=1024,
        codecs=[{"name": "rowwise", "version": 1, "bits": 4, "scheme": "adaptive"}],
    )
    size = len(names) * ROWS_PER_RANK * 40
    # Rank 0 writes the states as well, and so has all chunks of the plan.
    chunks = len(names)
    file = RankFile(f"rank-{rank:05d}.bin", size, size - 9000, 8960, "0123456789abcdef", chunks)
    return FileSummary(file, dict.fromkeys(names, one), 0)


def _peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def sizes(largest: Size) -> list[Size]:
    """Return the sizes up to the largest, along each direction."""
    t, r = largest.tables, largest.ranks
    found = [Size(t // 4, r // 4), Size(t // 2, r // 4), Size(t, r // 4)]
    found += [Size(t // 4, r // 2), Size(t // 4, r), Size(t // 2, r // 2), largest]
    return [size for size in found if size.tables and size.ranks]


def judge(costs: Sequence[Cost]) -> list[str]:
    """List the costs that grew too fast or are too large."""
    problems = []
    least, largest = costs[0], costs[-1]
    times = largest.size.tables * largest.size.ranks / (least.size.tables * least.size.ranks)
    for name in ("received_bytes", "plan_seconds", "commit_seconds", "memory_bytes"):
        grown = getattr(largest, name) / max(getattr(least, name), 1e-9)
        if grown > _SLACK * times:
            problems.append(f"{name} grew {grown:.1f} times, ranks × tables {times:.1f} times")
    if largest.manifest_bytes > MOST_MANIFEST_BYTES:
        problems.append(f"the manifest has {largest.manifest_bytes} bytes")
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a cost grew faster than ranks × tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--tables", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=1024)
    options = parser.parse_args(arguments)
    context = multiprocessing.get_context("spawn")
    costs = []
    todo = sizes(Size(options.tables, options.ranks))
    for size in tqdm(todo, desc="planning", file=sys.stderr, disable=not sys.stderr.isatty()):
        with ProcessPoolExecutor(1, mp_context=context) as process:
            costs.append(process.submit(measure, size).result())
    problems = judge(costs)
    _print(costs, problems)
    if options.json is not None:
        document: dict[str, Any] = {
            "machine": machine.describe(),
            "costs": [asdict(cost) for cost in costs],
            "problems": problems,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(bool(problems))


def _print(costs: Sequence[Cost], problems: Sequence[str]) -> None:
    table = Table(title="one checkpoint on rank 0")
    for name in ("tables", "ranks", "plans MB", "plan s", "commit s", "memory MB", "manifest MB"):
        table.add_column(name, justify="right")
    for cost in costs:
        table.add_row(
            *(str(cost.size.tables), str(cost.size.ranks), f"{cost.received_bytes / 1e6:.1f}"),
            *(f"{cost.plan_seconds:.2f}", f"{cost.commit_seconds:.2f}"),
            *(f"{cost.memory_bytes / 1e6:.0f}", f"{cost.manifest_bytes / 1e6:.3f}"),
        )
    console = Console(width=100)
    console.print(table)
    for problem in problems:
        console.print(f"[red]{problem}[/red]")


if __name__ == "__main__":
    raise SystemExit(main())
