"""Codecs against their promises: exact to the bit, or FBGEMM's bytes within a bound."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_checknrun.codecs import Codec, Exact, FusedRowwise, codec_from_spec
from torchrec_checknrun.errors import UnsupportedFormat

SEEDS = st.integers(0, 2**32 - 1)
WIDTHS = (8, 4, 2)


def random_rows(seed: int, n: int, dim: int) -> torch.Tensor:
    """Rows as tables have them, and rows that are hard to quantize, at scales of their own."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n, dim)) * 10.0 ** rng.integers(-9, 4, (n, 1))
    rows += rng.choice([0.0, 1.0, -300.0], (n, 1))
    kind = rng.integers(0, 5, n)
    rows[kind == 0] = rows[kind == 0][:, :1]  # constant rows
    rows[kind == 1, 0] = 60000.0  # one huge outlier
    rows[kind == 2] = 0.0
    return torch.from_numpy(rows.astype(np.float32))


def error_bound(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Per row: half a step and what the rounding of scale and bias can add."""
    values = rows.double()
    low, high = values.aminmax(dim=1)
    codes = 2**bits - 1
    if bits == 8:
        # FBGEMM adds 1e-8 to the range; scale and bias are fp32.
        rounding = 1e-8 + 4 * 2.0**-24 * values.abs().amax(dim=1)
        return (high - low) / codes / 2 + rounding
    bias_error = low.abs() * 2.0**-11 + 2.0**-25
    step = (high - low + bias_error) / codes
    scale_error = step * 2.0**-11 + 2.0**-25
    return step / 2 + bias_error + codes * scale_error


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.integers(0, 5),
    st.integers(1, 9),
    st.data(),
)
def test_exact_keeps_every_bit(dtype: torch.dtype, n: int, dim: int, data: st.DataObject) -> None:
    """Any bit pattern: NaNs with payloads, negative zero, denormals, infinities."""
    content = data.draw(st.binary(min_size=n * dim * dtype.itemsize, max_size=n * dim * 4))
    raw = torch.tensor(list(content[: n * dim * dtype.itemsize]), dtype=torch.uint8)
    rows = raw.view(dtype).reshape(n, dim)
    codec = Exact()
    assert codec.accepts(rows)
    encoded = codec.encode(rows)
    assert encoded.shape == (n, codec.row_bytes(dim, dtype))
    assert bytes(encoded.reshape(-1).tolist()) == bytes(raw.tolist())
    decoded = codec_from_spec(codec.spec()).decode(encoded, dim, dtype)
    assert decoded.dtype == dtype
    assert decoded.shape == (n, dim)
    assert torch.equal(decoded.reshape(-1).view(torch.uint8), raw)


def test_exact_keeps_named_specials() -> None:
    bits = [0x7FC12345, 0xFF800001, 0x80000000, 0x00000001, 0x7F800000, 0xFF800000, 0x807FFFFF]
    rows = torch.from_numpy(np.array([bits], np.uint32).view(np.float32))
    decoded = Exact().decode(Exact().encode(rows), len(bits), torch.float32)
    assert decoded.numpy().view(np.uint32).tolist() == [bits]


@pytest.mark.parametrize("codec", [Exact(), *map(FusedRowwise, WIDTHS)])
def test_views_are_encoded_as_their_values(codec: Codec) -> None:
    base = torch.randn(12, 12)
    views = [
        base[:, 2:10],
        base[::2, :8],
        base.t()[:, :4],
        base[3:4].t(),
        base[:1, :1],
        base[:, :1],
    ]
    for view in views:
        assert torch.equal(
            codec.encode(view), codec.encode(view.clone(memory_format=torch.contiguous_format))
        )


def test_exact_does_not_touch_autograd() -> None:
    rows = torch.nn.Parameter(torch.randn(3, 4))
    assert torch.equal(Exact().decode(Exact().encode(rows), 4, torch.float32), rows.detach())
    assert not FusedRowwise(8).encode(rows).requires_grad


@settings(max_examples=150, deadline=None)
@given(SEEDS, st.integers(1, 6), st.integers(1, 130), st.sampled_from(WIDTHS))
def test_rowwise_error_is_bounded(seed: int, n: int, dim: int, bits: int) -> None:
    rows = random_rows(seed, n, dim)
    codec = FusedRowwise(bits)
    assert codec.accepts(rows)
    encoded = codec.encode(rows)
    assert encoded.dtype == torch.uint8
    assert encoded.shape == (n, codec.row_bytes(dim, torch.float32))
    decoded = codec_from_spec(codec.spec()).decode(encoded, dim, torch.float32)
    assert decoded.shape == rows.shape
    error = (decoded.double() - rows.double()).abs().amax(dim=1)
    assert bool((error <= error_bound(rows, bits)).all()), (error, error_bound(rows, bits))


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 5), st.integers(1, 40), st.sampled_from(WIDTHS))
def test_rowwise_bytes_are_fbgemms(seed: int, n: int, groups: int, bits: int) -> None:
    dim = groups * (1 if bits == 8 else 16 // bits)
    rows = random_rows(seed, n, dim)
    if bits == 8:
        wanted = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows)
    else:
        wanted = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, bits)
    assert torch.equal(FusedRowwise(bits).encode(rows), wanted)


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 130), st.sampled_from(WIDTHS))
def test_a_row_does_not_depend_on_its_neighbours(seed: int, dim: int, bits: int) -> None:
    rows = random_rows(seed, 5, dim)
    codec = FusedRowwise(bits)
    one_by_one = torch.cat([codec.encode(rows[i : i + 1]) for i in range(5)])
    assert torch.equal(codec.encode(rows), one_by_one)


@pytest.mark.parametrize(("bits", "dim", "size"), [(8, 5, 13), (4, 16, 12), (4, 5, 8), (2, 9, 8)])
def test_rowwise_sizes(bits: int, dim: int, size: int) -> None:
    codec = FusedRowwise(bits)
    assert codec.row_bytes(dim, torch.float32) == size == codec.encode(torch.randn(2, dim)).shape[1]


@pytest.mark.parametrize("codec", [Exact(), *map(FusedRowwise, WIDTHS)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_no_rows(codec: Codec, dtype: torch.dtype) -> None:
    none = torch.empty(0, 7, dtype=dtype)
    assert codec.accepts(none)
    encoded = codec.encode(none)
    assert encoded.shape == (0, codec.row_bytes(7, dtype))
    decoded = codec.decode(encoded, 7, dtype)
    assert decoded.shape == (0, 7)
    assert decoded.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", WIDTHS)
def test_rowwise_of_half_precision_rows(dtype: torch.dtype, bits: int) -> None:
    rows = torch.randn(6, 16).to(dtype)
    codec = FusedRowwise(bits)
    assert torch.equal(codec.encode(rows), codec.encode(rows.float()))
    decoded = codec.decode(codec.encode(rows), 16, dtype)
    assert decoded.dtype == dtype
    rounding = rows.float().abs().amax(dim=1) * 2.0 ** (-11 if dtype == torch.float16 else -8)
    error = (decoded.float() - rows.float()).abs().amax(dim=1)
    assert bool((error <= error_bound(rows, bits) + rounding).all())


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [(0, 0), (2, 7), (1, 3)])
def test_rowwise_refuses_what_it_would_destroy(
    bits: int, value: float, place: tuple[int, int]
) -> None:
    rows = torch.randn(3, 8)
    codec = FusedRowwise(bits)
    assert codec.accepts(rows)
    rows[place] = value
    assert not codec.accepts(rows)


@pytest.mark.parametrize(
    ("bits", "value", "accepted"),
    [
        (8, 1e30, True),
        (8, 3e38, False),
        (4, 65504.0, True),
        (4, 65505.0, False),
        (2, -65504.0, True),
        (2, -65600.0, False),
    ],
)
def test_rowwise_range(bits: int, value: float, accepted: bool) -> None:
    rows = torch.zeros(2, 8)
    rows[1, 5] = value
    codec = FusedRowwise(bits)
    assert codec.accepts(rows) is accepted
    if accepted:
        decoded = codec.decode(codec.encode(rows), 8, torch.float32)
        error = (decoded.double() - rows.double()).abs().amax(dim=1)
        assert bool((error <= error_bound(rows, bits)).all())


@pytest.mark.parametrize("bits", [0, 1, 3, 16, 32, -8])
def test_other_widths(bits: int) -> None:
    with pytest.raises(ValueError, match="bits must be one of"):
        FusedRowwise(bits)


@pytest.mark.parametrize("codec", [Exact(), *map(FusedRowwise, WIDTHS)])
def test_spec_makes_the_codec_again(codec: Codec) -> None:
    again = codec_from_spec(codec.spec())
    assert type(again) is type(codec)
    assert again.spec() == codec.spec()
    assert again.lossy is codec.lossy
    assert again.value_bits == codec.value_bits


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({}, "None"),
        ({"name": "zstd", "version": 1}, "'zstd'"),
        ({"name": ["exact"], "version": 1}, "exact"),
        ({"name": "exact"}, "version None"),
        ({"name": "exact", "version": 2}, "version 2"),
        ({"name": "exact", "version": 0}, "version 0"),
        ({"name": "exact", "version": True}, "version True"),
        ({"name": "exact", "version": "1"}, "version '1'"),
        ({"name": "fbgemm_rowwise", "version": 2, "bits": 8}, "version 2"),
        ({"name": "fbgemm_rowwise", "version": 1}, "bits"),
        ({"name": "fbgemm_rowwise", "version": 1, "bits": 3}, "3"),
        ({"name": "fbgemm_rowwise", "version": 1, "bits": "8"}, "'8'"),
        ({"name": "fbgemm_rowwise", "version": 1, "bits": 8.0}, "8.0"),
    ],
)
def test_unknown_codecs(spec: dict[str, object], named: str) -> None:
    with pytest.raises(UnsupportedFormat) as raised:
        codec_from_spec(spec)
    assert named in str(raised.value)
