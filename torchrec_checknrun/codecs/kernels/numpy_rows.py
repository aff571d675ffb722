"""Fused rows in NumPy, where the compiled kernel could not be built.

Layout and algorithms are the kernel's, so that each reads the other's rows; methods without a
search give the same bytes. The searches add up in another order: some bytes may differ, the mean
error hardly does.

Rows are transposed, a block at a time: every number of a row (its scale, its sums) is then a vector
over the block, and no operation has to add up within one. Blocks are spread over threads. NumPy and
not torch, since NumPy's operations stay on the calling thread: torch would wake its own threads for
every operation, which on a busy machine takes a hundred times longer than the operation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import fbgemm_gpu  # noqa: F401  # registers torch.ops.fbgemm
import numpy as np
import numpy.typing as npt
import torch

from torchrec_checknrun.codecs.base import Method, Refusal
from torchrec_checknrun.codecs.kernels.limits import (
    CUTS,
    LEAST_RANGES,
    MOST_FLOAT,
    MOST_HALF,
    MOVES,
    SMALL,
    least_magnitude,
)
from torchrec_checknrun.threads import Threads

_ENCODED_AT_ONCE = 2**19
"""Values of a block: arrays of 2 MiB. With smaller ones threads mostly wait for each other, since
each operation begins and ends with Python's lock.
"""
_DECODED_AT_ONCE = 2**15
"""Values of a block: the most that torch's operations handle without waking threads."""

_ONE = np.float32(1)

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class Grid(NamedTuple):
    """Bias and scale of ``n`` rows, ``(n,)`` or ``(c, n)``: ``value = code * scale + bias``."""

    bias: Floats
    scale: Floats


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
    """Encode rows as ``torch.ops.checknrun.encode_rows`` does.

    Args: see ``kernel.encode_rows``; and
        refused: ``(n,)`` uint8, filled with a ``Refusal`` per row; the bytes of a refused row are
            zero.

    Returns:
        Number of refused rows.
    """
    bfloat16 = rows.dtype == torch.bfloat16
    table = (rows.detach().view(torch.int16) if bfloat16 else rows.detach()).numpy()
    positions = None if ids is None else ids.numpy()
    target, refusals = out.numpy(), refused.numpy()

    def encode(start: int, stop: int) -> None:
        block = table[start:stop] if positions is None else table[positions[start:stop]]
        if bfloat16:
            block = (block.astype(np.int32) << 16).view(np.float32)
        # At least two rows: NumPy would treat a single column as a vector and add up in pairs.
        x = np.empty((block.shape[1], max(2, len(block))), np.float32)
        np.copyto(x, block.T)
        if factor != 1:
            x *= np.float32(factor)
        with np.errstate(all="ignore"):
            encoded, refused_rows = _encode(x, bits, Method(method), num_bins, ratio)
        rows_here = stop - start
        target[start:stop], refusals[start:stop] = encoded[:rows_here], refused_rows[:rows_here]

    _for_blocks(encode, len(target), max(1, _ENCODED_AT_ONCE // table.shape[1]))
    return int(np.count_nonzero(refusals))


def decode_rows(
    data: torch.Tensor, bits: int, factor: float, ids: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Decode rows as ``torch.ops.checknrun.decode_rows`` does; see ``kernel.decode_rows``."""
    dim = out.shape[1]

    def decode(start: int, stop: int) -> None:
        part = data[start:stop]
        if bits == 8:
            values = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(part)
        elif bits == 3:
            values = torch.from_numpy(_decode3(part.numpy(), dim))
        else:
            values = torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(part, bits)
        values = values[:, :dim] if factor == 1 else values[:, :dim] * factor
        if ids is None:
            out[start:stop] = values
        else:
            out.index_copy_(0, ids[start:stop], values.to(out.dtype))

    _for_blocks(decode, len(data), max(1, _DECODED_AT_ONCE // dim))


def _for_blocks(work: Callable[[int, int], None], rows: int, size: int) -> None:
    """Call ``work(start, stop)`` for every block of rows, on as many threads as torch may use."""
    starts = range(0, rows, size)
    threads = min(torch.get_num_threads(), len(starts))
    if threads < 2:
        for start in starts:
            work(start, min(start + size, rows))
        return
    with Threads(threads, "checknrun-codec") as pool:
        blocks = [pool.submit(partial(work, start, min(start + size, rows))) for start in starts]
        for block in blocks:
            block.result()


def _encode(
    x: Floats, bits: int, method: Method, num_bins: int, ratio: float
) -> tuple[Bytes, Bytes]:
    """Encode rows ``(dim, n)``; return bytes ``(n, row bytes)`` and ``(n,)`` refusals."""
    top = np.float32(2**bits - 1)
    low, high = x.min(axis=0), x.max(axis=0)
    refusals = _refusals(low, high, bits, method)
    if method == Method.SYMMETRIC:
        grid = _symmetric_grid(low, high, bits)
        inverse = _ONE / grid.scale
    elif bits == 8:
        low = _signed_low(x, low)
        width = np.abs(high - low)  # not -0
        grid = Grid(low, np.divide(width, top))
        inverse = top / (width + np.float32(1e-8))
    else:
        low = _signed_low(x, low)
        grid = _min_max_grid(low, high, top)
        if method == Method.GREEDY:
            found = _greedy_search(x, low, high, top, num_bins, ratio)
            grid = _better(x, low, high, top, found, grid)
        elif method == Method.ADAPTIVE:
            found = _range_search(x, low, high, bits)
            grid = _better(x, low, high, top, found, grid)
        inverse = _ONE / grid.scale
    codes = _pack(_codes(x, grid.bias, inverse, top, np.empty_like(x)), bits)
    stored = np.stack((grid.scale, grid.bias), axis=1)
    tail = (stored if bits == 8 else stored.astype(np.float16)).view(np.uint8)
    encoded = np.concatenate((codes, tail), axis=1)
    encoded[refusals > 0] = 0
    return encoded, refusals


def _refusals(low: Floats, high: Floats, bits: int, method: Method) -> Bytes:
    """Decide which rows to refuse; a NaN anywhere in a row makes its extremes NaN."""
    most = np.maximum(np.abs(low), np.abs(high))
    refusals = np.zeros(len(most), np.uint8)
    refusals[(most > 0) & (most < least_magnitude(bits, method))] = Refusal.TOO_SMALL
    span = high - low
    least_range = np.float32(LEAST_RANGES[bits])
    refusals[(span > 0) & (span < least_range) & (most < SMALL)] = Refusal.TOO_SMALL
    refusals[most > (MOST_FLOAT if bits == 8 else MOST_HALF)] = Refusal.TOO_LARGE
    refusals[~np.isfinite(most)] = Refusal.NOT_FINITE
    return refusals


def _codes(x: Floats, bias: Floats, inverse: Floats, top: np.float32, out: Floats) -> Floats:
    np.subtract(x, bias, out=out)
    np.multiply(out, inverse, out=out)
    return _nearest(out, top)


def _nearest(x: Floats, top: np.float32) -> Floats:
    """Round to the nearest codes, in place."""
    np.clip(x, 0, top, out=x)
    return np.rint(x, out=x)


def _signed_low(x: Floats, low: Floats) -> Floats:
    """Return the minimum, with a zero's sign as FBGEMM up to 1.8 stores it.

    FBGEMM takes the last zero of the first of eight lanes that has one.
    """
    rows = np.flatnonzero(low == 0)
    if len(rows):
        dim = len(x)
        whole = dim // 8 * 8
        order = [d for lane in range(8) for d in range(whole - 8 + lane, -1, -8)]
        order += range(whole, dim)
        ordered = x[np.array(order)[:, None], rows]
        low[rows] = ordered[(ordered == 0).argmax(axis=0), np.arange(len(rows))]
    return low


def _half(x: Floats) -> Floats:
    return x.astype(np.float16).astype(np.float32)


def _min_max_grid(low: Floats, high: Floats, top: np.float32) -> Grid:
    """Compute FBGEMM's grid, equal to the bit."""
    bias = _half(low)
    width = high - bias
    scale = _half(np.where(width == 0, _ONE, width / top))
    return Grid(bias, np.where(scale == 0, _ONE, scale))


def _symmetric_grid(low: Floats, high: Floats, bits: int) -> Grid:
    """Compute the symmetric grid; scales keep so few bits that ``-scale * top / 2`` is exact."""
    top = np.float32(2**bits - 1)
    scale = np.divide(2 * np.maximum(np.abs(low), np.abs(high)), top)
    dropped = 8 if bits == 8 else 13 + bits
    pattern = scale.view(np.int32)
    half = (pattern >> dropped & 1) + ((1 << (dropped - 1)) - 1)
    scale = (pattern + half & -(1 << dropped)).view(np.float32)
    if bits < 8:
        coarser = (scale + np.float32(1.5)) - np.float32(1.5)  # subnormal halves that can be halved
        scale = _half(np.where(scale < np.float32(2.0**-14), coarser, scale))
    zero = scale == 0
    bias = np.where(zero, np.float32(0), -(scale * (top / np.float32(2))))
    return Grid(bias, np.where(zero, _ONE, scale))


def _better(
    x: Floats, low: Floats, high: Floats, top: np.float32, found: Grid, plain: Grid
) -> Grid:
    """Return the found grid, rounded as stored, for rows where it beats the plain one."""
    scale = _half(found.scale)
    usable = scale > 0
    found = Grid(_half(found.bias), np.where(usable, scale, _ONE))
    # Both end codes must be in use: then a decoded row's own extremes give the same grid again.
    inverse = _ONE / found.scale
    usable &= (low - found.bias) * inverse < 0.5
    usable &= (high - found.bias) * inverse > top - 0.5
    buffer = np.empty_like(x)
    least = _stored_error(x, plain, top, buffer) * np.float32(0.99999)
    usable &= _stored_error(x, found, top, buffer) < least
    return Grid(
        np.where(usable, found.bias, plain.bias), np.where(usable, found.scale, plain.scale)
    )


def _stored_error(x: Floats, grid: Grid, top: np.float32, buffer: Floats) -> Floats:
    """Compute every row's squared error, exactly as it will be encoded and decoded."""
    codes = _codes(x, grid.bias, _ONE / grid.scale, top, buffer)
    codes *= grid.scale
    codes += grid.bias
    codes -= x
    return _dot(codes, codes)


def _dot(x: Floats, y: Floats) -> Floats:
    product: Floats = np.einsum("dn,dn->n", x, y)
    return product


def _greedy_search(
    x: Floats, low: Floats, high: Floats, top: np.float32, num_bins: int, ratio: float
) -> Grid:
    """Search as Check-N-Run: cut a bin off the end where that costs less; keep the best range."""
    scaled, codes = np.empty_like(x), np.empty_like(x)

    def error(bias: Floats, scale: Floats) -> Floats:
        inverse = np.where(scale > 0, _ONE / scale, _ONE)
        np.multiply(x, inverse, out=scaled)
        np.add(scaled, -bias * inverse, out=scaled)
        np.copyto(codes, scaled)
        np.subtract(scaled, _nearest(codes, top), out=scaled)
        return _dot(scaled, scaled) * scale * scale

    step = (high - low) / np.float32(num_bins)
    best = Grid(low, np.divide(high - low, top))
    least = error(*best)
    for _ in range(int(np.float32(ratio) * np.float32(num_bins))):
        scale = np.divide(high - low - step, top)
        raised, lowered = error(low + step, scale), error(low, scale)
        raises = raised < lowered
        low = low + np.where(raises, step, np.float32(0))
        high = high - np.where(raises, np.float32(0), step)
        smaller = np.minimum(raised, lowered)
        better = (smaller < least) & (scale > 0)
        least = np.where(better, smaller, least)
        best = Grid(np.where(better, low, best.bias), np.where(better, scale, best.scale))
    return best


def _range_search(x: Floats, low: Floats, high: Floats, bits: int) -> Grid:
    """Search adaptively: start from a cut range, then move either end by part of a step, twice.

    Every grid is refitted to its own codes.
    """
    top, cut = np.float32(2**bits - 1), np.float32(CUTS[bits])
    mean = x.sum(axis=0) / np.float32(len(x))
    centred = x - mean
    width = high - low
    best = Grid(low - mean + cut * width, width * ((_ONE - 2 * cut) / top))
    start = Grid(best.bias[None], best.scale[None])
    best, gain = _fit_best(centred, start, top, best, np.zeros_like(mean))
    for move in MOVES:
        by = move * best.scale
        wider, narrower = best.scale + by / top, best.scale - by / top
        moved = Grid(
            np.stack((best.bias + by, best.bias - by, best.bias, best.bias)),
            np.stack((narrower, wider, wider, narrower)),
        )
        best, gain = _fit_best(centred, moved, top, best, gain)
    return Grid(best.bias + mean, best.scale)


def _fit_best(
    x: Floats, grids: Grid, top: np.float32, best: Grid, gain: Floats
) -> tuple[Grid, Floats]:
    """Refit each of ``c`` grids to its own codes; return the best of these and of ``best``.

    Args:
        x: ``(dim, n)``, rows of mean zero.
        gain: ``(n,)``, the reduction of the squared error that ``best`` achieves.

    Returns:
        The best grid of every row and its gain.
    """
    inverse = _ONE / grids.scale
    offset = -grids.bias * inverse
    total, squares, products = (np.empty_like(inverse) for _ in range(3))
    codes = np.empty_like(x)
    for i in range(len(inverse)):
        np.multiply(x, inverse[i], out=codes)
        np.add(codes, offset[i], out=codes)
        _nearest(codes, top)
        np.add.reduce(codes, axis=0, out=total[i])
        squares[i] = _dot(codes, codes)
        products[i] = _dot(codes, x)
    mean = total / np.float32(len(x))
    variance = squares - total * mean
    fitted = products / variance
    gains = np.where((variance > 1e-3) & (fitted > 0), products * fitted, np.float32(0))
    which = gains.argmax(axis=0)
    columns = np.arange(len(which))
    most, scale = gains[which, columns], fitted[which, columns]
    better = most > gain
    bias = -scale * mean[which, columns]
    found = Grid(np.where(better, bias, best.bias), np.where(better, scale, best.scale))
    return found, np.where(better, most, gain)


def _pack(codes: Floats, bits: int) -> Bytes:
    """Pack codes ``(dim, n)`` into bytes ``(n, code bytes)``, the first code in the lowest bits.

    Zero codes fill the last 16-bit word; at 3 bits, the last byte.
    """
    dim, n = codes.shape
    if bits == 8:
        return codes.astype(np.uint8).T
    unit, together = {2: (8, 4), 3: (8, 8), 4: (4, 2)}[bits]
    if dim % unit:
        codes = np.concatenate((codes, np.zeros((-dim % unit, n), np.float32)))
    groups = codes.reshape(-1, together, n)
    packed = groups[:, -1].copy()  # up to 24 bits are exact in a float
    for i in reversed(range(together - 1)):
        packed *= 2**bits
        packed += groups[:, i]
    if bits != 3:
        return packed.astype(np.uint8).T
    words = packed.T.astype("<u4", order="C").view(np.uint8).reshape(n, -1, 4)
    return words[:, :, :3].reshape(n, -1)[:, : -(-dim * 3 // 8)]


def _decode3(data: Bytes, dim: int) -> Floats:
    """Decode rows of 3 bits, which FBGEMM can't."""
    n, size = len(data), data.shape[1] - 4
    padded = np.zeros((n, -(-size // 3), 4), np.uint8)
    whole = size // 3
    padded[:, :whole, :3] = data[:, : 3 * whole].reshape(n, whole, 3)
    padded[:, whole:, : size % 3] = data[:, None, 3 * whole : size]
    codes = padded.view("<u4") >> np.arange(0, 24, 3, dtype=np.uint32) & 7
    values = codes.reshape(n, -1)[:, :dim].astype(np.float32)
    tail = data[:, size:].copy().view("<f2").astype(np.float32)
    values *= tail[:, :1]
    values += tail[:, 1:]
    return values
