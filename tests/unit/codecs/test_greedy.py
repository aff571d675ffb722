"""Choose the greedy search's parameters where the error flattens; record them; keep given ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.quantized_rows import decoded, fbgemm_decode, random_rows, relative_errors
from torchrec_checknrun.bitwidth import row_bytes
from torchrec_checknrun.codecs import Method, Rowwise
from torchrec_checknrun.codecs.kernels.dispatch import encode_rows
from torchrec_checknrun.codecs.rowwise import BINS, FLAT, RATIOS, SAMPLE_ROWS, choose_greedy

pytestmark = pytest.mark.usefixtures("either_kernel")

NARROW = (2, 3, 4)


def gaussian(n: int, dim: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed))


def search_error(rows: torch.Tensor, bits: int, num_bins: int, ratio: float) -> float:
    """Return the mean l2 error of a codec with both options given."""
    codec = Rowwise(bits, "greedy", num_bins, ratio)
    back = decoded(codec, codec.encode(rows), rows, len(rows))
    return float((back.double() - rows.double()).norm(dim=1).mean())


def first_flat(values: tuple[float, ...], errors: list[float]) -> float:
    """Return the smallest value with at least 99 % of the best value's gain over the worst."""
    gained = [(max(errors) - error) / ((max(errors) - min(errors)) or 1) for error in errors]
    return next(
        value
        for value, gain in zip(values, gained, strict=True)
        if gain >= 1 - FLAT or not any(gained)
    )


@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("bits", NARROW)
def test_the_smallest_parameters_after_which_little_is_gained(bits: int, dim: int) -> None:
    rows = gaussian(SAMPLE_ROWS, dim)  # the sample is the whole table
    encoded = Rowwise(bits, "greedy").encode(rows)
    chosen, ratio = encoded.parameters["num_bins"], encoded.parameters["ratio"]
    errors = [search_error(rows, bits, num_bins, RATIOS[-1]) for num_bins in BINS]
    assert chosen == first_flat(BINS, errors)
    errors = [search_error(rows, bits, int(str(chosen)), each) for each in RATIOS]
    assert ratio == first_flat(RATIOS, errors)


def test_fewer_bits_cut_more_of_the_range() -> None:
    """Cut half of the range at 2 bits and little at 4 bits, as in the paper's Figures 10 and 11."""
    (_, at_two), (_, at_four) = (choose_greedy(gaussian(1000, 64), None, bits) for bits in (2, 4))
    assert 0.4 <= at_two <= 0.6
    assert 0.1 <= at_four <= 0.3


@pytest.mark.parametrize("bits", NARROW)
def test_what_was_chosen_is_what_was_used(bits: int) -> None:
    rows = random_rows(2, 700, 24)
    encoded = Rowwise(bits, "greedy").encode(rows)
    parameters: dict[str, Any] = encoded.parameters
    found = Rowwise(bits, "greedy", **parameters)
    again = found.encode(rows)
    assert torch.equal(again.data, encoded.data)


def test_a_sample_stands_for_the_table() -> None:
    """Choose from a sample within a per cent of the best choice from all rows."""
    rows = gaussian(5000, 32)
    encoded = Rowwise(2, "greedy").encode(rows)
    back = decoded(Rowwise(2, "greedy"), encoded, rows, 5000)
    error = float((back - rows).norm(dim=1).mean())
    assert error <= 1.01 * min(search_error(rows, 2, BINS[-1], ratio) for ratio in (0.5, 0.8, 1.0))


@pytest.mark.parametrize(
    ("given_bins", "given_ratio"), [(7, None), (None, 0.35), (7, 0.35), (500, 1.0)]
)
def test_what_is_given_is_kept(given_bins: int | None, given_ratio: float | None) -> None:
    rows = gaussian(300, 16)
    num_bins, ratio = choose_greedy(rows, None, 4, given_bins, given_ratio)
    assert num_bins == (given_bins or num_bins) in (*BINS, given_bins)
    assert ratio == (given_ratio or ratio) in (*RATIOS, given_ratio)
    encoded = Rowwise(4, "greedy", given_bins, given_ratio).encode(rows)
    refused = torch.empty(len(rows), row_bytes(16, 4), dtype=torch.uint8)
    encode_rows(rows, None, 4, Method.GREEDY, num_bins, ratio, 1.0, refused)
    assert torch.equal(encoded.data, refused)


@pytest.mark.parametrize(
    ("given_bins", "given_ratio"), [(None, None), (7, None), (None, 0.35), (7, 0.35)]
)
def test_a_chunk_says_how_it_was_searched(
    given_bins: int | None, given_ratio: float | None
) -> None:
    """Put given options into the codec's spec, chosen ones into the block's parameters."""
    codec = Rowwise(4, "greedy", given_bins, given_ratio)
    encoded = codec.encode(gaussian(300, 16))
    recorded = {**codec.spec(), **encoded.parameters}
    assert recorded["num_bins"] == (given_bins or recorded["num_bins"])
    assert recorded["ratio"] == (given_ratio or recorded["ratio"])


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 20), st.integers(1, 40), st.sampled_from(NARROW))
def test_any_block_has_a_choice(seed: int, n: int, dim: int, bits: int) -> None:
    rows = random_rows(seed, 20, dim)
    rows[seed % 20] = float("nan")
    ids = torch.randperm(20, generator=torch.Generator().manual_seed(seed % 2**31))[:n]
    num_bins, ratio = choose_greedy(rows, ids if n else None, bits)
    assert num_bins in BINS
    assert ratio in RATIOS


@pytest.mark.parametrize(
    "rows",
    [
        torch.full((9, 4), float("nan")),
        torch.zeros(9, 4),
        torch.full((9, 4), 3e38),
        torch.full((9, 1), 1e-42),
        gaussian(9, 4) * 1e30,
    ],
    ids=["nan", "zeros", "huge", "denormal", "large"],
)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_blocks_of_which_nothing_can_be_learned(bits: int, rows: torch.Tensor) -> None:
    encoded = Rowwise(bits, "greedy").encode(rows)
    assert encoded.data.numel() == 9 * row_bytes(rows.shape[1], bits)


def test_only_the_chosen_rows_are_looked_at() -> None:
    """Ignore rows outside of the block, which may have another distribution."""
    rows = torch.cat([gaussian(400, 64).sign(), gaussian(400, 64)])
    ids = torch.arange(400, 800)
    assert choose_greedy(rows, ids, 2) == choose_greedy(rows[ids], None, 2)


def test_bits_8_need_no_search() -> None:
    """Choose and record no option at 8 bits, where the range is the row's own, as in FBGEMM."""
    rows = gaussian(100, 16)
    encoded = Rowwise(8, "greedy").encode(rows)
    assert torch.equal(encoded.data, Rowwise(8, "asymmetric").encode(rows).data)
    assert encoded.parameters == {}


def test_the_papers_search_at_four_bits() -> None:
    """Beat the range from minimum to maximum, and decode as FBGEMM does."""
    rows = gaussian(2000, 64)
    codec = Rowwise(4, "greedy")
    encoded = codec.encode(rows)
    back = decoded(codec, encoded, rows, 2000)
    assert torch.equal(fbgemm_decode(encoded.data.view(2000, -1), 4), back)
    assert float(relative_errors(back, rows).mean()) < 0.0835  # with minimum to maximum: 0.0890
