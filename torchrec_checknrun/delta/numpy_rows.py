"""Put rows on their grids and add differences up in NumPy: the reference of the compiled kernel.

All kernels give the same integers and the same bytes.
"""

from __future__ import annotations

import numpy as np
import torch

from torchrec_checknrun.delta.grid import (
    EXACT,
    LEAST_EXPONENT,
    MOST_CODE,
    MOST_EXPONENT,
    Grid,
    Kind,
)
from torchrec_checknrun.delta.layout import (
    ALONE,
    BIAS,
    FARTHER,
    MOST_DROP,
    PLANES,
    SLACK,
    VERBATIM,
    Plane,
    classes_of,
    has_extra,
    is_verbatim,
    stands_alone,
    stream_sizes,
)


def encode_rows(
    weight: torch.Tensor | None, wanted: np.ndarray | None, before: Grid | None, after: Grid
) -> tuple[np.ndarray, list[int]]:
    """Encode rows into streams; see ``kernel.encode_rows``."""
    before = Grid.none(*after.codes.shape) if before is None else before
    if weight is None:
        _check(after)
        linked = (after.kind == Kind.GRID) & (before.kind == Kind.GRID)
        linked &= before.exponent >= after.exponent
        linked &= _fit(_shifted(before, after.exponent))
    else:
        assert wanted is not None
        linked = _settle(weight, wanted, before, after)
    return _streams(linked, before, after)


def apply_streams(
    data: np.ndarray,
    rows: int,
    dim: int,
    chosen: np.ndarray | None,
    first: int,
    before: Grid | None,
    after: Grid,
) -> None:
    """Decode rows of streams; see ``kernel.apply_streams``."""
    symbols = data[:rows]
    ends = np.cumsum(stream_sizes(symbols, dim))
    if len(data) != ends[-1] + SLACK:
        raise ValueError(f"expected {ends[-1]} bytes and slack, not {len(data)}")
    places = np.arange(rows) if chosen is None else chosen
    stored = _stored(data, symbols, ends, dim, places)[:, first : first + after.codes.shape[1]]
    extra = np.zeros(rows, np.int16)
    extra[has_extra(symbols)] = data[rows : ends[1]]
    symbols, extra = symbols[places], extra[places]
    exact = is_verbatim(symbols)
    linked = ~stands_alone(symbols)
    before = Grid.none(*after.codes.shape) if before is None else before
    if (before.kind[linked] != Kind.GRID).any():
        raise ValueError("a row is a difference, but has no predecessor on a grid")
    drop = np.where(symbols >= FARTHER, extra, symbols & 7)
    exponent = np.where(linked, before.exponent - drop, extra + LEAST_EXPONENT)
    if ((exponent < LEAST_EXPONENT) | (exponent > MOST_EXPONENT))[~exact].any():
        raise ValueError("a row's exponent is out of range")
    base = np.where(linked[:, None], _shifted(before, exponent), 0)
    codes = base + np.where(exact[:, None], 0, (stored >> 1) ^ -(stored & 1))
    if not _fit(base).all() or not _fit(codes).all():
        raise ValueError(f"a row's code exceeds {MOST_CODE}")
    after.kind[:] = np.where(exact, Kind.VERBATIM, Kind.GRID)
    after.exponent[:] = np.where(exact, 0, exponent)
    after.codes[:] = codes
    after.codes[exact] = stored[exact].astype(np.uint32).view(np.int32)


def values_of(rows: Grid, out: np.ndarray) -> None:
    """Write rows as numbers, float32; see ``kernel.values_of``."""
    exact = np.ldexp(rows.codes.astype(np.float64), rows.exponent.astype(np.int32)[:, None])
    out[:] = exact.astype(np.float32)
    verbatim = rows.kind == Kind.VERBATIM
    out.view(np.int32)[verbatim] = rows.codes[verbatim]


def _settle(weight: torch.Tensor, wanted: np.ndarray, before: Grid, after: Grid) -> np.ndarray:
    """Set the rows' grids and codes; return which rows build on their predecessors."""
    values = _numbers(weight)
    least = _least_exponents(values)
    sound = np.isfinite(values).all(axis=1) & (wanted != EXACT)
    aimed = np.maximum(wanted, least).clip(LEAST_EXPONENT, MOST_EXPONENT).astype(np.int16)
    finer = np.minimum(aimed, before.exponent)
    linked = sound & (before.kind == Kind.GRID) & (finer >= least)
    linked &= _fit(_shifted(before, finer))
    exponent = np.where(linked, finer, aimed)
    after.kind[:] = Kind.GRID
    after.exponent[:] = exponent
    after.codes[:] = _codes(values, np.where(sound, exponent, 0), sound)
    if weight.dtype == torch.float16:
        size = np.abs(after.codes.astype(np.float64)).max(axis=1, initial=0)
        sound &= np.ldexp(size, exponent.astype(np.int32)) < _INFINITE_HALF
        linked &= sound
    after.kind[~sound] = Kind.VERBATIM
    after.exponent[~sound] = 0
    after.codes[~sound] = values.view(np.int32)[~sound]
    return linked


_INFINITE_HALF = 65520.0
"""The least number that fp16 rounds to infinity."""


def _streams(linked: np.ndarray, before: Grid, after: Grid) -> tuple[np.ndarray, list[int]]:
    """Write rows by class."""
    exact = after.kind == Kind.VERBATIM
    base = np.where(linked[:, None], _shifted(before, after.exponent), 0)
    difference = np.where(exact[:, None], 0, after.codes - base)
    largest = np.abs(difference).max(axis=1, initial=0)
    classes = np.frexp(largest.astype(np.float64))[1]
    if (classes >= VERBATIM).any():
        raise ValueError(f"a row's code exceeds {MOST_CODE}")
    drop = before.exponent.astype(np.int64) - after.exponent
    symbols = np.where(linked, classes * 8 + drop, classes * 8 + ALONE)
    symbols = np.where(linked & (drop > MOST_DROP), FARTHER + classes, symbols)
    symbols = np.where(exact, VERBATIM * 8 + ALONE, symbols).astype(np.uint8)
    extra = np.where(linked, drop, after.exponent + BIAS)[has_extra(symbols)].astype(np.uint8)
    codes = (difference << 1) ^ (difference >> 63)
    codes[exact] = after.codes[exact].view(np.uint32)
    streams, classes = [symbols, extra], classes_of(symbols)
    for each, planes in PLANES.items():
        here = codes[classes == each]
        streams += [_packed(here, plane).reshape(-1) for plane in planes]
    return np.concatenate(streams), [len(stream) for stream in streams]


def _stored(
    data: np.ndarray, symbols: np.ndarray, ends: np.ndarray, dim: int, places: np.ndarray
) -> np.ndarray:
    """Return the codes of the rows at ``places`` as stored, zigzag, int64."""
    found = np.zeros((len(places), dim), np.int64)
    classes, next_stream = classes_of(symbols), 2
    for each, planes in PLANES.items():
        rows = np.flatnonzero(classes == each)
        wanted = np.flatnonzero(classes[places] == each)
        within = np.searchsorted(rows, places[wanted])
        for plane in planes:
            stream = data[ends[next_stream - 1] : ends[next_stream]]
            packed = stream.reshape(len(rows), plane.row_bytes(dim))[within]
            found[wanted] |= _unpacked(packed, dim, plane)
            next_stream += 1
    return found


def _packed(codes: np.ndarray, plane: Plane) -> np.ndarray:
    """Pack a plane of codes, ``(m, dim)``, into ``(m, bytes)`` uint8."""
    part = (codes >> plane.low & ((1 << plane.bits) - 1)).astype(np.uint8)
    each = 8 // plane.width
    size = plane.row_bytes(codes.shape[1])
    whole = np.zeros((len(codes), size * each), np.uint8)
    whole[:, : codes.shape[1]] = part
    shifts = np.arange(each, dtype=np.uint8) * np.uint8(plane.width)
    joined: np.ndarray = np.bitwise_or.reduce(
        whole.reshape(len(codes), size, each) << shifts, axis=2
    )
    return joined


def _unpacked(packed: np.ndarray, dim: int, plane: Plane) -> np.ndarray:
    """Return a plane's part of codes, ``(m, dim)`` int64."""
    each = 8 // plane.width
    shifts = np.arange(each, dtype=np.uint8) * np.uint8(plane.width)
    mask = np.uint8((1 << plane.bits) - 1)
    whole = (packed[:, :, None] >> shifts & mask).reshape(len(packed), packed.shape[1] * each)
    part = whole[:, :dim]
    shifted: np.ndarray = part.astype(np.int64) << plane.low
    return shifted


def _numbers(weight: torch.Tensor) -> np.ndarray:
    """Return rows as float32; NaNs keep their bits, quiet ones if they were of fp16.

    Torch's conversion of fp16 gives NaNs other bits in short rows than in long ones.
    """
    if weight.dtype != torch.float16:
        values: np.ndarray = weight.to(torch.float32).contiguous().numpy()
        return values
    values = np.ascontiguousarray(weight.numpy().astype(np.float32))
    values.view(np.int32)[np.isnan(values)] |= 1 << 22
    return values


def _least_exponents(values: np.ndarray) -> np.ndarray:
    """Return the least exponent of each row's grid: the largest value's - 23."""
    largest = np.abs(values).max(axis=1, initial=0)
    known = np.isfinite(largest) & (largest > 0)
    least: np.ndarray = np.where(known, np.frexp(np.where(known, largest, 1))[1] - 24, -(1 << 14))
    return least.clip(LEAST_EXPONENT)


def _codes(values: np.ndarray, exponent: np.ndarray, sound: np.ndarray) -> np.ndarray:
    """Return the nearest integers, ties to even, on each sound row's grid."""
    finite = np.where(sound[:, None], values, 0).astype(np.float64)
    return np.rint(np.ldexp(finite, -exponent.astype(np.int32)[:, None])).astype(np.int32)


def _shifted(rows: Grid, exponent: np.ndarray) -> np.ndarray:
    """Return codes on finer grids, ``(n, dim)`` int64; codes too large for 24 bits stay so."""
    shift = np.where(rows.kind == Kind.GRID, rows.exponent - exponent, 0).clip(0, 32)
    return rows.codes.astype(np.int64) << shift.astype(np.int64)[:, None]


def _fit(codes: np.ndarray) -> np.ndarray:
    """Return which rows' codes have 24 bits at most."""
    fit: np.ndarray = (np.abs(codes) <= MOST_CODE).all(axis=1)
    return fit


def _check(rows: Grid) -> None:
    """Check rows that are to be encoded as they are.

    Raises:
        ValueError: a row is of kind ``NONE``, or its exponent or a code is out of range.
    """
    exact = rows.kind == Kind.VERBATIM
    if not (exact | (rows.kind == Kind.GRID)).all():
        raise ValueError("a row is neither on a grid nor verbatim")
    if ((rows.exponent < LEAST_EXPONENT) | (rows.exponent > MOST_EXPONENT))[~exact].any():
        raise ValueError("a row's exponent is out of range")
    if not (_fit(rows.codes.astype(np.int64)) | exact).all():
        raise ValueError(f"a row's code exceeds {MOST_CODE}")
