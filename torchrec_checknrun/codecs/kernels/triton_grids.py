"""Find scale and bias of rows on a GPU: the methods of ``base.Method``, as Triton functions.

The same algorithms as in ``numpy_rows`` and ``csrc/rows_grids.h``; importing this needs Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchrec_checknrun.codecs.base import Method
from torchrec_checknrun.codecs.kernels.limits import MOVES

_ASYMMETRIC = tl.constexpr(int(Method.ASYMMETRIC))
_SYMMETRIC = tl.constexpr(int(Method.SYMMETRIC))
_GREEDY = tl.constexpr(int(Method.GREEDY))
_MOVE1 = tl.constexpr(MOVES[0])
_MOVE2 = tl.constexpr(MOVES[1])


@triton.jit
def nearest(x: tl.tensor, top: tl.constexpr) -> tl.tensor:
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
    code = nearest((x - bias[:, None]) * inverse[:, None], top)
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
    code = nearest(x * inverse[:, None] - (bias * inverse)[:, None], top)
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
    error = tl.where(mask, scaled - nearest(scaled, top), 0.0)
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
    """Return the minimum, with a zero's sign as FBGEMM up to 1.8 stores it.

    FBGEMM takes the last zero of the first of eight lanes that has one.
    """
    whole = dim // 8 * 8
    rank = tl.where(column < whole, column % 8 * whole + (whole - column), 8 * whole + column)
    sign = x.to(tl.int32, bitcast=True) < 0
    key = tl.where(x == 0.0, 2 * rank[None, :] + sign.to(tl.int32), 2147483647)
    negative = (tl.min(key, axis=1) & 1) == 1
    zero = (negative.to(tl.int32) << 31).to(tl.float32, bitcast=True)  # Triton < 3.9: -0.0 is 0.0
    return tl.where(low == 0.0, zero, low)


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
def find_grid(
    x: tl.tensor,
    mask: tl.tensor,
    column: tl.tensor,
    dim: tl.tensor,
    count: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    num_bins: tl.tensor,
    moves: tl.tensor,
    METHOD: tl.constexpr,
    CUT: tl.constexpr,
    BITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Find bias, scale and the factor from values to codes for every row."""
    top: tl.constexpr = 2**BITS - 1
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
    return bias, scale, inverse
