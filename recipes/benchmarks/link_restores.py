"""Measure what restores of chains take, by how their rows are stored.

    python -m recipes.benchmarks.link_restores [--json out.json] [--rows 2600000] [--dim 64]

One table under row-wise Adagrad that has been trained once, one rank: a full checkpoint and ten of
1.8 % of the rows each. The newest checkpoint of each chain is restored in turn, paired, from the
page cache; what rows restore to is kept for the next link, as a training job needs it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from tqdm import tqdm

from recipes.benchmarks.machine import describe
from recipes.benchmarks.one_table import one_table, step
from recipes.benchmarks.paired import paired
from recipes.benchmarks.tracking import interval
from torchrec_checknrun import Checkpointer, Consecutive, Quantization
from torchrec_checknrun.root.chain import newest_required
from torchrec_checknrun.store.folder import Folder

STORED: Mapping[str, Quantization | None] = {
    "exact": None,
    "4 bit": Quantization(bits=4),
    "delta, 3 bits on average": Quantization(method="delta", mean_bits=3),
    "lc, x = 3": Quantization(method="lc", bits=3),
}
LINKS, SHARE = 10, 0.018
_BLOCK = 1 << 18
"""Rows of a step that trains every row once."""


def save_chain(
    model: DistributedModelParallel, rows: int, root: Path, quantization: Quantization | None
) -> None:
    """Save a full checkpoint and the links upon it."""
    random = np.random.default_rng(0)
    options: dict[str, Any] = {"policy": Consecutive(), "quantization": quantization}
    with Checkpointer(root, model=model, retention=None, **options) as checkpointer:
        for _ in range(1 + LINKS):
            checkpointer.save()
            modified = random.choice(rows, round(SHARE * rows), replace=False)
            step(model, torch.from_numpy(modified))


def measure(rows: int, dim: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Return by the way of storing rows the seconds of a restore, and its bytes."""
    model = one_table(rows, dim)
    for start in range(0, rows, _BLOCK):
        step(model, torch.arange(start, min(start + _BLOCK, rows)))
    for name, quantization in tqdm(STORED.items(), desc="saving", file=sys.stderr):
        save_chain(model, rows, folder / name, quantization)
    with ExitStack() as stack:

        def restore(name: str) -> Callable[[], object]:
            held = Checkpointer(folder / name, model=model, quantization=STORED[name])
            return stack.enter_context(held).restore

        bar = stack.enter_context(tqdm(total=rounds, desc="restoring", file=sys.stderr))
        seconds = paired({name: restore(name) for name in STORED}, rounds, bar.update)
    return {
        name: {
            "seconds": float(np.median(each)),
            "against_exact": interval(each / seconds["exact"]),
            "megabytes": _bytes(folder / name) / 1e6,
        }
        for name, each in seconds.items()
    }


def _bytes(root: Path) -> int:
    """Return the bytes that a restore of the newest checkpoint reads."""
    chain = newest_required(Folder(root)).manifests
    return sum(manifest.stored_bytes for manifest in chain)


def table(results: Mapping[str, Any]) -> str:
    """Return the results as a Markdown table."""
    lines = ["| rows | MB read | restore, s | times exact (95 %) |", "|---|---:|---:|---:|"]
    for name, one in results.items():
        middle, low, high = one["against_exact"]
        times = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        lines.append(f"| {name} | {one['megabytes']:,.0f} | {one['seconds']:.2f} | {times} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=int, default=2_600_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        results = measure(given.rows, given.dim, given.rounds, Path(folder))
    print(table(results))
    if given.json:
        found = {"machine": describe(), "rows": given.rows, "dim": given.dim, "results": results}
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
