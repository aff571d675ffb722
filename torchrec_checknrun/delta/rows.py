"""Encode rows as integers on their own grids, alone or as differences to their predecessors.

A row on a grid is ``codes * 2**exponent`` with ``|codes| < 2**24``: a fp32 number to the bit. A
row that builds on its predecessor is stored as the difference of codes on the finer of both grids,
hence adding it is exact and in any grouping gives the same integers. Everything else stands alone.

This is the only file that knows the payload's bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
import zstandard

LEAST_EXPONENT, MOST_EXPONENT = -149, 104
"""Of a grid: the least step is fp32's least number, the largest keeps 24 bit codes finite."""
MOST_CODE = (1 << 24) - 1
"""The largest magnitude of a code: codes of 24 bit are exact in fp32."""
EXACT = -(1 << 15)
"""Wanted as an exponent: store the row bit for bit."""
_BIAS = 150
"""Added to exponents in the payload, where 0 says that there is none."""
_LEVEL = 1


class Kind(IntEnum):
    """How a row is restored."""

    NONE = 0
    """Not at all: no predecessor is known."""
    GRID = 1
    """Its codes are integers, to be multiplied by its step."""
    VERBATIM = 2
    """Its codes are the bits of fp32."""


class _Mode(IntEnum):
    """How a row lies in a payload."""

    LINK = 0
    """Differences to the predecessor's codes, on a grid as fine or finer."""
    ALONE = 1
    VERBATIM = 2


@dataclass
class Grid:
    """Rows on their own grids.

    Attributes:
        kind: ``(n,)`` uint8, a ``Kind`` each.
        exponent: ``(n,)`` int16; 0 except for rows on a grid.
        codes: ``(n, dim)`` int32; 0 for rows of kind ``NONE``.
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

    def __len__(self) -> int:
        return len(self.kind)


def encode(
    weight: torch.Tensor, wanted: np.ndarray, before: Grid | None = None
) -> tuple[torch.Tensor, Grid]:
    """Encode rows.

    Rows whose predecessor lies on a grid are differences to it, if their codes fit: the exponent is
    the wanted one, but never larger than the predecessor's, and at least the row's largest
    exponent - 23. All others stand alone: first rows, rows that the caller gives no predecessor
    because they were reset, non-finite rows, codes beyond 24 bits, rows that would overflow fp16.

    Args:
        weight: ``(n, dim)`` of fp32, bf16 or fp16, on any device.
        wanted: ``(n,)`` int16: exponents of the steps; ``EXACT`` for rows to store bit for bit.
        before: the predecessors; None for a base, in which all rows stand alone.

    Returns:
        The payload, 1-D uint8 on the CPU; and the rows as ``apply`` restores them.
    """
    values = weight.detach().to("cpu", torch.float32).contiguous().numpy()
    n, dim = values.shape
    before = Grid.none(n, dim) if before is None else before
    floor = _least_exponents(values)
    sound = np.isfinite(values).all(axis=1) & (wanted != EXACT)
    aimed = np.maximum(wanted, floor).clip(LEAST_EXPONENT, MOST_EXPONENT).astype(np.int16)
    finer = np.minimum(aimed, before.exponent)
    base = _shifted(before, finer)
    fits = (np.abs(base) <= MOST_CODE).all(axis=1) & (finer >= floor)
    linked = sound & (before.kind == Kind.GRID) & fits
    exponent = np.where(linked, finer, aimed)
    codes = _codes(values, np.where(sound, exponent, 0), sound)
    after = Grid(np.full(n, Kind.GRID, np.uint8), exponent.astype(np.int16), codes)
    if weight.dtype != torch.float32:  # rounding to the type may overflow
        sound &= np.isfinite(values_of(after, weight.dtype).float().numpy()).all(axis=1)
        linked &= sound
    after.kind[~sound] = Kind.VERBATIM
    after.exponent[~sound] = 0
    after.codes[~sound] = values.view(np.int32)[~sound]
    modes = np.where(linked, _Mode.LINK, after.kind).astype(np.uint8)
    stored = np.where(linked[:, None], codes - base, after.codes).astype(np.int32)
    return _pack(modes, after.exponent, stored), after


def encode_grid(rows: Grid) -> torch.Tensor:
    """Encode rows that are on grids already, none of kind ``NONE``; all stand alone."""
    return _pack(rows.kind.astype(np.uint8), rows.exponent, rows.codes)


def apply(
    payload: torch.Tensor,
    rows: int,
    dim: int,
    before: Grid | None = None,
    chosen: np.ndarray | None = None,
    columns: slice | None = None,
) -> Grid:
    """Decode a payload's rows, or chosen rows and columns of it, upon their predecessors.

    Args:
        payload: as from ``encode``, 1-D uint8 on the CPU.
        rows, dim: of the whole payload.
        before: the predecessors of the chosen rows and columns; None: these have none. It is not
            changed.
        chosen: sorted positions of rows; None: all.
        columns: which columns; None: all.

    Raises:
        ValueError: no encoder writes such a payload, or not upon these predecessors.
    """
    modes, exponent, stored = _unpack(payload, rows, dim)
    if chosen is not None:
        modes, exponent, stored = modes[chosen], exponent[chosen], stored[chosen]
    if columns is not None:
        stored = np.ascontiguousarray(stored[:, columns])
    before = Grid.none(*stored.shape) if before is None else before
    linked = modes == _Mode.LINK
    if (before.kind[linked] != Kind.GRID).any():
        raise ValueError("a row is a difference, but has no predecessor on a grid")
    if (exponent[linked] > before.exponent[linked]).any():
        raise ValueError("a row's grid is coarser than its predecessor's")
    base = _shifted(before, np.where(linked, exponent, before.exponent))
    codes = np.where(linked[:, None], base + stored, stored)
    on_grid = modes != _Mode.VERBATIM
    if (np.abs(codes[on_grid]) > MOST_CODE).any():
        raise ValueError(f"a row's code exceeds {MOST_CODE}")
    kind = np.where(on_grid, Kind.GRID, Kind.VERBATIM).astype(np.uint8)
    return Grid(kind, exponent, codes.astype(np.int32))


def values_of(rows: Grid, dtype: torch.dtype) -> torch.Tensor:
    """Return rows as numbers: ``(n, dim)`` of a dtype, on the CPU."""
    exact = np.ldexp(rows.codes.astype(np.float64), rows.exponent.astype(np.int32)[:, None])
    exact = exact.astype(np.float32)
    verbatim = rows.kind == Kind.VERBATIM
    exact.view(np.int32)[verbatim] = rows.codes[verbatim]
    return torch.from_numpy(exact).to(dtype)


def has_links(payload: torch.Tensor, rows: int, dim: int) -> bool:
    """Return whether any row of a payload is a difference to a predecessor.

    Raises:
        ValueError: no encoder writes such a payload.
    """
    return bool((_unpack(payload, rows, dim)[0] == _Mode.LINK).any())


def verbatim(payload: torch.Tensor, rows: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of a payload that are stored bit for bit, which needs no predecessors.

    Returns:
        Their positions, ``(n,)`` int64 sorted, and the bits of fp32, ``(n, dim)`` int32.

    Raises:
        ValueError: no encoder writes such a payload.
    """
    modes, _, stored = _unpack(payload, rows, dim)
    positions = np.flatnonzero(modes == _Mode.VERBATIM)
    return positions, stored[positions]


def _least_exponents(values: np.ndarray) -> np.ndarray:
    """Return the least exponent of each row's grid: the largest value's - 23."""
    largest = np.abs(values).max(axis=1, initial=0)
    known = np.isfinite(largest) & (largest > 0)
    return np.where(known, np.frexp(largest)[1] - 24, LEAST_EXPONENT).clip(LEAST_EXPONENT)


def _codes(values: np.ndarray, exponent: np.ndarray, sound: np.ndarray) -> np.ndarray:
    """Return the nearest integers, ties to even, on each sound row's grid."""
    finite = np.where(sound[:, None], values, 0).astype(np.float64)
    return np.rint(np.ldexp(finite, -exponent.astype(np.int32)[:, None])).astype(np.int32)


def _shifted(rows: Grid, exponent: np.ndarray) -> np.ndarray:
    """Return codes on finer grids, ``(n, dim)`` int64; codes too large for 24 bits stay so."""
    shift = np.where(rows.kind == Kind.GRID, rows.exponent - exponent, 0).clip(0, 32)
    return rows.codes.astype(np.int64) << shift.astype(np.int64)[:, None]


def _pack(modes: np.ndarray, exponent: np.ndarray, stored: np.ndarray) -> torch.Tensor:
    biased = np.where(modes == _Mode.VERBATIM, 0, exponent + _BIAS).astype(np.uint8)
    data = modes.tobytes() + biased.tobytes() + stored.astype("<i4").tobytes()
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(data)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def _unpack(
    payload: torch.Tensor, rows: int, dim: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return modes, exponents and codes as stored.

    Raises:
        ValueError: no encoder writes such a payload.
    """
    data, size = payload.numpy().tobytes(), rows * (2 + 4 * dim)
    try:
        if zstandard.get_frame_parameters(data).content_size != size:
            raise ValueError(f"{rows} rows of {dim} columns don't take these bytes")
        raw = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    modes = np.frombuffer(raw, np.uint8, rows)
    exponent = np.frombuffer(raw, np.uint8, rows, rows).astype(np.int16) - _BIAS
    if (modes > _Mode.VERBATIM).any():
        raise ValueError("a row is stored in an unknown way")
    on_grid = modes != _Mode.VERBATIM
    known = (exponent >= LEAST_EXPONENT) & (exponent <= MOST_EXPONENT)
    if not known[on_grid].all() or (exponent[~on_grid] != -_BIAS).any():
        raise ValueError("a row's exponent is out of range")
    exponent[~on_grid] = 0
    return modes, exponent, np.frombuffer(raw, "<i4", rows * dim, 2 * rows).reshape(rows, dim)
