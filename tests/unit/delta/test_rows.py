"""Links add up to the bit: against plain whole numbers, over long chains, in any grouping."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.chains import same_bits
from tests.unit.delta.draw import has_links
from tests.unit.delta.plain import PlainRow, expected, row_of, same_rows
from torchrec_checknrun.delta.rows import (
    EXACT,
    MOST_CODE,
    Grid,
    Kind,
    apply,
    encode,
    encode_grid,
    values_of,
    verbatim,
)

pytestmark = pytest.mark.usefixtures("small_operations")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OVERFLOW = {torch.float32: 2.0**128, torch.bfloat16: 3.3961775292304957e38, torch.float16: 65520.0}
"""Magnitudes from which rounding to the type gives infinity."""


def random_rows(
    rng: np.random.Generator, n: int, dim: int, dtype: torch.dtype, scale: float
) -> torch.Tensor:
    """Draw rows of very different sizes; some are zero, denormal, huge, or not finite."""
    rows = rng.standard_normal((n, dim)) * scale * np.exp2(rng.integers(-12, 4, (n, 1)))
    special = rng.random(n)
    rows[special < 0.05] = 0.0
    rows[(special > 0.05) & (special < 0.09)] *= 2.0**-140
    rows[(special > 0.09) & (special < 0.12)] *= 2.0**100
    weight = torch.from_numpy(rows.astype(np.float32)).to(dtype)
    if n and dim:
        weight[torch.from_numpy((special > 0.12) & (special < 0.15)), 0] = float("nan")
        weight[torch.from_numpy((special > 0.15) & (special < 0.17)), -1] = float("-inf")
    return weight


def random_steps(rng: np.random.Generator, n: int) -> np.ndarray:
    wanted = rng.integers(-30, 2, n)
    special = rng.random(n)
    wanted[special < 0.1] = EXACT
    wanted[(special > 0.1) & (special < 0.13)] = -149
    wanted[(special > 0.13) & (special < 0.15)] = 104
    return wanted.astype(np.int16)


@settings(max_examples=examples(100), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 12),
    dim=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
    links=st.integers(1, 6),
)
def test_rows_are_what_the_rules_say(
    seed: int, n: int, dim: int, dtype: torch.dtype, links: int
) -> None:
    rng = np.random.default_rng(seed)
    before: Grid | None = None
    for _ in range(links):
        weight, wanted = random_rows(rng, n, dim, dtype, 1.0), random_steps(rng, n)
        payload, after = encode(weight, wanted, before)
        # Torch's own conversion of fp16 gives NaNs other bits in short rows than in long ones.
        half = weight.dtype == torch.float16
        values = weight.numpy().astype(np.float32).tolist() if half else weight.float().tolist()
        for at in range(n):
            known = PlainRow() if before is None else row_of(before, at)
            rule = expected(known, values[at], int(wanted[at]), OVERFLOW[dtype])
            if rule.bits is None:
                assert row_of(after, at) == rule, (at, values[at], wanted[at])
            else:
                assert after.kind[at] == Kind.VERBATIM
                assert same_bits(values_of(rows_at(after, np.array([at])), dtype), weight[[at]])
        assert same_rows(apply(payload, n, dim, before), after)
        before = after


@pytest.mark.parametrize("dim", [1, 2, 3, 7, 8, 16, 31, 64, 127, 128, 512])
@pytest.mark.parametrize("dtype", DTYPES)
def test_twenty_links_replayed_and_merged(dim: int, dtype: torch.dtype) -> None:
    """Replay rows modified at random; a base made of the integers restores the same bits."""
    n, rng = 60, np.random.default_rng(dim)
    weight = random_rows(rng, n, dim, dtype, 0.1)
    payload, live = encode(weight, random_steps(rng, n))
    replayed = apply(payload, n, dim)
    for _ in range(20):
        chosen = np.flatnonzero(rng.random(n) < 0.4)
        if not len(chosen):
            continue
        places = torch.from_numpy(chosen)
        weight[places] += random_rows(rng, len(chosen), dim, dtype, 0.01)
        wanted = random_steps(rng, len(chosen))
        payload, after = encode(weight[places], wanted, rows_at(live, chosen))
        put(live, chosen, after)
        put(replayed, chosen, apply(payload, len(chosen), dim, rows_at(replayed, chosen)))
    assert same_rows(replayed, live)
    assert same_rows(apply(encode_grid(live), n, dim), live)
    numbers = values_of(live, torch.float32).double()
    for row in np.flatnonzero(live.kind == Kind.GRID).tolist():
        exact = live.codes[row].astype(np.float64) * 2.0 ** int(live.exponent[row])
        assert numbers[row].tolist() == exact.tolist()


def rows_at(rows: Grid, chosen: np.ndarray) -> Grid:
    return Grid(rows.kind[chosen], rows.exponent[chosen], rows.codes[chosen])


def put(rows: Grid, chosen: np.ndarray, new: Grid) -> None:
    rows.kind[chosen], rows.exponent[chosen], rows.codes[chosen] = (
        new.kind,
        new.exponent,
        new.codes,
    )


@settings(max_examples=examples(100), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), dim=st.integers(1, 12))
def test_parts_of_a_payload(seed: int, dim: int) -> None:
    """Any rows and columns of a link are applied alone as they are in the whole."""
    rng, n = np.random.default_rng(seed), 25
    weight = random_rows(rng, n, dim, torch.float32, 1.0)
    _, before = encode(weight, random_steps(rng, n))
    payload, after = encode(weight * 1.01, random_steps(rng, n), before)
    chosen = np.flatnonzero(rng.random(n) < 0.5)
    start = int(rng.integers(0, dim))
    columns = slice(start, int(rng.integers(start + 1, dim + 1)))
    part = rows_at(before, chosen)
    part.codes = np.ascontiguousarray(part.codes[:, columns])
    found = apply(payload, n, dim, part, chosen, columns)
    wanted = rows_at(after, chosen)
    assert same_rows(found, Grid(wanted.kind, wanted.exponent, wanted.codes[:, columns]))
    positions, bits = verbatim(payload, n, dim)
    assert np.array_equal(positions, np.flatnonzero(after.kind == Kind.VERBATIM))
    assert np.array_equal(bits, after.codes[positions])


def test_rows_stored_bit_for_bit_keep_every_bit() -> None:
    bits = np.array([[0x7FC12345, -1, 1], [0x00000001, -(1 << 31), 0x7F800000]], np.int64)
    weight = torch.from_numpy(bits.astype(np.int32)).view(torch.float32)
    payload, after = encode(weight, np.full(2, EXACT, np.int16))
    restored = values_of(apply(payload, 2, 3), torch.float32)
    assert restored.numpy().tobytes() == weight.numpy().tobytes()
    assert after.kind.tolist() == [Kind.VERBATIM] * 2


def test_steps_never_grow_and_never_pass_the_floor() -> None:
    weight = torch.tensor([[1.0], [1.0], [2.0**30]])
    _, base = encode(weight, np.array([-10, -10, -10], np.int16))
    assert base.exponent.tolist() == [-10, -10, 7]  # 2**30 has 24 bits above 2**7
    payload, after = encode(weight, np.array([-4, -12, -4], np.int16), base)
    assert after.exponent.tolist() == [-10, -12, 7]
    assert has_links(payload, 3, 1)
    assert abs(after.codes).max() <= MOST_CODE


def test_a_row_that_outgrows_its_codes_stands_alone() -> None:
    _, base = encode(torch.tensor([[1.0]]), np.array([-23], np.int16))
    payload, after = encode(torch.tensor([[2.0]]), np.array([-23], np.int16), base)
    assert after.exponent.tolist() == [-22]
    assert not has_links(payload, 1, 1)
    assert same_rows(apply(payload, 1, 1), after)  # and ignores its predecessor


def test_a_base_has_no_links_and_empty_blocks_are_fine() -> None:
    payload, after = encode(torch.empty((0, 4)), np.empty(0, np.int16))
    assert len(apply(payload, 0, 4)) == len(after) == 0
    payload, _ = encode(torch.ones((3, 4)), np.zeros(3, np.int16))
    assert not has_links(payload, 3, 4)


def link() -> tuple[torch.Tensor, Grid]:
    _, base = encode(torch.ones((2, 3)), np.full(2, -4, np.int16))
    payload, _ = encode(torch.full((2, 3), 1.5), np.full(2, -4, np.int16), base)
    return payload, base


@pytest.mark.parametrize("kind", [Kind.NONE, Kind.VERBATIM])
def test_a_link_without_a_predecessor_is_refused(kind: Kind) -> None:
    payload, base = link()
    base.kind[1] = kind
    with pytest.raises(ValueError, match="predecessor"):
        apply(payload, 2, 3, base)
    with pytest.raises(ValueError, match="predecessor"):
        apply(payload, 2, 3)


def test_a_link_on_another_predecessor_is_refused_where_it_shows() -> None:
    """Digests show the rest: a difference is on a grid finer by so much than its predecessor's."""
    payload, base = link()
    base.codes[0] = MOST_CODE
    with pytest.raises(ValueError, match="exceeds"):
        apply(payload, 2, 3, base)


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_hostile_payloads_are_refused_or_read_within_bounds(data: st.DataObject) -> None:
    """Flip, cut and append bytes: nothing but a ``ValueError``, and no code out of range."""
    payload, base = link()
    raw = bytearray(payload.numpy().tobytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))] + data.draw(st.binary(max_size=3))
    rows, dim = data.draw(st.sampled_from([(2, 3), (3, 2), (1, 6), (2, 4)]))
    before = base if (rows, dim) == (2, 3) else Grid.none(rows, dim)
    hostile = torch.tensor(list(raw), dtype=torch.uint8)
    try:
        found = apply(hostile, rows, dim, before)
    except ValueError:
        return
    on_grid = found.kind == Kind.GRID
    assert (abs(found.codes[on_grid].astype(np.int64)) <= MOST_CODE).all()
    assert ((found.exponent >= -149) & (found.exponent <= 104)).all()
