"""Encode rows as integers on their own grids, alone or as differences to their predecessors.

A row on a grid is ``codes * 2**exponent`` with ``|codes| < 2**24``: a fp32 number to the bit. A
row that builds on its predecessor is stored as the difference of codes on the finer of both grids,
hence adding it is exact and in any grouping gives the same integers. Everything else stands alone.

``layout`` and ``payload`` say what the bytes are.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from torchrec_checknrun.delta import kernel
from torchrec_checknrun.delta.grid import (
    EXACT,
    LEAST_EXPONENT,
    MOST_CODE,
    MOST_EXPONENT,
    Grid,
    Kind,
)
from torchrec_checknrun.delta.layout import is_verbatim
from torchrec_checknrun.delta.payload import join, split, symbols_of

__all__ = [
    "EXACT",
    "LEAST_EXPONENT",
    "MOST_CODE",
    "MOST_EXPONENT",
    "Grid",
    "Kind",
    "apply",
    "encode",
    "encode_grid",
    "values_of",
    "verbatim",
]


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
    rows = weight.detach().cpu()
    if rows.stride(1) != 1 or not len(rows):
        rows = rows.clone(memory_format=torch.contiguous_format)  # empty ones may have any stride
    after = Grid.empty(*rows.shape)
    exponents = np.ascontiguousarray(wanted, np.int16)
    return join(*kernel.encode_rows(rows, exponents, before, after)), after


def encode_grid(rows: Grid, before: Grid | None = None) -> torch.Tensor:
    """Encode rows that are on grids already, none of kind ``NONE``.

    Args:
        before: predecessors, on which rows build that can: a merged link is the last one's rows
            upon the first one's predecessors. None: all rows stand alone.

    Raises:
        ValueError: a row has no kind, or its exponent or a code is out of range.
    """
    return join(*kernel.encode_rows(None, None, before, rows))


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
        before: the predecessors of the chosen rows and columns; None: these have none. Not
            changed.
        chosen: sorted positions of rows; None: all.
        columns: which columns; None: all.

    Raises:
        ValueError: no encoder writes such a payload, or not upon these predecessors.
    """
    data = split(payload, rows, partial(kernel.stream_sizes, dim=dim))
    first, last, _ = (columns or slice(None)).indices(dim)
    if chosen is not None:
        chosen = np.ascontiguousarray(chosen, np.int64)
    after = Grid.empty(rows if chosen is None else len(chosen), last - first)
    kernel.apply_streams(data, rows, dim, chosen, first, before, after)
    return after


def values_of(rows: Grid, dtype: torch.dtype) -> torch.Tensor:
    """Return rows as numbers: ``(n, dim)`` of a dtype, on the CPU."""
    exact = np.empty(rows.codes.shape, np.float32)
    kernel.values_of(rows, exact)
    values = torch.from_numpy(exact).to(dtype)
    if dtype in (torch.float16, torch.bfloat16):
        _keep_nans(rows, exact, values)
    return values


def verbatim(payload: torch.Tensor, rows: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of a payload that are stored bit for bit, which needs no predecessors.

    Returns:
        Their positions, ``(n,)`` int64 sorted, and the bits of fp32, ``(n, dim)`` int32.

    Raises:
        ValueError: no encoder writes such a payload.
    """
    positions = np.flatnonzero(is_verbatim(symbols_of(payload, rows)))
    return positions, apply(payload, rows, dim, chosen=positions).codes


def _keep_nans(rows: Grid, exact: np.ndarray, values: torch.Tensor) -> None:
    """Give NaNs of verbatim rows their bits: torch's conversion gives all the same."""
    found = np.flatnonzero(rows.kind == Kind.VERBATIM)
    found = found[np.isnan(exact[found]).any(axis=1)]
    if not len(found):
        return
    if values.dtype == torch.bfloat16:
        bits = (rows.codes[found] >> 16).astype(np.int16)
    else:
        bits = exact[found].astype(np.float16).view(np.int16)
    narrow = values.view(torch.int16).numpy()
    narrow[found] = np.where(np.isnan(exact[found]), bits, narrow[found])
