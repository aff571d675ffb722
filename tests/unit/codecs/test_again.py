"""Rows that were decoded are encoded to the same again, or to their last bit, however often."""

from __future__ import annotations

import pytest
import torch

from torchrec_checknrun.codecs import Method, Rowwise

PASSES = 8
LAST_BITS = {torch.float32: PASSES * 2.0**-22, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
"""By the table's type, as parts of a row's largest value: a last bit of fp32 may add up."""


def passed(codec: Rowwise, rows: torch.Tensor) -> torch.Tensor:
    encoded, found = codec.encode(rows), torch.empty_like(rows)
    codec.decode(encoded.data.view(-1), encoded.parameters, len(rows), 0, found)
    return found


@pytest.mark.parametrize("dtype", LAST_BITS, ids=str)
@pytest.mark.parametrize("method", [method.name.lower() for method in Method])
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_passes_hardly_move_rows(bits: int, method: str, dtype: torch.dtype) -> None:
    codec, draw = Rowwise(bits, method), torch.Generator().manual_seed(bits)
    first = passed(codec, torch.randn(500, 20, generator=draw).to(dtype))
    last = first
    for _ in range(PASSES):
        last = passed(codec, last)
    if dtype == torch.float32 and bits < 8:
        assert torch.equal(first, last)
    moved = (last.double() - first.double()).abs()
    largest = first.double().abs().amax(dim=1, keepdim=True)
    assert bool((moved <= LAST_BITS[dtype] * largest).all())
