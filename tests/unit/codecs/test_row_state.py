"""Return row-wise optimizer state exactly, or within the bound of its scheme."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.examples import examples
from torchrec_checknrun.codecs.row_state import (
    STATE_SCHEMES,
    decode_row_state,
    encode_row_state,
    state_row_bytes,
)

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
FLOAT_MAX = float(np.finfo(np.float32).max)
POSITIVE = st.floats(2.0**-149, FLOAT_MAX, width=32)
STATE = st.one_of(
    st.lists(st.one_of(st.just(0.0), POSITIVE), max_size=40),
    st.lists(
        st.floats(1.0, 1 + 2.0**-10, width=32), max_size=40
    ),  # levels closer than float32 resolves
    st.lists(st.integers(0, 600).map(lambda k: k * 2.0**-149), max_size=40),
)


def adagrad_state(n: int, seed: int = 0) -> torch.Tensor:
    """Make sums of squares as after training: over some fifty powers of two, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    state = torch.exp(torch.randn(n, generator=generator) * 4 - 19)
    state[:: max(2, n // 10)] = 0.0
    return state


def round_trip(values: torch.Tensor, scheme: str) -> tuple[torch.Tensor, str]:
    data, parameters = encode_row_state(values, scheme)
    assert data.dtype == torch.uint8
    assert data.dim() == 1
    assert data.device.type == "cpu"
    parameters = json.loads(json.dumps(parameters, allow_nan=False))
    assert len(data) == len(values) * state_row_bytes(parameters, values.shape, values.dtype)
    decoded = decode_row_state(data, parameters, values.shape, values.dtype)
    assert decoded.dtype == values.dtype
    assert decoded.shape == values.shape
    return decoded, parameters["scheme"]


def bits(values: torch.Tensor) -> list[int]:
    return values.contiguous().view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32])
def test_fp32_is_exact_in_every_dtype(dtype: torch.dtype) -> None:
    raw = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 8 * 100, dtype=np.uint8))
    values = raw.view(dtype)  # NaNs with payloads, denormals, infinities
    decoded, stored = round_trip(values, "fp32")
    assert stored == "fp32"
    assert bits(decoded) == bits(values)


@settings(max_examples=examples(200), deadline=None)
@given(STATE)
def test_bf16_rounds(state: list[float]) -> None:
    values = torch.tensor(state, dtype=torch.float32)
    decoded, stored = round_trip(values, "bf16")
    rounded = values.bfloat16().float()
    if bool(torch.isinf(rounded).any()) or bool(((rounded == 0) & (values != 0)).any()):
        assert stored == "fp32"
        assert bits(decoded) == bits(values)
    elif state:
        assert stored == "bf16"
        assert torch.equal(decoded, rounded)
        error = (decoded.double() - values.double()).abs()
        assert bool((error <= values.double() * 2.0**-8 + 2.0**-134).all())
        assert torch.equal(round_trip(decoded, "bf16")[0], decoded)


@settings(max_examples=examples(300), deadline=None)
@given(STATE, st.sampled_from([torch.float32, torch.float64]))
@example([2.0**-149, float(np.finfo(np.float32).max)], torch.float32)
@example([1.0, float(np.nextafter(np.float32(1), np.float32(2)))], torch.float32)
def test_log8_is_within_half_a_step(state: list[float], dtype: torch.dtype) -> None:
    values = torch.tensor(state, dtype=dtype)
    decoded, stored = round_trip(values, "log8")
    assert stored == ("log8" if state else "fp32")
    assert torch.equal(decoded == 0, values == 0)
    positive = values > 0
    if not positive.any():
        return
    before, after = values[positive].double(), decoded[positive].double()
    low, high = float(before.min()), float(before.max())
    half_step = math.exp((math.log(high) - math.log(low)) / 508) - 1
    # A level and the boundary below it are each rounded to the dtype; denormals to multiples of the
    # smallest one.
    rounding = torch.finfo(dtype).eps * before + 2 * float(torch.finfo(dtype).smallest_normal) * (
        torch.finfo(dtype).eps
    )
    assert bool(((after - before).abs() <= half_step * before * (1 + 1e-12) + rounding).all())
    assert bool((after[before == low] == low).all())
    assert bool((after[before == high] == high).all())


@settings(max_examples=examples(200), deadline=None)
@given(STATE, st.sampled_from(FLOATS))
def test_log8_of_what_log8_gave_changes_nothing(state: list[float], dtype: torch.dtype) -> None:
    values = torch.tensor(state, dtype=torch.float64).clamp(max=6e4).to(dtype)
    once, _ = round_trip(values, "log8")
    assert torch.equal(round_trip(once, "log8")[0], once)


MOMENTS = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 6), st.integers(2, 40)),
    elements=st.one_of(
        st.just(0.0),
        st.floats(-(2.0**6), 2.0**6, width=32),
        st.floats(-FLOAT_MAX, FLOAT_MAX, width=32),
        st.floats(-(2.0**-120), 2.0**-120, width=32, allow_subnormal=True),
    ),
)


@settings(max_examples=examples(300), deadline=None)
@given(MOMENTS, st.booleans())
@example(np.array([[2.0**-149, FLOAT_MAX]], np.float32), True)
@example(np.array([[2.0**-149, -FLOAT_MAX]], np.float32), False)
@example(np.full((2, 3), 2.0**-149, np.float32), True)
def test_rowlog8_is_within_its_bound(moments: np.ndarray, squared: bool) -> None:
    values = torch.from_numpy(np.abs(moments) if squared else moments)
    decoded, stored = round_trip(values, "rowlog8")
    assert stored == "rowlog8"
    before, after = values.double(), decoded.double()
    signed = bool((values < 0).any())
    scale = before.abs().amax(dim=1, keepdim=True).clamp(min=2.0**-93)
    error = (after - before).abs()
    assert bool(
        ((error <= 0.048 * before.abs()) | (error <= scale * 2.0 ** (-16 if signed else -32))).all()
    )
    assert bool((after * before >= 0).all())
    largest = (before.abs() == scale).nonzero(as_tuple=True)
    assert torch.equal(after[largest], before[largest])
    assert bool((after[before == 0] == 0).all())
    if not signed:
        assert bool((after[before > 0] > 0).all())
    assert torch.equal(round_trip(decoded, "rowlog8")[0], decoded)


def test_rowlog8_of_rows_apart() -> None:
    """Store a row alike with any other rows, so that rows can move between chunks."""
    values = adagrad_state(6400).view(100, 64)
    whole, _ = round_trip(values, "rowlog8")
    parts = [round_trip(part, "rowlog8")[0] for part in values.split(7)]
    assert torch.equal(torch.cat(parts), whole)
    assert float(((whole - values)[whole > 0] / whole[whole > 0]).abs().median()) < 0.03


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([[1.0, float("nan")]]),
        torch.tensor([[1.0, -float("inf")]]),
        torch.ones(3, 2, dtype=torch.float64),
        torch.ones(3, 2, dtype=torch.bfloat16),
        torch.ones(3, 2, dtype=torch.int64),
        torch.ones(3, 1),  # a scale would take more bytes than the codes save
        torch.ones(0, 4),
    ],
    ids=lambda values: f"{values.dtype}-{tuple(values.shape)}",
)
def test_pointwise_state_that_rowlog8_leaves_alone(values: torch.Tensor) -> None:
    decoded, stored = round_trip(values, "rowlog8")
    assert stored == "fp32"
    assert bits(decoded) == bits(values)


@pytest.mark.parametrize("scheme", ["bf16", "log8"])
def test_pointwise_state_stays_exact_under(scheme: str) -> None:
    values = adagrad_state(60).view(20, 3)
    decoded, stored = round_trip(values, scheme)
    assert stored == "fp32"
    assert torch.equal(decoded, values)


@pytest.mark.parametrize(
    ("signed", "scale", "dtype"),
    [
        *((flag, 1.0, torch.float32) for flag in (None, 1, "true")),
        *((False, bad, torch.float32) for bad in (math.nan, math.inf, 0.0, -1.0, 2.0**-94)),
        (False, 1.0, torch.float16),
    ],
)
def test_damaged_rowlog8(signed: object, scale: float, dtype: torch.dtype) -> None:
    data, parameters = encode_row_state(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "rowlog8")
    data[8:] = torch.tensor([scale]).view(torch.uint8)
    with pytest.raises(ValueError, match="rowlog8"):
        decode_row_state(data, {**parameters, "signed": signed}, (2, 2), dtype)
    with pytest.raises(ValueError, match="take 12 bytes, not 11"):
        decode_row_state(data[1:], parameters, (2, 2), torch.float32)


@pytest.mark.parametrize("signed", [False, True])
def test_any_bytes_of_rowlog8_are_finite(signed: bool) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    data = torch.cat((codes, torch.tensor([FLOAT_MAX]).view(torch.uint8)))
    found = decode_row_state(data, {"scheme": "rowlog8", "signed": signed}, (1, 256), torch.float32)
    assert bool(found.isfinite().all())
    assert found[0, 127 if signed else 255] == FLOAT_MAX


@pytest.mark.parametrize("scheme", ["bf16", "log8"])
def test_ten_passes_add_nothing(scheme: str) -> None:
    first, stored = round_trip(adagrad_state(5000), scheme)
    assert stored == scheme
    again = first
    for _ in range(9):
        again, _ = round_trip(again, scheme)
    assert torch.equal(again, first)


def test_log8_of_trained_state() -> None:
    values = adagrad_state(20_000)
    decoded, _ = round_trip(values, "log8")
    trained = values > 0
    error = (decoded[trained] - values[trained]).abs() / values[trained]
    assert float(error.max()) < 0.08
    assert len(decoded.unique()) > 150  # all levels are used


def test_order_is_kept_by_log8() -> None:
    values = adagrad_state(3000).sort().values
    decoded, _ = round_trip(values, "log8")
    assert bool((decoded[1:] >= decoded[:-1]).all())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -1e-30])
@pytest.mark.parametrize("scheme", ["bf16", "log8"])
def test_what_a_scheme_would_destroy_is_stored_exactly(scheme: str, value: float) -> None:
    values = adagrad_state(50)
    values[17] = value
    decoded, stored = round_trip(values, scheme)
    if scheme == "bf16" and value == -1e-30:
        assert stored == "bf16"
        assert math.isclose(float(decoded[17]), value, rel_tol=2**-8)
    else:
        assert stored == "fp32"
        assert bits(decoded) == bits(values)


@pytest.mark.parametrize("scheme", STATE_SCHEMES)
def test_zeros_and_signs_of_zero(scheme: str) -> None:
    zeros, stored = round_trip(torch.zeros(9), scheme)
    assert stored == ("log8" if scheme == "rowlog8" else scheme)
    assert torch.equal(zeros, torch.zeros(9))
    signed, _ = round_trip(torch.tensor([-0.0, 2.0]), scheme)
    assert signed.tolist() == [0.0, 2.0]


@pytest.mark.parametrize("scheme", STATE_SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_no_rows_come_back(scheme: str, dtype: torch.dtype) -> None:
    decoded, _ = round_trip(torch.empty(0, dtype=dtype), scheme)
    assert len(decoded) == 0


@pytest.mark.parametrize("scheme", STATE_SCHEMES)
def test_counters_stay_exact(scheme: str) -> None:
    values = torch.tensor([0, 1, 2**40 + 1])
    decoded, stored = round_trip(values, scheme)
    assert stored == "fp32"
    assert decoded.tolist() == values.tolist()


@pytest.mark.parametrize("scheme", STATE_SCHEMES)
def test_views_and_parameters_are_encoded_as_their_values(scheme: str) -> None:
    state = adagrad_state(60)
    for view in (state[::3], state[7:], state.view(6, 10)[:, 2], torch.nn.Parameter(state)):
        data, parameters = encode_row_state(view, scheme)
        wanted, wanted_parameters = encode_row_state(view.detach().clone(), scheme)
        assert torch.equal(data, wanted)
        assert parameters == wanted_parameters
        assert not data.requires_grad


@pytest.mark.parametrize("scheme", STATE_SCHEMES)
@pytest.mark.parametrize("offset", [0, 1])
def test_a_run_of_rows_is_decoded_alone(scheme: str, offset: int) -> None:
    """Decode a run of rows alone, from bytes at an odd address, too."""
    values = adagrad_state(100)
    data, parameters = encode_row_state(values, scheme)
    whole = decode_row_state(data, parameters, (100,), torch.float32)
    size = state_row_bytes(parameters, (100,), torch.float32)
    moved = torch.cat([torch.zeros(offset, dtype=torch.uint8), data])
    part = moved[offset + 30 * size : offset + 70 * size]
    assert torch.equal(decode_row_state(part, parameters, (40,), torch.float32), whole[30:70])


@pytest.mark.parametrize("scheme", STATE_SCHEMES)
def test_decoding_gives_memory_of_its_own(scheme: str) -> None:
    values = adagrad_state(10)
    data, parameters = encode_row_state(values.clone(), scheme)
    decoded = decode_row_state(data, parameters, (10,), torch.float32)
    kept = decoded.clone()
    data.zero_()
    assert torch.equal(decoded, kept)


@pytest.mark.parametrize("scheme", ["fp16", "exact", "", "LOG8"])
def test_unknown_schemes_are_refused(scheme: str) -> None:
    with pytest.raises(ValueError, match="fp32, bf16, log8, rowlog8"):
        encode_row_state(torch.ones(3), scheme)


@pytest.mark.parametrize(
    ("parameters", "n", "dtype"),
    [
        ({}, 4, torch.float32),
        ({"scheme": "fp16"}, 2, torch.float32),
        ({"scheme": ["bf16"]}, 2, torch.float32),
        ({"scheme": "fp32"}, 4, torch.float32),  # one value of four bytes
        ({"scheme": "bf16"}, 4, torch.float32),
        ({"scheme": "bf16"}, 2, torch.int64),
        ({"scheme": "log8"}, 4, torch.float32),
        ({"scheme": "log8", "low": 1.0, "high": 2.0}, 5, torch.float32),
        ({"scheme": "log8", "low": 1.0, "high": 2.0}, 4, torch.int32),
        ({"scheme": "log8", "low": 2.0, "high": 1.0}, 4, torch.float32),
        ({"scheme": "log8", "low": 0.0, "high": 1.0}, 4, torch.float32),
        ({"scheme": "log8", "low": -2.0, "high": -1.0}, 4, torch.float32),
        ({"scheme": "log8", "low": 1.0, "high": float("inf")}, 4, torch.float32),
        ({"scheme": "log8", "low": float("nan"), "high": 1.0}, 4, torch.float32),
        ({"scheme": "log8", "low": 1.0, "high": 1e5}, 4, torch.float16),
        ({"scheme": "log8", "low": "1", "high": 2.0}, 4, torch.float32),
        ({"scheme": "log8", "low": True, "high": 2.0}, 4, torch.float32),
    ],
)
def test_damaged_parameters_are_refused(
    parameters: dict[str, object], n: int, dtype: torch.dtype
) -> None:
    with pytest.raises(ValueError, match=r"stored as|range from"):
        decode_row_state(torch.zeros(4, dtype=torch.uint8), parameters, (n,), dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("scheme", STATE_SCHEMES)
def test_the_same_bytes_from_a_gpu(scheme: str) -> None:
    values = adagrad_state(10_000)
    wanted, wanted_parameters = encode_row_state(values, scheme)
    data, parameters = encode_row_state(values.cuda(), scheme)
    assert torch.equal(data, wanted)
    assert parameters == wanted_parameters
