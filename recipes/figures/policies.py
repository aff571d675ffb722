"""Draw the paper's figures on modified rows and on policies (Check-N-Run, 5, 6, 15 and 16).

    python -m recipes.figures.policies [--data train.txt] [--out figures] [--quick]

fig05: the part of all rows that training has modified, by the samples since several starting
points. fig06: the part modified in each interval, for several lengths. fig15: bytes of every
checkpoint under each policy, and where Intermittent decided on a new baseline. fig16: bytes to keep
for a restore of the newest one; dotted, with the previous one during its writing. A PNG of each,
and `policies.json` with all numbers.

The modified rows follow from the samples: synthetic ones (all ids may come at any time, as in
shuffled data; see --vocabulary-start) or any file in Criteo's format. An interval is as long as it
takes to modify 26 % of the rows, the paper's figure. Decisions are made by the package's policies.
A checkpoint's bytes are those of the tables: rows and their row-wise optimizer state as the package
encodes a thousand rows at each width, and encoded row ids. Dense part, chunk indexes and manifests
are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hydra.utils import instantiate
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from recipes.benchmarks.machine import describe
from recipes.dlrm_criteo.criteo_tsv import CriteoTsv
from recipes.dlrm_criteo.model import Architecture
from recipes.dlrm_criteo.samples import Dataset
from recipes.dlrm_criteo.synthetic import Synthetic
from recipes.dlrm_criteo.train import CONFIGS
from recipes.figures import plots
from recipes.figures.lookups import Lookups, batches_until, read_slots
from recipes.figures.simulated_run import Checkpoint, Run
from torchrec_checknrun import Consecutive, Full, Intermittent, OneShot
from torchrec_checknrun.codecs.base import WIDTHS
from torchrec_checknrun.policy import Policy

POLICIES: dict[str, Policy] = {
    "Full": Full(),
    "OneShot": OneShot(),
    "Consecutive": Consecutive(),
    "Intermittent": Intermittent(),
}
SLOTS = 4
"""Parts of an interval: rows are counted after each."""
LENGTHS = (1, 2, 4, 8)
"""Intervals of fig06, in slots."""
STARTS = 4
"""Starting points of fig05."""
_LARGEST_BATCH = 1 << 14
_MANY = 1 << 40


@dataclass(frozen=True)
class Size:
    """The size of the synthetic trace."""

    samples: int
    scale: float
    """Factor of Kaggle's tables."""


FULL = Size(samples=12_000_000, scale=0.05)
QUICK = Size(samples=240_000, scale=0.001)


def simulate(
    dataset: Dataset,
    num_embeddings: Sequence[int],
    batch: int,
    batches: int,
    limit: int,
    dim: int,
    widths: Sequence[int | None],
) -> dict[str, Any]:
    """Compute all numbers of the figures.

    Args:
        batch: samples to read together.
        batches: batches of a slot; an interval has ``SLOTS`` slots.
        limit: batches in all.
        widths: bits of stored values; None: exact.

    Raises:
        ValueError: there are less than two intervals.
    """
    lookups, slot = Lookups(num_embeddings), batch * batches
    runs = {
        (bits, name): Run(policy, bits, lookups.num_embeddings, dim)
        for bits in widths
        for name, policy in POLICIES.items()
    }
    total = None if limit >= _MANY else limit // batches  # unknown for a file
    fractions: list[np.ndarray] = []  # of each slot's end, by the first slot
    slots = read_slots(dataset, batch, batches, limit)
    for sparse in tqdm(slots, desc="reading", unit="slot", total=total):
        for part in sparse:
            lookups.add(part)
        lookups.end_slot()
        fractions.append(lookups.fractions())
        if lookups.slots % SLOTS == 0:
            for run in runs.values():
                run.save(lookups, lookups.slots * slot)
    intervals = len(fractions) // SLOTS
    if intervals < 2:
        raise ValueError(
            f"{len(fractions) * slot} samples are less than two intervals of {SLOTS * slot}: give "
            "more, or a smaller --fraction or --interval"
        )
    return {
        "rows": lookups.rows,
        "dim": dim,
        "interval_samples": SLOTS * slot,
        "intervals": intervals,
        "growth": [
            _growth(fractions, slot, intervals * i // STARTS * SLOTS)
            for i in range(min(STARTS, intervals))
        ],
        "per_interval": [_per_interval(fractions, slot, length) for length in LENGTHS],
        "runs": [
            {"bits": bits, "policy": name, **_with_summary(run.checkpoints)}
            for (bits, name), run in runs.items()
        ],
    }


def _with_summary(checkpoints: list[Checkpoint]) -> dict[str, Any]:
    return {
        **_summary(checkpoints),
        "checkpoints": [asdict(checkpoint) for checkpoint in checkpoints],
    }


def _growth(fractions: list[np.ndarray], slot: int, start: int) -> dict[str, Any]:
    """Return the rows modified since a starting point."""
    later = fractions[start:]
    return {
        "start": start * slot,
        "samples": [(i + 1) * slot for i in range(len(later))],
        "fractions": [float(at_end[start]) for at_end in later],
    }


def _per_interval(fractions: list[np.ndarray], slot: int, length: int) -> dict[str, Any]:
    """Return the rows modified in each interval of ``length`` slots."""
    ends = range(length, len(fractions) + 1, length)
    return {
        "interval_samples": length * slot,
        "ends": [end * slot for end in ends],
        "fractions": [float(fractions[end - 1][end - length]) for end in ends],
    }


def _summary(checkpoints: list[Checkpoint]) -> dict[str, Any]:
    """Average from baseline to baseline if there are two; otherwise over all checkpoints."""
    full = [i for i, checkpoint in enumerate(checkpoints) if checkpoint.kind == "full"]
    cycle = checkpoints[: full[-1]] if len(full) > 1 else checkpoints
    return {
        "baselines": full,
        "mean_bytes": sum(checkpoint.bytes for checkpoint in cycle) / len(cycle),
        "most_kept_bytes": max(checkpoint.kept_bytes for checkpoint in checkpoints),
        "most_peak_bytes": max(checkpoint.peak_bytes for checkpoint in checkpoints),
    }


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.figures.policies", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--data", help="a file in Criteo's format, or a pattern; else synthetic")
    parser.add_argument(
        "--samples", type=int, help="samples to read at most; default: all of a file"
    )
    parser.add_argument("--scale", type=float, help="of Kaggle's tables; 1 for a file")
    parser.add_argument("--interval", type=int, help="in samples, in place of --fraction")
    parser.add_argument(
        "--fraction", type=float, default=0.26, help="of rows modified in the first interval"
    )
    parser.add_argument(
        "--vocabulary-start",
        type=float,
        default=1.0,
        help="share of the synthetic ids that exist from the start; the others appear later",
    )
    parser.add_argument("--dim", type=int, default=64, help="columns of every table")
    parser.add_argument(
        "--bits",
        nargs="+",
        default=["exact", "4"],
        choices=["exact", *map(str, sorted(WIDTHS))],
        help="widths of rows",
    )
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder of the figures")
    parser.add_argument("--quick", action="store_true", help="few samples, small tables")
    options = parser.parse_args()
    plots.require_matplotlib()
    try:
        numbers = _measure(options)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "policies.json").write_text(json.dumps(numbers, indent=2) + "\n")
    plots.draw_policies(numbers, options.out)
    Console(width=120).print(_table(numbers))
    print(f"{len(plots.POLICY_NAMES)} figures and policies.json are in {options.out}")
    return 0


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    size = QUICK if options.quick else FULL
    scale = options.scale or (1.0 if options.data else size.scale)
    model: Architecture = instantiate(
        OmegaConf.load(CONFIGS / "model" / "dlrm_kaggle.yaml"), scale=scale
    )
    tables = model.num_embeddings_per_feature
    samples = options.samples or (_MANY * _LARGEST_BATCH if options.data else size.samples)
    if options.data:
        dataset: Dataset = CriteoTsv(tables, options.data, holdout_every=0)
        source = Path(options.data).name
    else:
        start = options.vocabulary_start
        dataset = Synthetic(tables, samples=samples, vocabulary_start=start, holdout_every=0)
        source = "synthetic"
    batch, batches = _slot(dataset, tables, samples, options)
    widths = [None if bits == "exact" else int(bits) for bits in dict.fromkeys(options.bits)]
    return {
        **describe(),
        "source": source,
        "scale": scale,
        **simulate(dataset, tables, batch, batches, samples // batch, options.dim, widths),
    }


def _slot(
    dataset: Dataset, tables: Sequence[int], samples: int, options: argparse.Namespace
) -> tuple[int, int]:
    """Return the samples to read together, and the number of such batches in a slot."""
    if options.interval is not None:
        slot = max(1, options.interval // SLOTS)
    else:
        # Fine enough for a short trace, and a file's end may come early.
        step = max(1, min(samples // 1000, _LARGEST_BATCH)) if not options.data else 1 << 10
        slot = max(1, batches_until(dataset, tables, step, options.fraction) * step // SLOTS)
    batches = -(-slot // _LARGEST_BATCH)
    return slot // batches, batches


def _table(numbers: dict[str, Any]) -> Table:
    table = Table(
        title=f"{numbers['source']}: {numbers['rows']:,} rows of dim {numbers['dim']}, "
        f"{numbers['intervals']} intervals of {numbers['interval_samples']:,} samples"
    )
    columns = ("width", "policy", "mean bytes", "of full", "x less", "kept", "peak", "baselines")
    for column in columns:
        table.add_column(column, justify="left" if column in ("width", "policy") else "right")
    for run in numbers["runs"]:
        full = run["checkpoints"][0]["bytes"]
        table.add_row(
            "exact" if run["bits"] is None else f"{run['bits']} bit",
            run["policy"],
            f"{run['mean_bytes']:,.0f}",
            f"{run['mean_bytes'] / full:.1%}",
            f"{full / run['mean_bytes']:.2f}",
            *(f"{run[name] / full:.2f}" for name in ("most_kept_bytes", "most_peak_bytes")),
            "all" if run["policy"] == "Full" else ", ".join(map(str, run["baselines"])),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
