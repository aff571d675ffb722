"""Compare all kernels of the delta codec with exact fractions, and replay and merge chains."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.delta import reference
from tests.unit.delta.draw import (
    DIMS,
    DTYPES,
    KERNELS,
    SEEDS,
    copy_of,
    drawn_predecessors,
    drawn_rows,
    drawn_steps,
    has_links,
    part_of,
    same,
    using,
)
from tests.unit.quantized_rows import threads
from torchrec_checknrun.delta.rows import (
    EXACT,
    Grid,
    Kind,
    apply,
    encode,
    encode_grid,
    values_of,
)


@settings(max_examples=examples(150), deadline=None)
@given(SEEDS, st.integers(1, 40), DIMS, st.sampled_from(DTYPES))
def test_all_kernels_give_the_same_bytes_and_rows(
    seed: int, n: int, dim: int, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(seed)
    weight, wanted = drawn_rows(rng, n, dim, dtype), drawn_steps(rng, n)
    before = drawn_predecessors(rng, weight, dtype)
    kept = before and copy_of(before)
    with using("numpy"):
        expected, rows = encode(weight, wanted, before)
    assert same(rows, reference.restored(weight, wanted, before))
    expected_values = reference.values_of(rows).tobytes()
    for name in KERNELS:
        with using(name):
            payload, after = encode(weight, wanted, before)
            assert same(after, rows), name
            assert torch.equal(payload, expected), name
            assert same(apply(payload, n, dim, before), rows), name
            assert values_of(after, torch.float32).numpy().tobytes() == expected_values
            again = apply(encode_grid(rows), n, dim)
            assert same(again, rows), name
            assert torch.equal(encode_grid(rows, before), expected), name
    assert before is None or kept is None or same(before, kept)


@settings(max_examples=examples(60), deadline=None)
@given(SEEDS, st.integers(1, 40), DIMS, st.sampled_from(KERNELS))
def test_chosen_rows_and_columns(seed: int, n: int, dim: int, name: str) -> None:
    rng = np.random.default_rng(seed)
    weight, wanted = drawn_rows(rng, n, dim, torch.float32), drawn_steps(rng, n)
    before = drawn_predecessors(rng, weight, torch.float32)
    chosen = np.flatnonzero(rng.random(n) < 0.5)
    first, last = sorted(rng.integers(0, dim + 1, 2).tolist())
    columns = slice(first, last)
    with using(name):
        payload, after = encode(weight, wanted, before)
        base = before and part_of(before, chosen, columns)
        found = apply(payload, n, dim, base, chosen, columns)
    assert same(found, part_of(after, chosen, columns))


@settings(max_examples=examples(25, quick=3), deadline=None)
@given(SEEDS, st.integers(1, 30), DIMS, st.sampled_from(DTYPES))
def test_twenty_links_replay_to_the_bit(seed: int, n: int, dim: int, dtype: torch.dtype) -> None:
    """Write each link by any kernel, cut into chunks anywhere; replay with every kernel, whole, and
    in two ranges of columns.
    """
    rng = np.random.default_rng(seed)
    weight = drawn_rows(rng, n, dim, dtype)
    grids = {name: Grid.none(n, dim) for name in KERNELS}
    middle = int(rng.integers(0, dim + 1))
    halves = [slice(0, middle), slice(middle, dim)]
    split = [Grid.none(n, middle), Grid.none(n, dim - middle)]
    truth = Grid.none(n, dim)
    for link in range(21):
        touched = np.arange(n) if link == 0 else np.flatnonzero(rng.random(n) < 0.4)
        moved = weight[touched].float() + torch.from_numpy(
            (rng.standard_normal((len(touched), dim)) * 2.0**-6).astype(np.float32)
        )
        weight[touched] = moved.to(dtype)
        if link % 5 == 4 and n > 2:
            weight[touched[:1]] = drawn_rows(rng, len(touched[:1]), dim, dtype)
        wanted = drawn_steps(rng, n)
        cuts = [0, *sorted(rng.integers(0, len(touched) + 1, 2).tolist()), len(touched)]
        for start, stop in itertools.pairwise(cuts):
            ids = touched[start:stop]
            with using(str(rng.choice(KERNELS))):
                payload, after = encode(weight[ids], wanted[ids], part_of(truth, ids))
            put(truth, ids, after)
            for name, grid in grids.items():
                with using(name):
                    put(grid, ids, apply(payload, len(ids), dim, part_of(grid, ids)))
            for grid, columns in zip(split, halves, strict=True):
                with using(str(rng.choice(KERNELS))):
                    base = part_of(grid, ids)
                    put(grid, ids, apply(payload, len(ids), dim, base, columns=columns))
    for grid in grids.values():
        assert same(grid, truth)
    for grid, columns in zip(split, halves, strict=True):
        assert same(grid, part_of(truth, slice(None), columns))


def put(rows: Grid, ids: np.ndarray, part: Grid) -> None:
    rows.kind[ids], rows.exponent[ids], rows.codes[ids] = part.kind, part.exponent, part.codes


@settings(max_examples=examples(40), deadline=None)
@given(SEEDS, st.integers(1, 30), DIMS, st.integers(2, 6), st.sampled_from(KERNELS))
def test_links_add_up(seed: int, n: int, dim: int, links: int, name: str) -> None:
    """The integers of links, summed on the last grid, are those of the merged link, and what the
    last row has beyond the first: however the sum is grouped.
    """
    rng = np.random.default_rng(seed)
    weight = torch.from_numpy(rng.standard_normal((n, dim)).astype(np.float32))
    wanted = rng.integers(-12, -3, n).astype(np.int16)
    with using(name):
        base = rows = encode(weight, wanted)[1]
        total = np.zeros((n, dim), np.int64)
        payloads = []
        for _ in range(links):
            weight = weight + torch.from_numpy(rng.normal(0, 0.05, (n, dim)).astype(np.float32))
            wanted = (wanted - rng.integers(0, 2, n)).astype(np.int16)
            payload, after = encode(weight, wanted, rows)
            assert has_links(payload, n, dim)
            shift = (rows.exponent - after.exponent).astype(np.int64)[:, None]
            total = (total << shift) + (after.codes - (rows.codes.astype(np.int64) << shift))
            payloads.append(payload)
            rows = after
        merged = encode_grid(rows, base)
        assert same(apply(merged, n, dim, base), rows)
        shift = (base.exponent - rows.exponent).astype(np.int64)[:, None]
        assert np.array_equal((base.codes.astype(np.int64) << shift) + total, rows.codes)
        middle = int(rng.integers(0, links + 1))
        found = base
        for payload in payloads[:middle]:
            found = apply(payload, n, dim, found)
        rest = encode_grid(rows, found)
        assert same(apply(rest, n, dim, found), rows)


@settings(max_examples=examples(60), deadline=None)
@given(SEEDS, st.integers(1, 30), DIMS, st.sampled_from(DTYPES), st.sampled_from(KERNELS))
def test_errors_stay_below_half_a_step(
    seed: int, n: int, dim: int, dtype: torch.dtype, name: str
) -> None:
    rng = np.random.default_rng(seed)
    weight, wanted = drawn_rows(rng, n, dim, dtype), drawn_steps(rng, n)
    before = drawn_predecessors(rng, weight, dtype)
    with using(name):
        after = encode(weight, wanted, before)[1]
        values = values_of(after, torch.float32).double().numpy()
    given_rows = weight.double().numpy()
    on_grid = after.kind == Kind.GRID
    step = np.ldexp(1.0, after.exponent.astype(int))[:, None]
    assert (np.abs(values[on_grid] - given_rows[on_grid]) <= step[on_grid] / 2).all()
    largest = np.abs(np.where(on_grid[:, None], given_rows, 0)).max(axis=1)
    floor = np.where(largest > 0, np.frexp(largest)[1] - 24, -149).clip(-149)
    coarse = on_grid & (after.exponent > np.maximum(wanted, floor))
    assert not coarse.any()
    if before is not None:
        builds = on_grid & (before.kind == Kind.GRID) & (after.exponent > before.exponent)
        with using(name):
            other = Grid.none(n, dim)
            payload, _ = encode(weight, wanted, before)
            alone = np.flatnonzero(builds)
            assert same(apply(payload, n, dim, part_of(other, alone), alone), part_of(after, alone))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_rows_keep_every_bit(name: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(3)
    bits = rng.integers(-(2**31), 2**31, (500, 24)).astype(np.int32)
    weight = torch.from_numpy(bits).view(torch.float32)
    if dtype != torch.float32:
        weight = torch.from_numpy(bits.astype(np.int16)).view(dtype)
        weight = torch.where(torch.isnan(weight), torch.nan, weight)
    with using(name):
        payload, after = encode(weight, np.full(500, EXACT, np.int16))
        back = values_of(apply(payload, 500, 24), dtype)
    assert (after.kind == Kind.VERBATIM).all()
    assert torch.equal(back.view(torch.uint8), weight.view(torch.uint8))


@pytest.mark.parametrize("name", KERNELS)
def test_nans_of_bfloat16_keep_their_bits(name: str) -> None:
    weight = torch.tensor([[0x7F81, -1, 0x7FC0, 0x3F80]], dtype=torch.int32).to(torch.int16)
    with using(name):
        payload, _ = encode(weight.view(torch.bfloat16), np.zeros(1, np.int16))
        back = values_of(apply(payload, 1, 4), torch.bfloat16)
    assert torch.equal(back.view(torch.int16), weight)


@pytest.mark.parametrize("name", KERNELS)
def test_what_would_overflow_fp16_is_kept_exactly(name: str) -> None:
    weight = torch.tensor([[65504.0, 1.0], [65504.0, 1.0], [32.0, 64.0]]).half()
    with using(name):
        payload, after = encode(weight, np.array([5, 6, 6], np.int16))
        back = values_of(apply(payload, 3, 2), torch.float16)
    assert after.kind.tolist() == [Kind.GRID, Kind.VERBATIM, Kind.GRID]
    assert back.tolist() == [[65504.0, 0.0], [65504.0, 1.0], [0.0, 64.0]]


@pytest.mark.skipif(len(KERNELS) == 1, reason="the extension was not built")
@pytest.mark.parametrize("name", KERNELS[1:])
def test_denormals_count_where_the_processor_flushes_them(name: str) -> None:
    rng = np.random.default_rng(5)
    values = (rng.standard_normal((40, 33)) * 2.0 ** rng.integers(-149, -120, (40, 1))).astype("f4")
    wanted = rng.integers(-149, -118, 40).astype(np.int16)
    weight = torch.from_numpy(values)
    with using(name):
        payload, after = encode(weight, wanted)
        expected = values_of(after, torch.float32)
        assert torch.set_flush_denormal(True)
        try:
            with threads(1):
                again, rows = encode(weight, wanted)
                back = values_of(rows, torch.float32)
        finally:
            torch.set_flush_denormal(False)
    assert torch.equal(again, payload)
    assert same(rows, after)
    assert torch.equal(back.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("name", KERNELS)
def test_any_number_of_threads(name: str) -> None:
    rng = np.random.default_rng(11)
    weight = drawn_rows(rng, 6001, 40, torch.float32)
    before = drawn_predecessors(rng, weight, torch.float32) or Grid.none(6001, 40)
    wanted = drawn_steps(rng, 6001)
    chosen = np.flatnonzero(rng.random(6001) < 0.7)
    found = []
    for number in (1, 2, 3, 7):
        with threads(number), using(name):
            payload, after = encode(weight, wanted, before)
            part = apply(payload, 6001, 40, part_of(before, chosen), chosen)
            found.append((payload, after, part))
    for payload, after, part in found:
        assert torch.equal(payload, found[0][0])
        assert same(after, found[0][1])
        assert same(part, part_of(after, chosen))


@pytest.mark.parametrize("name", KERNELS)
def test_no_rows(name: str) -> None:
    with using(name):
        nothing = torch.from_numpy(np.empty((0, 7), np.float32))  # of strides zero
        payload, after = encode(nothing, np.empty(0, np.int16))
        assert len(after) == 0
        assert len(apply(payload, 0, 7)) == 0
        assert not has_links(payload, 0, 7)


@pytest.mark.parametrize("name", KERNELS)
def test_rows_of_a_wider_table(name: str) -> None:
    table = drawn_rows(np.random.default_rng(1), 30, 57, torch.float32)
    wanted = drawn_steps(np.random.default_rng(2), 30)
    with using(name):
        assert torch.equal(
            encode(table[:, 20:41], wanted)[0], encode(table[:, 20:41].contiguous(), wanted)[0]
        )
        assert torch.equal(
            encode(table.t()[:30, :30], wanted)[0],
            encode(table.t()[:30, :30].contiguous(), wanted)[0],
        )


@pytest.mark.parametrize("name", KERNELS)
def test_rows_without_a_grid_are_refused(name: str) -> None:
    sound = Grid(np.array([1], np.uint8), np.array([-3], np.int16), np.array([[5, -6]], np.int32))
    with using(name):
        assert len(encode_grid(sound))
        for field, value in [("kind", 0), ("kind", 3), ("exponent", -150), ("exponent", 105)]:
            spoilt = copy_of(sound)
            getattr(spoilt, field)[0] = value
            with pytest.raises(ValueError, match="a row"):
                encode_grid(spoilt)
        for code in (1 << 24, -(1 << 24), -(1 << 31)):
            spoilt = copy_of(sound)
            spoilt.codes[0, 1] = code
            with pytest.raises(ValueError, match="exceeds"):
                encode_grid(spoilt)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("spread", [-1.2, 0.6])
def test_chunks_of_4096_rows_are_nearly_as_small_as_their_entropy(
    name: str, dim: int, spread: float
) -> None:
    """Within 6 %, as the documentation says; ``recipes.benchmarks.codecs`` measures more."""
    from recipes.benchmarks.delta_cases import entropy_bytes, link_rows

    weight, wanted, before = link_rows(4096, dim, spread)
    with using(name):
        payload, after = encode(weight, wanted, before)
    assert payload.numel() <= 1.06 * entropy_bytes(before, after)
