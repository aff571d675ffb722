"""Check k-means codebooks: optimal per row, better than uniform steps per block, stable."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from torchrec_checknrun.codecs import codec_from_spec
from torchrec_checknrun.codecs.kmeans import WIDTHS, KMeans, require_kmeans1d
from torchrec_checknrun.errors import UnsupportedFormat

pytest.importorskip("kmeans1d", reason="the extra [kmeans] isn't installed")

CODECS = [KMeans(bits, block) for bits in WIDTHS for block in (None, 3)]
SEEDS = st.integers(0, 2**32 - 1)


def round_trip(codec: KMeans, rows: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    encoded = codec.encode(rows)
    assert encoded.data.dtype == torch.uint8
    assert encoded.data.dim() == 1
    decoded = torch.empty_like(rows)
    codec.decode(encoded.data, encoded.parameters, len(rows), 0, decoded)
    return decoded, encoded.exceptions.tolist()


def relative_error(decoded: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    rows = rows.double()
    return (decoded.double() - rows).norm(dim=1) / rows.norm(dim=1).clamp(min=1e-300)


def hard_rows(seed: int, n: int, dim: int) -> torch.Tensor:
    """Make ordinary and hard rows: constant, zero, with an outlier, of few values."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n, dim)) * 10.0 ** rng.integers(-3, 3, (n, 1))
    rows += rng.choice([0.0, 1.0, -300.0], (n, 1))
    kind = rng.integers(0, 6, n)
    rows[kind == 0] = rows[kind == 0][:, :1]
    rows[kind == 1, 0] = 60000.0
    rows[kind == 2] = 0.0
    rows[kind == 3] = rng.choice([-0.5, 0.25, 3.0], (int((kind == 3).sum()), dim))
    return torch.from_numpy((rows * 2.0 ** rng.choice([0, -40])).astype(np.float32))


def held(rows: torch.Tensor, exceptions: list[int]) -> torch.Tensor:
    """Return which rows the codebooks hold: rows not too small beside the largest one.

    No exponent could bring both into fp16's range.
    """
    assert bool((rows[exceptions].abs() < 2.0**-24 * rows.abs().max()).all())
    kept = torch.ones(len(rows), dtype=torch.bool)
    kept[exceptions] = False
    return kept


def least_error(row: list[float], k: int) -> float:
    """Find the smallest l2 error of any ``k`` values by trying all cuts of the sorted row."""
    values = np.sort(np.array(row, dtype=np.float64))
    n = len(values)
    cost = np.zeros((n + 1, n + 1))
    for i in range(n):
        for j in range(i + 1, n + 1):
            cost[i, j] = ((values[i:j] - values[i:j].mean()) ** 2).sum()
    best = cost[0]
    for _ in range(k - 1):
        best = np.array([min(best[i] + cost[i, j] for i in range(j + 1)) for j in range(n + 1)])
    return float(np.sqrt(best[n]))


@settings(max_examples=examples(40), deadline=None)
@given(SEEDS, st.integers(1, 20), st.sampled_from((2, 3, 4)))
def test_no_codebook_of_a_row_is_better(seed: int, dim: int, bits: int) -> None:
    rows = hard_rows(seed, 3, dim)
    decoded, exceptions = round_trip(KMeans(bits), rows)
    kept = held(rows, exceptions)
    for row, again in zip(rows[kept].double(), decoded[kept].double(), strict=True):
        least = least_error(row.tolist(), 2**bits)
        rounding = 2.0**-10 * float(row.norm()) + float(row.abs().max()) * 1e-6
        assert float((again - row).norm()) <= least + rounding


@settings(max_examples=examples(60), deadline=None)
@given(SEEDS, st.integers(1, 12), st.integers(1, 70), st.sampled_from(CODECS))
def test_any_shape_within_the_bound(seed: int, n: int, dim: int, codec: KMeans) -> None:
    """Bound a row's error by the range of its elements, for any codebook of its block."""
    rows = hard_rows(seed, n, dim)
    decoded, exceptions = round_trip(codec, rows)
    kept = held(rows, exceptions)
    rows, decoded = rows[kept], decoded[kept]
    spread = (rows.double() - rows.double().mean(dim=1, keepdim=True)).norm(dim=1)
    rounding = 2.0**-9 * rows.double().norm(dim=1)
    error = (decoded.double() - rows.double()).norm(dim=1)
    assert bool((error <= spread * (1 + 1e-6) + rounding).all())
    span = rows.double().amax(dim=1) - rows.double().amin(dim=1)
    largest = (decoded.double() - rows.double()).abs().amax(dim=1)
    assert bool((largest <= span + 2.0**-9 * rows.double().abs().amax(dim=1)).all())


@pytest.mark.parametrize("bits", WIDTHS)
def test_rows_of_few_values_are_exact_up_to_fp16(bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(30, 2**bits, generator=generator)
    places = torch.randint(0, 2**bits, (30, 300), generator=generator)
    rows = values.gather(1, places)
    decoded, _ = round_trip(KMeans(bits), rows)
    assert bool(((decoded - rows).abs() <= rows.abs() * 2.0**-11).all())
    exact = rows.half().float()
    assert torch.equal(round_trip(KMeans(bits), exact)[0], exact)


# Columns: the mean relative l2 error on Gaussian rows, of exact k-means per row, and an upper bound
# for codebooks shared by blocks (uniform steps between a row's extremes: .3229 .1378 .0643, .4468
# .1907 .0890).
@pytest.mark.parametrize(
    ("dim", "bits", "per_row", "per_block"),
    [
        (16, 2, 0.2264, 0.2731),
        (16, 3, 0.0656, 0.1357),
        (64, 2, 0.3092, 0.326),
        (64, 3, 0.1400, 0.1689),
        (64, 4, 0.0545, 0.0866),
    ],
)
def test_error_on_gaussian_rows(dim: int, bits: int, per_row: float, per_block: float) -> None:
    rows = torch.randn(1000, dim, generator=torch.Generator().manual_seed(0))
    own, _ = round_trip(KMeans(bits), rows)
    assert float(relative_error(own, rows).mean()) == pytest.approx(per_row, rel=0.02)
    shared, _ = round_trip(KMeans(bits, block_rows=500), rows)
    assert float(relative_error(shared, rows).mean()) <= per_block


@pytest.mark.parametrize("codec", [KMeans(b, block) for b in WIDTHS for block in (None, 40)])
@pytest.mark.parametrize("dim", [5, 32])
def test_ten_passes_add_nothing(codec: KMeans, dim: int) -> None:
    ordinary = torch.randn(60, dim, generator=torch.Generator().manual_seed(0))
    rows = torch.cat([ordinary, hard_rows(1, 60, dim)])
    first, _ = round_trip(codec, rows)
    again = first
    for _ in range(9 if codec.bits < 8 else 3):
        again, _ = round_trip(codec, again)
    added = relative_error(again, rows) - relative_error(first, rows)
    assert float(added.max()) <= 1e-3
    assert torch.equal(again[:60], first[:60])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [1e-7, 1e-30, 1e-44, 1.0, 3e4])
def test_the_error_is_the_same_at_all_sizes(codec: KMeans, size: float) -> None:
    rows = torch.randn(12, 8, generator=torch.Generator().manual_seed(0)).clamp(-2, 2)
    if size == 1e-44:  # denormal numbers: few values, all exact
        rows, size = rows.sign(), 2.0**-145
    decoded, exceptions = round_trip(codec, rows * size)
    assert exceptions == []
    wanted = relative_error(round_trip(codec, rows)[0], rows)
    assert torch.allclose(relative_error(decoded, rows * size), wanted, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("codec", CODECS)
def test_rows_out_of_range_are_exceptions(codec: KMeans) -> None:
    rows = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    rows[8, 0] = 65504.0
    sound = rows.clone()
    bad = {1: float("nan"), 4: float("inf"), 5: -float("inf"), 7: 65505.0, 11: 3e38}
    for place, value in bad.items():
        rows[place, 3] = value
        sound[place] = 0.0
    rows[0], sound[0] = rows[0] * 1e-12, 0.0  # lost beside 65504
    decoded, exceptions = round_trip(codec, rows)
    assert exceptions == [0, *bad]
    assert torch.equal(decoded, round_trip(codec, sound)[0])  # other rows are unaffected


@pytest.mark.parametrize("codec", [KMeans(2, 16), KMeans(4, 64), KMeans(8, 64), KMeans(4)])
def test_a_table_of_fp16_stays_finite(codec: KMeans) -> None:
    generator = torch.Generator().manual_seed(4)
    rows = (torch.rand(128, 8, generator=generator) * 2 - 1) * 65504
    rows[:, 0] = 65504
    rows = rows.half()
    encoded = codec.encode(rows)
    back = torch.empty_like(rows)
    codec.decode(encoded.data, encoded.parameters, len(rows), 0, back)
    back[encoded.exceptions] = rows[encoded.exceptions]
    assert bool(back.isfinite().all())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes_are_encoded_as_float32(codec: KMeans, dtype: torch.dtype) -> None:
    rows = torch.randn(7, 10).to(dtype)
    encoded = codec.encode(rows)
    assert torch.equal(encoded.data, codec.encode(rows.float()).data)
    out = torch.empty(7, 10, dtype=torch.float64)
    codec.decode(encoded.data, encoded.parameters, 7, 0, out)
    assert torch.equal(round_trip(codec, rows)[0], out.to(dtype))


@pytest.mark.parametrize("block", [None, 3, 5, 100])
@pytest.mark.parametrize("bits", WIDTHS)
def test_runs_of_rows_are_decoded_alone(bits: int, block: int | None) -> None:
    rows = torch.randn(13, 9)
    codec = KMeans(bits, block)
    encoded = codec.encode(rows)
    whole = torch.empty(13, 9)
    codec.decode(encoded.data, encoded.parameters, 13, 0, whole)
    for start, count in [(0, 1), (2, 2), (2, 8), (12, 1), (5, 0)]:
        part = torch.empty(count, 9)
        codec.decode(encoded.data, encoded.parameters, 13, start, part)
        assert torch.equal(part, whole[start : start + count])


@pytest.mark.parametrize("codec", CODECS)
def test_chosen_rows_and_views(codec: KMeans) -> None:
    base = torch.nn.Parameter(torch.randn(20, 12))
    ids = torch.tensor([7, 3, 19, 0, 4])
    for view in (base, base[:, 2:10], base[::2].t(), base[:, :1]):
        chosen = ids.clamp(max=len(view) - 1)
        encoded = codec.encode(view, chosen)
        assert torch.equal(encoded.data, codec.encode(view.detach()[chosen].clone()).data)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("offset", [0, 1])
def test_memory_that_is_given(codec: KMeans, offset: int) -> None:
    rows = torch.randn(7, 5)
    wanted = codec.encode(rows)
    size = wanted.data.numel()
    buffer = torch.zeros(size + offset + 9, dtype=torch.uint8)[offset:]
    encoded = codec.encode(rows, out=buffer)
    assert encoded.data.data_ptr() == buffer.data_ptr()
    assert torch.equal(encoded.data, wanted.data)
    assert not buffer[size:].any()
    out = torch.empty(7, 5)
    codec.decode(encoded.data, encoded.parameters, 7, 0, out)
    assert torch.equal(out, round_trip(codec, rows)[0])
    assert torch.equal(codec.encode(rows, out=buffer[: size - 1]).data, wanted.data)


@pytest.mark.parametrize("codec", CODECS)
def test_no_rows_and_zero_rows(codec: KMeans) -> None:
    assert round_trip(codec, torch.empty(0, 7))[0].shape == (0, 7)
    zeros = torch.zeros(4, 7)
    decoded, exceptions = round_trip(codec, zeros)
    assert exceptions == []
    assert torch.equal(decoded, zeros)


@pytest.mark.parametrize(
    ("bits", "block", "dim", "size"),
    [
        (2, None, 16, 10 * (8 + 4)),
        (3, None, 9, 10 * (16 + 4)),
        (4, None, 3, 10 * (6 + 2)),  # at most as many centroids as elements
        (8, None, 64, 10 * (128 + 64)),
        (3, 4, 16, 3 * 16 + 10 * (4 + 6)),
        (8, 10, 5, 512 + 10 * (4 + 5)),
    ],
)
def test_encoded_blocks_have_the_documented_size(
    bits: int, block: int | None, dim: int, size: int
) -> None:
    assert KMeans(bits, block).encode(torch.randn(10, dim)).data.numel() == size


def test_the_layout_is_fixed() -> None:
    """Keep the format of the bytes: fp16 values, then codes of three bits, the first lowest."""
    row = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 7.0]])
    codes = sum(code << 3 * i for i, code in enumerate([0, 1, 2, 3, 4, 5, 6, 7, 7]))
    encoded = KMeans(3).encode(row)
    assert encoded.parameters == {"exponent": 10}
    centroids = np.arange(8, dtype="<f2") * 2**10
    assert bytes(encoded.data.tolist()) == centroids.tobytes() + codes.to_bytes(4, "little")
    encoded = KMeans(3, block_rows=1).encode(row)
    codebook = (np.arange(8) / 7).astype("<f2")
    head = np.array([7 * 2**10, 0], dtype="<f2")
    parts = codebook.tobytes(), head.tobytes(), codes.to_bytes(4, "little")
    assert encoded.data[:16].tolist() == list(parts[0])
    assert encoded.data[20:].tolist() == list(parts[2])
    stored = np.frombuffer(bytes(encoded.data[16:20].tolist()), "<f2")
    assert np.allclose(stored, head, rtol=1e-3, atol=1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"exponent": None}, "exponent"),
        ({"exponent": "3"}, "'3'"),
        ({"exponent": 1.5}, "1.5"),
        ({"exponent": True}, "True"),
        ({"exponent": 5000}, "5000"),
    ],
)
def test_damaged_parameters_are_refused(change: dict[str, object], named: str) -> None:
    encoded = KMeans(2).encode(torch.randn(3, 4))
    with pytest.raises(ValueError, match=named):
        KMeans(2).decode(encoded.data, change, 3, 0, torch.empty(3, 4))


def test_damaged_data_is_refused() -> None:
    codec = KMeans(4)
    encoded = codec.encode(torch.randn(3, 5))
    with pytest.raises(ValueError, match="bytes"):
        codec.decode(encoded.data[:-1], encoded.parameters, 3, 0, torch.empty(3, 5))
    encoded.data[-1] = 0x0F  # code 15 of five centroids
    with pytest.raises(ValueError, match="beyond the row's 5 centroids"):
        codec.decode(encoded.data, encoded.parameters, 3, 0, torch.empty(3, 5))


@pytest.mark.parametrize("codec", CODECS)
def test_spec_makes_the_codec_again(codec: KMeans) -> None:
    again = codec_from_spec(codec.spec())
    assert isinstance(again, KMeans)
    assert (again.bits, again.block_rows) == (codec.bits, codec.block_rows)
    assert again.value_bits == codec.bits
    assert again.lossy


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 2}, "version 2"),
        ({"bits": 5}, "bits"),
        ({"bits": "2"}, "'2'"),
        ({"bits": None}, "None"),
        ({"block_rows": 0}, "block_rows"),
        ({"block_rows": 2.5}, "2.5"),
        ({"block_rows": True}, "True"),
    ],
)
def test_unknown_specs_are_refused(change: dict[str, object], named: str) -> None:
    with pytest.raises(UnsupportedFormat, match=named):
        codec_from_spec(KMeans(2, 8).spec() | change)


@pytest.mark.parametrize(("bits", "block"), [(0, None), (1, None), (16, None), (2, 0), (2, -1)])
def test_wrong_arguments_are_refused(bits: int, block: int | None) -> None:
    with pytest.raises(ValueError, match="must be"):
        KMeans(bits, block)


def test_reading_needs_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(20, 32)
    codecs = [KMeans(2), KMeans(2, 8)]
    encoded = [codec.encode(rows) for codec in codecs]
    wanted = [round_trip(codec, rows)[0] for codec in codecs]
    monkeypatch.setitem(sys.modules, "kmeans1d", None)
    for codec, one, whole in zip(codecs, encoded, wanted, strict=True):
        out = torch.empty_like(rows)
        codec.decode(one.data, one.parameters, 20, 0, out)
        assert torch.equal(out, whole)
        with pytest.raises(ImportError, match=r"pip install 'torchrec_checknrun\[kmeans\]'"):
            codec.encode(rows)
    with pytest.raises(ImportError, match="kmeans1d"):
        require_kmeans1d()
