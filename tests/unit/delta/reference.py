"""Round rows to grids in exact fractions, row by row: what every kernel is compared with."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch

from torchrec_checknrun.delta.rows import (
    EXACT,
    LEAST_EXPONENT,
    MOST_CODE,
    MOST_EXPONENT,
    Grid,
    Kind,
)

_MOST_HALF = 65520
"""The least number that fp16 rounds to infinity."""


def restored(weight: torch.Tensor, wanted: np.ndarray, before: Grid | None) -> Grid:
    """Return what a checkpoint of rows restores to."""
    found = Grid.none(*weight.shape)
    half = weight.dtype == torch.float16
    numbers = weight.numpy().astype(np.float32) if half else weight.float().numpy()
    for row, values in enumerate(numbers):
        base = None
        if before is not None and before.kind[row] == Kind.GRID:
            base = int(before.exponent[row]), [int(code) for code in before.codes[row]]
        grid = _grid(values, int(wanted[row]), base, half)
        if grid is None:
            found.kind[row] = Kind.VERBATIM
            found.codes[row] = values.view(np.int32)
        else:
            found.kind[row] = Kind.GRID
            found.exponent[row], found.codes[row] = grid
    return found


def _grid(
    values: np.ndarray, wanted: int, base: tuple[int, list[int]] | None, half: bool
) -> tuple[int, list[int]] | None:
    """Return a row's exponent and codes; None if it must be kept bit for bit."""
    if wanted == EXACT or not np.isfinite(values).all():
        return None
    largest = max(abs(float(value)) for value in values)
    least = max(math.frexp(largest)[1] - 24, LEAST_EXPONENT) if largest else LEAST_EXPONENT
    exponent = min(max(wanted, least, LEAST_EXPONENT), MOST_EXPONENT)
    if base is not None:
        finer = min(exponent, base[0])
        most = max(abs(code) for code in base[1]) << (base[0] - finer)
        if finer >= least and most <= MOST_CODE:
            exponent = finer
    step = Fraction(2) ** exponent
    codes = [round(Fraction(float(value)) / step) for value in values]
    if half and max(abs(code) for code in codes) * step >= _MOST_HALF:
        return None
    return exponent, codes


def values_of(rows: Grid) -> np.ndarray:
    """Return rows as float32, by exact fractions."""
    found = np.zeros(rows.codes.shape, np.float32)
    for row in range(len(rows)):
        if rows.kind[row] == Kind.VERBATIM:
            found[row] = rows.codes[row].view(np.float32)
        elif rows.kind[row] == Kind.GRID:
            step = Fraction(2) ** int(rows.exponent[row])
            found[row] = [np.float32(float(int(code) * step)) for code in rows.codes[row]]
    return found
