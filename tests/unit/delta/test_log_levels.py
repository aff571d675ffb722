"""Number values by levels at equal ratios, and store the numbers or their differences."""

from __future__ import annotations

import bisect
import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from torchrec_checknrun.delta import log_levels
from torchrec_checknrun.delta.log_levels import MOST_CODE, NONE, codes_of, decode, encode, values_of
from torchrec_checknrun.delta.payload import join

NAN, INFINITY = MOST_CODE, MOST_CODE - 1
FLOATS = st.one_of(
    st.floats(width=32),
    st.floats(0, 2.0**-126, width=32, allow_subnormal=True),
    st.sampled_from([0.0, -0.0, 2.0**-149, math.inf, -math.inf, math.nan, 3.4028234663852886e38]),
)


def plain_levels() -> list[float]:
    """Round all powers of two by eighths to fp32 in plain Python."""
    found = {_fp32(2.0 ** (k / 8)) for k in range(-149 * 8, 128 * 8)}
    return sorted({0.0, *found, 3.4028234663852886e38})


def _fp32(value: float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


PLAIN = plain_levels()


def test_levels_are_those_of_the_page() -> None:
    levels = log_levels.levels().tolist()
    assert levels[:INFINITY] == PLAIN
    assert levels[INFINITY] == math.inf
    assert math.isnan(levels[NAN])
    assert len(levels) == NAN + 1 == 2202


def code_of(value: float) -> int:
    return int(codes_of(torch.tensor([value]))[0])


@settings(max_examples=examples(400))
@given(FLOATS)
def test_each_value_has_a_level_beside_it(value: float) -> None:
    code = code_of(value)
    (restored,) = values_of(np.array([code], np.int16)).tolist()
    if math.isnan(value):
        assert code == NAN
        assert math.isnan(restored)
    elif math.isinf(value) or value == 0:
        assert restored == value
    else:
        exact, found = abs(Fraction(value)), abs(Fraction(restored))
        at = bisect.bisect_left(PLAIN, abs(value))
        around = [Fraction(level) for level in PLAIN[max(1, at - 1) : at + 1]]
        if exact < Fraction(1, 2**126):
            around = [min(around, key=lambda level: abs(level - exact))]
        assert found in around
        assert found == exact or exact not in around
        assert abs(found - exact) <= exact * Fraction(91, 1000) + Fraction(1, 2**150)
        assert math.copysign(1, restored) == math.copysign(1, value)
        assert restored != 0
    assert code_of(restored) == code


@pytest.mark.parametrize("scale", [2.0**-100, 1.0, 3e30])
def test_values_are_right_in_the_mean(scale: float) -> None:
    values = (torch.rand(100_000, generator=torch.Generator().manual_seed(1)) + 0.5) * scale
    restored = values_of(codes_of(values))
    apart = (restored.double() - values.double()) / values.double()
    assert abs(float(apart.mean())) < 1e-3
    assert float(apart.square().mean().sqrt()) < 0.037
    # Whatever the next level is from the value: a tenth of all values has a small part of the way.
    lower = values.double().log2().mul(8).floor().div(8).exp2()
    part = (values.double() / lower - 1) / (2 ** (1 / 8) - 1)
    for start in np.arange(0, 1, 0.1).tolist():
        chosen = (part >= start) & (part < start + 0.1)
        up = (restored.double() > values.double())[chosen].double().mean()
        assert abs(float(up) - float(part[chosen].mean())) < 0.02


def test_sums_grow_through_many_restores() -> None:
    """Move by a third of a level between two of them, which the nearest level never shows."""
    generator = torch.Generator().manual_seed(2)
    sums = torch.rand(50_000, generator=generator) * 4 + 1
    exact = sums.double()
    for _ in range(20):
        growth = sums * 0.06 * torch.rand(len(sums), generator=generator)
        sums, exact = values_of(codes_of(sums + growth)), exact * (sums + growth).double() / sums
    assert float(sums.double().sum() / exact.sum()) == pytest.approx(1, abs=0.01)


def test_all_codes_are_kept() -> None:
    codes = np.arange(-INFINITY, NAN + 1, dtype=np.int16)
    assert np.array_equal(codes_of(values_of(codes)), codes)


@settings(max_examples=examples(200))
@given(st.data())
def test_codes_come_back_upon_any_predecessors(data: st.DataObject) -> None:
    rows = data.draw(st.integers(0, 40))
    near = st.integers(-INFINITY, NAN)
    codes = np.array(data.draw(st.lists(near, min_size=rows, max_size=rows)), np.int16)
    change = st.integers(-140, 140)
    moved = np.array(data.draw(st.lists(change, min_size=rows, max_size=rows)), np.int16)
    before = np.clip(codes + moved, -INFINITY, NAN).astype(np.int16)
    before[np.array(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)), bool)] = NONE
    start = data.draw(st.integers(0, rows))
    chosen = slice(start, data.draw(st.integers(start, rows)))
    payload = encode(codes, before)
    assert np.array_equal(decode(payload, rows, before), codes)
    assert np.array_equal(decode(payload, rows, before[chosen], chosen), codes[chosen])
    alone = encode(codes)
    for upon in (None, before):
        assert np.array_equal(decode(alone, rows, upon), codes)
    if (before != NONE).any() and (abs(codes.astype(int) - before) < 128).any():
        with pytest.raises(ValueError, match="without predecessors"):
            decode(payload, rows)


def test_no_values() -> None:
    assert len(codes_of(torch.zeros(0))) == 0
    assert len(decode(encode(np.empty(0, np.int16)), 0)) == 0


def payload_of(symbols: list[int], low: list[int], high: list[int]) -> torch.Tensor:
    data = np.array([*symbols, *low, *high], np.int64).astype(np.uint8)
    return join(data, [len(symbols), len(low), len(high)])


BEFORE = np.array([5, NONE, MOST_CODE, -INFINITY], np.int16)
HOSTILE = {
    "a difference to nothing": ("not known", payload_of([0, 1, 0, 0], [], [])),
    "beyond the largest code": ("beyond", payload_of([0, -128, 1, 0], [0], [0])),
    "below the least code": ("beyond", payload_of([0, -128, 0, -1], [0], [0])),
    "a large code alone": ("beyond", payload_of([0, -128, 0, 0], [255], [127])),
    "no code": ("beyond", payload_of([0, -128, 0, 0], [0], [128])),
    "too few codes": ("no zstd frame", payload_of([0, -128, -128, 0], [1], [0])),
    "too many codes": ("can't hold", payload_of([0, -128, 0, 0], [1, 1], [0, 0])),
    "fewer rows": ("no zstd frame", payload_of([0, -128, 0], [1], [0])),
    "another version": ("version", torch.cat([torch.tensor([9], dtype=torch.uint8),
                                              payload_of([0, -128, 0, 0], [0], [0])[1:]])),
    "nothing": ("version", torch.empty(0, dtype=torch.uint8)),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_payloads_are_refused(name: str) -> None:
    words, payload = HOSTILE[name]
    with pytest.raises(ValueError, match=words):
        decode(payload, 4, BEFORE)


@settings(max_examples=examples(300))
@given(st.data())
def test_damaged_payloads_give_codes_or_are_refused(data: st.DataObject) -> None:
    codes = np.array([7, 900, 901, 902, 0, 2000] * 8, np.int16)
    before = np.array([9, NONE, 900, 0, 0, 1999] * 8, np.int16)
    payload = encode(codes, before).clone()
    for at in data.draw(st.lists(st.integers(0, len(payload) - 1), min_size=1, max_size=3)):
        payload[at] = data.draw(st.integers(0, 255))
    try:
        found = decode(payload, len(codes), before)
    except ValueError:
        return
    assert (found >= -INFINITY).all()
    assert (found <= NAN).all()


def test_modified_rows_take_clearly_less_than_a_byte() -> None:
    """Sums that have grown by up to a third since the checkpoint before, over 20 octaves."""
    generator = torch.Generator().manual_seed(0)
    sums = torch.rand(1 << 16, generator=generator).mul(20).sub(15).exp2()
    grown = sums * (1 + torch.rand(len(sums), generator=generator) / 3)
    link = encode(codes_of(grown), codes_of(sums))
    assert len(link) < 0.35 * len(sums)
