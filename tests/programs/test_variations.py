"""Restore everything that teams change in a training program, to the last attribute."""

from __future__ import annotations

import pytest

from tests.programs.conftest import Both
from tests.programs.resuming import compare, compare_bytes
from tests.programs.variations import VARIATIONS

OFTEN = {
    *("WarmUpAndClippingInside", "KernelsLag", "ReplayBuffer", "InsideAnother"),
}
"""The variations that each `make test` runs."""


@pytest.mark.parametrize(
    "variation",
    [
        pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow)
        for name in sorted(VARIATIONS)
    ],
)
def test_every_live_object_comes_back(both: Both, variation: str) -> None:
    resumed, wanted = both("variations", variation=variation)
    compare(resumed, wanted)
    compare_bytes(resumed, wanted)
