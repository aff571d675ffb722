"""Measure speed and error of the codecs, beside FBGEMM's and torch's own operators and memcpy.

    python -m recipes.benchmarks.codecs [--json out.json] [--quick] [--dims 64 16 128] [--threads 2]
        [--only delta]

Gaussian fp32 rows; GB/s count the fp32 values that are encoded or decoded, into warm buffers. All
calls of a part run in the same rounds (`paired`), and ratios are medians of a round's own. Slow
methods get fewer rows. `codec_cases` and `delta_cases` define the calls.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from recipes.benchmarks.codec_cases import (
    GATHERED,
    OURS,
    REFERENCES,
    TWO_PASSES,
    Case,
    decode_cases,
    encode_cases,
    gather_cases,
    gaussian,
    row_id_cases,
    row_state_cases,
)
from recipes.benchmarks.delta_cases import CHUNK_ROWS, SPREADS, delta_cases
from recipes.benchmarks.machine import describe
from recipes.benchmarks.paired import paired
from torchrec_checknrun.codecs.base import WIDTHS


@dataclass(frozen=True)
class Figure:
    """The measurements of a case. ``ratios``: its speed over that of others in the same rounds."""

    part: str
    who: str
    method: str
    bits: int | None
    dim: int
    mbytes: float
    gbps: float
    row_bytes: float | None
    error: float | None
    """Mean relative l2 error of a row."""
    note: str
    over_entropy: float | None = None
    """Bytes over the entropy of what they hold."""
    ratios: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """A speed that the codecs should reach on two cores at dim 64."""

    claim: str
    value: float
    limit: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit


@dataclass(frozen=True)
class Size:
    """The amount of measuring."""

    rows_bytes: int
    slow_rows: int
    """Rows for operators that are a hundred times slower than the rest."""
    table_ids: int
    rounds: int


FULL = Size(rows_bytes=256 << 20, slow_rows=4096, table_ids=1 << 22, rounds=15)
DELTA_PART = 4
"""One of so many bytes is encoded as differences, whose predecessors take four more each."""
QUICK = Size(rows_bytes=8 << 20, slow_rows=256, table_ids=1 << 17, rounds=3)


def figures(cases: list[Case], dim: int, rounds: int, title: str) -> list[Figure]:
    """Time the cases of one or more parts together."""
    with tqdm(total=rounds, desc=title, unit="round") as bar:
        seconds = paired({i: c.call for i, c in enumerate(cases)}, rounds, bar.update)
    speeds = [case.nbytes / seconds[i] / 1e9 for i, case in enumerate(cases)]
    found = []
    for case, speed in zip(cases, speeds, strict=True):
        ratios = {
            other.who: float(np.median(speed / its))
            for other, its in zip(cases, speeds, strict=True)
            if other.who in REFERENCES and case.who not in REFERENCES and _comparable(case, other)
        }
        found.append(
            Figure(
                part=case.part,
                who=case.who,
                method=case.method,
                bits=case.bits,
                dim=dim,
                mbytes=case.nbytes / 1e6,
                gbps=float(np.median(speed)),
                row_bytes=case.row_bytes,
                error=case.error,
                note=case.note,
                over_entropy=case.over_entropy,
                ratios=ratios,
            )
        )
    return found


def _comparable(case: Case, other: Case) -> bool:
    """Return whether two cases compare: encoders of one width; elsewhere the very same work."""
    same_method = case.method == other.method or case.part == "encode" or not other.method
    return case.part == other.part and other.bits in (None, case.bits) and same_method


def targets(found: list[Figure]) -> list[Target]:
    """Return the targets, with the measurements at dim 64."""

    def of(part: str, method: str, bits: int, who: str = OURS) -> Figure:
        key = (part, who, method, bits)
        return next(f for f in found if (f.part, f.who, f.method, f.bits) == key and f.dim == 64)

    rows = []
    for bits, speed, error in ((4, 3.0, 0.081), (2, 3.0, 0.325), (3, 2.5, 0.165)):
        figure = of("encode", "adaptive", bits)
        assert figure.error is not None
        rows.append(Target(f"adaptive {bits} bit: GB/s", figure.gbps, speed))
        rows.append(Target(f"adaptive {bits} bit: error", figure.error, error, at_most=True))
    prepack = of("encode", "adaptive", 4).ratios.get("torch prepack optimized")
    if prepack is not None:
        rows.append(Target("adaptive 4 bit, times torch's optimized prepack", prepack, 150))
    for bits in (8, 4, 2):
        for who, ratio in of("encode", "asymmetric", bits).ratios.items():
            if who.startswith("FBGEMM"):
                rows.append(Target(f"asymmetric {bits} bit, times {who}", ratio, 1))
    for bits in WIDTHS:
        rows.append(Target(f"decode {bits} bit: GB/s", of("decode", "rowwise", bits).gbps, 4))
    for bits, method in GATHERED:
        ratio = of("gather", method, bits).ratios[TWO_PASSES]
        rows.append(Target(f"one pass {method} {bits} bit, times two passes", ratio, 1))
    fallbacks = [f for f in found if (f.part, f.who, f.dim) == ("encode", "fallback", 64)]
    rows += [Target(f"fallback {f.method} {f.bits} bit: GB/s", f.gbps, 0.25) for f in fallbacks]
    return rows


def delta_targets(found: list[Figure]) -> list[Target]:
    """Return the delta codec's targets, on one thread, with the measurements at dim 64."""
    ours = [f for f in found if f.who == OURS and f.dim == 64]
    link = next(iter(SPREADS))
    wanted = (
        ("encode", f"{link}, {CHUNK_ROWS[-1]} rows", 1.2),
        ("encode", f"{link}, upon references", 1.2),
        ("decode", f"{link}, {CHUNK_ROWS[-1]} rows", 2.0),
    )
    rows = []
    for part, method, speed in wanted:
        figure = next(f for f in ours if (f.part, f.method) == (f"{part} delta", method))
        rows.append(Target(f"delta {part} a thread, {method}: GB/s", figure.gbps, speed))
    sizes = [f.over_entropy for f in found if f.over_entropy is not None]
    rows.append(Target("delta: bytes, times their entropy", max(sizes), 1.06, at_most=True))
    return rows


def measure(size: Size, dims: list[int], only: str = "") -> list[Figure]:
    """Measure all parts, or only those whose name holds ``only``."""
    found = []
    for dim in dims:
        rows = gaussian(size.rows_bytes, dim)
        parts: dict[str, Callable[[], Iterator[Case]]] = {
            "encode": partial(encode_cases, rows, size.slow_rows),
            "decode": partial(decode_cases, rows),
            "gather": partial(gather_cases, rows),
            "delta": partial(delta_cases, size.rows_bytes // DELTA_PART, dim),
        }
        for name, cases in parts.items():
            if only in name:
                found += figures(list(cases()), dim, size.rounds, f"dim {dim}, {name}")
    if only in "row ids":
        found += figures(list(row_id_cases(size.table_ids)), 1, size.rounds, "row ids")
    if only in "row state":
        found += figures(list(row_state_cases(size.table_ids)), 1, size.rounds, "row state")
    return found


def main() -> int:
    """Run the command; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmarks.codecs", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="few rows and rounds: speeds vary")
    parser.add_argument("--dims", type=int, nargs="+", default=[64], help="columns")
    threads = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=threads, help="of torch; all by default")
    parser.add_argument("--only", default="", help="only parts whose name holds this")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = measure(QUICK if options.quick else FULL, options.dims, options.only)
    aims = targets(found) if 64 in options.dims and not options.only else []
    if 64 in options.dims and any(figure.over_entropy is not None for figure in found):
        aims += delta_targets(found)
    console = Console(width=170)
    for part in dict.fromkeys(figure.part for figure in found):
        console.print(_table(part, [figure for figure in found if figure.part == part]))
    console.print(_targets_table(aims))
    if options.json:
        content = {
            **describe(),
            "quick": options.quick,
            "targets": [{**asdict(aim), "met": aim.met} for aim in aims],
            "figures": [asdict(figure) for figure in found],
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    missed = sum(not aim.met for aim in aims)
    print(f"{len(aims) - missed} of {len(aims)} targets (meant for 2 cores) met")
    return 1 if missed else 0


def _table(part: str, found: list[Figure]) -> Table:
    others = [who for who in REFERENCES if any(who in f.ratios for f in found)]
    table = Table(title=f"{part}; × n: so many times as fast as n, in the same rounds")
    columns = ["who", "method", "bits", "dim", "MB", "GB/s", "B/row", "error", "÷ entropy"]
    for column in [*columns, *(f"× {who}" for who in others), "note"]:
        table.add_column(column, justify="left" if column in ("who", "note") else "right")
    for f in found:
        table.add_row(
            f.who,
            f.method,
            "" if f.bits is None else str(f.bits),
            str(f.dim),
            f"{f.mbytes:.1f}",
            f"{f.gbps:.3g}",
            "" if f.row_bytes is None else f"{f.row_bytes:.4g}",
            "" if f.error is None else f"{f.error:.4f}",
            "" if f.over_entropy is None else f"{f.over_entropy:.4f}",
            *(f"{f.ratios[who]:.3g}" if who in f.ratios else "" for who in others),
            f.note,
        )
    return table


def _targets_table(aims: list[Target]) -> Table:
    table = Table(title="targets, on 2 cores")
    for column in ("target", "measured", "wanted", ""):
        table.add_column(column, justify="left" if column == "target" else "right")
    for aim in aims:
        wanted = f"{'≤' if aim.at_most else '≥'} {aim.limit:g}"
        table.add_row(aim.claim, f"{aim.value:.4g}", wanted, "met" if aim.met else "not met")
    return table


if __name__ == "__main__":
    sys.exit(main())
