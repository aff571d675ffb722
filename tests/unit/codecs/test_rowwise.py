"""Check row-wise quantization: error bounds, hard rows, stability."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples, some_of
from tests.unit.quantized_rows import (
    DTYPES,
    LEAST,
    METHODS,
    WIDTHS,
    decoded,
    dtype_rounding,
    error_bound,
    fbgemm_decode,
    fbgemm_encode,
    random_rows,
    relative_errors,
    round_trip,
    rowwise,
    spoil,
)
from torchrec_checknrun.bitwidth import row_bytes
from torchrec_checknrun.codecs import Rowwise, codec_from_spec
from torchrec_checknrun.codecs.kernels.limits import LEAST_RANGES

pytestmark = pytest.mark.usefixtures("either_kernel")

SEEDS = st.integers(0, 2**32 - 1)
DIMS = st.one_of(st.integers(1, 70), st.integers(1, 512))
ROWS = st.one_of(st.integers(0, 3), st.integers(1, 70))
ALL = [(bits, method) for bits in WIDTHS for method in METHODS]
NAN, INF = float("nan"), float("inf")


def unquantizable(rows: torch.Tensor, bits: int, method: str) -> list[int]:
    """Find the rows that are not finite, or out of the range of scale and bias."""
    largest = rows.double().abs().amax(dim=1)
    too_large = 8.5e37 if bits == 8 else 65504
    least = 2.0**-15 * (2**bits - 1) if method == "symmetric" and bits < 8 else LEAST
    wrong = ~(largest <= too_large) | ((largest > 0) & (largest < least))
    # Allow for codes moved by the scale's rounding, or by the 1e-8 that FBGEMM adds to a range at 8
    # bit.
    span = rows.float().amax(dim=1) - rows.float().amin(dim=1)
    wrong |= (span > 0) & (span < LEAST_RANGES[bits]) & (largest < 2.0**-6)
    return wrong.nonzero().view(-1).tolist()


@settings(max_examples=examples(150), deadline=None)
@given(
    SEEDS,
    ROWS,
    DIMS,
    st.sampled_from(WIDTHS),
    st.sampled_from(["asymmetric", "symmetric"]),
    st.sampled_from([*DTYPES, torch.float64]),
)
def test_every_element_is_within_the_bound(
    seed: int, n: int, dim: int, bits: int, method: str, dtype: torch.dtype
) -> None:
    rows = random_rows(seed, n, dim, method).to(dtype)
    rows[~rows.isfinite()] = 2.0  # from 60000 in a bfloat16
    encoded, back = round_trip(Rowwise(bits, method), rows)
    assert encoded.exceptions.tolist() == unquantizable(rows, bits, method)
    if not n:
        return
    bound = error_bound(rows.to(torch.float32), bits, method == "symmetric")
    bound += dtype_rounding(rows, bound, dtype)
    if dtype == torch.float64:
        bound += rows.abs().amax(dim=1, keepdim=True) * 2.0**-24
    error = (back.double() - rows.double()).abs()
    assert bool((error <= bound).all()), (error - bound).max()


@settings(max_examples=examples(100), deadline=None)
@given(SEEDS, ROWS, DIMS, st.sampled_from((2, 3, 4)), st.sampled_from(["greedy", "adaptive"]))
def test_a_search_never_makes_a_row_worse(
    seed: int, n: int, dim: int, bits: int, method: str
) -> None:
    rows = random_rows(seed, n, dim)
    _, searched = round_trip(rowwise(bits, method), rows)
    _, plain = round_trip(Rowwise(bits, "asymmetric"), rows)
    values = rows.double()
    error = (searched.double() - values).norm(dim=1)
    assert bool((error <= (plain.double() - values).norm(dim=1)).all())


@settings(max_examples=examples(80), deadline=None)
@given(SEEDS, st.integers(1, 4), DIMS, st.sampled_from(ALL))
def test_exceptions_are_the_rows_that_are_not_held(
    seed: int, n: int, dim: int, how: tuple[int, str]
) -> None:
    """Try a few small rows among normal ones: the block is not scaled for them."""
    bits, method = how
    good = random_rows(seed, 64 * n, dim, method)
    rows = torch.cat([spoil(random_rows(seed + 1, n, dim), seed), good])
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed % 2**31))
    rows = rows[order]
    codec = rowwise(bits, method)
    encoded = codec.encode(rows)
    wrong = unquantizable(rows, bits, method)
    if "exponent" not in encoded.parameters:
        assert encoded.exceptions.tolist() == wrong
    else:
        assert len(encoded.exceptions) < len(wrong)
    held = torch.ones(len(rows), dtype=torch.bool)
    held[encoded.exceptions] = False
    exponent: Any = encoded.parameters.get("exponent", 0)
    factor = 2.0**exponent
    if method in ("asymmetric", "symmetric"):
        bound = error_bound(rows[held] * factor, bits, method == "symmetric") / factor
        error = (decoded(codec, encoded, rows, len(rows))[held].double() - rows[held]).abs()
        assert bool((error <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "method"), ALL)
def test_no_finite_row_becomes_infinite(bits: int, method: str, dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    generator = torch.Generator().manual_seed(bits)
    rows = (torch.rand(400, 9, dtype=torch.float64, generator=generator) * 2 - 1) * most
    rows[:200].abs_()
    rows[::2, 0], rows[1::2, 0] = most, -most
    codec = rowwise(bits, method)
    rows = rows.to(dtype)
    encoded = codec.encode(rows)
    back = decoded(codec, encoded, rows, len(rows))
    back[encoded.exceptions] = rows[encoded.exceptions]
    assert bool(back.isfinite().all())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize(
    ("value", "place"),
    some_of(
        itertools.product([NAN, INF, -INF, 3e38, -65504.004], [(0, 0), (2, 7), (199, 36)]),
        *(0, 4, 8, 9, 13),
    ),
)
def test_a_row_that_would_be_destroyed_is_an_exception(
    bits: int, method: str, value: float, place: tuple[int, int]
) -> None:
    rows = random_rows(5, 200, 37, method)
    others = torch.ones(200, dtype=torch.bool)
    others[place[0]] = False
    codec = rowwise(bits, method)
    unharmed = codec.encode(rows).data[others]
    rows[place] = value
    encoded = codec.encode(rows)
    expected = [] if bits == 8 and abs(value) < 1e6 else [place[0]]
    assert encoded.exceptions.tolist() == expected
    assert encoded.exceptions.dtype == torch.int64
    assert encoded.parameters == {}
    assert torch.equal(encoded.data[others], unharmed)


@pytest.mark.parametrize(("bits", "method"), ALL)
def test_the_largest_magnitudes(bits: int, method: str) -> None:
    largest = 8.4e37 if bits == 8 else 65504.0
    rows = torch.linspace(-largest, largest, 40).view(4, 10).clone()
    rows = torch.cat([rows, torch.tensor([[largest, -largest] * 5, [largest] * 10])])
    encoded, back = round_trip(Rowwise(bits, method), rows)
    assert not len(encoded.exceptions)
    assert back.isfinite().all()
    error = (back.double() - rows.double()).abs()
    if method in ("asymmetric", "symmetric"):
        assert bool((error <= error_bound(rows, bits, method == "symmetric")).all())


@pytest.mark.parametrize(
    ("dim", "dtype"),
    some_of(itertools.product([1, 2, 7, 16, 130], DTYPES), 0, 5, 14),
)
@pytest.mark.parametrize(("bits", "method"), ALL)
def test_constant_rows_are_as_exact_as_scale_and_bias(
    bits: int, method: str, dim: int, dtype: torch.dtype
) -> None:
    """Keep a constant row as exactly as scale and bias are; keep zeros of any sign exactly."""
    constants = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, 0.1, -0.3, 1000.5, -65504.0, 2e-5, 5e-4, 60000.0]
    )
    rows = constants.to(dtype).clamp(-65000, 65000).unsqueeze(1).expand(-1, dim)
    encoded, back = round_trip(Rowwise(bits, method), rows.clone())
    assert encoded.exceptions.tolist() == unquantizable(rows, bits, method)
    assert (8 in encoded.exceptions) == (
        method == "symmetric" and bits < 8
    )  # too small for the scale
    assert bool((back[:2] == 0).all())
    bound = error_bound(rows.float(), bits, method == "symmetric")
    bound += dtype_rounding(rows, bound, dtype)
    assert bool(((back.double() - rows.double()).abs() <= bound).all())


@pytest.mark.parametrize("dim", [1, 3, 64])
@pytest.mark.parametrize(("bits", "method"), ALL)
def test_zeros_beside_a_huge_outlier(bits: int, method: str, dim: int) -> None:
    """Keep both ends of the range: the outlier and zero."""
    rows = torch.zeros(3, dim)
    rows[0, 0], rows[1, -1] = 60000.0, -60000.0
    encoded, back = round_trip(Rowwise(bits, method), rows)
    assert not len(encoded.exceptions)
    bound = error_bound(rows, bits, method == "symmetric")
    assert bool(((back.double() - rows).abs() <= bound).all())


@pytest.mark.parametrize("scale", some_of([1e-6, 1e-7, 1e-10, 1e-30, 3e-39], 1, 4))
@pytest.mark.parametrize(("bits", "method"), ALL)
def test_a_block_of_tiny_rows_is_held_as_well_as_normal_rows(
    bits: int, method: str, scale: float
) -> None:
    normal = torch.randn(500, 24, generator=torch.Generator().manual_seed(7))
    codec = Rowwise(bits, method)
    tiny = normal * scale
    encoded, back = round_trip(codec, tiny)
    assert not len(encoded.exceptions)
    assert "exponent" in encoded.parameters
    expected = relative_errors(round_trip(codec, normal)[1], normal).mean()
    assert float(relative_errors(back, tiny).mean()) == pytest.approx(float(expected), rel=0.02)


@pytest.mark.parametrize(("bits", "method"), [how for how in ALL if how[0] < 8])
def test_a_block_of_huge_rows_is_held_as_well_as_normal_rows(bits: int, method: str) -> None:
    normal = torch.randn(500, 24, generator=torch.Generator().manual_seed(7))
    codec = Rowwise(bits, method)
    encoded, back = round_trip(codec, normal * 1e7)
    assert not len(encoded.exceptions)
    expected = relative_errors(round_trip(codec, normal)[1], normal).mean()
    assert float(relative_errors(back, normal * 1e7).mean()) == pytest.approx(
        float(expected), rel=0.02
    )


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_few_tiny_rows_dont_change_the_bytes_of_the_others(bits: int) -> None:
    rows = torch.randn(640, 32, generator=torch.Generator().manual_seed(8))
    tiny = [3, 77, 639]
    rows[tiny] *= 1e-8
    encoded = Rowwise(bits, "asymmetric").encode(rows)
    assert encoded.parameters == {}
    assert encoded.exceptions.tolist() == tiny
    others = torch.ones(640, dtype=torch.bool)
    others[tiny] = False
    assert torch.equal(encoded.data[others], fbgemm_encode(rows, bits)[others])


@pytest.mark.parametrize("bits", WIDTHS)
def test_denormals_are_scaled_or_zero(bits: int) -> None:
    """Scale a block of denormals; take denormals among normal values for zero."""
    rows = torch.tensor([[1e-40, -2e-41, 3e-42, 0.0], [1e-38, 0, 0, -1e-38]])
    _, back = round_trip(Rowwise(bits, "asymmetric"), rows)
    span = (rows.amax(dim=1) - rows.amin(dim=1)).double().unsqueeze(1)
    bound = span / (2**bits - 1) * 0.51 + span * 2.0**-10 + 2.0**-149
    assert bool(((back.double() - rows.double()).abs() <= bound).all())
    mixed = torch.tensor([[1.0, 0.0, 1e-40, 0.5]])
    zeroed = torch.tensor([[1.0, 0.0, 0.0, 0.5]])
    codec = Rowwise(bits)
    assert torch.equal(codec.encode(mixed).data, codec.encode(zeroed).data)


@pytest.mark.parametrize(("bits", "method"), ALL)
def test_nothing_but_nan(bits: int, method: str) -> None:
    encoded = Rowwise(bits, method).encode(torch.full((5, 6), NAN))
    assert encoded.exceptions.tolist() == [0, 1, 2, 3, 4]
    assert not encoded.data.any()


@pytest.mark.parametrize(("bits", "bound"), [(2, 0.325), (3, 0.165), (4, 0.081)])
def test_error_on_gaussian_rows(bits: int, bound: float) -> None:
    rows = torch.randn(50_000, 64, generator=torch.Generator().manual_seed(2024))
    codec = Rowwise(bits)
    encoded = codec.encode(rows)
    assert not len(encoded.exceptions)
    error = relative_errors(decoded(codec, encoded, rows, len(rows)), rows)
    assert float(error.mean()) <= bound


def repeated(codec: Rowwise, rows: torch.Tensor, passes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows after one encode/decode pass, and after all passes."""
    _, first = round_trip(codec, rows)
    last = first
    for _ in range(passes - 1):
        _, last = round_trip(codec, last)
    return first, last


@settings(max_examples=examples(120), deadline=None)
@given(
    SEEDS,
    st.integers(1, 130),
    st.sampled_from(ALL),
    st.sampled_from([1e-8, 1e-6, 2e-5, 1e-4, 1e-3, 0.02, 1.0, 3e3]),
    st.sampled_from([0.0, 0.3, 10.0, -1000.0]),
)
def test_ten_passes_are_as_good_as_one(
    seed: int, dim: int, how: tuple[int, str], scale: float, offset: float
) -> None:
    """Bound the error of every row, even with values far from zero and close to each other.

    A block is scaled if some of its rows are too small for fp16; as decoded, they may no longer be.
    Then scale and bias of all of its rows are rounded anew, to fp16's smallest step.
    """
    bits, method = how
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((40, dim)) + offset) * (scale / max(1.0, abs(offset)))
    rows = torch.from_numpy(values.astype(np.float32))
    codec = rowwise(bits, method)
    passes, exponents = [rows], set()
    for _ in range(10):
        encoded, decoded_rows = round_trip(codec, passes[-1])
        passes.append(decoded_rows)
        exponents.add(encoded.parameters.get("exponent"))
    _, first, *_, last = passes
    bound = 1e-3 * rows.double().norm(dim=1)
    if len(exponents) > 1:
        bound += 2.0**-25 * 2**bits * dim**0.5
    assert bool(((last.double() - first).norm(dim=1) <= bound).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("bits", "method"), ALL)
def test_ten_passes_through_a_table_of_half_precision(
    bits: int, method: str, dtype: torch.dtype
) -> None:
    """Bound the mean error: a pass rounds to the dtype, so the next starts from other values."""
    for dim, offset in ((1, 0), (8, 0), (31, 10), (130, 0)):
        rows = torch.randn(300, dim, generator=torch.Generator().manual_seed(dim)) + offset
        rows = rows.to(dtype)
        first, last = repeated(rowwise(bits, method), rows, 10)
        added = relative_errors(last, rows).mean() - relative_errors(first, rows).mean()
        assert float(added) <= 1e-3


@settings(max_examples=examples(80), deadline=None)
@given(SEEDS, st.integers(1, 60), DIMS, st.sampled_from(ALL), st.data())
def test_a_part_is_that_part_of_the_whole(
    seed: int, n: int, dim: int, how: tuple[int, str], data: st.DataObject
) -> None:
    codec = rowwise(*how)
    rows = random_rows(seed, n, dim) * data.draw(st.sampled_from([1.0, 1e-9]))
    encoded = codec.encode(rows)
    whole = decoded(codec, encoded, rows, n)
    start = data.draw(st.integers(0, n))
    part = torch.empty(data.draw(st.integers(0, n - start)), dim)
    codec.decode(encoded.data.view(-1), encoded.parameters, n, start, part)
    assert torch.equal(part, whole[start : start + len(part)])


@settings(max_examples=examples(60), deadline=None)
@given(SEEDS, DIMS, st.sampled_from(ALL))
def test_a_row_does_not_depend_on_its_neighbours(seed: int, dim: int, how: tuple[int, str]) -> None:
    rows = random_rows(seed, 19, dim, how[1])
    codec = rowwise(*how)
    one_by_one = torch.cat([codec.encode(rows[i : i + 1]).data for i in range(len(rows))])
    assert torch.equal(codec.encode(rows).data, one_by_one)


@pytest.mark.parametrize(
    ("bits", "dim", "size"),
    [(8, 5, 13), (4, 16, 12), (4, 5, 8), (2, 9, 8), (2, 1, 6), (3, 8, 7), (3, 9, 8), (3, 1, 5)],
)
def test_row_bytes_are_the_encoded_size(bits: int, dim: int, size: int) -> None:
    encoded = Rowwise(bits).encode(torch.randn(3, dim))
    assert encoded.data.numel() == 3 * size
    assert Rowwise(bits).row_bytes(dim) == row_bytes(dim, bits) == size


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dim", [1, 5, 8, 30, 64])
def test_chunks_of_version_1_still_decode(bits: int, dim: int) -> None:
    """Decode version 1: FBGEMM's bytes of rows padded with their first value to an accepted dim."""
    rows = random_rows(9, 12, dim)
    missing = -dim % (1 if bits == 8 else 16 // bits)
    stored = fbgemm_encode(torch.cat([rows, rows[:, :1].expand(-1, missing)], dim=1), bits)
    codec = codec_from_spec({"name": "fbgemm_rowwise", "version": 1, "bits": bits})
    back = torch.empty_like(rows)
    codec.decode(stored.view(-1), {}, 12, 0, back)
    assert bool(((back.double() - rows).abs() <= error_bound(rows, bits)).all())
    assert torch.equal(back, fbgemm_decode(stored, bits)[:, :dim])
    part = torch.empty(3, dim)
    codec.decode(stored.view(-1), {}, 12, 5, part)
    assert torch.equal(part, back[5:8])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"bits": bits}, "bits must be one of") for bits in (0, 1, 5, 16, -4, True, 4.0, "4")),
        ({"bits": 4, "method": "best"}, "method must be one of.*'greedy'.*not 'best'"),
        ({"bits": 4, "method": "ADAPTIVE"}, "method must be one of"),
        ({"bits": 4, "num_bins": 0}, "num_bins must be from 1 to"),
        ({"bits": 4, "num_bins": 1 << 31}, "num_bins must be from 1 to"),
        ({"bits": 4, "ratio": -0.1}, "ratio must be between 0 and 1"),
        ({"bits": 4, "ratio": 1.1}, "ratio must be between 0 and 1"),
        ({"bits": 4, "ratio": NAN}, "ratio must be between 0 and 1"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rowwise(**arguments)


@pytest.mark.parametrize("exponent", [127, -127, 1.0, "3", None, True])
def test_an_exponent_that_no_encoder_writes(exponent: object) -> None:
    codec = Rowwise(4)
    data = codec.encode(torch.randn(3, 8)).data.view(-1)
    with pytest.raises(ValueError, match="exponent"):
        codec.decode(data, {"exponent": exponent}, 3, 0, torch.empty(3, 8))
