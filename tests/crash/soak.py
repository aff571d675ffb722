"""Save many checkpoints with retention and random faults: nothing grows, and nothing is lost.

``python -m tests.crash.soak --checkpoints 1000 --json soak.json``
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.crash.faulty_store import Faults, Mode, faulty_disk, patience
from tests.crash.save_sweep import SPEC, alone, leftovers
from tests.distributed import references
from tests.distributed.models import Job, uniform_plan
from tests.distributed.states import gather, scramble
from torchrec_checknrun import Checkpointer, Intermittent, Retention
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.verify import verify

FAULTS = 0.2
"""Fraction of the checkpoints that meet a fault."""
OPERATIONS = 60
"""Operations of a save, about: the faulty one is drawn from these."""
TRAINED_MEANWHILE = 2
"""Steps that training takes while a checkpoint is saved."""
RESTORE_EVERY = 25
SAMPLES = 20
WARM_UP = 0.3
"""Fraction of the checkpoints after which nothing may grow any more."""
MOST_GROWTH_MB = 8.0
"""Most growth of the memory after that: allocators keep some pages."""
MOST_FILES = 100
"""Most files in the store: two restore points with all they need, and a few leftovers of faults."""


class Soak:
    """A job that trains and saves, for ever if need be.

    Args:
        root: an empty folder.
    """

    def __init__(self, root: Path, seed: int) -> None:
        self._root = root
        self._rng = random.Random(seed)
        self._faults = Faults()
        plan = uniform_plan(SPEC, "table_wise", 1)
        self._job = Job.build(SPEC, plan)
        self._reader = Job.build(SPEC, plan, seed=5)
        self.result: dict[str, Any] = {
            "seed": seed,
            "checkpoints": 0,
            "committed": 0,
            "faults": 0,
            "errors": 0,
            "protected": 0,
            "restores": 0,
            "lost": [],
            "samples": [],
        }

    def run(self, checkpoints: int) -> dict[str, Any]:
        """Save so many times; return the outcome."""
        result, started = self.result, time.monotonic()
        with faulty_disk(self._faults), self._checkpointer(self._job, Intermittent()) as saver:
            for number in range(1, checkpoints + 1):
                self._save(saver)
                if number % RESTORE_EVERY == 0 or number == checkpoints:
                    self._restore(saver)
                if number % max(1, checkpoints // SAMPLES) == 0:
                    result["samples"].append(self._sample(saver, number))
        result["checkpoints"] = checkpoints
        result["seconds"] = round(time.monotonic() - started, 1)
        result["lost"] += _growth(result["samples"], checkpoints)
        return result

    def _save(self, saver: Checkpointer) -> None:
        self._job.train()
        mode = self._rng.choice(list(Mode)) if self._rng.random() < FAULTS else None
        with patience(mode or Mode.BUSY):
            self._faults.arm(self._rng.randint(1, OPERATIONS), mode)
            try:
                saver.step()
                saver.save(wait=False)
                self._job.train(TRAINED_MEANWHILE)
                report = saver.wait()
                self.result["committed"] += 1
                self.result["protected"] += report.protected_rows if report else 0
            except SaveFailed as error:
                self.result["errors"] += 1
                if "says the test" not in str(error):
                    self.result["lost"].append(f"an error of its own: {error}")
            _wait_for_pruner(saver)
            self._faults.disarm()
        self.result["faults"] += len(self._faults.failed)

    def _restore(self, saver: Checkpointer) -> None:
        """Restore the last save over noise, into another model."""
        saver.steps += 1  # trained meanwhile
        saver.mark_all()  # also if the last step is committed: what is looked at is of now
        saver.save()
        _wait_for_pruner(saver)
        with self._checkpointer(self._reader, None) as reader:
            scramble(self._reader)
            reader.restore()
        self.result["restores"] += 1
        self.result["lost"] += references.differences(gather(self._reader), gather(self._job), None)
        for found in verify(self._root):
            self.result["lost"] += found.problems

    def _checkpointer(self, job: Job, policy: Intermittent | None) -> Checkpointer:
        state = {"optimizer": job.optimizer, "job": job}
        return Checkpointer(
            self._root, model=job.model, state=state, policy=policy, retention=Retention(keep=2)
        )

    def _sample(self, saver: Checkpointer, number: int) -> dict[str, Any]:
        gc.collect()
        status = Path("/proc/self/status").read_text()
        resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return {
            "checkpoint": number,
            "rss_mb": round(int(resident.split()[1]) / 1024, 1),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "files": sum(len(files) for _, _, files in os.walk(self._root)),
            "leftovers": len(leftovers(Folder(self._root))),
        }


def _growth(samples: list[dict[str, Any]], checkpoints: int) -> list[str]:
    """Name what has grown since the run was warm."""
    warm = [sample for sample in samples if sample["checkpoint"] >= WARM_UP * checkpoints]
    if len(warm) < 2:
        return []
    problems = []
    half = len(warm) // 2
    early, late = warm[:half], warm[half:]
    for name in ("descriptors", "threads"):
        before, after = (max(sample[name] for sample in part) for part in (early, late))
        if after > before + 2:
            problems.append(f"{name}: {before}, and later {after}")
    before, after = (min(sample["rss_mb"] for sample in part) for part in (early, late))
    if after > before + MOST_GROWTH_MB:
        problems.append(f"memory: {before} MB, and later {after} MB")
    most = max(sample["files"] for sample in warm)
    if most > MOST_FILES:
        problems.append(f"{most} files in the store")
    return problems


def _wait_for_pruner(saver: Checkpointer) -> None:
    if saver._saver.writer._pruner is not None:
        saver._saver.writer._pruner.wait(60)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where the result goes")
    given = parser.parse_args(arguments)
    logging.disable(logging.ERROR)  # every fault is logged
    with tempfile.TemporaryDirectory() as folder, alone():
        result = Soak(Path(folder), given.seed).run(given.checkpoints)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    first, last = result["samples"][0], result["samples"][-1]
    print(
        f"{result['checkpoints']} saves, {result['committed']} committed, {result['faults']} "
        f"faults, {result['errors']} errors told, {result['protected']} rows copied in hooks, "
        f"{result['restores']} restores compared, in "
        f"{result['seconds']} s; from {first} to {last}"
    )
    print(*(result["lost"] or ["nothing was lost, nothing grew"]), sep="\n")
    return bool(result["lost"])


if __name__ == "__main__":
    sys.exit(main())
