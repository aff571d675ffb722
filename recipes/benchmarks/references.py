"""Print the memory that references of tables stored as differences take, by dim and data type.

    python -m recipes.benchmarks.references

Once with codes that all fit a byte, once with one row in eight that needs 16 bits; beside them the
undo record of a checkpoint that writes a quarter of the latter rows. Last, both for one row-wise
optimizer state by ``logdelta``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from functools import partial

import numpy as np
import torch

from torchrec_checknrun.delta.grid_references import GridReferences, Record
from torchrec_checknrun.delta.references import Undo, encode_state_upon
from torchrec_checknrun.delta.rows import Grid, Kind
from torchrec_checknrun.shards import Rectangle

DIMS = (4, 8, 16, 32, 64, 128, 256)
SIZES = {"fp32": 4, "bf16, fp16": 2}
STATE = "momentum1"
_WIDE_PART, _MODIFIED_PART = 8, 0.25


def filled(rows: int, dim: int, wide: bool, states: Iterable[str] = ()) -> GridReferences:
    """Make references of random rows, and of states."""
    rng = np.random.default_rng(dim)
    codes = rng.integers(-127, 128, (rows, dim), dtype=np.int32)
    if wide:
        codes[::_WIDE_PART] *= 100
    grid = Grid(np.full(rows, Kind.GRID, np.uint8), np.full(rows, -12, np.int16), codes)
    references = GridReferences("t", Rectangle(0, rows, 0, dim), states)
    references.scatter(np.arange(rows), grid)
    return references


def record_bytes(record: Record) -> int:
    """Return the memory of an undo record."""
    arrays = [record.positions, record.forms, record.exponents, record.slots]
    return sum(array.nbytes for array in [*arrays, *record.beside.values()])


def state_undo_bytes(references: GridReferences, modified: np.ndarray) -> int:
    """Encode the state of some rows upon references; return the memory of its undo record."""
    notes: list[Undo] = []
    sums = torch.rand(len(modified))
    encode_state_upon(references, modified, notes.append, name=STATE, state=sums)
    (undo,) = notes
    assert isinstance(undo, partial)
    return sum(array.nbytes for array in undo.args)


def table(rows: int) -> list[str]:
    """Return the lines of a table in Markdown."""
    shares = " | ".join(f"of {name}" for name in SIZES)
    lines = [
        f"| dim | bytes a row | {shares} | with wide rows | {shares} | undo, bytes a row "
        "| logdelta: bytes a row | its undo |",
        "|---:|---:|" + "---:|" * (2 * len(SIZES) + 4),
    ]
    for dim in DIMS:
        narrow, wide = filled(rows, dim, wide=False), filled(rows, dim, wide=True)
        cells = []
        for references in (narrow, wide):
            row = references.bytes / rows
            cells += [f"{row:.1f}", *(f"{row / (dim * size):.1%}" for size in SIZES.values())]
        modified = np.flatnonzero(np.random.default_rng(0).random(rows) < _MODIFIED_PART)
        undo = record_bytes(wide.record(modified)) / len(modified)
        with_state = filled(rows, dim, wide=True, states=[STATE])
        state = (with_state.bytes - wide.bytes) / rows
        state_undo = state_undo_bytes(with_state, modified) / len(modified)
        lines.append(
            f"| {dim} | {' | '.join(cells)} | {undo:.1f} | {state:.1f} | {state_undo:.1f} |"
        )
    return lines


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=80_000)
    print("\n".join(table(parser.parse_args().rows)))


if __name__ == "__main__":
    main()
