"""Print the memory that references of tables stored as differences take, by dim and data type.

    python -m recipes.benchmarks.references

Once with codes that all fit a byte, once with one row in eight that needs 16 bits; beside them the
undo record of a checkpoint that writes a quarter of the latter rows.
"""

from __future__ import annotations

import argparse

import numpy as np

from torchrec_checknrun.delta.grid_references import GridReferences, Record
from torchrec_checknrun.delta.rows import Grid, Kind
from torchrec_checknrun.shards import Rectangle

DIMS = (4, 8, 16, 32, 64, 128, 256)
SIZES = {"fp32": 4, "bf16, fp16": 2}
_WIDE_PART, _MODIFIED_PART = 8, 0.25


def filled(rows: int, dim: int, wide: bool) -> GridReferences:
    """Make references of random rows."""
    rng = np.random.default_rng(dim)
    codes = rng.integers(-127, 128, (rows, dim), dtype=np.int32)
    if wide:
        codes[::_WIDE_PART] *= 100
    grid = Grid(np.full(rows, Kind.GRID, np.uint8), np.full(rows, -12, np.int16), codes)
    references = GridReferences("t", Rectangle(0, rows, 0, dim))
    references.scatter(np.arange(rows), grid)
    return references


def record_bytes(record: Record) -> int:
    """Return the memory of an undo record."""
    arrays = [record.positions, record.forms, record.exponents, record.slots]
    return sum(array.nbytes for array in [*arrays, *record.beside.values()])


def table(rows: int) -> list[str]:
    """Return the lines of a table in Markdown."""
    shares = " | ".join(f"of {name}" for name in SIZES)
    lines = [
        f"| dim | bytes a row | {shares} | with wide rows | {shares} | undo, bytes a row |",
        "|---:|---:|" + "---:|" * (2 * len(SIZES) + 2),
    ]
    for dim in DIMS:
        narrow, wide = filled(rows, dim, wide=False), filled(rows, dim, wide=True)
        cells = []
        for references in (narrow, wide):
            row = references.bytes / rows
            cells += [f"{row:.1f}", *(f"{row / (dim * size):.1%}" for size in SIZES.values())]
        modified = np.flatnonzero(np.random.default_rng(0).random(rows) < _MODIFIED_PART)
        undo = record_bytes(wide.record(modified)) / len(modified)
        lines.append(f"| {dim} | {' | '.join(cells)} | {undo:.1f} |")
    return lines


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=80_000)
    print("\n".join(table(parser.parse_args().rows)))


if __name__ == "__main__":
    main()
