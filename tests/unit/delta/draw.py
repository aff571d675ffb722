"""Draw rows, steps and predecessors that are hard to encode, and choose the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import strategies as st

from torchrec_checknrun.delta import kernel
from torchrec_checknrun.delta.layout import stands_alone
from torchrec_checknrun.delta.payload import symbols_of
from torchrec_checknrun.delta.rows import EXACT, LEAST_EXPONENT, MOST_EXPONENT, Grid, encode
from torchrec_checknrun.native import has_extension

SEEDS = st.integers(0, 2**32 - 1)
DIMS = st.one_of(st.integers(1, 40), st.sampled_from([64, 128, 511, 512]))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KERNELS: list[str] = ["numpy", *(torch.ops.checknrun.kernel_builds() if has_extension() else [])]


@contextmanager
def using(name: str) -> Iterator[None]:
    """Use one of ``KERNELS`` during the block."""
    with (
        patch.object(kernel, "has_extension", lambda: name != "numpy"),
        patch.object(kernel, "BUILD", "" if name == "numpy" else name),
    ):
        yield


def drawn_rows(rng: np.random.Generator, n: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw rows of all magnitudes; some constant, zero, denormal, not finite, or of one value."""
    scale = 2.0 ** rng.integers(-12, 4, (n, 1))
    kind = rng.integers(0, 16, n)
    scale[kind == 0] = 2.0 ** rng.integers(-140, 120)
    rows = rng.standard_normal((n, dim)) * scale
    rows[kind == 1] = 0.0
    rows[kind == 2] = -0.0
    rows[kind == 3] *= 2.0**-135
    rows[kind == 4, 1:] = 0.0
    rows[kind == 5] = np.rint(rows[kind == 5] * 8) / 16  # halfway between codes
    with np.errstate(over="ignore"):
        found = rows.astype(np.float32)
    for row in np.flatnonzero(kind >= 13):
        spoilt = [np.nan, np.inf, 65504.0, -65519.0, 3.4e38, 1e-45, -1e-40]
        found[row, rng.integers(0, dim)] = rng.choice(spoilt)
    return torch.from_numpy(found).to(dtype)


def drawn_steps(rng: np.random.Generator, n: int) -> np.ndarray:
    """Draw wanted exponents: mostly like the rows', some extreme, some for exact rows."""
    wanted = rng.integers(-24, 2, n).astype(np.int16)
    wild = rng.random(n) < 0.15
    extremes = [EXACT, EXACT + 1, LEAST_EXPONENT, -126, -125, 5, 12, MOST_EXPONENT, 32767]
    wanted[wild] = rng.choice(extremes, int(wild.sum()))
    return wanted


def drawn_predecessors(
    rng: np.random.Generator, weight: torch.Tensor, dtype: torch.dtype
) -> Grid | None:
    """Draw what a base holds: rows near the ones given, on coarser and finer grids, or others."""
    n, dim = weight.shape
    if rng.random() < 0.2:
        return None
    near = weight.float() * torch.from_numpy(1 + rng.normal(0, 0.01, (n, 1)).astype(np.float32))
    other = rng.random(n) < 0.2
    near[torch.from_numpy(other)] = drawn_rows(rng, int(other.sum()), dim, torch.float32)
    with using("numpy"):
        found = encode(near.to(dtype), drawn_steps(rng, n))[1]
    gone = rng.random(n) < 0.1
    found.kind[gone], found.exponent[gone], found.codes[gone] = 0, 0, 0
    return found


def same(one: Grid, other: Grid) -> bool:
    """Return whether rows are the same to the bit."""
    return (
        np.array_equal(one.kind, other.kind)
        and np.array_equal(one.exponent, other.exponent)
        and np.array_equal(one.codes, other.codes)
    )


def copy_of(rows: Grid) -> Grid:
    return Grid(rows.kind.copy(), rows.exponent.copy(), rows.codes.copy())


def part_of(rows: Grid, chosen: np.ndarray | slice, columns: slice = slice(None)) -> Grid:
    """Return some rows and columns."""
    return Grid(rows.kind[chosen], rows.exponent[chosen], rows.codes[chosen][:, columns])


def has_links(payload: torch.Tensor, rows: int, dim: int) -> bool:
    """Return whether any row of a payload is a difference to a predecessor.

    Raises:
        ValueError: no encoder writes such a payload.
    """
    symbols = symbols_of(payload, rows)
    kernel.stream_sizes(symbols, dim)
    return not bool(stands_alone(symbols).all())
