"""Make rows that are hard to quantize, and bound the error of quantized rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import fbgemm_gpu  # noqa: F401  # registers torch.ops.fbgemm
import numpy as np
import torch

from torchrec_checknrun.codecs import (
    NO_CONTEXT,
    Codec,
    Encoded,
    RowContext,
    Rowwise,
    codec_from_spec,
)

WIDTHS = (2, 3, 4, 8)
METHODS = ("asymmetric", "symmetric", "greedy", "adaptive")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LEAST = 2.0**-16
"""Smallest largest magnitude of a row that is not too small for a fp16 scale."""


def rowwise(bits: int, method: str) -> Rowwise:
    """Return a codec whose greedy search, if any, has fixed parameters."""
    return Rowwise(bits, method, num_bins=20, ratio=0.6)


def fbgemm_encode(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Encode by FBGEMM into ``(n, row bytes)``; the dim must be one that FBGEMM accepts.

    A bias of zero keeps the sign of one of the row's zeros, which depends on FBGEMM's release.
    Stored bytes must not depend on the release: they keep the choice of FBGEMM up to 1.8.
    """
    if bits == 8:
        data = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows)
    else:
        data = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, bits)
    known = [_first_in(rows, range(rows.shape[1])), _first_in(rows, _by_lanes(rows.shape[1]))]
    zero = rows.min(dim=1).values == 0
    signs = [torch.where(zero, chosen.view(torch.uint8) << 7, data[:, -1]) for chosen in known]
    assert any(torch.equal(data[:, -1], sign) for sign in signs), "a third choice"
    data[:, -1] = signs[1]
    return data


def _by_lanes(dim: int) -> list[int]:
    """List positions by eight lanes, the last of a lane first, then the rest beyond full eights."""
    whole = dim // 8 * 8
    lanes = [place for lane in range(8) for place in range(whole - 8 + lane, -1, -8)]
    return lanes[:whole] + list(range(whole, dim))


def _first_in(rows: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return ``(n,)`` bool: whether the first zero in this order of positions has the sign."""
    ordered = rows[:, list(order)]
    first = (ordered == 0).int().argmax(dim=1, keepdim=True)
    return torch.signbit(ordered.gather(1, first))[:, 0]


def fbgemm_decode(data: torch.Tensor, bits: int) -> torch.Tensor:
    """Decode by FBGEMM to ``(n, dim)``; the bytes are padded to whole bytes and words."""
    if bits == 8:
        return torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(data)
    return torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(data, bits)


def random_rows(seed: int, n: int, dim: int, method: str = "") -> torch.Tensor:
    """Draw ``(n, dim)`` float32 rows as in tables, and hard ones, all within the codecs' range,
    which begins higher for symmetric rows.
    """
    floor = (40 if method == "symmetric" else 4) * LEAST
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n, dim)) * 10.0 ** rng.integers(-4, 4, (n, 1))
    rows += rng.choice([0.0, 1.0, -300.0], (n, 1))
    kind = rng.integers(0, 8, n)
    rows[kind == 0] = rows[kind == 0][:, :1]  # constant rows
    rows[kind == 1, rng.integers(0, dim)] = 60000.0  # one huge outlier
    rows[kind == 2] = 0.0
    rows[kind == 3] = np.abs(rows[kind == 3]) * rng.choice([-0.0, 1.0], (1, dim))  # signed zeros
    rows[kind == 4, rng.integers(0, dim)] = 1e-41  # a denormal
    rows = rows.astype(np.float32)
    rows[(np.abs(rows).max(axis=1) < floor) & (rows != 0).any(axis=1)] = 1.0
    return torch.from_numpy(rows)


def spoil(rows: torch.Tensor, seed: int) -> torch.Tensor:
    """Make some rows not finite, too large or too small."""
    rng = np.random.default_rng(seed)
    rows = rows.clone()
    for row in range(len(rows)):
        kind = rng.integers(0, 14)
        if kind < 5:
            column = rng.integers(0, rows.shape[1])
            rows[row, column] = [np.nan, np.inf, -np.inf, 3e38, -65510.0][kind]
        elif kind < 7:
            rows[row] *= [1e-9, 1e-42][kind - 5]
    return rows


def half_rounding(values: torch.Tensor) -> torch.Tensor:
    """Bound the distance of doubles to the nearest fp16 numbers."""
    return (values.abs() * 2.0**-11).clamp(min=2.0**-25)


def error_bound(rows: torch.Tensor, bits: int, symmetric: bool = False) -> torch.Tensor:
    """Return ``(n, 1)``: the largest error of an element, for float32 values.

    Half a step, and the rounding of bias and of scale (most at the largest code): in fp16, at 8 bit
    in fp32 and with FBGEMM's 1e-8; and a few roundings of the arithmetic.
    """
    values = rows.double()
    low, high = values.aminmax(dim=1, keepdim=True)
    if symmetric:
        high = values.abs().amax(dim=1, keepdim=True)
        low = -high
    largest_code = 2**bits - 1
    step = (high - low) / largest_code
    arithmetic = 4 * 2.0**-24 * values.abs().amax(dim=1, keepdim=True)
    if bits == 8:
        return step / 2 + 1e-8 + largest_code * step * 2.0**-24 + arithmetic
    return step / 2 + half_rounding(low) + largest_code * half_rounding(step) + arithmetic


def dtype_rounding(rows: torch.Tensor, bound: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bound the error of storing decoded elements in the dtype of their table."""
    if dtype in (torch.float32, torch.float64):
        return torch.zeros_like(bound)
    info = torch.finfo(dtype)
    largest = rows.double().abs().amax(dim=1, keepdim=True) + bound
    return (largest * info.eps / 2).clamp(min=info.smallest_normal * info.eps / 2)


def decoded(codec: Codec, encoded: Encoded, like: torch.Tensor, n: int) -> torch.Tensor:
    """Decode all ``n`` rows as a reader does: through JSON, in the dtype of ``like``."""
    spec, parameters = json.loads(json.dumps([codec.spec(), encoded.parameters]))
    out = torch.full((n, like.shape[1]), 77, dtype=like.dtype)
    codec_from_spec(spec).decode(encoded.data.view(-1), parameters, n, 0, out)
    return out


def round_trip(
    codec: Codec, rows: torch.Tensor, context: RowContext = NO_CONTEXT
) -> tuple[Encoded, torch.Tensor]:
    """Encode and decode rows as a chunk does: exceptions exactly."""
    encoded = codec.encode(rows, context=context)
    back = decoded(codec, encoded, rows, len(rows))
    back[encoded.exceptions] = rows[encoded.exceptions]
    return encoded, back


def relative_errors(changed: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return ``(n,)`` l2 errors relative to the rows; 0 for rows of zeros that stayed zeros."""
    values = rows.double()
    return (changed.double() - values).norm(dim=1) / values.norm(dim=1).clamp(min=1e-300)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Set the number of torch's threads during the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
