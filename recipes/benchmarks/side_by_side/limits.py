"""Measure the machine's own time for a snapshot's bytes: no copying checkpoint can be faster."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from recipes.benchmarks.side_by_side.model import Job

GATHER, MEMCPY, WRITE = "gather of the modified rows", "memcpy of their bytes", "disk write of them"
_REPEATED = 3


class Limits:
    """The machine's gather, copy and write of an interval's rows, with permanent buffers.

    All memory that any method needs is held and touched from the beginning, so that a worker's
    further growth includes none of it, whichever methods it calls.

    Args:
        job: the model; each rank does its own part at the same time.
        folder: where to write.
        intervals: number of intervals to measure, counted from 0.
    """

    def __init__(self, job: Job, folder: Path, intervals: int) -> None:
        self._job = job
        self._path = folder / f"raw-{job.rank}"
        most = max(self._rows(interval) for interval in range(intervals))
        self._buffer = torch.zeros(most, job.setting.dim)
        self._copy = torch.zeros(most, job.setting.dim)
        cores = max(1, len(os.sched_getaffinity(0)) // job.ranks)
        self._threads = sorted({job.setting.threads, cores})

    def gather(self, interval: int) -> float:
        """Return the seconds of ``index_select(out=)`` of the interval's rows, one table after the
        other, with training's number of threads or with all cores, whichever is faster.
        """
        return min(self._gather(interval, threads) for threads in self._threads)

    def all(self, interval: int) -> dict[str, float]:
        """Return the seconds of each limit by name; in memory with training's number of threads and
        with all cores.
        """
        found = {}
        for threads in self._threads:
            suffix = f", {threads} thread{'s' if threads > 1 else ''}"
            found[GATHER + suffix] = self._gather(interval, threads)
            count = self._rows(interval)
            copy = partial(self._copy[:count].copy_, self._buffer[:count])
            found[MEMCPY + suffix] = self._median(copy, threads)
        found[WRITE] = self._median(lambda: self._write(self._buffer[:count].numpy()))
        self._path.unlink()
        return found

    def _gather(self, interval: int, threads: int) -> float:
        rows = self._job.modified(interval)
        counts = [len(ids) for _, ids in rows]
        parts = torch.split(self._buffer[: sum(counts)], counts)
        pairs = [(s.weight, ids, out) for (s, ids), out in zip(rows, parts, strict=True)]

        def gather() -> None:
            for weight, ids, out in pairs:
                torch.index_select(weight, 0, ids, out=out)

        return self._median(gather, threads)

    def bytes(self, interval: int) -> int:
        """Return the bytes of the interval's rows on this rank."""
        return self._rows(interval) * 4 * self._job.setting.dim

    def _rows(self, interval: int) -> int:
        return sum(len(ids) for _, ids in self._job.modified(interval))

    def _write(self, rows: np.ndarray) -> None:
        with self._path.open("wb") as file:
            rows.tofile(file)
            file.flush()
            os.fsync(file.fileno())

    def _median(self, call: Callable[[], object], threads: int = 1) -> float:
        own = torch.get_num_threads()
        torch.set_num_threads(threads)
        seconds = []
        for _ in range(1 + _REPEATED):
            self._job.together()
            started = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - started)
        torch.set_num_threads(own)
        return float(np.median(seconds[1:]))  # the first one warms up
