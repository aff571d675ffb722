"""Check every codec: any rows, in any order, into any memory; found again by its spec."""

from __future__ import annotations

import json
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples, some_of
from tests.unit.quantized_rows import decoded, random_rows, spoil, threads
from torchrec_checknrun.codecs import (
    Bf16,
    Codec,
    Encoded,
    Exact,
    Fp16,
    ImportanceWeighted,
    KMeans,
    Parameters,
    RowContext,
    Rowwise,
    codec_from_spec,
)
from torchrec_checknrun.errors import UnsupportedFormat

pytestmark = pytest.mark.usefixtures("each_kernel")

SEEDS = st.integers(0, 2**32 - 1)
DIMS = st.one_of(st.integers(1, 40), st.integers(1, 512))
CODECS: list[Codec] = [
    Exact(),
    Fp16(),
    Bf16(),
    Rowwise(8, "asymmetric"),
    Rowwise(4, "adaptive"),
    Rowwise(3, "adaptive"),
    Rowwise(3, "symmetric"),
    Rowwise(2, "greedy"),
    Rowwise(2, "greedy", num_bins=20, ratio=0.6),
    ImportanceWeighted(),
    ImportanceWeighted(offset=6.0),
    *([KMeans(2), KMeans(3, block_rows=16)] if find_spec("kmeans1d") else []),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: json.dumps(codec.spec()))


def context(n: int) -> RowContext:
    """Make row-wise Adagrad's state of as many rows, of rising importance."""
    return RowContext({"momentum1": torch.logspace(-8, 0, n)})


def same(one: Encoded, other: Encoded) -> bool:
    return (
        torch.equal(one.data.view(-1), other.data.view(-1))
        and one.parameters == other.parameters
        and torch.equal(one.exceptions, other.exceptions)
    )


@every_codec
@settings(max_examples=examples(20), deadline=None)
@given(SEEDS, st.integers(0, 60), DIMS, st.sampled_from(DTYPES), st.sampled_from([1, 2, 3]))
def test_rows_of_any_shape_and_type(
    codec: Codec, seed: int, n: int, dim: int, dtype: torch.dtype, number: int
) -> None:
    """Return rows in their shape and dtype, and leave the source rows unchanged."""
    rows = spoil(random_rows(seed, n, dim), seed).to(dtype)
    before = rows.clone()
    with threads(number):
        encoded = codec.encode(rows, context=context(n))
        back = decoded(codec, encoded, rows, n)
    assert torch.equal(rows.nan_to_num(7), before.nan_to_num(7))
    assert (back.dtype, back.shape) == (dtype, (n, dim))
    data, exceptions = encoded.data, encoded.exceptions
    assert (data.dtype, data.device.type, data.is_contiguous()) == (torch.uint8, "cpu", True)
    assert exceptions.dtype == torch.int64
    assert exceptions.tolist() == sorted(set(exceptions.tolist()))
    assert set(exceptions.tolist()) <= set(range(n))
    assert json.loads(json.dumps(encoded.parameters)) == encoded.parameters
    if not codec.lossy:
        assert len(exceptions) == 0
    elif n:
        back[exceptions] = rows[exceptions]
        nonfinite = ~rows.isfinite().all(dim=1)
        assert torch.equal(back[nonfinite].view(torch.uint8), rows[nonfinite].view(torch.uint8))


@every_codec
@settings(max_examples=examples(15, quick=6), deadline=None)
@given(SEEDS, st.integers(1, 40), st.integers(1, 70), st.data())
def test_ids_choose_rows_in_any_order(
    codec: Codec, seed: int, n: int, dim: int, data: st.DataObject
) -> None:
    """Return rows as often as the ids name them; the ids need not be contiguous."""
    rows = spoil(random_rows(seed, n, dim), seed)
    chosen = data.draw(st.lists(st.integers(0, n - 1), max_size=60))
    ids = torch.tensor(chosen, dtype=torch.int64)
    expected = codec.encode(rows[ids], context=context(len(ids)))
    assert same(codec.encode(rows, ids, context(len(ids))), expected)
    apart = torch.stack([ids, torch.full_like(ids, -1)], dim=1)[:, 0]
    assert same(codec.encode(rows, apart, context(len(ids))), expected)


@every_codec
@pytest.mark.parametrize(
    ("by_id", "dtype"),
    some_of([(by_id, d) for by_id in (False, True) for d in (torch.float32, torch.float16)], 3),
)
def test_memory_for_the_bytes(codec: Codec, by_id: bool, dtype: torch.dtype) -> None:
    """Use given memory if large enough, at any alignment, and no more than the encoded size."""
    rows = random_rows(3, 50, 13).to(dtype)
    ids = torch.arange(49, 0, -2) if by_id else None
    n = 25 if by_id else 50
    expected = codec.encode(rows, ids, context(n))
    size = expected.data.numel()
    for spare in (-1, 0, 1, 100):
        for start in (0, 4, 3):
            memory = torch.full((start + size + spare,), 0xA5, dtype=torch.uint8)
            encoded = codec.encode(rows, ids, context(n), out=memory[start:])
            assert same(encoded, expected)
            assert encoded.data.numel() == size
            if spare >= 0:
                assert encoded.data.data_ptr() == memory.data_ptr() + start
            else:
                assert encoded.data.data_ptr() != memory.data_ptr() + start
            assert bool((memory[:start] == 0xA5).all())
            assert bool((memory[start + size :] == 0xA5).all())


@every_codec
def test_views_are_encoded_as_their_values(codec: Codec) -> None:
    base = torch.randn(12, 12, generator=torch.Generator().manual_seed(5))
    views = [
        base[:, 2:10],
        base[::2, :8],
        base[:, ::3],
        base.t()[:, :4],
        base[3:4].t(),
        base[:1, :1],
        base[:, :1],
        base[:1].expand(5, 12),
        base[:, :1].expand(12, 6),
    ]
    for view in views:
        values = view.clone(memory_format=torch.contiguous_format)
        n = len(view)
        assert same(
            codec.encode(view, context=context(n)), codec.encode(values, context=context(n))
        )
        ids = torch.arange(n - 1, -1, -1)
        assert same(
            codec.encode(view, ids, context(n)), codec.encode(values[ids], context=context(n))
        )


@every_codec
def test_what_was_encoded_does_not_change_with_the_table(codec: Codec) -> None:
    """Keep encoded rows unchanged while training continues."""
    rows = torch.randn(20, 8)
    for ids in (None, torch.arange(20)):
        encoded = codec.encode(rows, ids, context(20))
        before = encoded.data.clone()
        rows += 1
        assert torch.equal(encoded.data, before)


@every_codec
def test_no_gradient_flows(codec: Codec) -> None:
    rows = torch.nn.Parameter(torch.randn(3, 4))
    encoded = codec.encode(rows, context=context(3))
    assert not encoded.data.requires_grad
    assert same(encoded, codec.encode(rows.detach(), context=context(3)))


@every_codec
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_take_no_bytes(codec: Codec, dtype: torch.dtype) -> None:
    for rows, ids in (
        (torch.empty(0, 7, dtype=dtype), None),
        (torch.empty(0, 7, dtype=dtype), torch.arange(0)),
        (torch.ones(4, 7, dtype=dtype), torch.arange(0)),
    ):
        encoded = codec.encode(rows, ids, context(0))
        assert encoded.data.numel() == 0
        assert encoded.exceptions.tolist() == []
        assert decoded(codec, encoded, rows, 0).shape == (0, 7)


@every_codec
def test_bytes_of_another_length(codec: Codec) -> None:
    rows = torch.randn(30, 6)
    encoded = codec.encode(rows, context=context(30))
    data = encoded.data.view(-1)
    for wrong in (data[:-1], data[:0], torch.cat([data, data[:1]]), torch.cat([data, data])):
        with pytest.raises(ValueError, match=r"bytes|group"):
            codec.decode(wrong, encoded.parameters, 30, 0, torch.empty(30, 6))
    for n in (29, 31, 300):
        with pytest.raises(ValueError, match=r"bytes|group"):
            codec.decode(data, encoded.parameters, n, 0, torch.empty(n, 6))


@every_codec
@settings(max_examples=6, deadline=None)
@given(SEEDS, st.integers(2, 20), st.integers(1, 70), st.data())
def test_some_rows_of_a_block_are_a_block(
    codec: Codec, seed: int, n: int, dim: int, data: st.DataObject
) -> None:
    rows = random_rows(seed, n, dim)
    encoded = codec.encode(rows, context=context(n))
    whole = torch.empty_like(rows)
    codec.decode(encoded.data.view(-1), encoded.parameters, n, 0, whole)
    chosen = sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1)))
    block = encoded.data.view(-1), encoded.parameters, n, dim, torch.tensor(chosen)
    selected = codec.select(*block)
    if selected is None:
        assert isinstance(codec, KMeans)
        assert codec.block_rows is not None
        return
    part = torch.empty((len(chosen), dim), dtype=rows.dtype)
    codec.decode(*json_again(selected), len(chosen), 0, part)
    assert part.numpy().tobytes() == whole[chosen].numpy().tobytes()
    with pytest.raises(ValueError, match="bytes"):
        codec.select(block[0][:-1], *block[1:])


def json_again(block: tuple[torch.Tensor, Parameters]) -> tuple[torch.Tensor, Parameters]:
    return block[0], json.loads(json.dumps(block[1]))


@every_codec
def test_a_spec_makes_the_codec_again(codec: Codec) -> None:
    again = codec_from_spec(json.loads(json.dumps(codec.spec())))
    assert type(again) is type(codec)
    assert again.spec() == codec.spec()
    assert again.lossy is codec.lossy is not isinstance(codec, Exact)
    assert again.value_bits == codec.value_bits
    assert codec.spec()["name"] == codec.name
    assert codec.spec()["version"] == codec.version


@pytest.mark.parametrize(
    ("codec", "bits"),
    [
        (Exact(), 32),
        (Bf16(), 16),
        (KMeans(2), 2),
        (Rowwise(3), 3),
        (Rowwise(8, "symmetric"), 8),
        (ImportanceWeighted(), 4),
    ],
)
def test_width_of_a_value(codec: Codec, bits: int) -> None:
    assert codec.value_bits == bits


@settings(max_examples=examples(60), deadline=None)
@given(st.sampled_from(DTYPES), st.integers(0, 5), st.integers(1, 9), st.data())
def test_exact_keeps_every_bit(dtype: torch.dtype, n: int, dim: int, data: st.DataObject) -> None:
    """Keep any bits, in parts too: NaNs with payloads, negative zero, denormals, infinities."""
    size = n * dim * dtype.itemsize
    raw = torch.tensor(list(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    rows = raw.view(dtype).reshape(n, dim)
    encoded = Exact().encode(rows)
    assert encoded.data.tolist() == raw.tolist()
    assert torch.equal(decoded(Exact(), encoded, rows, n).view(-1).view(torch.uint8), raw)
    start = data.draw(st.integers(0, n))
    part = torch.empty(data.draw(st.integers(0, n - start)), dim, dtype=dtype)
    Exact().decode(encoded.data, encoded.parameters, n, start, part)
    row_bytes = dim * dtype.itemsize
    expected = raw[start * row_bytes : (start + len(part)) * row_bytes]
    assert torch.equal(part.view(-1).view(torch.uint8), expected)


def test_exact_keeps_named_specials() -> None:
    bits = [0x7FC12345, 0xFF800001, 0x80000000, 0x00000001, 0x7F800000, 0xFF800000, 0x807FFFFF]
    rows = torch.from_numpy(np.array([bits], np.uint32).view(np.float32))
    back = decoded(Exact(), Exact().encode(rows), rows, 1)
    assert back.numpy().view(np.uint32).tolist() == [bits]


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
        ({"name": "fbgemm_rowwise", "version": 3, "bits": 8}, "version 3"),
        ({"name": "fbgemm_rowwise", "version": 1}, "bits"),
        ({"name": "fbgemm_rowwise", "version": 2, "bits": 5}, "5"),
        ({"name": "fbgemm_rowwise", "version": 2, "bits": "8"}, "'8'"),
        ({"name": "fbgemm_rowwise", "version": 2, "bits": 8.0}, "8.0"),
        ({"name": "fbgemm_rowwise", "version": 2, "bits": True}, "True"),
        ({"name": "fbgemm_rowwise", "version": 2, "bits": 4, "method": "best"}, "'best'"),
        ({"name": "fbgemm_rowwise", "version": 2, "bits": 4, "method": 3}, "3"),
        ({"name": "fp16", "version": 2}, "version 2"),
        ({"name": "kmeans", "version": 1, "bits": 5}, "5"),
        ({"name": "kmeans", "version": 1, "bits": 2, "block_rows": 0}, "0"),
        ({"name": "importance", "version": 2}, "version 2"),
        ({"name": "importance", "version": 1, "mean_bits": 9}, "9"),
        ({"name": "importance", "version": 1, "mean_bits": "4"}, "4"),
        ({"name": "importance", "version": 1, "offset": True}, "True"),
        ({"name": "importance", "version": 1, "offset": 1.0, "mean_bits": 4}, "not both"),
    ],
)
def test_unknown_codecs_are_refused(spec: dict[str, object], named: str) -> None:
    with pytest.raises(UnsupportedFormat) as raised:
        codec_from_spec(spec)
    assert named in str(raised.value)
