"""Encode fused rows on a GPU, so that only the encoded bytes are copied to the host.

Layout and algorithms are those of the compiled kernel. Division is rounded and nothing is fused
(both are otherwise at Triton's discretion), so methods without a search give the same bytes; the
searches add up in another order.
"""

from __future__ import annotations

import numpy as np
import torch

from torchrec_checknrun.codecs.base import Method, Refusal
from torchrec_checknrun.codecs.limits import (
    CUTS,
    LEAST_RANGES,
    MOST_FLOAT,
    MOST_HALF,
    MOVES,
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

_VALUES = 512
"""Values that one program encodes, unless a single row has more: at most one row per thread."""

_ASYMMETRIC = tl.constexpr(int(Method.ASYMMETRIC))
_SYMMETRIC = tl.constexpr(int(Method.SYMMETRIC))
_GREEDY = tl.constexpr(int(Method.GREEDY))
_NOT_FINITE = tl.constexpr(int(Refusal.NOT_FINITE))
_TOO_LARGE = tl.constexpr(int(Refusal.TOO_LARGE))
_TOO_SMALL = tl.constexpr(int(Refusal.TOO_SMALL))
_SMALL = tl.constexpr(SMALL)
_LARGEST = tl.constexpr(float(np.finfo(np.float32).max))
_MOVE1 = tl.constexpr(MOVES[0])
_MOVE2 = tl.constexpr(MOVES[1])


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
def _nearest(x: tl.tensor, top: tl.constexpr) -> tl.tensor:
    """Return the nearest code, ties to even: adding 1.5 * 2^23 leaves no bits for a fraction."""
    return (tl.minimum(tl.maximum(x, 0.0), top) + 12582912.0) - 12582912.0


@triton.jit
def _half(x: tl.tensor) -> tl.tensor:
    return x.to(tl.float16).to(tl.float32)


@triton.jit
def _stored_error(
    x: tl.tensor, mask: tl.tensor, bias: tl.tensor, scale: tl.tensor, top: tl.constexpr
) -> tl.tensor:
    """Compute every row's squared error, exactly as it will be encoded and decoded."""
    inverse = tl.div_rn(1.0, scale)
    code = _nearest((x - bias[:, None]) * inverse[:, None], top)
    error = tl.where(mask, x - (code * scale[:, None] + bias[:, None]), 0.0)
    return tl.sum(error * error, axis=1)


@triton.jit
def _fit(
    x: tl.tensor,
    mask: tl.tensor,
    dim: tl.tensor,
    bias: tl.tensor,
    scale: tl.tensor,
    best_bias: tl.tensor,
    best_scale: tl.tensor,
    gain: tl.tensor,
    top: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Refit a grid to its own codes (least squares); return the better of it and the best so far.

    The rows of x have mean zero; gain is the reduction of the squared error that the best grid
    achieves.
    """
    inverse = tl.div_rn(1.0, scale)
    code = _nearest(x * inverse[:, None] - (bias * inverse)[:, None], top)
    code = tl.where(mask, code, 0.0)
    total = tl.sum(code, axis=1)
    product = tl.sum(code * x, axis=1)
    mean = tl.div_rn(total, dim)
    variance = tl.sum(code * code, axis=1) - total * mean
    fitted = tl.div_rn(product, variance)
    better = (variance > 1e-3) & (fitted > 0.0) & (product * fitted > gain)
    return (
        tl.where(better, -fitted * mean, best_bias),
        tl.where(better, fitted, best_scale),
        tl.where(better, product * fitted, gain),
    )


@triton.jit
def _move_ends(
    x: tl.tensor,
    mask: tl.tensor,
    dim: tl.tensor,
    bias: tl.tensor,
    scale: tl.tensor,
    gain: tl.tensor,
    move: tl.constexpr,
    top: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the best of the grid and its four neighbours, either end moved by part of a step."""
    by = scale * move
    part = tl.div_rn(by, tl.full(by.shape, top, tl.float32))
    b, s, g = _fit(x, mask, dim, bias + by, scale - part, bias, scale, gain, top)
    b, s, g = _fit(x, mask, dim, bias - by, scale + part, b, s, g, top)
    b, s, g = _fit(x, mask, dim, bias, scale + part, b, s, g, top)
    return _fit(x, mask, dim, bias, scale - part, b, s, g, top)


@triton.jit
def _range_search(
    x: tl.tensor,
    mask: tl.tensor,
    dim: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    cut: tl.constexpr,
    top: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Search adaptively: start from a cut range, then move either end, twice; refit every grid."""
    mean = tl.div_rn(tl.sum(x, axis=1), dim)
    centred = tl.where(mask, x - mean[:, None], 0.0)
    width = high - low
    bias = low - mean + width * cut
    scale = width * ((1.0 - 2.0 * cut) / top)
    gain = tl.zeros_like(width)
    bias, scale, gain = _fit(centred, mask, dim, bias, scale, bias, scale, gain, top)
    bias, scale, gain = _move_ends(centred, mask, dim, bias, scale, gain, _MOVE1, top)
    bias, scale, gain = _move_ends(centred, mask, dim, bias, scale, gain, _MOVE2, top)
    return bias + mean, scale


@triton.jit
def _range_error(
    x: tl.tensor, mask: tl.tensor, bias: tl.tensor, scale: tl.tensor, top: tl.constexpr
) -> tl.tensor:
    inverse = tl.where(scale > 0.0, tl.div_rn(1.0, scale), 1.0)
    scaled = x * inverse[:, None] - (bias * inverse)[:, None]
    error = tl.where(mask, scaled - _nearest(scaled, top), 0.0)
    return tl.sum(error * error, axis=1) * scale * scale


@triton.jit
def _greedy_search(
    x: tl.tensor,
    mask: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    num_bins: tl.tensor,
    moves: tl.tensor,
    top: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Search as Check-N-Run: cut a bin off the end where that costs less; keep the best range."""
    tops = tl.full(low.shape, top, tl.float32)
    step = tl.div_rn(high - low, num_bins.to(tl.float32) + tl.zeros_like(low))
    bias, best = low, tl.div_rn(high - low, tops)
    least = _range_error(x, mask, bias, best, top)
    for _ in range(moves):
        scale = tl.div_rn(high - low - step, tops)
        raised = _range_error(x, mask, low + step, scale, top)
        lowered = _range_error(x, mask, low, scale, top)
        low = tl.where(raised < lowered, low + step, low)
        high = tl.where(raised < lowered, high, high - step)
        better = (tl.minimum(raised, lowered) < least) & (scale > 0.0)
        least = tl.where(better, tl.minimum(raised, lowered), least)
        bias = tl.where(better, low, bias)
        best = tl.where(better, scale, best)
    return bias, best


@triton.jit
def _signed_low(x: tl.tensor, column: tl.tensor, dim: tl.tensor, low: tl.tensor) -> tl.tensor:
    """Return the minimum, with a zero's sign as FBGEMM stores it.

    FBGEMM takes the last zero of the first of eight lanes that has one.
    """
    whole = dim // 8 * 8
    rank = tl.where(column < whole, column % 8 * whole + (whole - column), 8 * whole + column)
    sign = x.to(tl.int32, bitcast=True) < 0
    key = tl.where(x == 0.0, 2 * rank[None, :] + sign.to(tl.int32), 2147483647)
    negative = (tl.min(key, axis=1) & 1) == 1
    return tl.where(low == 0.0, tl.where(negative, -0.0, 0.0), low)


@triton.jit
def _symmetric_grid(
    low: tl.tensor, high: tl.tensor, BITS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Compute the symmetric grid; the scale keeps so few bits that -scale * top / 2 is exact."""
    top: tl.constexpr = 2**BITS - 1
    dropped: tl.constexpr = 8 if BITS == 8 else 13 + BITS
    most = tl.maximum(tl.abs(low), tl.abs(high))
    scale = tl.div_rn(2.0 * most, tl.full(most.shape, top, tl.float32))
    pattern = scale.to(tl.int32, bitcast=True)
    pattern += (pattern >> dropped & 1) + ((1 << (dropped - 1)) - 1)
    scale = (pattern & -(1 << dropped)).to(tl.float32, bitcast=True)
    if BITS < 8:
        coarser = (scale + 1.5) - 1.5  # subnormal halves that can be halved
        scale = _half(tl.where(scale < 6.103515625e-5, coarser, scale))
    zero = scale == 0.0
    return tl.where(zero, 0.0, -(scale * (top / 2))), tl.where(zero, 1.0, scale)


@triton.jit
def _min_max_grid(
    low: tl.tensor, high: tl.tensor, top: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Compute FBGEMM's grid, equal to the bit."""
    bias = _half(low)
    width = high - bias
    scale = tl.div_rn(width, tl.full(low.shape, top, tl.float32))
    scale = _half(tl.where(width == 0.0, 1.0, scale))
    return bias, tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def _store_bytes(target: tl.tensor, word: tl.tensor, mask: tl.tensor, count: tl.constexpr) -> None:
    """Store integers byte by byte, lowest first: rows of an odd size have no alignment."""
    for i in tl.static_range(count):
        tl.store(target + i, (word >> (8 * i) & 255).to(tl.uint8), mask=mask)


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
def _searched_grid(
    x: tl.tensor,
    mask: tl.tensor,
    dim: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    num_bins: tl.tensor,
    moves: tl.tensor,
    METHOD: tl.constexpr,
    CUT: tl.constexpr,
    top: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return FBGEMM's grid, or the one that a search finds, rounded as stored, if better."""
    bias, scale = _min_max_grid(low, high, top)
    if METHOD != _ASYMMETRIC:
        if METHOD == _GREEDY:
            found, step = _greedy_search(x, mask, low, high, num_bins, moves, top)
        else:
            found, step = _range_search(x, mask, dim, low, high, CUT, top)
        step = _half(step)
        better = step > 0.0
        found, step = _half(found), tl.where(better, step, 1.0)
        # Both end codes must be in use: then a decoded row's own extremes give the same grid
        # again.
        inverse = tl.div_rn(1.0, step)
        better &= (low - found) * inverse < 0.5
        better &= (high - found) * inverse > top - 0.5
        plain_error = _stored_error(x, mask, bias, scale, top)
        better &= _stored_error(x, mask, found, step, top) < plain_error * 0.99999
        bias, scale = tl.where(better, found, bias), tl.where(better, step, scale)
    return bias, scale


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
    if METHOD == _SYMMETRIC:
        bias, scale = _symmetric_grid(low, high, BITS)
        inverse = tl.div_rn(1.0, scale)
    else:
        low = _signed_low(tl.where(mask, x, 1.0), column, dim, low)
        if BITS == 8:
            width = tl.abs(high - low)  # not -0
            bias = low
            scale = tl.div_rn(width, tl.full(low.shape, top, tl.float32))
            inverse = tl.div_rn(tl.full(low.shape, top, tl.float32), width + 1e-8)
        else:
            bias, scale = _searched_grid(
                x, mask, count, low, high, num_bins, moves, METHOD, CUT, top
            )
            inverse = tl.div_rn(1.0, scale)

    kept = refusal == 0
    code = _nearest((x - bias[:, None]) * inverse[:, None], top)
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
