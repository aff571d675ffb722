"""Draw the paper's figures on quantization (Check-N-Run, 9 to 13), on rows of a trained model.

    python -m recipes.figures.quantization [--rows rows.pt] [--out figures] [--quick]

fig09: mean l2 error of every method at 2, 3, 4 and 8 bit. fig10, fig11: the gain of the paper's
greedy search over asymmetric quantization, by its number of bins, and by its ratio at the chosen
bins. fig12, fig13: the time of both. shannon: the error over all bits that a method stores. A PNG
of each, and `quantization.json` with all numbers and the machine.

The rows are the modified ones of the recipe's synthetic job, or a file's: a tensor
`(n, dim)`, or a dict or list of such, of one dim, saved by `torch.save`.

The limit in fig09 and shannon is rate-distortion theory's: no code of R bits per value on average
represents independent Gaussian values of variance s^2 with a mean squared error below s^2 / 4^R, so
a relative l2 error of 2^-R is the best possible. R counts all bits stored, scales, biases and
centroids too. For Gaussian rows (also measured) the limit can't be beaten, except by the spread of
the rows' norms, which a mean of rows' own relative errors leaves out and `rms` does not. Trained
rows are not Gaussian: the Gaussian is the hardest distribution of its variance, so there 2^-R is a
yardstick.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from recipes.benchmarks.machine import describe
from recipes.benchmarks.paired import paired
from recipes.figures import plots
from recipes.figures.small_job import small_job
from torchrec_checknrun.codecs import Codec, Rowwise
from torchrec_checknrun.codecs.base import WIDTHS
from torchrec_checknrun.codecs.kmeans import KMeans, require_kmeans1d
from torchrec_checknrun.codecs.rowwise import BINS, RATIOS, choose_greedy

SEARCHED = (2, 3, 4)
"""Widths at which a range search gains."""
KMEANS_BLOCK = 1024
"""Rows that share their centroids in k-means per block."""


@dataclass(frozen=True)
class Size:
    """The amount of measuring."""

    steps: int
    rows: int
    """Rows to measure errors on."""
    timed_bytes: int
    rounds: int


FULL = Size(steps=400, rows=4096, timed_bytes=32 << 20, rounds=9)
QUICK = Size(steps=40, rows=512, timed_bytes=1 << 20, rounds=3)


@dataclass(frozen=True)
class Error:
    """The error of one method on rows. ``l2`` is a row's absolute error, the paper's figure."""

    rows: str
    method: str
    bits: int
    total_bits: float
    """Bits per value, with everything stored."""
    l2: float
    relative: float
    """Mean over rows of the error's l2 norm over the row's."""
    rms: float
    """Root of all squared errors over all squared values."""
    shannon: float
    """The best possible ``rms`` of Gaussian rows in as many bits."""


@dataclass(frozen=True)
class Sweep:
    """The greedy search at one setting."""

    bits: int
    num_bins: int
    ratio: float
    improvement: float
    """Relative reduction of asymmetric quantization's mean relative l2 error."""
    seconds_per_gb: float


def trained_rows(steps: int, dim: int) -> torch.Tensor:
    """Train ``steps`` steps of the synthetic job; return all changed rows ``(n, dim)``."""
    overrides = [
        f"model.embedding_dim={dim}",
        f"model.bottom_mlp=[64,{dim}]",
        "trainer.batch_size=1024",
        "trainer.eval_samples=1024",
    ]
    with small_job(overrides) as job, tqdm(total=steps, desc="training", unit="step") as bar:
        job.train(job.batches(steps), bar.update)
        # Row-wise Adagrad's accumulator is positive once a row had a gradient.
        return torch.cat([s.weight[s.optimizer["momentum1"] > 0].cpu() for s in job.shards])


def load_rows(path: Path) -> torch.Tensor:
    """Load rows from a file.

    Raises:
        ValueError: the file holds something else.
    """
    content = torch.load(path, weights_only=True, map_location="cpu")
    parts = list(content.values()) if isinstance(content, dict) else content
    parts = [parts] if isinstance(parts, torch.Tensor) else list(parts)
    if not parts or not all(isinstance(p, torch.Tensor) and p.dim() == 2 for p in parts):
        raise ValueError(f"{path} should hold a tensor (n, dim), or a dict or list of such")
    if len({p.shape[1] for p in parts}) > 1:
        raise ValueError(f"{path} holds rows of several dims {sorted({p.shape[1] for p in parts})}")
    return torch.cat([p.detach().to(torch.float32) for p in parts])


def sample(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Choose ``count`` of the rows, or all; none that is all zero or not finite."""
    norms = rows.norm(dim=1)
    usable = ((norms > 0) & norms.isfinite()).nonzero().view(-1)
    order = torch.randperm(len(usable), generator=torch.Generator().manual_seed(0))
    return rows[usable[order[:count]]].contiguous()


def methods(dim: int) -> Iterator[tuple[str, int, Codec]]:
    """Yield (method, bits, codec) of all methods to compare."""
    for bits in WIDTHS:
        for method in ("symmetric", "asymmetric", "greedy", "adaptive"):
            yield method, bits, Rowwise(bits, method)
        yield "k-means per row", bits, KMeans(bits)
        yield f"k-means per {KMEANS_BLOCK} rows", bits, KMeans(bits, block_rows=KMEANS_BLOCK)


def error_of(name: str, rows: torch.Tensor, method: str, bits: int, codec: Codec) -> Error:
    """Measure a method's error on rows, and the bits stored for them."""
    encoded = codec.encode(rows)
    decoded = torch.empty_like(rows)
    codec.decode(encoded.data.view(-1), encoded.parameters, len(rows), 0, decoded)
    exact = rows[encoded.exceptions]  # stored with their positions, beside the encoded rows
    decoded[encoded.exceptions] = exact
    errors, norms = (decoded - rows).double().norm(dim=1), rows.double().norm(dim=1)
    total_bits = 8 * (encoded.data.numel() + exact.nbytes + 4 * len(exact)) / rows.numel()
    return Error(
        rows=name,
        method=method,
        bits=bits,
        total_bits=total_bits,
        l2=float(errors.mean()),
        relative=float((errors / norms).mean()),
        rms=float(errors.norm() / norms.norm()),
        shannon=2.0**-total_bits,
    )


def all_errors(rows: torch.Tensor) -> list[Error]:
    """Measure every method on these rows and on as many Gaussian ones."""
    gaussian = torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))
    kinds = {"given": rows, "gaussian": gaussian}
    cases = [(name, values, *m) for name, values in kinds.items() for m in methods(rows.shape[1])]
    return [error_of(*case) for case in tqdm(cases, desc="errors", unit="method")]


def sweeps(rows: torch.Tensor, size: Size) -> dict[str, Any]:
    """Sweep the greedy search by number of bins (at ratio 1), and by ratio (at the chosen bins);
    time the choice, asymmetric and adaptive quantization in the same rounds.
    """
    chosen = {bits: choose_greedy(rows, None, bits) for bits in SEARCHED}
    by_bins = [(bits, bins, 1.0) for bits in SEARCHED for bins in BINS]
    by_ratio = [(bits, chosen[bits][0], ratio) for bits in SEARCHED for ratio in RATIOS]
    many = rows.repeat(-(-size.timed_bytes // rows.nbytes), 1)
    out = torch.zeros(many.numel() * 4, dtype=torch.uint8)
    calls = {
        key: partial(Rowwise(key[0], "greedy", *key[1:]).encode, many, out=out)
        for key in dict.fromkeys([*by_bins, *by_ratio])
    }
    others = {
        (bits, method): partial(Rowwise(bits, method).encode, many, out=out)
        for bits in SEARCHED
        for method in ("asymmetric", "adaptive")
    }
    with tqdm(total=size.rounds, desc="times", unit="round") as bar:
        seconds = paired({**calls, **others}, size.rounds, bar.update)
    # The fastest round: other work on the machine can only add time.
    per_gb = {key: float(s.min()) / (many.nbytes / 1e9) for key, s in seconds.items()}

    def error(codec: Rowwise) -> float:
        return error_of("", rows, "", codec.bits, codec).relative

    naive = {bits: error(Rowwise(bits, "asymmetric")) for bits in SEARCHED}

    def swept(key: tuple[int, int, float]) -> dict[str, Any]:
        improvement = 1 - error(Rowwise(key[0], "greedy", *key[1:])) / naive[key[0]]
        return asdict(Sweep(*key, improvement, per_gb[key]))

    return {
        "by_bins": [swept(key) for key in tqdm(by_bins, desc="by bins", unit="setting")],
        "by_ratio": [swept(key) for key in tqdm(by_ratio, desc="by ratio", unit="setting")],
        "chosen": [{"bits": b, "num_bins": n, "ratio": r} for b, (n, r) in chosen.items()],
        "others": [
            {
                "bits": bits,
                "method": method,
                "improvement": 1 - error(Rowwise(bits, method)) / naive[bits],
                "seconds_per_gb": per_gb[bits, method],
            }
            for bits, method in others
        ],
    }


def measure(rows: torch.Tensor, size: Size) -> dict[str, Any]:
    """Compute all numbers of the figures from rows ``(n, dim)`` of a trained model."""
    rows = sample(rows, size.rows)
    return {
        **describe(),
        "rows": len(rows),
        "dim": rows.shape[1],
        "timed_bytes": size.timed_bytes,
        "errors": [asdict(error) for error in all_errors(rows)],
        **sweeps(rows, size),
    }


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.figures.quantization", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--rows", type=Path, help="rows of a trained model; default: train one")
    parser.add_argument("--dim", type=int, default=64, help="columns of the model to train")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder of the figures")
    parser.add_argument("--quick", action="store_true", help="few steps, rows and rounds")
    threads = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=threads, help="of torch; all by default")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    plots.require_matplotlib()
    require_kmeans1d()
    size = QUICK if options.quick else FULL
    if options.rows is None:
        rows = trained_rows(size.steps, options.dim)
        source = f"{size.steps} steps of the synthetic job: {len(rows)} rows were changed"
    else:
        rows = load_rows(options.rows)
        source = options.rows.name
    numbers = {"source": source, **measure(rows, size)}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "quantization.json").write_text(json.dumps(numbers, indent=2) + "\n")
    plots.draw(numbers, options.out)
    Console(width=120).print(_table(numbers))
    print(f"{len(plots.NAMES)} figures and quantization.json are in {options.out}")
    return 0


def _table(numbers: dict[str, Any]) -> Table:
    table = Table(title=f"mean relative l2 error: {numbers['rows']} rows of dim {numbers['dim']}")
    for column in ("rows", "method", "bits", "bits in all", "error", "rms", "Gaussian limit"):
        table.add_column(column, justify="left" if column in ("rows", "method") else "right")
    for error in numbers["errors"]:
        table.add_row(
            error["rows"],
            error["method"],
            str(error["bits"]),
            f"{error['total_bits']:.2f}",
            *(f"{error[name]:.4f}" for name in ("relative", "rms", "shannon")),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
