"""Measure the memory of a save and a restore on top of the model, beside the byte budget.

    python -m recipes.benchmarks.memory [--json out.json] [--budget-mib 64] [--times 10]

One rank holds one table of `times` the budget (`Checkpointer(memory_budget=…)`) with row-wise
Adagrad state. Every measurement has a process of its own: the peak of its resident memory during
the call, above the level just before, after a first small checkpoint has loaded all code involved.
To a save's peak comes the staging memory that the Checkpointer holds all the time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from tqdm import tqdm

from recipes.dlrm_criteo import sharding
from torchrec_checknrun import Checkpointer, Consecutive, Quantization

ALLOWED = 1.1
"""Part of the budget that a save or restore may take."""
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A table and its saves: a full one, then one of the rows at every `stride`-th position."""

    dim: int
    bits: int | None
    stride: int
    budget: int
    times: int

    @property
    def rows(self) -> int:
        return self.times * self.budget // (4 * self.dim)


@dataclass(frozen=True)
class Measured:
    """One call's peak memory above the level before it, in bytes."""

    dim: int
    bits: int | None
    call: str
    rows: int
    peak: int
    of_budget: float


def cases(budget: int, times: int, dims: Sequence[int]) -> list[Case]:
    """Return exact rows and both extremes of quantization, with all rows again or every third row,
    whose row ids take the most bytes (a bitmap).
    """
    choices: list[tuple[int | None, int]] = [(None, 1), (None, 3), (8, 1), (2, 3)]
    return [Case(dim, bits, stride, budget, times) for dim in dims for bits, stride in choices]


def peak_of(call: Callable[[], object]) -> int:
    """Return the bytes of resident memory at a call's peak, above the level before."""
    ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    except OSError:
        return _sampled_peak(call)
    before = _resident("VmRSS")
    call()
    return _resident("VmHWM") - before


def _sampled_peak(call: Callable[[], object]) -> int:
    """Do the same where the kernel has no high-water mark that can be reset."""
    before = peak = _resident("VmRSS")
    done = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.0005):
            peak = max(peak, _resident("VmRSS"))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        call()
    finally:
        done.set()
        sampler.join()
    return max(peak, _resident("VmRSS")) - before


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}: this needs a Linux kernel")


def _checkpointer(case: Case, root: Path, model: DistributedModelParallel) -> Checkpointer:
    return Checkpointer(
        root,
        model=model,
        policy=Consecutive(),
        quantization=Quantization(bits=case.bits),
        memory_budget=case.budget,
    )


def _change(checkpointer: Checkpointer, case: Case, rows: int) -> None:
    for start in range(0, rows, 1 << 18):
        stop = min(start + (1 << 18), rows)
        checkpointer.mark("embedding_bags.table", range(start, stop, case.stride))


def _measure_save(case: Case, root: Path) -> dict[str, int]:
    _prepare(case, root)
    model = _model(case.rows, case.dim)
    before = _resident("VmRSS")
    with _checkpointer(case, root / "store", model) as checkpointer:
        held = _resident("VmRSS") - before  # the marks are not touched yet
        checkpointer.mark_all()  # as training has: the marks' memory is the tracker's
        full = peak_of(checkpointer.save)
        _change(checkpointer, case, case.rows)
        differential = peak_of(checkpointer.save)
        return {"save full": held + full, "save differential": held + differential}


def _measure_restore(case: Case, root: Path) -> dict[str, int]:
    _prepare(case, root)
    model = _model(case.rows, case.dim)
    with _checkpointer(case, root / "store", model) as checkpointer:
        checkpointer.mark_all()
        return {"restore both": peak_of(checkpointer.restore)}


def _prepare(case: Case, root: Path) -> None:
    """Load all code involved, by a small checkpoint of the same kinds."""
    torch.set_num_threads(1)
    rendezvous = root / f"rendezvous-{os.getpid()}"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    with (
        tempfile.TemporaryDirectory() as folder,
        _checkpointer(case, Path(folder), _model(1000, case.dim)) as checkpointer,
    ):
        checkpointer.save()
        _change(checkpointer, case, 1000)
        checkpointer.save()
        checkpointer.restore()


def measure(case: Case) -> list[Measured]:
    """Save twice in one fresh process, and restore both in another."""
    peaks: dict[str, int] = {}
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        for step in (_measure_save, _measure_restore):
            with ProcessPoolExecutor(1, mp_context=spawn) as process:
                peaks |= process.submit(step, case, Path(folder)).result()
    return [
        Measured(
            dim=case.dim,
            bits=case.bits,
            call=call,
            rows=-(-case.rows // (1 if call == "save full" else case.stride)),
            peak=peak,
            of_budget=peak / case.budget,
        )
        for call, peak in peaks.items()
    ]


def main() -> int:
    """Run the command; return 1 if a call took more than the budget and 10 %."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmarks.memory", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--budget-mib", type=int, default=64, help="memory_budget, in MiB")
    parser.add_argument("--times", type=int, default=10, help="the table's size in budgets")
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64], help="columns")
    options = parser.parse_args()
    budget = options.budget_mib << 20
    measured = [
        one
        for case in tqdm(cases(budget, options.times, options.dims), desc="tables", unit="table")
        for one in measure(case)
    ]
    table = Table(
        title=f"peak memory on top of a table of {options.times * options.budget_mib} MiB, "
        f"budget {options.budget_mib} MiB"
    )
    for column in ("columns", "stored", "call", "rows", "peak MiB", "of budget"):
        table.add_column(column, justify="left" if column == "call" else "right")
    for one in measured:
        stored = "exact" if one.bits is None else f"{one.bits} bit"
        table.add_row(
            str(one.dim),
            stored,
            one.call,
            f"{one.rows:,}",
            f"{one.peak / (1 << 20):.1f}",
            f"{one.of_budget:.0%}",
        )
    Console(width=100).print(table)
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in measured], indent=2) + "\n")
    worst = max(one.of_budget for one in measured)
    print(f"largest peak: {worst:.1%} of the budget; allowed {ALLOWED:.0%}")
    return 0 if worst <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
