"""Add links up as plain Python does: one row at a time, whole numbers of any size, fractions."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from torchrec_checknrun.delta.rows import EXACT, Grid, Kind


@dataclass
class PlainRow:
    """A row on a grid, or the bits of a row, or neither."""

    exponent: int | None = None
    codes: tuple[int, ...] | None = None
    bits: tuple[int, ...] | None = None

    @property
    def numbers(self) -> list[Fraction]:
        assert self.codes is not None
        assert self.exponent is not None
        return [code * Fraction(2) ** self.exponent for code in self.codes]


def expected(before: PlainRow, values: list[float], wanted: int, overflow: float) -> PlainRow:
    """Return what a row must restore to, by the rules alone.

    Args:
        values: fp32 numbers.
        overflow: magnitude from which a number of the table's type is infinite.
    """
    bits = tuple(struct.unpack("<i", struct.pack("<f", v))[0] for v in values)
    if wanted == EXACT or not all(math.isfinite(v) for v in values):
        return PlainRow(bits=bits)
    largest = max((abs(v) for v in values), default=0.0)
    floor = math.frexp(largest)[1] - 24 if largest else -149
    aimed = min(max(wanted, floor, -149), 104)
    row = PlainRow(aimed, _rounded(values, aimed))
    if before.codes is not None and before.exponent is not None:
        finer = min(aimed, before.exponent)
        shifted = [code << (before.exponent - finer) for code in before.codes]
        if finer >= floor and all(abs(code) < 1 << 24 for code in shifted):
            row = PlainRow(finer, _rounded(values, finer))
    if any(abs(number) >= overflow for number in row.numbers):
        return PlainRow(bits=bits)
    return row


def _rounded(values: list[float], exponent: int) -> tuple[int, ...]:
    return tuple(round(Fraction(v) / Fraction(2) ** exponent) for v in values)


def row_of(rows: Grid, at: int) -> PlainRow:
    codes = tuple(map(int, rows.codes[at]))
    if rows.kind[at] == Kind.GRID:
        return PlainRow(int(rows.exponent[at]), codes)
    return PlainRow(bits=codes) if rows.kind[at] == Kind.VERBATIM else PlainRow()


def same_rows(one: Grid, other: Grid) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("kind", "exponent", "codes")
    )
