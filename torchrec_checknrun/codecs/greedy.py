"""The greedy search's parameters, chosen on a sample as the paper does (section 4.2.3).

A sweep over few rows shows the same mean error as the whole table; the smallest value after which
the error gains little is taken, since the search's time grows with both.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from torchrec_checknrun.codecs.kernel import Method, Refusal, decode_rows, encode_rows, row_bytes

T = TypeVar("T", bound=float)

SAMPLE_ROWS = 256
BINS = (5, 10, 15, 20, 25, 30, 35, 40, 45, 50)
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
FLAT = 0.01
"""A gain below this part of what the whole sweep gains counts as flat."""


def choose_greedy(
    rows: torch.Tensor,
    ids: torch.Tensor | None,
    bits: int,
    num_bins: int | None = None,
    ratio: float | None = None,
) -> tuple[int, float]:
    """``num_bins`` and ``ratio`` for a block of rows; what is given stays.

    Args:
        rows: ``(m, dim)``; ids: which of them, None for all.
    """
    if ids is None:
        ids = torch.arange(len(rows), device=rows.device)
    sample = rows.index_select(0, ids[:: max(1, -(-len(ids) // SAMPLE_ROWS))]).to(torch.float64)
    magnitude = sample.abs().amax(dim=1)
    magnitude = magnitude[magnitude.isfinite() & (magnitude > 0)]
    if len(magnitude):  # as a block of rows that are tiny or huge is scaled before it is encoded
        sample *= 2.0 ** -torch.frexp(magnitude.median()).exponent
    sample = sample.to(torch.float32)
    bins = BINS if num_bins is None else (num_bins,)
    ratios = RATIOS if ratio is None else (ratio,)
    chosen = _knee(bins, [mean_error(sample, bits, n, ratios[-1]) for n in bins])
    return chosen, _knee(ratios, [mean_error(sample, bits, chosen, r) for r in ratios])


def mean_error(rows: torch.Tensor, bits: int, num_bins: int, ratio: float) -> float:
    """Mean l2 error of rows ``(n, dim)`` float32, quantized by the greedy search; of those that can
    be quantized.
    """
    encoded = torch.empty(
        (len(rows), row_bytes(rows.shape[1], bits)), dtype=torch.uint8, device="cpu"
    )
    refused = encode_rows(rows, None, bits, Method.GREEDY, num_bins, ratio, 1.0, encoded)
    decoded = torch.empty_like(rows, device="cpu")
    decode_rows(encoded, bits, 1.0, decoded)
    error = (decoded - rows.cpu())[refused == Refusal.NONE].norm(dim=1)
    return float(error.mean()) if len(error) else 0.0


def _knee(values: tuple[T, ...], errors: list[float]) -> T:
    """The smallest value whose error is within a little of the best one's."""
    best, worst = min(errors), max(errors)
    allowed = best + FLAT * (worst - best)
    return next(v for v, error in zip(values, errors, strict=True) if error <= allowed)
