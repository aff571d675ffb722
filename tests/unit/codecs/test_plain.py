"""Cast to 16 bits within half a unit in the last place, or name the row as an exception."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from torchrec_checknrun.codecs import codec_from_spec
from torchrec_checknrun.codecs.plain import Bf16, Fp16, Narrow
from torchrec_checknrun.errors import UnsupportedFormat

CODECS = (Fp16(), Bf16())
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
VALUES = st.one_of(
    st.floats(width=32),
    st.floats(-1, 1, width=32),
    st.sampled_from([65504.0, 65505.0, 65519.0, 65520.0, -65536.0, 2.0**-14, 2.0**-24, 2.0**-25]),
    st.integers(-3000, 3000).map(lambda k: k * 2.0**-24),
    st.integers(-3000, 3000).map(lambda k: k * 2.0**-149),
)
ROWS = st.integers(1, 9).flatmap(
    lambda dim: st.lists(st.lists(VALUES, min_size=dim, max_size=dim), min_size=1, max_size=6)
)


def round_trip(codec: Narrow, rows: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    encoded = codec.encode(rows)
    assert encoded.data.dtype == torch.uint8
    assert encoded.data.shape == (rows.numel() * 2,)
    decoded = torch.empty(rows.shape, dtype=rows.dtype)
    codec.decode(encoded.data, encoded.parameters, len(rows), 0, decoded)
    return decoded, encoded.exceptions.tolist()


def is_exception(row: torch.Tensor, dtype: torch.dtype) -> bool:
    """Apply the documented rule in Python's floats."""
    values = row.double().tolist()
    limit, eps = {torch.float16: (65504.0, 2.0**-10), torch.bfloat16: (3.3895e38, 2.0**-7)}[dtype]
    if not all(abs(v) <= limit for v in values):
        return True
    unit = max(map(abs, values)) or 1.0
    lost = [(v - w) / unit for v, w in zip(values, row.to(dtype).double().tolist(), strict=True)]
    return sum(e * e for e in lost) ** 0.5 > eps * sum((v / unit) ** 2 for v in values) ** 0.5


def bits(values: torch.Tensor) -> list[int]:
    return values.contiguous().view(torch.uint8).flatten().tolist()


@settings(max_examples=examples(300), deadline=None)
@given(ROWS, st.sampled_from(CODECS))
@example([[65504.0], [65519.0], [65520.0]], CODECS[0])
@example([[1e-7, 1e-7], [1e-7, 1.0], [0.0, 0.0]], CODECS[0])
@example([[1e-40], [3.3895e38], [3.4e38]], CODECS[1])
def test_a_row_is_within_the_bound_or_an_exception(
    values: list[list[float]], codec: Narrow
) -> None:
    rows = torch.tensor(values, dtype=torch.float32)
    decoded, exceptions = round_trip(codec, rows)
    assert exceptions == [i for i, row in enumerate(rows) if is_exception(row, codec.dtype)]
    form = torch.finfo(codec.dtype)
    for i in set(range(len(rows))) - set(exceptions):
        error = (decoded[i].double() - rows[i].double()).abs()
        half_unit = (rows[i].double().abs() * form.eps / 2).clamp(
            min=form.smallest_normal * form.eps / 2
        )
        assert bool((error <= half_unit).all())
        again, lost = round_trip(codec, decoded[i : i + 1])
        assert lost == []
        assert bits(again) == bits(decoded[i : i + 1])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_cast(codec: Narrow, dtype: torch.dtype) -> None:
    rows = torch.randn(50, 7).to(dtype)
    decoded, exceptions = round_trip(codec, rows)
    assert exceptions == []
    assert torch.equal(decoded, rows.to(codec.dtype).to(dtype))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_decoding_into_any_dtype(codec: Narrow, out_dtype: torch.dtype) -> None:
    rows = torch.randn(9, 5)
    out = torch.empty(9, 5, dtype=out_dtype)
    codec.decode(codec.encode(rows).data, {}, 9, 0, out)
    assert torch.equal(out, rows.to(codec.dtype).to(out_dtype))


@pytest.mark.parametrize("codec", CODECS)
def test_a_table_of_the_same_dtype_is_kept_bit_for_bit(codec: Narrow) -> None:
    """Keep every bit pattern: denormals, infinities, NaNs with their payloads."""
    patterns = torch.from_numpy(np.arange(2**16, dtype=np.uint16).view(np.uint8).copy())
    rows = patterns.view(codec.dtype).view(-1, 8)
    encoded = codec.encode(rows)
    assert len(encoded.exceptions) == 0
    out = torch.empty_like(rows)
    codec.decode(encoded.data, encoded.parameters, len(rows), 0, out)
    assert bits(out) == bits(rows)


def test_values_far_beyond_are_exceptions() -> None:
    rows = torch.tensor(
        [[1.0, 2.0], [1e-300, 1e-310], [0.0, 0.0], [1e300, 1.0]], dtype=torch.double
    )
    for codec in CODECS:
        assert codec.encode(rows).exceptions.tolist() == [1, 3]


def test_a_table_of_fp16_stays_finite() -> None:
    """Round values to bf16, of which the one next to 65504 is beyond fp16."""
    values = [65504.0, 65408.0, 65376.0, -65504.0, 1.0]
    rows = torch.tensor([[value, 0.5, 0.0] for value in values], dtype=torch.float16)
    encoded = Bf16().encode(rows)
    back = torch.empty_like(rows)
    Bf16().decode(encoded.data, {}, len(rows), 0, back)
    assert encoded.exceptions.tolist() == [0, 1, 3]
    assert back[[2, 4]].tolist() == [[65280.0, 0.5, 0.0], [1.0, 0.5, 0.0]]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dim", [1, 3, 64, 513])
def test_many_rows_are_done_in_blocks(codec: Narrow, dim: int) -> None:
    rows = torch.rand(800_000 // dim, dim) + 0.5
    wanted = rows.to(codec.dtype)
    places = torch.tensor([0, 7, len(rows) // 2, len(rows) - 1])
    rows[places, dim // 2] = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.4e38])
    encoded = codec.encode(rows)
    assert encoded.exceptions.tolist() == places.tolist()
    sound = torch.ones(len(rows), dtype=torch.bool)
    sound[places] = False
    assert torch.equal(encoded.data.view(codec.dtype).view(-1, dim)[sound], wanted[sound])


@pytest.mark.parametrize("codec", CODECS)
def test_chosen_rows_equal_gathered_ones(codec: Narrow) -> None:
    rows = torch.randn(9000, 40)
    rows[[5, 8000], 3] = float("nan")
    ids = torch.randperm(9000)[:7000]
    chosen = codec.encode(rows, ids)
    gathered = codec.encode(rows[ids])
    assert torch.equal(chosen.data, gathered.data)
    assert torch.equal(chosen.exceptions, gathered.exceptions)
    assert codec.encode(rows, ids[:0]).data.numel() == 0


@pytest.mark.parametrize("codec", CODECS)
def test_views_are_encoded_as_their_values(codec: Narrow) -> None:
    base = torch.nn.Parameter(torch.randn(12, 12))
    ids = torch.tensor([2, 0])
    for view in (base, base[:, 2:10], base[::2, :8], base.t()[:, :4], base[3:4].t(), base[:, :1]):
        assert torch.equal(codec.encode(view).data, codec.encode(view.detach().clone()).data)
        assert torch.equal(codec.encode(view, ids).data, codec.encode(view[ids]).data)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("offset", [0, 1])
def test_memory_that_is_given(codec: Narrow, offset: int) -> None:
    """Use given memory if large enough, at odd addresses, too."""
    rows = torch.randn(30, 6)
    wanted = codec.encode(rows).data
    buffer = torch.zeros(400 + offset, dtype=torch.uint8)[offset:]
    encoded = codec.encode(rows, out=buffer)
    assert encoded.data.data_ptr() == buffer.data_ptr()
    assert torch.equal(encoded.data, wanted)
    assert not buffer[360:].any()
    out = torch.empty(10, 6)
    codec.decode(encoded.data, {}, 30, 15, out)
    assert torch.equal(out, rows[15:25].to(codec.dtype).float())
    assert torch.equal(codec.encode(rows, out=buffer[:359]).data, wanted)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_no_rows_come_back(codec: Narrow, dtype: torch.dtype) -> None:
    decoded, exceptions = round_trip(codec, torch.empty(0, 7, dtype=dtype))
    assert exceptions == []
    assert decoded.shape == (0, 7)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [0, 47, 49])
def test_data_of_another_size(codec: Narrow, size: int) -> None:
    with pytest.raises(ValueError, match="48 bytes"):
        codec.decode(torch.zeros(size, dtype=torch.uint8), {}, 6, 0, torch.empty(2, 4))


@pytest.mark.parametrize("codec", CODECS)
def test_the_spec_makes_the_same_codec(codec: Narrow) -> None:
    assert codec.spec() == {"name": codec.name, "version": 1}
    again = codec_from_spec(codec.spec())
    assert again.spec() == codec.spec()
    assert again.lossy
    assert again.value_bits == 16
    with pytest.raises(UnsupportedFormat, match="version 2"):
        codec_from_spec({"name": codec.name, "version": 2})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("codec", CODECS)
def test_the_same_bytes_from_a_gpu(codec: Narrow) -> None:
    rows = torch.randn(5000, 40)
    rows[[5, 800], 3] = float("nan")
    rows[9] *= 1e-8
    ids = torch.randperm(5000)[:3000]
    for chosen in (None, ids):
        wanted = codec.encode(rows, chosen)
        encoded = codec.encode(rows.cuda(), chosen)
        sound = torch.ones(len(rows) if chosen is None else len(chosen), dtype=torch.bool)
        sound[wanted.exceptions] = False
        assert torch.equal(encoded.data.view(-1, 80)[sound], wanted.data.view(-1, 80)[sound])
        assert torch.equal(encoded.exceptions, wanted.exceptions)
