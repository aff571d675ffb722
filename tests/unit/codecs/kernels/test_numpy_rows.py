"""Quantize rows without the compiled kernel: same layout, same decoding, hardly more error."""

from __future__ import annotations

import functools

import fbgemm_gpu  # noqa: F401  # registers torch.ops.fbgemm
import pytest
import torch

from tests.unit.quantized_rows import fbgemm_encode
from torchrec_checknrun.bitwidth import row_bytes
from torchrec_checknrun.codecs.base import Method, Refusal
from torchrec_checknrun.codecs.kernels import numpy_rows
from torchrec_checknrun.native import has_extension

WIDTHS = (2, 3, 4, 8)
NUM_BINS, RATIO = 25, 0.5

needs_kernel = pytest.mark.skipif(
    not has_extension(), reason="the compiled kernel was not built: there was no C++ compiler"
)


def encode(
    rows: torch.Tensor,
    bits: int,
    method: Method,
    ids: torch.Tensor | None = None,
    factor: float = 1.0,
    kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bytes and refusals."""
    n = len(rows) if ids is None else len(ids)
    out = torch.full((n, row_bytes(rows.shape[1], bits)), 255, dtype=torch.uint8)
    refused = torch.full((n,), 255, dtype=torch.uint8)
    options = (bits, int(method), NUM_BINS, RATIO, factor, out, refused)
    if kernel:
        count = torch.ops.checknrun.encode_rows(rows, ids, *options, "")
    else:
        count = numpy_rows.encode_rows(rows, ids, *options)
    assert count == int((refused > 0).sum())
    return out, refused


def decode(
    data: torch.Tensor,
    bits: int,
    dim: int,
    factor: float = 1.0,
    dtype: torch.dtype = torch.float32,
    kernel: bool = False,
) -> torch.Tensor:
    out = torch.empty((len(data), dim), dtype=dtype)
    if kernel:
        torch.ops.checknrun.decode_rows(data, bits, factor, None, out, "")
    else:
        numpy_rows.decode_rows(data, bits, factor, None, out)
    return out


def decode_with_fbgemm(data: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    if bits == 8:
        return torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(data)
    return torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(data, bits)[:, :dim]


@functools.cache
def gaussian(dim: int, rows: int = 400) -> torch.Tensor:
    return torch.randn((rows, dim), generator=torch.Generator().manual_seed(dim))


def odd_rows(dim: int) -> torch.Tensor:
    """Make rows with zeros, constant, negative, of one sign or far from zero."""
    rows = gaussian(dim, 64).clone()
    rows[8:16] = rows[8:16].relu()
    rows[16:24] = -rows[16:24].relu()
    rows[24:32, 0] = 0.0
    rows[24:32] = rows[24:32].abs() * torch.tensor([1.0, -0.0])[(rows[24:32] > 0).long()]
    rows[32] = 0.0
    rows[33] = -0.0
    rows[34] = 3.25
    rows[35] = -1e-3
    rows[36:40] += 1000
    rows[40:44] *= 6e4 / rows[40:44].abs().amax(dim=1, keepdim=True)
    rows[44:48] *= 1e-4
    rows[48:52, -1] = 500.0
    return rows


def mean_error(rows: torch.Tensor, decoded: torch.Tensor) -> float:
    return float(((decoded - rows).norm(dim=1) / rows.norm(dim=1)).mean())


@pytest.mark.parametrize(
    ("bits", "dims"), [(2, (8, 16, 64, 72)), (4, (4, 8, 12, 64, 100)), (8, (1, 3, 8, 20, 64, 131))]
)
def test_asymmetric_gives_the_bytes_of_fbgemm(bits: int, dims: tuple[int, ...]) -> None:
    for dim in dims:
        zeros = torch.cartesian_prod(*[torch.tensor([0.0, -0.0, 1.0])] * 4).repeat(1, dim)
        for rows in (gaussian(dim), odd_rows(dim), zeros[:, :dim].contiguous()):
            data, refused = encode(rows, bits, Method.ASYMMETRIC)
            assert not refused.any()
            expected = fbgemm_encode(rows, bits)
            assert torch.equal(data, expected), (dim, (data != expected).any(1).nonzero().view(-1))


@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize("bits", WIDTHS)
def test_decodes_as_fbgemm_and_the_kernel_do(bits: int, method: Method) -> None:
    for dim in (1, 5, 8, 16, 64, 67):
        data, _ = encode(odd_rows(dim), bits, method)
        decoded = decode(data, bits, dim)
        if bits != 3:
            assert torch.equal(decoded, decode_with_fbgemm(data, bits, dim))
        if has_extension():
            assert torch.equal(decoded, decode(data, bits, dim, kernel=True))


@needs_kernel
@pytest.mark.parametrize("method", [Method.ASYMMETRIC, Method.SYMMETRIC])
@pytest.mark.parametrize("bits", WIDTHS)
def test_without_a_search_the_bytes_are_the_kernels(bits: int, method: Method) -> None:
    for dim in (1, 7, 16, 65):
        for rows in (gaussian(dim), odd_rows(dim)):
            data, _ = encode(rows, bits, method)
            assert torch.equal(data, encode(rows, bits, method, kernel=True)[0]), dim


@needs_kernel
@pytest.mark.parametrize("method", [Method.SYMMETRIC, Method.GREEDY, Method.ADAPTIVE])
@pytest.mark.parametrize("bits", WIDTHS)
def test_errors_are_within_one_percent_of_the_kernels(bits: int, method: Method) -> None:
    for dim in (8, 16, 33, 64, 128):
        rows = gaussian(dim)
        ours = mean_error(rows, decode(encode(rows, bits, method)[0], bits, dim))
        kernels = mean_error(rows, decode(encode(rows, bits, method, kernel=True)[0], bits, dim))
        assert ours <= 1.01 * kernels, (dim, ours, kernels)


@pytest.mark.parametrize(("bits", "most"), [(2, 0.325), (3, 0.165), (4, 0.081)])
def test_the_adaptive_error_of_gaussian_rows(bits: int, most: float) -> None:
    rows = gaussian(64, 2000)
    assert mean_error(rows, decode(encode(rows, bits, Method.ADAPTIVE)[0], bits, 64)) <= most


@pytest.mark.parametrize("bits", WIDTHS)
def test_every_dim_is_within_half_a_step(bits: int) -> None:
    for dim in range(1, 71):
        rows = gaussian(dim, 9)
        low, high = rows.aminmax(dim=1, keepdim=True)
        width = high - low
        naive = decode(encode(rows, bits, Method.ASYMMETRIC)[0], bits, dim)
        # Half a step, and the rounding of scale and bias in fp16 or fp32.
        rounding = 2.0**-22 if bits == 8 else 2.0**-10
        bound = width / (2**bits - 1) / 2 + rounding * (width + low.abs())
        assert ((naive - rows).abs() <= bound).all(), dim
        adaptive = decode(encode(rows, bits, Method.ADAPTIVE)[0], bits, dim)
        assert ((adaptive - rows).norm(dim=1) <= (naive - rows).norm(dim=1) * (1 + 1e-6)).all()


@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize("bits", WIDTHS)
def test_what_was_decoded_is_encoded_to_the_same(bits: int, method: Method) -> None:
    rows = decode(encode(gaussian(24), bits, method)[0], bits, 24)
    again = decode(encode(rows, bits, method)[0], bits, 24)
    assert mean_error(rows, again) <= 1e-4


@pytest.mark.parametrize("bits", WIDTHS)
def test_no_rows_take_no_bytes(bits: int) -> None:
    data, refused = encode(torch.empty((0, 12)), bits, Method.ADAPTIVE)
    assert data.shape == (0, row_bytes(12, bits))
    assert refused.shape == (0,)
    assert decode(data, bits, 12).shape == (0, 12)


@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize("bits", WIDTHS)
def test_refused_rows_have_zero_bytes(bits: int, method: Method) -> None:
    rows = gaussian(16, 8).clone()
    rows[1, 3] = torch.nan
    rows[2, 0] = torch.inf
    rows[3, 15] = -torch.inf
    rows[4, 5] = 65505.0
    rows[5] = rows[5].clamp(-1, 1) * 1e-6
    rows[6] = -3e38
    data, refused = encode(rows, bits, method)
    large = Refusal.NONE if bits == 8 else Refusal.TOO_LARGE
    expected = [0, *[Refusal.NOT_FINITE] * 3, large, Refusal.TOO_SMALL, Refusal.TOO_LARGE, 0]
    assert refused.tolist() == expected
    assert not data[refused > 0].any()
    untouched = encode(rows[refused == 0], bits, method)[0]
    assert torch.equal(data[refused == 0], untouched)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", WIDTHS)
def test_ids_factor_and_dtypes(bits: int, dtype: torch.dtype) -> None:
    table = torch.empty((50, 40), dtype=dtype)[:, 8:32]  # rows that are not contiguous
    table.copy_(gaussian(24, 50) * 1e-3)
    ids = torch.tensor([49, 0, 7, 7, 30])
    data, refused = encode(table, bits, Method.ADAPTIVE, ids, factor=1024.0)
    assert not refused.any()
    plain, _ = encode(table[ids].float() * 1024, bits, Method.ADAPTIVE)
    assert torch.equal(data, plain)
    decoded = decode(data, bits, 24, 1 / 1024, dtype)
    assert torch.equal(decoded, (decode(plain, bits, 24) / 1024).to(dtype))
    target = torch.zeros_like(table)
    unique = torch.tensor([0, 1, 2, 4])
    numpy_rows.decode_rows(data[unique], bits, 1 / 1024, ids[unique], target)
    assert torch.equal(target[ids[unique]], decoded[unique])
    assert target.count_nonzero(dim=1).count_nonzero() == 4


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("threads", [1, 2])
def test_blocks_and_threads_change_nothing(
    monkeypatch: pytest.MonkeyPatch, bits: int, threads: int
) -> None:
    rows = gaussian(20)
    whole, _ = encode(rows, bits, Method.ADAPTIVE)
    decoded = decode(whole, bits, 20)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(numpy_rows, "_ENCODED_AT_ONCE", 20 * 33)
    monkeypatch.setattr(numpy_rows, "_DECODED_AT_ONCE", 20 * 7)
    assert torch.equal(encode(rows, bits, Method.ADAPTIVE)[0], whole)
    assert torch.equal(decode(whole, bits, 20), decoded)
