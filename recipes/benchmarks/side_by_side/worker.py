"""Train with one system, in a process (or torchrun's processes) of its own, turn by turn.

    python -m recipes.benchmarks.side_by_side.worker FOLDER

``FOLDER/case.json`` defines the work. The workers of several systems live at the same time and take
turns, so that every round measures them all under the same conditions, and a system's first save of
a turn comes after a long idle. ``ready-N`` says that a worker waits for its turn, which begins when
``turn-N`` appears; after the last one, ``result.json`` does.

A turn consists of pairs of blocks with the very same steps: one that begins with a save and lasts
until the save is durable, and one without. The cost of a save is the difference per save, tracking
not included (``recipes.benchmarks.tracking`` measures it). The steps of a pair look up one
interval's rows, so that the next save finds exactly these rows modified.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch

from recipes.benchmarks.side_by_side.limits import Limits
from recipes.benchmarks.side_by_side.model import Job, Setting
from recipes.benchmarks.side_by_side.store import committed, split, superseded
from recipes.benchmarks.side_by_side.systems import CASES, NONE, System
from recipes.dlrm_criteo.distributed import process_group

_LONGEST = 4
"""Limit of a block, in multiples of its steps, while a save isn't durable."""
_POLL_SECONDS = 0.02


@dataclass
class Saved:
    """The cost of one save for training, in seconds.

    Attributes:
        label: ``first``, ``idle`` (after a long one) or ``warm``.
        call: of the call that saves.
        extra: the block's time beyond that of as many steps without a save.
        longest: the longest step of that block, with the system's work after it.
        normal: the median step without a save.
        steps: of the block.
        begun: on the system's monotonic clock.
        gather: of the bare gather of the rows, at that time (`Limits.gather`).
        fraction: of all rows, modified since the previous save.
    """

    label: str
    call: float
    extra: float
    longest: float
    normal: float
    steps: int
    begun: float
    gather: float
    fraction: float


class Worker:
    """One rank of a worker."""

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        self._folder = folder
        self._plan = plan
        case = CASES[plan["case"]]
        self._job = Job(Setting(**plan["setting"]), case.dtensor)
        self._store = folder / "store"
        self._limits = Limits(self._job, folder, 1 + plan["pairs"] * plan["turns"])
        self._interval = 0
        self._batches: list[Batch] = self._job.batches(0)
        self.block(None)  # warms up, and modifies the first interval's rows
        self._limits.gather(0)
        self._job.together()
        self._level = memory(start=True)
        started = time.perf_counter()
        self._system = case.make(self._job, self._store)
        self._system.step()  # programs save after a step, of which the first is set-up as well
        self._result: dict[str, Any] = {
            "setup": time.perf_counter() - started,
            "level": self._level,
        }
        self._saves: list[Saved] = []
        self._limits_found: list[dict[str, float]] = []

    def ready(self, number: int) -> None:
        """Tell that a turn may begin."""
        self._job.together()
        if self._job.rank == 0:
            _write(self._folder / f"ready-{number}", None)

    def turn(self, number: int) -> None:
        """Run a turn's blocks."""
        for pair in range(self._plan["pairs"]):
            warm = pair > 0
            label = "warm" if warm else "idle" if number else "first"
            trace = self._job.trace
            rows = sum(len(ids) for ids in trace.rows(self._interval))
            gather = self._limits.gather(self._interval)
            self._interval += 1
            self._batches = self._job.batches(self._interval)
            self._job.together()
            begun = time.monotonic()
            call, with_save = self.block(self._system)
            self._system.wait()
            self._after_save()
            _, without = self.block(None)
            normal = statistics.median(without)
            mean = statistics.fmean(without)
            self._saves.append(
                Saved(
                    label=label,
                    call=call,
                    extra=sum(with_save) - len(with_save) * mean,
                    longest=max(with_save),
                    normal=normal,
                    steps=len(with_save),
                    begun=begun,
                    gather=gather,
                    fraction=rows / sum(trace.tables),
                )
            )
            if self._plan["case"] == NONE:
                self._limits_found.append(self._limits.all(self._interval))

    def block(self, system: System | None) -> tuple[float, list[float]]:
        """Train the interval; with a system, from its save on until the save is durable.

        Returns:
            Seconds of the call that saves, and of every step; the first one's with the save.
        """
        steps = len(self._batches)
        seconds, call = [], 0.0
        batches = islice(cycle(self._batches), _LONGEST * steps if system else steps)
        first = next(batches)
        started = time.perf_counter()
        if system is not None:
            system.save()
            call = time.perf_counter() - started
        for batch in chain([first], batches):
            self._job.step(batch)
            if system is not None:
                system.step()
            now = time.perf_counter()
            seconds.append(now - started)
            started = now
            if len(seconds) >= steps and not self._anywhere(system is not None and system.busy):
                break
        return call, seconds

    def finish(self) -> None:
        """Write the result."""
        self._result["memory"] = peak = memory() - self._level
        self._system.close()
        ranks: list[Any] = [None] * self._job.ranks
        own = ([asdict(save) for save in self._saves], peak, self._result["setup"])
        dist.all_gather_object(ranks, own)
        found = {
            **self._result,
            # A step ends when the slowest rank has finished.
            "saves": [
                {name: max(rank[name] for rank in save) for name in save[0]}
                for save in zip(*(saves for saves, _, _ in ranks), strict=True)
            ],
            "memory": sum(extra for _, extra, _ in ranks),
            "setup": max(setup for _, _, setup in ranks),
            "limits": self._limits_found,
            "limit_bytes": self._limits.bytes(self._interval),
            "reports": self._system.reports,
        }
        if self._job.rank == 0:
            _write(self._folder / "result.json", found)

    def _anywhere(self, busy: bool) -> bool:
        if self._job.ranks == 1:
            return busy
        flag = torch.tensor(busy, dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def _after_save(self) -> None:
        """List the store, and delete all that the newest checkpoint doesn't need."""
        self._job.together()
        if self._job.rank == 0 and (found := committed(self._store)):
            self._result["bytes"] = split(found[-1]).to_json()
            self._result.setdefault("first_bytes", self._result["bytes"])
            for path in superseded(self._store):
                shutil.rmtree(path)
        self._job.together()


def memory(start: bool = False) -> int:
    """Return the peak bytes of memory of this process and its children since the start.

    Memory that a child shares with others is not counted: modules that both have loaded, and shared
    memory, which is counted once, here.

    Args:
        start: reset the peak; return the present level.
    """
    if start:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return _fields(Path("/proc/self/status"))["VmRSS"]
    peak = _fields(Path("/proc/self/status"))["VmHWM"]
    waiting = [Path("/proc/self")]
    while waiting:
        for path in waiting.pop().glob("task/*/children"):
            for child in (Path("/proc") / pid for pid in path.read_text().split()):
                now = _fields(child / "smaps_rollup")
                shared = now["Shared_Clean"] + now["Shared_Dirty"]
                peak += _fields(child / "status")["VmHWM"] - shared
                waiting.append(child)
    return peak


def _fields(path: Path) -> dict[str, int]:
    """Return the sizes in a file of /proc, in bytes."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words[-1] == "kB"}


def _write(path: Path, content: object) -> None:
    path.with_suffix(".tmp").write_text(json.dumps(content))
    path.with_suffix(".tmp").rename(path)


def main() -> int:
    """Run one rank of a worker."""
    folder = Path(sys.argv[1])
    plan = json.loads((folder / "case.json").read_text())
    with process_group(600) as ranks:
        try:
            worker = Worker(folder, plan)
            for number in range(plan["turns"]):
                worker.ready(number)
                while not (folder / f"turn-{number}").exists():
                    os.kill(plan["benchmark"], 0)  # raises if the benchmark is gone
                    time.sleep(_POLL_SECONDS)
                worker.turn(number)
            worker.finish()
        except BaseException as error:
            _write(folder / f"error-{ranks.rank}", f"{type(error).__name__}: {error}")
            raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
