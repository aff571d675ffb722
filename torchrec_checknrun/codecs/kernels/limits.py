"""Limits and search steps that the NumPy and the GPU kernel share; ``csrc/`` repeats them."""

from __future__ import annotations

import numpy as np

from torchrec_checknrun.codecs.base import Method

CUTS = {2: 0.18, 3: 0.08, 4: 0.02}
"""Part of a row's range, by bits, that the search cuts off at either end before it starts."""
MOVES = (0.4, 0.2)
"""Parts of a step by which the search then moves the ends."""
MOST_HALF = 65504.0
"""The largest float16."""
MOST_FLOAT = 8.5e37
"""A quarter of the largest float32: ranges stay finite."""
SMALL = 2.0**-6
LEAST_RANGES = {2: 6e-7, 3: 3.2e-6, 4: 1.5e-5, 8: 5.5e-6}
"""Range, by bits, below which the last code isn't stable in rows of values below ``SMALL``."""
_LEAST = 2.0**-16
"""Magnitude below which a fp16 scale has too few bits."""
_LEAST_HALVED = 2.0**-15
"""Step below which half a symmetric scale is subnormal."""


def least_magnitude(bits: int, method: Method) -> np.float32:
    """Return the least magnitude of a row that can be encoded without scaling."""
    if method == Method.SYMMETRIC and bits < 8:
        return np.float32(_LEAST_HALVED * (2**bits - 1))
    return np.float32(_LEAST)
