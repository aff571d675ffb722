"""Compare the compiled kernel's bytes with FBGEMM's in every build, and refuse wrong arguments."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.quantized_rows import (
    DTYPES,
    WIDTHS,
    fbgemm_decode,
    fbgemm_encode,
    random_rows,
    spoil,
    threads,
)
from torchrec_checknrun.bitwidth import row_bytes
from torchrec_checknrun.codecs.base import Method
from torchrec_checknrun.codecs.kernels import dispatch as kernel

pytestmark = pytest.mark.skipif(
    not kernel.has_extension(), reason="the extension was not built: there was no compiler"
)

SEEDS = st.integers(0, 2**32 - 1)
DIMS = st.one_of(st.integers(1, 70), st.integers(1, 512))
BUILDS: list[str] = torch.ops.checknrun.kernel_builds() if kernel.has_extension() else []


def encode(
    rows: torch.Tensor,
    bits: int,
    method: Method,
    ids: torch.Tensor | None = None,
    factor: float = 1.0,
    build: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bytes ``(n, row_bytes)`` and refusals ``(n,)``."""
    n = len(rows) if ids is None else len(ids)
    out = torch.full((n, row_bytes(rows.shape[1], bits)), 0xA5, dtype=torch.uint8)
    refused = torch.full((n,), 9, dtype=torch.uint8)
    count = torch.ops.checknrun.encode_rows(
        rows, ids, bits, int(method), 15, 0.6, factor, out, refused, build
    )
    assert count == int((refused > 0).sum())
    return out, refused


def decode(
    data: torch.Tensor,
    bits: int,
    dim: int,
    dtype: torch.dtype = torch.float32,
    factor: float = 1.0,
    build: str = "",
) -> torch.Tensor:
    out = torch.empty((len(data), dim), dtype=dtype)
    torch.ops.checknrun.decode_rows(data, bits, factor, None, out, build)
    return out


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def reference_codes(row: np.ndarray, bits: int) -> tuple[np.ndarray, np.float16, np.float16]:
    """Compute asymmetric codes, scale and bias below 8 bits in plain NumPy."""
    top = np.float32(2**bits - 1)
    bias = np.float16(row.min())
    reach = row.max() - np.float32(bias)
    scale = np.float16(reach / top) if reach != 0 else np.float16(1)
    scale = scale if scale != 0 else np.float16(1)
    codes = (row - np.float32(bias)) * (np.float32(1) / np.float32(scale))
    return np.rint(np.clip(codes, 0, top)).astype(np.uint8), scale, bias


def test_the_plain_build_runs_anywhere() -> None:
    assert BUILDS[-1] == "plain"
    assert set(BUILDS) <= {"avx512", "avx2", "plain"}


@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("bits", WIDTHS)
@settings(max_examples=examples(25), deadline=None)
@given(
    SEEDS,
    st.integers(1, 70),
    DIMS,
    st.sampled_from(DTYPES),
    st.sampled_from([1.0, 1.0, 2.0**-3, 2.0**40]),
    st.booleans(),
)
def test_all_builds_give_the_same_bytes(
    bits: int,
    method: Method,
    seed: int,
    n: int,
    dim: int,
    dtype: torch.dtype,
    factor: float,
    by_id: bool,
) -> None:
    rows = spoil(random_rows(seed, n, dim), seed).to(dtype)
    ids = torch.from_numpy(np.random.default_rng(seed).integers(0, n, 2 * n))
    chosen = ids if by_id else None
    expected, refused = encode(rows, bits, method, chosen, factor, "plain")
    back = decode(expected, bits, dim, dtype, 1 / factor, "plain")
    for build in BUILDS:
        data, refused_here = encode(rows, bits, method, chosen, factor, build)
        assert torch.equal(data, expected), build
        assert torch.equal(refused_here, refused), build
        assert same_bits(decode(expected, bits, dim, dtype, 1 / factor, build), back), build


@pytest.mark.parametrize("build", BUILDS)
def test_no_rows_take_no_bytes(build: str) -> None:
    for rows, ids in ((torch.empty(0, 7), None), (torch.randn(4, 7), torch.arange(0))):
        data, refused = encode(rows, 4, Method.ADAPTIVE, ids, build=build)
        assert data.shape == (0, 8)
        assert len(refused) == 0
        assert decode(data, 4, 7, build=build).shape == (0, 7)


@pytest.mark.parametrize("build", BUILDS)
@settings(max_examples=examples(40), deadline=None)
@given(SEEDS, st.integers(1, 40), st.integers(1, 40), st.sampled_from([2, 4, 8]))
def test_asymmetric_bytes_are_fbgemms(build: str, seed: int, n: int, words: int, bits: int) -> None:
    """Include constant rows, and rows whose least value is a zero of either sign."""
    dim = words * (1 if bits == 8 else 16 // bits)
    rows = random_rows(seed, n, dim)
    data, refused = encode(rows, bits, Method.ASYMMETRIC, build=build)
    assert not refused.any()
    assert torch.equal(data, fbgemm_encode(rows, bits))


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_signed_zeros_are_fbgemms(build: str, bits: int) -> None:
    """Try every pattern of zeros of both signs in a row of 8, alone and beside positive values."""
    signs = (torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1).float()
    zeros = torch.where(signs > 0, -0.0, 0.0)
    for rows in (zeros, torch.cat([zeros, zeros.flip(0) + torch.eye(8)[torch.arange(256) % 8]], 1)):
        data, _ = encode(rows, bits, Method.ASYMMETRIC, build=build)
        assert torch.equal(data, fbgemm_encode(rows, bits))


@settings(max_examples=examples(80), deadline=None)
@given(SEEDS, st.integers(1, 40), DIMS, st.sampled_from([2, 4, 8]), st.sampled_from(list(Method)))
def test_fbgemm_decodes_every_method(
    seed: int, n: int, dim: int, bits: int, method: Method
) -> None:
    """Decode to FBGEMM's values bit for bit; where FBGEMM refuses the dim, with more columns."""
    rows = random_rows(seed, n, dim)
    data, _ = encode(rows, bits, method)
    theirs = fbgemm_decode(data, bits)
    assert dim <= theirs.shape[1] < dim + (1 if bits == 8 else 16 // bits)
    assert torch.equal(theirs[:, :dim], decode(data, bits, dim))


@settings(max_examples=examples(60), deadline=None)
@given(SEEDS, DIMS, st.sampled_from((2, 3, 4)), st.sampled_from(BUILDS or [""]))
def test_packing_equals_a_plain_reference(seed: int, dim: int, bits: int, build: str) -> None:
    """Compare with a plain reference that packs codes from the lowest bits up, then scale and bias.

    At 3 bits, unknown to FBGEMM, 8 codes take 3 bytes.
    """
    rows = random_rows(seed, 5, dim)
    data, _ = encode(rows, bits, Method.ASYMMETRIC, build=build)
    values = decode(data, bits, dim, build=build)
    for row, bytes_, value in zip(rows.numpy(), data.numpy(), values.numpy(), strict=True):
        codes, scale, bias = reference_codes(row, bits)
        stream = np.unpackbits(bytes_[:-4], bitorder="little")
        stored = stream[: dim * bits].reshape(dim, bits) @ (1 << np.arange(bits))
        assert stored.tolist() == codes.tolist()
        assert not stream[dim * bits :].any()
        tail = bytes_[-4:].view(np.float16)
        assert tail.tolist() == [scale, bias]
        expected = codes.astype(np.float32) * np.float32(scale) + np.float32(bias)
        assert value.tolist() == expected.tolist()


@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("bits", WIDTHS)
def test_any_number_of_threads(bits: int, method: Method) -> None:
    rows = random_rows(11, 3001, 40)
    rows[17, 3] = float("nan")
    ids = torch.randperm(3001, generator=torch.Generator().manual_seed(1))[:2503]
    results = []
    for number in (1, 2, 3, 7):
        with threads(number):
            data, refused = encode(rows, bits, method, ids)
            results.append((data, refused, decode(data, bits, 40)))
    for data, refused, values in results[1:]:
        assert torch.equal(data, results[0][0])
        assert torch.equal(refused, results[0][1])
        assert torch.equal(values, results[0][2])


@settings(max_examples=examples(40), deadline=None)
@given(SEEDS, st.sampled_from(WIDTHS), st.sampled_from(list(Method)), st.sampled_from(DTYPES))
def test_rows_further_apart_than_their_length(
    seed: int, bits: int, method: Method, dtype: torch.dtype
) -> None:
    """Encode columns of a wider table by ids, and decode into such columns."""
    table = random_rows(seed, 30, 57).to(dtype)
    rows = table[:, 20:41]
    ids = torch.randperm(30, generator=torch.Generator().manual_seed(seed % 2**31))[:19]
    data, _ = encode(rows, bits, method, ids)
    assert torch.equal(data, encode(rows[ids].contiguous(), bits, method)[0])
    target = table.clone()
    torch.ops.checknrun.decode_rows(data, bits, 1.0, ids, target[:, 20:41], "")
    expected = table.clone()
    expected[ids, 20:41] = decode(data, bits, 21, dtype)
    assert same_bits(target, expected)


@settings(max_examples=examples(60), deadline=None)
@given(SEEDS, st.sampled_from(WIDTHS), st.sampled_from(DTYPES), st.booleans(), st.booleans())
def test_some_of_the_encoded_rows(
    seed: int, bits: int, dtype: torch.dtype, by_ids: bool, compiled: bool
) -> None:
    """Decode only the chosen rows, to rows given by ids or one after another."""
    random = torch.Generator().manual_seed(seed % 2**31)
    rows = random_rows(seed, 30, 21).to(dtype)
    data, _ = encode(rows, bits, Method.ASYMMETRIC)
    positions = torch.randperm(30, generator=random)[:11].sort().values
    ids = torch.randperm(40, generator=random)[:11] if by_ids else None
    target = torch.zeros(40 if by_ids else 11, 21, dtype=dtype)
    with patch.object(kernel, "has_extension", lambda: compiled):
        kernel.decode_rows(data, bits, 1.0, target, ids, positions)
    expected = torch.zeros_like(target)
    expected[slice(None) if ids is None else ids] = decode(data, bits, 21, dtype)[positions]
    assert same_bits(target, expected)


def test_other_threads_run_meanwhile() -> None:
    """Release the GIL: with Python's own switching turned off, other threads run only then."""
    rows = torch.randn(60_000, 256)
    out = torch.empty((60_000, row_bytes(256, 4)), dtype=torch.uint8)
    refused = torch.empty(60_000, dtype=torch.uint8)
    turns, stop, interval = [0], [False], sys.getswitchinterval()

    def take_turns() -> None:
        while not stop[0]:
            turns[0] += 1
            time.sleep(0)  # releases the GIL

    def turns_during(act: Callable[[], object]) -> int:
        before = turns[0]
        for _ in range(200):  # on a busy machine another thread may get no processor at once
            act()
            if turns[0] > before:
                break
        return turns[0] - before

    other = threading.Thread(target=take_turns)
    sys.setswitchinterval(1000)
    try:
        other.start()
        before = turns[0]
        sum(range(300_000))
        kept = turns[0] == before
        with threads(1):
            encoding = turns_during(
                lambda: torch.ops.checknrun.encode_rows(
                    rows, None, 4, int(Method.ADAPTIVE), 1, 0.0, 1.0, out, refused, "plain"
                )
            )
            decoding = turns_during(
                lambda: torch.ops.checknrun.decode_rows(out, 4, 1.0, None, rows, "plain")
            )
    finally:
        sys.setswitchinterval(interval)
        stop[0] = True
        other.join()
    assert kept
    assert encoding > 0
    assert decoding > 0


def call_encode(**changed: Any) -> None:
    arguments = {
        "rows": torch.randn(6, 8),
        "ids": None,
        "bits": 4,
        "method": 0,
        "num_bins": 1,
        "ratio": 0.0,
        "factor": 1.0,
        "out": torch.empty((6, 8), dtype=torch.uint8),
        "refused": torch.empty(6, dtype=torch.uint8),
        "build": "",
    } | changed
    torch.ops.checknrun.encode_rows(*arguments.values())


def call_decode(**changed: Any) -> None:
    arguments = {
        "data": torch.zeros((6, 8), dtype=torch.uint8),
        "bits": 4,
        "factor": 1.0,
        "ids": None,
        "out": torch.empty(6, 8),
        "build": "",
        "positions": None,
    } | changed
    torch.ops.checknrun.decode_rows(*arguments.values())


BYTES = torch.zeros((6, 8), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"rows": torch.randn(8)}, ValueError, "expected rows on the CPU"),
        ({"rows": torch.randn(6, 2, 4)}, ValueError, "expected rows on the CPU"),
        ({"rows": torch.randn(8, 6).t()}, ValueError, "each in one piece"),
        ({"rows": torch.empty((6, 8), device="meta")}, ValueError, "expected rows on the CPU"),
        ({"rows": torch.randn(6, 0)}, ValueError, "no columns"),
        ({"rows": torch.randn(6, 8).double()}, TypeError, "float32, float16 or bfloat16"),
        ({"rows": torch.ones((6, 8), dtype=torch.int32)}, TypeError, "float32, float16"),
        ({"ids": torch.arange(6).float()}, ValueError, "int64 vector"),
        ({"ids": torch.arange(6, dtype=torch.int32)}, ValueError, "int64 vector"),
        ({"ids": torch.arange(12)[::2]}, ValueError, "contiguous"),
        ({"ids": torch.zeros((6, 1), dtype=torch.int64)}, ValueError, "int64 vector"),
        ({"ids": torch.tensor([0, 1, 2, 3, 4, 6])}, IndexError, "row 6 of 6"),
        ({"ids": torch.tensor([0, 1, -1, 3, 4, 5])}, IndexError, "row -1 of 6"),
        ({"ids": torch.arange(5)}, ValueError, r"\(5, 8\)"),
        ({"bits": 5}, ValueError, "bits must be 2, 3, 4 or 8"),
        ({"bits": 2}, ValueError, r"\(6, 6\)"),
        ({"method": 4}, ValueError, "unknown method 4"),
        ({"method": -1}, ValueError, "unknown method -1"),
        ({"method": 2, "num_bins": 0}, ValueError, "num_bins must be positive"),
        ({"method": 2, "ratio": 1.5}, ValueError, "ratio between 0 and 1"),
        ({"out": BYTES[:5]}, ValueError, r"\(6, 8\)"),
        ({"out": BYTES[:, :7]}, ValueError, r"\(6, 8\)"),
        ({"out": torch.zeros((8, 6), dtype=torch.uint8).t()}, ValueError, "contiguous"),
        ({"out": BYTES.view(-1)}, ValueError, r"\(6, 8\)"),
        ({"out": BYTES.to(torch.int8)}, ValueError, "uint8"),
        ({"out": BYTES.to("meta")}, ValueError, "on the CPU"),
        ({"refused": torch.empty(5, dtype=torch.uint8)}, ValueError, "6 contiguous uint8"),
        ({"refused": torch.empty(6)}, ValueError, "6 contiguous uint8"),
        ({"build": "sse9"}, ValueError, "no build 'sse9'"),
    ],
)
def test_wrong_arguments_to_encode(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    call_encode()
    with pytest.raises(error, match=message):
        call_encode(**changed)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"data": BYTES[:5]}, ValueError, r"\(6, 8\)"),
        ({"data": torch.zeros((6, 9), dtype=torch.uint8)}, ValueError, r"\(6, 8\)"),
        ({"data": torch.zeros((6, 9), dtype=torch.uint8)[:, :8]}, ValueError, "contiguous"),
        ({"data": BYTES.float()}, ValueError, "uint8"),
        ({"positions": torch.arange(5)}, ValueError, "expected 6 positions"),
        ({"positions": torch.tensor([0, 1, 2, 3, 4, 6])}, IndexError, "row 6 of 6"),
        ({"positions": torch.tensor([0, 1, -1, 3, 4, 5])}, IndexError, "row -1 of 6"),
        ({"positions": torch.arange(6).int()}, ValueError, "int64 vector"),
        ({"data": BYTES.to("meta")}, ValueError, "on the CPU"),
        ({"bits": 16}, ValueError, "bits must be 2, 3, 4 or 8"),
        ({"ids": torch.tensor([0, 1, 2, 3, 4, 60])}, IndexError, "row 60 of 6"),
        ({"ids": torch.arange(7)}, ValueError, r"\(7, 8\)"),
        ({"out": torch.empty(6, 20)}, ValueError, r"\(6, 14\)"),
        ({"out": torch.empty(8, 6).t()}, ValueError, "each in one piece"),
        ({"out": torch.empty((6, 8), dtype=torch.float64)}, TypeError, "float32, float16"),
        ({"build": "sse9"}, ValueError, "no build 'sse9'"),
    ],
)
def test_wrong_arguments_to_decode(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    call_decode()
    with pytest.raises(error, match=message):
        call_decode(**changed)
