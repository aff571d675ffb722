"""Measure the memory of a save and a restore on top of the model, beside the byte budget.

    python -m recipes.benchmarks.memory [--json out.json] [--budget-mib 64] [--times 10] [--delta]

One rank holds one table of `times` the budget (`Checkpointer(memory_budget=…)`) with row-wise
Adagrad state. Every measurement has a process of its own: the peak of its resident memory during
the call, above the level just before, after a first small checkpoint has loaded all code involved.
To a save's peak comes the staging memory that the Checkpointer holds all the time. With ``--delta``
rows are stored as differences. What these take beside the budget is told apart: references of what
rows restore to (``reference_bytes``), how rows were before, chunks that a restore uses twice.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torchrec.distributed.model_parallel import DistributedModelParallel
from tqdm import tqdm

from recipes.benchmarks.one_table import TABLE, one_table, step
from torchrec_checknrun import Checkpointer, CheckpointReport, Consecutive, Quantization
from torchrec_checknrun.restore.links import KEPT_BYTES
from torchrec_checknrun.snapshot.encoded_at_cut import StagingMode

ALLOWED = 1.1
"""Part of the budget that a save or restore may take."""
FULL, AGAIN, BESIDE = "save full", "save differential", "save differential, in training"
RESTORE = "restore all"
STEP = 2.0**-6
"""The step of differences: the table's values, from -1 to 1, are codes that fit a byte."""
_FORM_BYTES = 2
"""Bytes of a reference, beside a byte a code: its form and its exponent."""
_POSITION_BYTES = 8
"""Bytes of a row whose predecessor is kept until a link is committed."""
_LOOKUPS = 4096
"""Rows that a training step looks up."""


@dataclass(frozen=True)
class Case:
    """A table and its saves: a full one, then two of the rows at every `stride`-th position, the
    second while training changes these rows: the memory for copies on write is used then alone.
    """

    dim: int
    bits: int | None
    stride: int
    budget: int
    times: int
    staging: StagingMode = "copy_on_write"
    delta: bool = False

    @property
    def rows(self) -> int:
        return self.times * self.budget // (4 * self.dim)

    @property
    def quantization(self) -> Quantization:
        if self.delta:
            return Quantization(method="delta", step=STEP)
        return Quantization(bits=self.bits)

    def beside(self, call: str, rows: int, root: Path) -> int:
        """Return what differences take beside the budget for a call that stores or restores rows,
        in bytes, on top of what they took before.
        """
        if not self.delta:
            return 0
        if call != RESTORE:
            return rows * (self.dim + _FORM_BYTES + (0 if call == FULL else _POSITION_BYTES))
        stored = sum(file.stat().st_size for file in root.glob("seq-*/*.bin"))
        return rows * (self.dim + _FORM_BYTES) + min(stored, KEPT_BYTES)


@dataclass(frozen=True)
class Measured:
    """One call's peak memory above the level before it, in bytes.

    Attributes:
        beside: what differences take beside the budget; not in the peak.
        mode: how rows were copied, as the checkpoint's report tells; empty for a restore.
        protected_rows: number of rows copied before training changed them.
    """

    dim: int
    bits: int | None
    call: str
    rows: int
    peak: int
    of_budget: float
    mode: str = ""
    protected_rows: int = 0
    beside: int = 0


def cases(
    budget: int,
    times: int,
    dims: Sequence[int],
    staging: StagingMode = "copy_on_write",
    delta: bool = False,
) -> list[Case]:
    """Return exact rows and both extremes of quantization, with all rows again or every third row,
    whose row ids take the most bytes (a bitmap); or differences, with both.
    """
    if delta:
        return [
            Case(dim, None, stride, budget, times, staging, delta)
            for dim in dims
            for stride in (1, 3)
        ]
    choices: list[tuple[int | None, int]] = [(None, 1), (None, 3), (8, 1), (2, 3)]
    return [
        Case(dim, bits, stride, budget, times, staging) for dim in dims for bits, stride in choices
    ]


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


def _checkpointer(
    case: Case, root: Path, model: DistributedModelParallel, reports: list[CheckpointReport]
) -> Checkpointer:
    return Checkpointer(
        root,
        model=model,
        policy=Consecutive(),
        quantization=case.quantization,
        memory_budget=case.budget,
        staging=case.staging,
        callbacks=[reports.append],
    )


def _change(checkpointer: Checkpointer, case: Case, rows: int) -> None:
    for start in range(0, rows, 1 << 18):
        stop = min(start + (1 << 18), rows)
        checkpointer.mark(TABLE, range(start, stop, case.stride))


class _Training:
    """Steps that look up random rows among those that `_change` marks."""

    def __init__(self, case: Case, model: DistributedModelParallel) -> None:
        self._stride, self._rows = case.stride, case.rows
        self._model = model
        self._random = torch.Generator().manual_seed(0)
        for _ in range(3):  # takes the memory that training needs itself
            self.step()

    def step(self) -> None:
        """Do one step."""
        chosen = torch.randint(self._rows // self._stride, (_LOOKUPS,), generator=self._random)
        step(self._model, chosen * self._stride)

    def beside(self, checkpointer: Checkpointer, reports: list[CheckpointReport]) -> None:
        """Save, and train until the checkpoint is durable."""
        known = len(reports)
        checkpointer.save(wait=False)
        while len(reports) == known:
            self.step()
            checkpointer.step()


def _measure_save(case: Case, root: Path) -> list[Measured]:
    _prepare(case, root)
    model = one_table(case.rows, case.dim)
    training = _Training(case, model)
    before = _resident("VmRSS")
    reports: list[CheckpointReport] = []
    found = []
    with _checkpointer(case, root / "store", model, reports) as checkpointer:
        held = _resident("VmRSS") - before  # the marks are not touched yet
        checkpointer.mark_all()  # as training has: the marks' memory is the tracker's
        calls: dict[str, Callable[[], object]] = {
            FULL: checkpointer.save,
            AGAIN: checkpointer.save,
            BESIDE: lambda: training.beside(checkpointer, reports),
        }
        for name, call in calls.items():
            if name != FULL:
                _change(checkpointer, case, case.rows)
            found.append(_measured(case, name, held + peak_of(call), reports[-1], root))
    return found


def _measured(
    case: Case, call: str, peak: int, report: CheckpointReport | None, root: Path
) -> Measured:
    rows = -(-case.rows // (1 if report is None or call == FULL else case.stride))
    on_write = case.staging == "copy_on_write" and report is not None and not report.copied_at_cut
    beside = case.beside(call, rows, root)
    return Measured(
        dim=case.dim,
        bits=case.bits,
        call=call,
        rows=rows,
        peak=peak - beside,
        of_budget=(peak - beside) / case.budget,
        beside=beside,
        mode="" if report is None else "copy on write" if on_write else "copy",
        protected_rows=0 if report is None else report.protected_rows,
    )


def _measure_restore(case: Case, root: Path) -> list[Measured]:
    _prepare(case, root)
    model = one_table(case.rows, case.dim)
    store = root / "store"
    with _checkpointer(case, store, model, []) as checkpointer:
        checkpointer.mark_all()
        return [_measured(case, RESTORE, peak_of(checkpointer.restore), None, store)]


def _prepare(case: Case, root: Path) -> None:
    """Load all code involved, by a small checkpoint of the same kinds."""
    torch.set_num_threads(1)
    rendezvous = root / f"rendezvous-{os.getpid()}"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    small = replace(case, times=1, budget=max(1 << 16, 1000 * 4 * case.dim))
    model, reports = one_table(small.rows, case.dim), list[CheckpointReport]()
    with (
        tempfile.TemporaryDirectory() as folder,
        _checkpointer(case, Path(folder), model, reports) as checkpointer,
    ):
        checkpointer.save()
        _change(checkpointer, case, small.rows)
        _Training(small, model).beside(checkpointer, reports)
        checkpointer.restore()


def measure(case: Case) -> list[Measured]:
    """Save three times in one fresh process, and restore all in another."""
    found: list[Measured] = []
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        for part in (_measure_save, _measure_restore):
            with ProcessPoolExecutor(1, mp_context=spawn) as process:
                found += process.submit(part, case, Path(folder)).result()
    return found


def main() -> int:
    """Run the command; return 1 if a call took more than the budget and 10 %."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmarks.memory", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--budget-mib", type=int, default=64, help="memory_budget, in MiB")
    parser.add_argument("--times", type=int, default=10, help="the table's size in budgets")
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64], help="columns")
    modes = ("copy_on_write", "copy")
    parser.add_argument("--staging", choices=modes, default=modes[0], help="of rows")
    parser.add_argument("--delta", action="store_true", help="store rows as differences")
    options = parser.parse_args()
    budget = options.budget_mib << 20
    chosen = cases(budget, options.times, options.dims, options.staging, options.delta)
    measured = [one for case in tqdm(chosen, desc="tables", unit="table") for one in measure(case)]
    table = Table(
        title=f"peak memory on top of a table of {options.times * options.budget_mib} MiB, "
        f"budget {options.budget_mib} MiB"
    )
    for column in (
        "columns",
        "stored",
        "call",
        "mode",
        "rows",
        "protected",
        "beside MiB",
        "peak MiB",
        "of budget",
    ):
        table.add_column(column, justify="left" if column in ("call", "mode") else "right")
    for one in measured:
        stored = f"{one.bits} bit" if one.bits else "delta" if one.beside else "exact"
        table.add_row(
            str(one.dim),
            stored,
            one.call,
            one.mode,
            f"{one.rows:,}",
            f"{one.protected_rows:,}",
            f"{one.beside / (1 << 20):.1f}",
            f"{one.peak / (1 << 20):.1f}",
            f"{one.of_budget:.0%}",
        )
    Console(width=120).print(table)
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in measured], indent=2) + "\n")
    worst = max(one.of_budget for one in measured)
    print(f"largest peak: {worst:.1%} of the budget; allowed {ALLOWED:.0%}")
    return 0 if worst <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
