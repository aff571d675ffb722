"""Check importance-weighted widths: the formula, the budget, and the order of decoded rows."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples, some_of
from tests.unit.quantized_rows import (
    decoded,
    random_rows,
    relative_errors,
    round_trip,
    spoil,
    threads,
)
from torchrec_checknrun.codecs import (
    NO_CONTEXT,
    Encoded,
    ImportanceWeighted,
    Parameters,
    RowContext,
    Rowwise,
    codec_from_spec,
    importance,
)
from torchrec_checknrun.errors import UnsupportedFormat

pytestmark = pytest.mark.usefixtures("either_kernel")

SEEDS = st.integers(0, 2**32 - 1)
BUDGETS = st.one_of(st.sampled_from([2.0, 4.0, 8.0]), st.floats(2, 8))
NAN = float("nan")


def adagrad(accumulator: torch.Tensor) -> RowContext:
    return RowContext({"momentum1": accumulator})


def trained(seed: int, n: int, octaves: float = 40) -> torch.Tensor:
    """Make sums of squared gradients over powers of two; a tenth of the rows is untrained."""
    rng = np.random.default_rng(seed)
    sums = 2.0 ** (rng.random(n) * octaves - octaves)
    sums[rng.random(n) < 0.1] = 0
    return torch.from_numpy(sums.astype(np.float32))


def widths_of(encoded: Encoded, n: int) -> np.ndarray:
    """Read each row's bits from the block's first bytes: two bits a row, the first row lowest."""
    head = encoded.data.view(-1)[: -(-n // 4)].numpy()
    pairs = np.unpackbits(head, bitorder="little").reshape(-1, 2)
    return np.array([2, 4, 8])[(pairs @ [1, 2])[:n]]


def scores(rows: torch.Tensor, accumulator: torch.Tensor) -> np.ndarray:
    """Compute ``log2(G / median G) / 2 + log2(rms)`` in double precision."""
    sums = accumulator.double().numpy()
    positive = np.sort(sums[sums > 0])
    median = positive[(len(positive) - 1) // 2]
    with np.errstate(divide="ignore"):
        root_mean_square = np.sqrt(np.square(rows.double().numpy()).mean(axis=1))
        return np.log2(sums / median) / 2 + np.log2(root_mean_square)


def bits_at(score: np.ndarray, offset: float) -> np.ndarray:
    """Return the nearest of the widths 2, 4 and 8."""
    return np.where(score + offset > 6, 8, np.where(score + offset > 3, 4, 2))


@settings(max_examples=examples(60), deadline=None)
@given(SEEDS, st.integers(1, 80), st.integers(1, 40), st.floats(-10, 20), st.booleans())
def test_the_width_of_a_row_is_as_the_formula_says(
    seed: int, n: int, dim: int, offset: float, by_id: bool
) -> None:
    rows = random_rows(seed, n, dim)
    ids = torch.from_numpy(np.random.default_rng(seed).permutation(n)[: max(1, n // 2)])
    chosen = rows[ids] if by_id else rows
    accumulator = trained(seed, len(chosen))
    accumulator[0] = 1e-3
    encoded = ImportanceWeighted(offset).encode(rows, ids if by_id else None, adagrad(accumulator))
    score = scores(chosen, accumulator)
    nowhere_near = np.minimum(abs(score + offset - 3), abs(score + offset - 6)) > 1e-3
    widths = widths_of(encoded, len(chosen))
    assert (widths == bits_at(score, offset))[nowhere_near].all()


def test_an_untrained_row_gets_the_least_width() -> None:
    """Give untrained rows the smallest width, and rows whose sum is NaN or infinite as well."""
    rows = torch.randn(6, 8) * 100
    sums = torch.tensor([0.0, 1.0, NAN, 1.0, float("inf"), -1.0])
    widths = widths_of(ImportanceWeighted(20.0).encode(rows, context=adagrad(sums)), 6)
    assert widths.tolist() == [2, 8, 2, 8, 2, 2]
    none = ImportanceWeighted(20.0).encode(rows, context=adagrad(torch.zeros(6)))
    assert widths_of(none, 6).tolist() == [2] * 6


@settings(max_examples=examples(60), deadline=None)
@given(SEEDS, st.integers(1, 200), BUDGETS)
def test_no_larger_offset_is_within_the_budget(seed: int, n: int, budget: float) -> None:
    """Use up the budget, with rows whose sums are so far apart that borders pass each alone."""
    order = np.random.default_rng(seed).permutation(n)
    sums = torch.from_numpy((2.0 ** (order * 0.137 - 20)).astype(np.float32))
    rows = torch.where(torch.rand(n, 12) < 0.5, 1.0, -1.0)
    score = scores(rows, sums)
    encoded = ImportanceWeighted(mean_bits=budget).encode(rows, context=adagrad(sums))
    mean = widths_of(encoded, n).mean()
    assert mean <= budget
    # Try offsets between neighbouring steps of the mean, and beyond the last one.
    steps = np.sort(np.concatenate([3 - score, 6 - score]))
    between = np.concatenate([[steps[0] - 1], (steps[:-1] + steps[1:]) / 2, [steps[-1] + 1]])
    means = [bits_at(score, offset).mean() for offset in between]
    assert mean == max(each for each in means if each <= budget)


@settings(max_examples=examples(40), deadline=None)
@given(SEEDS, st.integers(1, 120), BUDGETS)
def test_a_budget_is_never_exceeded(seed: int, n: int, budget: float) -> None:
    rows = spoil(random_rows(seed, n, 9), seed)
    encoded = ImportanceWeighted(mean_bits=budget).encode(rows, context=adagrad(trained(seed, n)))
    assert widths_of(encoded, n).mean() <= budget


def test_four_bits_on_average_unless_said_otherwise() -> None:
    assert ImportanceWeighted().mean_bits == 4
    assert ImportanceWeighted().value_bits == 4
    assert ImportanceWeighted(offset=3.0).mean_bits is None


@settings(max_examples=examples(60), deadline=None)
@given(SEEDS, st.integers(0, 90), st.integers(1, 70), BUDGETS, st.data())
def test_rows_are_those_of_the_adaptive_codec(
    seed: int, n: int, dim: int, budget: float, data: st.DataObject
) -> None:
    """Return the adaptive codec's rows of the same width, in the given order; in parts, too."""
    rows = spoil(random_rows(seed, n, dim), seed)
    codec = ImportanceWeighted(mean_bits=budget)
    encoded, back = round_trip(codec, rows, adagrad(trained(seed, n)))
    widths = torch.from_numpy(widths_of(encoded, n))
    expected = torch.empty_like(rows)
    exceptions = []
    for bits in (2, 4, 8):
        members = (widths == bits).nonzero().view(-1)
        group, expected[members] = round_trip(Rowwise(bits), rows[members])
        exceptions += members[group.exceptions].tolist()
    assert encoded.exceptions.tolist() == sorted(exceptions)
    assert torch.equal(back.nan_to_num(7), expected.nan_to_num(7))
    whole = decoded(codec, encoded, rows, n)
    start = data.draw(st.integers(0, n))
    part = torch.empty(data.draw(st.integers(0, n - start)), dim)
    codec.decode(encoded.data.view(-1), encoded.parameters, n, start, part)
    assert torch.equal(part, whole[start : start + len(part)])


def test_exceptions_are_where_they_were_given() -> None:
    rows = torch.randn(200, 6, generator=torch.Generator().manual_seed(1))
    rows[5, 2], rows[120, 0], rows[199] = NAN, float("inf"), 3e38
    ids = torch.cat([torch.arange(199, 99, -1), torch.arange(100)])
    encoded = ImportanceWeighted().encode(rows, ids, adagrad(trained(2, 200)))
    assert encoded.exceptions.tolist() == [0, 79, 105]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_tables_of_other_types(dtype: torch.dtype) -> None:
    rows = torch.randn(300, 16, generator=torch.Generator().manual_seed(3)).to(dtype)
    encoded, back = round_trip(ImportanceWeighted(mean_bits=5), rows, adagrad(trained(3, 300)))
    assert back.dtype == dtype
    assert len(set(widths_of(encoded, 300).tolist())) == 3
    assert float(relative_errors(back, rows).mean()) < 0.15


@pytest.mark.parametrize(
    ("codec", "width"),
    [
        (ImportanceWeighted(), 4),
        (ImportanceWeighted(offset=20.0), 4),
        (ImportanceWeighted(mean_bits=2), 2),
        (ImportanceWeighted(mean_bits=3.9), 2),
        (ImportanceWeighted(mean_bits=7), 4),
        (ImportanceWeighted(mean_bits=8), 8),
    ],
    ids=["default", "offset", "2", "3.9", "7", "8"],
)
def test_without_row_wise_adagrad_the_width_is_fixed(
    codec: ImportanceWeighted, width: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Log the fixed width once."""
    importance._warn_fixed_width.cache_clear()
    rows = torch.randn(30, 8)
    others = [
        NO_CONTEXT,
        RowContext({"exp_avg": torch.rand(30, 8), "exp_avg_sq": torch.rand(30)}),
        RowContext({"momentum1": torch.rand(30, 8)}),  # Adagrad with a sum per element
    ]
    with caplog.at_level(logging.WARNING):
        for context in others:
            encoded = codec.encode(rows, context=context)
            assert set(widths_of(encoded, 30)) == {width}
            expected, back = Rowwise(width), decoded(codec, encoded, rows, 30)
            assert torch.equal(back, decoded(expected, expected.encode(rows), rows, 30))
    (record,) = caplog.records
    assert "row-wise Adagrad" in record.getMessage()
    assert f"{width} bit" in record.getMessage()
    assert codec.value_bits == width


@pytest.mark.parametrize(
    ("dim", "mean", "octaves"),
    some_of([(d, m, o) for d, m in ((4, 0.0), (64, 3.0), (130, 0.0)) for o in (40, 0)], 3, 4),
)
@pytest.mark.parametrize(
    "codec",
    [ImportanceWeighted(), ImportanceWeighted(mean_bits=3), ImportanceWeighted(offset=3.0)],
    ids=["default", "3 bit", "offset"],
)
def test_ten_passes_add_little(
    codec: ImportanceWeighted, dim: int, mean: float, octaves: int
) -> None:
    """Keep the mean error small although a quantized row's norm, and so its width, may change.

    Rows of about equal importance are among the cases.
    """
    rows = torch.randn(2000, dim, generator=torch.Generator().manual_seed(dim)) + mean
    context = adagrad(trained(dim, 2000, octaves))
    with threads(1):
        _, first = round_trip(codec, rows, context)
        last = first
        for _ in range(9):
            _, last = round_trip(codec, last, context)
    added = relative_errors(last, rows).mean() - relative_errors(first, rows).mean()
    assert float(added) <= 1e-3


def example() -> tuple[ImportanceWeighted, Encoded]:
    rows = torch.randn(50, 6, generator=torch.Generator().manual_seed(4))
    codec = ImportanceWeighted(mean_bits=4.5)
    encoded = codec.encode(rows, context=adagrad(trained(4, 50)))
    assert len(set(widths_of(encoded, 50))) == 3
    return codec, encoded


def decode_example(parameters: dict[str, Any], data: torch.Tensor, rows: int = 50) -> torch.Tensor:
    out = torch.empty(rows, 6)
    ImportanceWeighted().decode(data, parameters, rows, 0, out)
    return out


def drop_groups(parameters: dict[str, Any]) -> None:
    del parameters["groups"]


def drop_one_group(parameters: dict[str, Any]) -> None:
    parameters["groups"].pop()


def another_count(parameters: dict[str, Any]) -> None:
    parameters["groups"][1]["rows"] += 1


def swap_groups(parameters: dict[str, Any]) -> None:
    parameters["groups"].reverse()


def not_a_group(parameters: dict[str, Any]) -> None:
    parameters["groups"][0] = 7


def wild_exponent(parameters: dict[str, Any]) -> None:
    parameters["groups"][2]["exponent"] = 10**6


@pytest.mark.parametrize(
    "damage",
    [drop_groups, drop_one_group, another_count, swap_groups, not_a_group, wild_exponent],
)
def test_damaged_parameters_are_refused(damage: Callable[[dict[str, Any]], None]) -> None:
    _, encoded = example()
    parameters = copy.deepcopy(encoded.parameters)
    decode_example(parameters, encoded.data)
    damage(parameters)
    with pytest.raises(ValueError, match=r"group|exponent"):
        decode_example(parameters, encoded.data)


def test_damaged_data_is_refused() -> None:
    _, encoded = example()
    for wrong in (encoded.data[:-1], encoded.data[:5], torch.cat([encoded.data, encoded.data[:1]])):
        with pytest.raises(ValueError, match=r"group|bytes"):
            decode_example(encoded.parameters, wrong)
    no_such_width = encoded.data.clone()
    no_such_width[0] = 0xFF
    with pytest.raises(ValueError, match="group"):
        decode_example(encoded.parameters, no_such_width)
    with pytest.raises(ValueError, match="group"):
        decode_example(encoded.parameters, encoded.data, rows=49)


def test_no_row_is_left_as_it_was() -> None:
    """Refuse what a faulty writer makes, which counts only the rows of known widths, or fewer."""
    none: Parameters = {"groups": [{"rows": 0}] * 3}
    for data, rows in ((torch.tensor([0b11], dtype=torch.uint8), 1), (torch.empty(0).byte(), 5)):
        with pytest.raises(ValueError, match="group of each"):
            ImportanceWeighted().decode(data, none, rows, 0, torch.empty(rows, 8))


JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-200, 200), st.floats(), st.text(max_size=3)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["groups", "rows", "exponent"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=examples(150, quick=12), deadline=None)
@given(JUNK, st.integers(0, 2), st.sampled_from(["groups", "group", "rows", "exponent"]))
def test_no_parameter_can_crash_a_reader(junk: object, group: int, where: str) -> None:
    _, encoded = example()
    parameters: dict[str, Any] = json.loads(json.dumps(encoded.parameters))
    if where == "groups":
        parameters["groups"] = junk
    elif where == "group":
        parameters["groups"][group] = junk
    else:
        parameters["groups"][group][where] = junk
    try:
        decode_example(parameters, encoded.data)
    except ValueError:
        return


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"offset": 3.0, "mean_bits": 4.0}, "offset or mean_bits, not both"),
        ({"mean_bits": 1.9}, "between 2 and 8, not 1.9"),
        ({"mean_bits": 8.1}, "between 2 and 8"),
        ({"mean_bits": NAN}, "between 2 and 8"),
        ({"offset": NAN}, "offset"),
        ({"offset": float("inf")}, "offset"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImportanceWeighted(**arguments)
    spec = {"name": "importance", "version": 1, **arguments}
    with pytest.raises(UnsupportedFormat):
        codec_from_spec(spec)
