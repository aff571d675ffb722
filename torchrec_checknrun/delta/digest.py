"""Digest rows on grids: one number per row, whose sum over rows stands for a whole table.

A sum can be kept up to date row by row, and added over ranks however a table is split by rows. A
digest tells apart states that differ by accident; it is no protection against forgery.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from torchrec_checknrun.delta.rows import Grid
from torchrec_checknrun.native import has_extension

WORD = 1 << 64
"""Digests are numbers modulo this one."""

Columns = tuple[int, int]


def row_digests(ids: np.ndarray, columns: Columns, rows: Grid) -> np.ndarray:
    """Digest rows by id, range of columns, kind, exponent and codes.

    Args:
        ids: ``(n,)`` int64, global.
        columns: the half-open range of the table's columns that the rows have.

    Returns:
        ``(n,)`` uint64; 0 for rows of kind ``NONE``.
    """
    if has_extension():
        out = np.empty(len(ids), np.int64)
        torch.ops.checknrun.delta_digests(
            torch.from_numpy(np.ascontiguousarray(ids, np.int64)),
            *columns,
            torch.from_numpy(np.ascontiguousarray(rows.kind)),
            torch.from_numpy(np.ascontiguousarray(rows.exponent)),
            torch.from_numpy(np.ascontiguousarray(rows.codes)),
            torch.from_numpy(out),
        )
        return out.view(np.uint64)
    place = mixed(ids.astype(np.uint64) ^ mixed(np.array(columns, np.uint64))[0])
    place ^= mixed(np.array(columns, np.uint64))[1] << np.uint64(1)
    kind = rows.kind.astype(np.uint64) << np.uint64(32)
    place = mixed(place ^ kind ^ (rows.exponent.astype(np.int64) + 1024).astype(np.uint64))
    codes = np.ascontiguousarray(rows.codes).view(np.uint32).astype(np.uint64)
    codes *= _factors(rows.codes.shape[1])
    found = mixed(place + codes.sum(axis=1, dtype=np.uint64))
    found[rows.kind == 0] = 0
    return found


def total(digests: np.ndarray) -> int:
    """Return the sum of rows' digests, as a table's digest counts them."""
    return int(digests.sum(dtype=np.uint64))


def text_of(digest: int) -> str:
    """Return a digest as manifests hold it: 16 hex digits."""
    return f"{digest % WORD:016x}"


@functools.cache
def _factors(columns: int) -> np.ndarray:
    """Return odd factors, one for each column."""
    return mixed(np.arange(columns, dtype=np.uint64)) | np.uint64(1)


def mixed(values: np.ndarray) -> np.ndarray:
    """Mix the bits of 64-bit words, one to one (splitmix64)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
