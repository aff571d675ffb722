"""Take a restart after a kill apart: from the new process to its first step, with images.

    python -m recipes.benchmarks.restart [--json out.json] [--rounds 5] [--rows 4960000]

The DLRM of ``recipes.benchmarks.side_by_side``, with the initial values that TorchRec draws, is
killed in the middle of a step (SIGKILL), on one rank and one thread. A new process goes on from its
image; the parts of that are told by the wall clock, with all files in the system's cache: once with
a model that is built as ever, and once with one that is built within ``skip_initialization``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tqdm import tqdm

PARTS = ("imports", "process group", "model", "Checkpointer", "restore", "reader", "first step")
WAYS = ("built as ever", "skip_initialization")
DIMS = (16, 64)


def start(began: float, folder: str, memory: str, rows: int, dim: int, way: str) -> None:
    """Begin an image and be killed; or go on from one, and print the parts of the start."""
    parts: dict[str, float] = {}

    def lap(part: str) -> None:
        parts[part] = time.time() - began - sum(parts.values())

    import torch.distributed as dist

    from recipes.benchmarks.side_by_side.model import Job, Setting
    from torchrec_checknrun import Checkpointer, Images, skip_initialization

    build = skip_initialization if way == WAYS[1] else lambda *_: nullcontext()
    images, kind = Images(folder=memory), Checkpointer
    lap("imports")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    lap("process group")
    with build(folder, images):
        job = Job(Setting(rows, dim), drawn_here=False)
    lap("model")
    saver = kind(folder, model=job.model, state={"optimizer": job.optimizer}, survive=images)
    lap("Checkpointer")
    report = saver.restore()
    lap("restore")
    first, second = job.batches(0)[:2]
    lap("reader")
    job.step(first)
    saver.step()
    lap("first step")
    if report is None:
        job.model(second)[0].backward()
        os.kill(os.getpid(), signal.SIGKILL)
    assert report is not None
    assert report.source == "images", report.without_images
    size = sum(tensor.nbytes for shard in job.shards for tensor in shard.tensors)
    print(json.dumps({"parts": parts, "bytes": size}))
    saver._release(failed=True)  # as a killed process leaves it


def run(folder: str, memory: str, rows: int, dim: int, way: str, killed: bool) -> dict[str, Any]:
    """Run a process, and return what it prints."""
    values = [folder, memory, str(rows), str(dim), way]
    command = [sys.executable, "-W", "ignore", "-m", __spec__.name, "--start", str(time.time())]
    done = subprocess.run([*command, *values], stdout=subprocess.PIPE, text=True)
    if done.returncode != (-signal.SIGKILL if killed else 0):
        raise SystemExit(f"a process ended with {done.returncode}")
    found: dict[str, Any] = {} if killed else json.loads(done.stdout.splitlines()[-1])
    return found


def measure(rows: int, dim: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of each part by way, medians over rounds, and the image's gigabytes."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        run(folder, memory, rows, dim, WAYS[0], killed=True)
        order = np.random.default_rng(0)
        for _ in tqdm(range(rounds), desc=f"dim {dim}", file=sys.stderr):
            for way in order.permutation(WAYS).tolist():
                found[way].append(run(folder, memory, rows, dim, way, killed=False))
    seconds = {
        way: {part: median(one["parts"][part] for one in starts) for part in PARTS}
        for way, starts in found.items()
    }
    whole = {way: median(sum(one["parts"].values()) for one in found[way]) for way in WAYS}
    return {
        "dim": dim,
        "rows": rows,
        "rounds": rounds,
        "gigabytes": found[WAYS[0]][0]["bytes"] / 1e9,
        "seconds": seconds,
        "whole": whole,
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    columns = [(result, way) for result in results for way in WAYS]
    heads = [f"dim {r['dim']} ({r['gigabytes']:.2f} GB), {way}" for r, way in columns]
    lines = [f"| seconds | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for part in PARTS:
        cells = [f"{result['seconds'][way][part]:.2f}" for result, way in columns]
        lines.append(f"| {part} | {' | '.join(cells)} |")
    cells = [f"{result['whole'][way]:.2f}" for result, way in columns]
    return "\n".join([*lines, f"| **from the start of the process** | {' | '.join(cells)} |"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure for each dimension, print and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=int, default=4_960_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(arguments)
    results = [measure(given.rows, dim, given.rounds) for dim in DIMS]
    print(table(results))
    if given.json:
        from recipes.benchmarks.machine import describe  # imports torch, which a start measures

        found = {"machine": describe(), "results": results}
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--start"]:
        began, folder, memory, rows, dim, way = sys.argv[2:]
        start(float(began), folder, memory, int(rows), int(dim), way)
    else:
        main()
