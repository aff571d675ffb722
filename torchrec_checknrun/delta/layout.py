"""Lay out differences of rows by class, so that equal distributions lie together; csrc repeats it.

A row's class is the number of bits of its largest magnitude. Its symbol, a byte, says its class and
what it builds on:

    class * 8 + drop      a difference, on a grid finer than the predecessor's by 2**drop, drop <= 6
    class * 8 + 7         the row stands alone; an extra byte holds its exponent + 149
    26 * 8 + 7            verbatim: the bits of fp32
    216 + class           a difference whose drop is in an extra byte

Codes are zigzag (0, -1, 1, -2, ...), of class + 1 bits, and cut from the top bit into planes of
eight bits; the last plane has the rest. A plane's code takes 1, 2, 4 or 8 bits, the first code of a
byte in its lowest bits, and each row begins a byte. A stream holds one plane of all rows of a
class. The streams' order: symbols, extra bytes, then by class the planes from the top.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchrec_checknrun.delta.grid import LEAST_EXPONENT

MOST_DROP = 6
ALONE = 7
FARTHER = 216
VERBATIM = 26
"""The class of verbatim rows."""
BIAS = -LEAST_EXPONENT
"""Added to exponents in extra bytes."""
MOST_DIM = (1 << 24) - 1
SLACK = 64
"""Bytes behind the last stream that the compiled kernel may read, of any content."""


class Plane(NamedTuple):
    """``bits`` bits of codes, above ``low`` others; each takes ``width`` bits."""

    low: int
    bits: int
    width: int

    def row_bytes(self, dim: int) -> int:
        """Bytes of a row."""
        return (dim * self.width + 7) // 8


def _planes(bits: int) -> list[Plane]:
    planes = []
    while bits:
        part = min(bits, 8)
        bits -= part
        planes.append(Plane(bits, part, 8 if part > 4 else 4 if part > 2 else part))
    return planes


PLANES: dict[int, list[Plane]] = {
    **{each: _planes(each + 1) for each in range(1, VERBATIM)},
    VERBATIM: _planes(32),
}
"""The planes of each class; class 0 needs none."""


def classes_of(symbols: np.ndarray) -> np.ndarray:
    """Return the rows' classes, ``(n,)`` uint8."""
    found: np.ndarray = np.where(symbols >= FARTHER, symbols - FARTHER, symbols >> 3)
    return found.astype(np.uint8)


def stands_alone(symbols: np.ndarray) -> np.ndarray:
    """Return which rows build on nothing, verbatim ones included."""
    found: np.ndarray = (symbols < FARTHER) & (symbols & 7 == ALONE)
    return found


def is_verbatim(symbols: np.ndarray) -> np.ndarray:
    """Return which rows are verbatim."""
    found: np.ndarray = symbols == VERBATIM * 8 + ALONE
    return found


def has_extra(symbols: np.ndarray) -> np.ndarray:
    """Return which rows have an extra byte."""
    alone = stands_alone(symbols) & ~is_verbatim(symbols)
    found: np.ndarray = (symbols >= FARTHER) | alone
    return found


def stream_sizes(symbols: np.ndarray, dim: int) -> list[int]:
    """Return the bytes of all streams, in their order.

    Raises:
        ValueError: a symbol is unknown, or dim out of range.
    """
    if not 0 < dim <= MOST_DIM:
        raise ValueError(f"dim is {dim}")
    classes = classes_of(symbols)
    known = (classes < VERBATIM) | (symbols == VERBATIM * 8 + ALONE)
    if not known.all():
        raise ValueError("a row has an unknown symbol")
    counts = np.bincount(classes, minlength=VERBATIM + 1)
    sizes = [len(symbols), int(has_extra(symbols).sum())]
    for each, planes in PLANES.items():
        sizes += [int(counts[each]) * plane.row_bytes(dim) for plane in planes]
    return sizes
