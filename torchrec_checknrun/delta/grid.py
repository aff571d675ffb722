"""Define rows on grids of their own: integers that are multiplied by powers of two."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

LEAST_EXPONENT, MOST_EXPONENT = -149, 104
"""Exponents of a grid: the least step is fp32's least number, the largest keeps 24 bit codes
finite.
"""
MOST_CODE = (1 << 24) - 1
"""The largest magnitude of a code: codes of 24 bit are exact in fp32."""
EXACT = -(1 << 15)
"""Wanted as an exponent: store the row bit for bit."""


class Kind(IntEnum):
    """The way in which a row is restored."""

    NONE = 0
    """Not at all: no predecessor is known."""
    GRID = 1
    """Codes are integers, to be multiplied by the row's step."""
    VERBATIM = 2
    """Codes are the bits of fp32."""


@dataclass
class Grid:
    """Rows on their own grids.

    Attributes:
        kind: ``(n,)`` uint8, a ``Kind`` each.
        exponent: ``(n,)`` int16; 0 except for rows on a grid.
        codes: ``(n, dim)`` int32, of at most 24 bits for rows on a grid; 0 for rows of kind
            ``NONE``.
    """

    kind: np.ndarray
    exponent: np.ndarray
    codes: np.ndarray

    @classmethod
    def none(cls, rows: int, dim: int) -> Grid:
        """Return rows without a predecessor."""
        return cls(
            np.zeros(rows, np.uint8), np.zeros(rows, np.int16), np.zeros((rows, dim), np.int32)
        )

    @classmethod
    def empty(cls, rows: int, dim: int) -> Grid:
        """Return memory for rows."""
        return cls(
            np.empty(rows, np.uint8), np.empty(rows, np.int16), np.empty((rows, dim), np.int32)
        )

    def at(self, positions: np.ndarray) -> Grid:
        """Copy rows by position."""
        return Grid(self.kind[positions], self.exponent[positions], self.codes[positions])

    def __len__(self) -> int:
        return len(self.kind)
