"""Measure the cost of images: training on them against the heap, and going back to a step.

    python -m recipes.benchmarks.images [--json out.json] [--rows-cap 1000000] [--rounds 20]

The model and its samples are those of ``recipes.benchmarks.tracking``: 26 tables, 2,048 lookups
each, one rank, one thread. Two such jobs train the same batches in turn, in blocks of some steps:
one with a Checkpointer on the heap, one with images. Processor time is measured, of the whole
process for a step, of the training thread for journal and commit.

Then the second job is left as by a killed process, in the middle of a step; a new one takes its
image over and goes back to the step's start. Beside it, the restore of a full checkpoint, and
``dcp.load`` of the same tables with their fused optimizer's state.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from recipes.benchmarks.machine import describe
from recipes.benchmarks.tracking import Job, Setting, interval
from torchrec_checknrun import Checkpointer, Images
from torchrec_checknrun.memory.image import RankImage
from torchrec_checknrun.memory.step_journal import StepJournal
from torchrec_checknrun.shared_memory import file

BLOCK = 5  # steps of one job in a round; the first is not timed
LOOKUPS = 2048


class Trained:
    """A job with its Checkpointer.

    Args:
        memory: the folder of images; None: on the heap.
    """

    def __init__(self, setting: Setting, root: Path, memory: str | None) -> None:
        self.job = Job(setting)
        self.saver = Checkpointer(
            root,
            model=self.job.model,
            state={"optimizer": self.job._optimizer},
            survive=Images(folder=memory) if memory else None,
        )
        self.batches = cycle(list(islice(self.job.batches(), 16)))
        self.spent: dict[str, float] = {"journal": 0.0, "commit": 0.0}

    def step(self) -> None:
        self.job.step(next(self.batches))
        self.saver.step()

    def block(self) -> tuple[float, ...]:
        """Train a block; return seconds of processor time per step: all, journal, commit."""
        self.step()
        self.spent = dict.fromkeys(self.spent, 0.0)
        started = time.process_time()
        with (
            timed(StepJournal, "append", self.spent, "journal"),
            timed(RankImage, "end_step", self.spent, "commit"),
        ):
            for _ in range(BLOCK - 1):
                self.step()
        whole = time.process_time() - started
        parts = (whole, self.spent["journal"], self.spent["commit"])
        return tuple(part / (BLOCK - 1) for part in parts)

    def tables(self) -> dict[str, Any]:
        """Return the tables and their fused optimizer's state, as ``dcp.save`` takes them."""
        model = self.job.model
        return {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}

    def load_by_dcp(self, folder: Path) -> float:
        """Load what ``dcp.save`` wrote of ``tables`` in place; return the seconds."""
        tables = self.tables()
        started = time.perf_counter()
        dcp.load(tables, checkpoint_id=str(folder))
        return time.perf_counter() - started

    @property
    def table_bytes(self) -> int:
        return sum(t.nbytes for s in self.saver._target.tracked.shards for t in s.local.tensors)


@contextmanager
def timed(owner: type, name: str, spent: dict[str, float], key: str) -> Iterator[None]:
    """Add up the processor time that the calling thread spends in a method."""
    own: Callable[..., Any] = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        started = time.thread_time()
        try:
            return own(*arguments)
        finally:
            spent[key] += time.thread_time() - started

    with mock.patch.object(owner, name, call):
        yield


def training(dim: int, cap: int, rounds: int, folder: Path, memory: str) -> dict[str, Any]:
    """Compare training on images with training on the heap."""
    setting = Setting(dim, cap, LOOKUPS)
    jobs = {
        "heap": Trained(setting, folder / "heap", None),
        "images": Trained(setting, folder / "images", memory),
    }
    for trained in jobs.values():
        trained.saver.restore()
        trained.block()
    order = np.random.default_rng(0)
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name in order.permutation(list(jobs)):
            found[name].append(jobs[name].block())
    heap, images = (np.array(found[name]) for name in jobs)
    extra = images[:, 1] + images[:, 2]
    result = {
        "dim": dim,
        "rows": jobs["heap"].job.rows,
        "step_ms": 1e3 * float(np.median(heap[:, 0])),
        "journal_ms": 1e3 * float(np.median(images[:, 1])),
        "commit_ms": 1e3 * float(np.median(images[:, 2])),
        "share": interval(extra / images[:, 0]),
        "images_against_heap": interval(images[:, 0] / heap[:, 0] - 1),
        "memory_alone_against_heap": interval((images[:, 0] - extra) / heap[:, 0] - 1),
    }
    jobs["heap"].saver.close()
    return {**result, **going_back(jobs, setting, folder, memory)}


def going_back(
    jobs: dict[str, Trained], setting: Setting, folder: Path, memory: str
) -> dict[str, Any]:
    """Kill the job with images in the middle of a step, as far as that goes in one process."""
    killed = jobs.pop("images")
    killed.saver.save()
    dcp.save(killed.tables(), checkpoint_id=str(folder / "dcp"))
    gigabytes = killed.table_bytes / 1e9
    killed.step()
    killed.job.step(next(killed.batches))
    killed.saver._release(failed=True)
    jobs.clear()
    del killed
    gc.collect()
    seconds = {}
    for name, where in (("images", memory), ("full_restore", None)):
        file._mapped.clear()  # as in another process: the killed job is trained no more
        again = Trained(setting, folder / "images", where)
        started = time.perf_counter()
        report = again.saver.restore()
        seconds[name] = (time.perf_counter() - started) / gigabytes
        assert report is not None
        assert report.source == ("images" if where else "checkpoint"), report.without_images
        if not where:
            seconds["dcp_load"] = again.load_by_dcp(folder / "dcp") / gigabytes
        again.saver._release(failed=not where)
        del again
        gc.collect()
    return {"gigabytes": gigabytes, "seconds_per_gigabyte": seconds}


def main(arguments: list[str] | None = None) -> None:
    """Measure for each dimension, print and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows-cap", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    results = []
    for dim in given.dims:
        with (
            tempfile.TemporaryDirectory() as folder,
            tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        ):
            results.append(training(dim, given.rows_cap, given.rounds, Path(folder), memory))
        print(json.dumps(results[-1], indent=1))
    if given.json:
        found = {"machine": describe(), "results": results}
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
