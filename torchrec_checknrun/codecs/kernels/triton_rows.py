"""Encode fused rows on a GPU, so that only the encoded bytes are copied to the host.

Layout and algorithms are the compiled kernel's. Division is rounded and nothing is fused
(both are otherwise at Triton's discretion), so methods without a search give the same bytes; the
searches add up in another order.
"""

from __future__ import annotations

import numpy as np
import torch

from torchrec_checknrun.codecs.base import Method, Refusal
from torchrec_checknrun.codecs.kernels.limits import (
    CUTS,
    LEAST_RANGES,
    MOST_FLOAT,
    MOST_HALF,
    SMALL,
    least_magnitude,
)

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        "rows on a GPU are quantized with Triton, which is not installed: pip install triton "
        "in the version that this torch requires"
    ) from error

from torchrec_checknrun.codecs.kernels.triton_grids import find_grid, nearest

_VALUES = 512
"""Values that one program encodes, unless a single row has more: at most one row per thread."""

_NOT_FINITE = tl.constexpr(int(Refusal.NOT_FINITE))
_TOO_LARGE = tl.constexpr(int(Refusal.TOO_LARGE))
_TOO_SMALL = tl.constexpr(int(Refusal.TOO_SMALL))
_SMALL = tl.constexpr(SMALL)
_LARGEST = tl.constexpr(float(np.finfo(np.float32).max))


def encode_rows(
    rows: torch.Tensor,
    ids: torch.Tensor | None,
    bits: int,
    method: int,
    num_bins: int,
    ratio: float,
    factor: float,
    out: torch.Tensor,
    refused: torch.Tensor,
) -> int:
    """Encode rows as ``torch.ops.checknrun.encode_rows`` does, with all tensors on one GPU.

    Args: see ``kernel.encode_rows``; and
        out: ``(n, row bytes)`` uint8.
        refused: ``(n,)`` uint8, filled with a ``Refusal`` per row; the bytes of a refused row are
            zero.

    Returns:
        Number of refused rows.

    Raises:
        IndexError: an id is out of range.
    """
    n, dim = len(out), rows.shape[1]
    if not n:
        return 0
    if ids is not None and (int(ids.min()) < 0 or int(ids.max()) >= len(rows)):
        raise IndexError(f"ids of rows must be from 0 to {len(rows) - 1}")
    columns = max(8, triton.next_power_of_2(dim))
    block = max(1, _VALUES // columns)
    with torch.cuda.device_of(rows):
        _encode[(triton.cdiv(n, block),)](
            rows.detach(),
            ids,
            out,
            refused,
            n,
            dim,
            rows.stride(0),
            out.shape[1],
            num_bins,
            int(np.float32(ratio) * np.float32(num_bins)),
            factor,
            BITS=bits,
            METHOD=int(Method.ASYMMETRIC) if bits == 8 and method != Method.SYMMETRIC else method,
            CUT=CUTS.get(bits, 0.0),
            LIMIT=MOST_FLOAT if bits == 8 else MOST_HALF,
            LEAST=float(least_magnitude(bits, Method(method))),
            LEAST_RANGE=LEAST_RANGES[bits],
            ROWS=block,
            COLUMNS=columns,
            num_warps=min(16, max(4, columns // 512)),
            enable_fp_fusion=False,
        )
    return int(refused.count_nonzero())


@triton.jit
def _refuse(
    x: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    LIMIT: tl.constexpr,
    LEAST: tl.constexpr,
    LEAST_RANGE: tl.constexpr,
) -> tl.tensor:
    """Decide which rows to refuse, and why."""
    magnitude = tl.abs(x)
    finite = tl.min((magnitude <= _LARGEST).to(tl.int32), axis=1) == 1
    most = tl.max(magnitude, axis=1)
    small = (most > 0.0) & (most < LEAST)
    small |= (high > low) & (high - low < LEAST_RANGE) & (most < _SMALL)
    refusal = tl.where(small, _TOO_SMALL, 0)
    refusal = tl.where(most > LIMIT, _TOO_LARGE, refusal)
    return tl.where(finite, refusal, _NOT_FINITE)


@triton.jit
def _store_bytes(target: tl.tensor, word: tl.tensor, mask: tl.tensor, count: tl.constexpr) -> None:
    """Store integers byte by byte, lowest first: rows of an odd size have no alignment."""
    for i in tl.static_range(count):
        tl.store(target + i, (word >> (8 * i) & 255).to(tl.uint8), mask=mask)


@triton.jit
def _store_codes(
    target: tl.tensor,
    code: tl.tensor,
    inside: tl.tensor,
    size: tl.tensor,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Pack and store codes of fewer than 8 bits, ``size`` bytes a row."""
    # Groups of codes that fill whole bytes; zeros fill the last 16-bit word (3 bits: byte).
    together: tl.constexpr = 8 if BITS == 3 else 8 // BITS
    word_bytes: tl.constexpr = 3 if BITS == 3 else 1
    groups = tl.reshape(code, (ROWS, COLUMNS // together, together))
    words = tl.sum(groups << (tl.arange(0, together) * BITS)[None, None, :], axis=2)
    first = tl.arange(0, COLUMNS // together) * word_bytes
    for i in tl.static_range(word_bytes):
        _store_bytes(
            target[:, None] + (first + i)[None, :],
            words >> (8 * i),
            inside[:, None] & (first + i < size)[None, :],
            1,
        )


@triton.jit(do_not_specialize=["n", "dim", "row_bytes", "num_bins", "moves"])
def _encode(
    table: tl.tensor,
    ids: tl.tensor,
    out: tl.tensor,
    refused: tl.tensor,
    n: tl.tensor,
    dim: tl.tensor,
    row_stride: tl.tensor,
    row_bytes: tl.tensor,
    num_bins: tl.tensor,
    moves: tl.tensor,
    factor: tl.tensor,
    BITS: tl.constexpr,
    METHOD: tl.constexpr,
    CUT: tl.constexpr,
    LIMIT: tl.constexpr,
    LEAST: tl.constexpr,
    LEAST_RANGE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Encode ``ROWS`` rows per program."""
    top: tl.constexpr = 2**BITS - 1
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = row < n
    position = row if ids is None else tl.load(ids + row, mask=inside, other=0)
    mask = inside[:, None] & (column < dim)[None, :]
    at = position[:, None] * row_stride + column[None, :]
    x = tl.load(table + at, mask=mask, other=0.0).to(tl.float32) * factor

    low = tl.min(tl.where(mask, x, float("inf")), axis=1)
    high = tl.max(tl.where(mask, x, float("-inf")), axis=1)
    refusal = _refuse(x, low, high, LIMIT, LEAST, LEAST_RANGE)
    tl.store(refused + row, refusal.to(tl.uint8), mask=inside)

    count = dim.to(tl.float32) + tl.zeros_like(low)
    bias, scale, inverse = find_grid(
        x, mask, column, dim, count, low, high, num_bins, moves, METHOD, CUT, BITS
    )
    kept = refusal == 0
    code = nearest((x - bias[:, None]) * inverse[:, None], top)
    code = tl.where(mask & kept[:, None], code, 0.0).to(tl.int32)
    target = out + row * row_bytes
    if BITS == 8:
        _store_bytes(target[:, None] + column[None, :], code, mask, 1)
        size = dim
    else:
        size = row_bytes - 4
        _store_codes(target, code, inside, size, BITS, ROWS, COLUMNS)
    tail: tl.constexpr = 4 if BITS == 8 else 2
    if BITS == 8:
        scale, bias = scale.to(tl.int32, bitcast=True), bias.to(tl.int32, bitcast=True)
    else:
        scale = scale.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        bias = bias.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    _store_bytes(target + size, tl.where(kept, scale, 0), inside, tail)
    _store_bytes(target + size + tail, tl.where(kept, bias, 0), inside, tail)
