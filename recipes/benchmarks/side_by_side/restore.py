"""Time restores; check whether a save during training is one instant.

    torchrun --nproc_per_node 2 -m recipes.benchmarks.side_by_side.restore FOLDER

is started by ``measure_on`` on several ranks; ``FOLDER/restore.json`` holds the input, and the
figures afterwards.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from recipes.benchmarks.side_by_side.model import Job, Setting
from recipes.benchmarks.side_by_side.sizes import DIFFERENTIALS, mark
from recipes.benchmarks.side_by_side.store import committed, listed
from recipes.benchmarks.side_by_side.systems import (
    ASYNC,
    CASES,
    CHANGED_ROWS,
    DCP,
    SNAPSHOT,
    SNAPSHOT_ASYNC,
    Case,
    Ours,
)
from recipes.dlrm_criteo.distributed import process_group

CHAIN, SINGLE = f"chain of 1 + {DIFFERENTIALS}", "single full"


ON_SEVERAL = (
    DCP,
    SNAPSHOT,
    f"ours fp32, {SINGLE}",
    f"ours 4 bit, {SINGLE}",
    f"ours 4 bit, {CHAIN}",
)


def cases(ranks: int = 1) -> list[tuple[Case, int]]:
    """Return the systems to restore, each with its number of differential checkpoints."""
    found = [(CASES[DCP], 0), (CASES[SNAPSHOT], 0), (CASES[CHANGED_ROWS], DIFFERENTIALS)]
    for bits in (None, 8, 4, 2):
        width = "fp32" if bits is None else f"{bits} bit"
        options = {"bits": bits, "policy": "consecutive", "waiting": True}
        for name, differentials in ((SINGLE, 0), (CHAIN, DIFFERENTIALS)):
            found.append((Case(f"ours {width}, {name}", Ours, options), differentials))
    return [one for one in found if ranks == 1 or one[0].name in ON_SEVERAL]


def measure_on(ranks: int, setting: Setting, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Call `measure` on several ranks of this machine, which share its cores."""
    setting = replace(setting, threads=max(1, setting.threads // ranks))
    path = folder / "restore.json"
    path.write_text(json.dumps({"setting": asdict(setting), "rounds": rounds}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(ranks), "-m", __name__, str(folder)]
    done = subprocess.run(command)
    if done.returncode:
        why = f"the ranks' processes ended with {done.returncode}"
        return [{"name": case.name, "ranks": ranks, "error": why} for case, _ in cases(ranks)]
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def measure(setting: Setting, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Restore all systems in turn, ``rounds`` times, with the files in the system's cache.

    On one rank, also read the same files. A restore ends when the last rank has finished.
    """
    rows: list[dict[str, Any]] = []
    with process_group(600):
        job = Job(setting)
        ready = []
        quiet = job.rank > 0
        of_all = tqdm(cases(job.ranks), "checkpoints to restore", unit="chain", disable=quiet)
        for case, differentials in of_all:
            root = folder / f"restore-{len(rows)}"
            row: dict[str, Any] = {"name": case.name, "ranks": job.ranks}
            rows.append(row)
            try:
                system = case.make(job, root)
                for interval in range(1 + differentials):
                    if interval:
                        mark(system, job, interval - 1)
                    system.save()
                    system.wait()
                system.close()
                job.together()
                row |= {"bytes": listed(root), "checkpoints": len(committed(root))}
                row |= {"seconds": [], "reading": []}
                ready.append((case, root, row))
            except Exception as error:  # a failing system gets a row with the error
                row["error"] = f"{type(error).__name__}: {error}"
        random = np.random.default_rng(0)
        for number in tqdm(range(1 + rounds), "restores", unit="round", disable=quiet):
            for case, root, row in (ready[i] for i in random.permutation(len(ready))):
                reading = 0.0
                if job.rank == 0:
                    _read(root)  # reads from the disk if other files have taken the cache
                    reading = _read(root)
                seconds = _restore(case, job, root, row)
                if number and seconds is not None:  # the first is not timed
                    row["seconds"].append(seconds)
                    row["reading"].append(reading)
        job.together()
        for _, root, _ in ready if job.rank == 0 else []:
            shutil.rmtree(root)
    for row in rows:
        if "error" not in row:
            row["median"] = median(row["seconds"])
            row["median_reading"] = median(row["reading"])
    return rows


def _restore(case: Case, job: Job, root: Path, row: dict[str, Any]) -> float | None:
    if "error" in row:
        return None
    system = case.make(job, root)
    job.together()
    started = time.perf_counter()
    try:
        system.restore()
        job.together()
        return time.perf_counter() - started
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"
        return None
    finally:
        system.close()


def _read(root: Path) -> float:
    """Return the seconds of reading a store's files into a warm buffer."""
    buffer = memoryview(bytearray(16 << 20))
    started = time.perf_counter()
    for path in root.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
    return time.perf_counter() - started


def instants(
    setting: Setting, folder: Path, names: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Check whether systems that write in the background save one instant.

    Every weight is overwritten as soon as ``save`` returns, announced to the system; a restore
    must return all earlier values.
    """
    if names is None:
        # A background process has copied its rows in the same way.
        behind = [n for n in CASES if n.startswith(ASYNC) and not n.endswith("process")]
        exact = [n for n, c in CASES.items() if c.system is Ours and c.options["bits"] is None]
        names = [*behind, SNAPSHOT_ASYNC, *exact]
    rows = []
    with process_group(600):
        for dtensor in (False, True):
            chosen = [CASES[name] for name in names if CASES[name].dtensor == dtensor]
            if not chosen:
                continue
            job = Job(setting, dtensor)
            before = [shard.weight.clone() for shard in job.shards]
            for case in tqdm(chosen, desc="instants", unit="system"):
                rows.append({"name": case.name, **_instant(case, job, before, folder / "instant")})
                shutil.rmtree(folder / "instant", ignore_errors=True)
            del job, before
    return rows


def _instant(case: Case, job: Job, before: list[torch.Tensor], root: Path) -> dict[str, Any]:
    for shard, weight in zip(job.shards, before, strict=True):
        shard.weight.copy_(weight)
    try:
        system = case.make(job, root)
        try:
            system.save()
            for shard in job.shards:
                held = shard.rectangle
                rows = torch.arange(held.row_start, held.row_stop)
                with system.writing(shard.table, rows):
                    shard.weight.fill_(7)
            system.wait()
            system.restore()
        finally:
            system.close()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    later = [
        shard.table.rsplit(".", 1)[1]
        for shard, weight in zip(job.shards, before, strict=True)
        if not torch.equal(shard.weight, weight)
    ]
    return {"one_instant": not later, "later": later}


def main() -> None:
    """Run one of several ranks."""
    folder = Path(sys.argv[1])
    path = folder / "restore.json"
    plan = json.loads(path.read_text())
    rows = measure(Setting(**plan["setting"]), folder, plan["rounds"])
    if os.environ["RANK"] == "0":
        path.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
