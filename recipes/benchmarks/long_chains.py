"""Measure long chains: what their restores cost, compacted or not, and compactions behind training.

    python -m recipes.benchmarks.long_chains [--json out.json] [--rows 2600000] [--dim 64]

One table under row-wise Adagrad, one rank. A full checkpoint, then 60 of 1.8 % of the rows each,
drawn anew every time; exact, and in 4 bits. The state of the 60th is then restored in turn, paired:
from the chain, from its compacted copy, from a full checkpoint, and from the chain of a run with
``compact_after``, whose checkpoints come a second apart. Files are in the page cache.

Then the price of a compaction for training, in turn: steps beside one, and as many without; and the
bytes that each run's root holds.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from recipes.benchmarks.machine import describe
from recipes.benchmarks.one_table import one_table, step
from recipes.benchmarks.paired import paired
from recipes.benchmarks.quiet import wait_until_quiet
from recipes.benchmarks.tracking import interval
from torchrec_checknrun import (
    Checkpointer,
    CompactAfter,
    Consecutive,
    Quantization,
    Retention,
    compact,
)
from torchrec_checknrun.policy import Policy
from torchrec_checknrun.root.chain import newest_required, resolve
from torchrec_checknrun.run.compaction import CompactionProcess
from torchrec_checknrun.store.folder import Folder

WIDTHS: Mapping[str, int | None] = {"exact": None, "4 bit": 4}
_PATIENCE = 5.0
"""Seconds to wait for a quiet machine, at most, before each measurement."""


class Run:
    """A run that saves a long chain.

    Args:
        share: of the rows that are modified between two checkpoints.
    """

    def __init__(self, rows: int, dim: int, share: float, bits: int | None) -> None:
        self.model = one_table(rows, dim)
        self.bits = bits
        self._rows, self._modified = rows, round(rows * share)
        self._random = np.random.default_rng(0)
        self._interval = np.zeros(1, dtype=np.int64)

    def checkpointer(self, root: Path, **options: Any) -> Checkpointer:
        """Make a checkpointer of the run."""
        policy: Policy = Consecutive()
        return Checkpointer(
            root,
            model=self.model,
            quantization=Quantization(bits=self.bits),
            **{"policy": policy, "retention": None, **options},
        )

    def train(self) -> None:
        """Do one training step that modifies as many rows as an interval does."""
        self._interval = self._random.choice(self._rows, self._modified, replace=False)
        step(self.model, torch.from_numpy(self._interval))

    def few(self) -> None:
        """Do one training step of 4,096 lookups, of rows that the interval modifies anyway."""
        step(self.model, torch.from_numpy(self._random.choice(self._interval, 4096)))


def save_chain(run: Run, root: Path, links: int, **options: Any) -> dict[str, Any]:
    """Save a full checkpoint and ``links`` upon it; return what saves and the root cost.

    Args:
        options: of the Checkpointer; ``pause`` is the time between two checkpoints, in seconds.
    """
    pause = options.pop("pause", 0.0)
    stalls, bytes_read = [], []
    with run.checkpointer(root, **options) as checkpointer:
        checkpointer.save()
        for _ in tqdm(range(links), desc=f"saving to {root.name}", file=sys.stderr):
            due = time.monotonic() + pause
            run.train()
            while time.monotonic() < due:
                run.few()
            stalls.append(checkpointer.save().stall_seconds)
            bytes_read.append(bytes_of(root, newest_ids(root)))
    full = resolve(Folder(root), newest_ids(root)[0]).head.stored_bytes
    return {
        "stall_ms": 1e3 * median(stalls),
        "stored_bytes": sum(path.stat().st_size for path in root.rglob("*") if path.is_file()),
        "most_read_against_full": max(bytes_read) / full,
        "chain": len(newest_ids(root)),
    }


def newest_ids(root: Path) -> list[str]:
    """Name the checkpoints that a restore of the newest reads, oldest first."""
    return [manifest.id for manifest in newest_required(Folder(root)).manifests]


def bytes_of(root: Path, ids: list[str]) -> int:
    """Return the bytes of checkpoints."""
    return sum(path.stat().st_size for id in ids for path in (root / id).glob("rank-*"))


def restores(run: Run, where: Mapping[str, tuple[Path, str]], rounds: int) -> dict[str, Any]:
    """Restore checkpoints in turn.

    Args:
        where: by name, root and id.
    """
    with tqdm(total=rounds, desc="restoring", file=sys.stderr) as bar:
        holders = {name: run.checkpointer(root) for name, (root, _) in where.items()}

        def call(name: str) -> Callable[[], object]:
            return lambda: holders[name].restore(where[name][1])

        seconds = paired({name: call(name) for name in where}, rounds, bar.update)
        for holder in holders.values():
            holder.close()
    full = seconds["full"]
    return {
        name: {
            "seconds": float(np.median(each)),
            "against_full": interval(each / full),
            "bytes_read": bytes_of(root, [m.id for m in resolve(Folder(root), id).manifests]),
        }
        for (name, each), (root, id) in zip(seconds.items(), where.values(), strict=True)
    }


def measure_restores(
    run: Run, folder: Path, links: int, pause: float, rounds: int
) -> dict[str, Any]:
    """Save the chains, compact one, and restore all."""
    plain, behind, whole = folder / "chain", folder / "compact_after", folder / "full"
    saves = {"chain": save_chain(run, plain, links)}
    head = newest_ids(plain)[-1]
    with run.checkpointer(whole) as checkpointer:
        full = checkpointer.save().id
    started, spent = time.perf_counter(), time.process_time()
    report = compact(plain, head)
    assert report is not None
    compaction = {
        "seconds": time.perf_counter() - started,
        "processor_seconds": time.process_time() - spent,
        "bytes": report.total_bytes,
    }
    saves["compact_after"] = save_chain(
        run, behind, links, compact_after=CompactAfter(links=8), retention=Retention(2), pause=pause
    )
    where = {
        "full": (whole, full),
        "compacted": (plain, report.id),
        "chain": (plain, head),
        "compact_after": (behind, newest_ids(behind)[-1]),
    }
    return {"saves": saves, "compaction": compaction, "restores": restores(run, where, rounds)}


def measure_price(run: Run, folder: Path, rounds: int) -> dict[str, Any]:
    """Time training steps beside a compaction in another process, and as many without, in turn."""
    root = folder / "price"
    save_chain(run, root, 8)
    head = newest_required(Folder(root)).head
    found, beside, seconds = [], [], []
    for _ in tqdm(range(rounds), desc="training beside a compaction", file=sys.stderr):
        wait_until_quiet(_PATIENCE)
        started = time.perf_counter()
        process = CompactionProcess(Folder(root), head)
        steps = []
        while process.outcome is None:
            steps.append(timed(run.few))
        seconds.append(time.perf_counter() - started)
        assert process.outcome.copy is not None
        shutil.rmtree(root / process.outcome.copy.id)
        wait_until_quiet(_PATIENCE)
        alone = [timed(run.few) for _ in steps]
        found.append(median(steps) / median(alone))
        beside.append(sum(steps) - sum(alone))
    return {
        "steps_beside_against_alone": interval(np.array(found)),
        "lost_seconds": median(beside),
        "compaction_seconds": median(seconds),
    }


def timed(act: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def show(results: Mapping[str, Any]) -> None:
    """Print the restores and the price."""
    table = Table(title="Restores, paired")
    for column in ("rows", "checkpoint", "seconds", "against a full one", "MB read"):
        table.add_column(
            column, justify="right" if column not in ("rows", "checkpoint") else "left"
        )
    for width, found in results.items():
        for name, each in found["restores"].items():
            middle, low, high = each["against_full"]
            table.add_row(
                width,
                name,
                f"{each['seconds']:.3f}",
                f"{middle:.2f} ({low:.2f} to {high:.2f})",
                f"{each['bytes_read'] / 1e6:.0f}",
            )
    Console(width=100).print(table)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=int, default=2_600_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--links", type=int, default=60)
    parser.add_argument("--share", type=float, default=0.018)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between checkpoints")
    parser.add_argument("--rounds", type=int, default=9, help="of restores")
    parser.add_argument("--compactions", type=int, default=5, help="beside training")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    results: dict[str, Any] = {}
    for name, bits in WIDTHS.items():
        run = Run(given.rows, given.dim, given.share, bits)
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measure_restores(
                run, Path(folder), given.links, given.pause, given.rounds
            )
        with tempfile.TemporaryDirectory() as folder:
            results[name]["price"] = measure_price(run, Path(folder), given.compactions)
        del run
        gc.collect()
        print(json.dumps({name: results[name]}, indent=1), flush=True)
    show(results)
    if given.json:
        setting = {key: getattr(given, key) for key in ("rows", "dim", "links", "share", "pause")}
        document = {"machine": describe(), "setting": setting, "results": results}
        given.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
