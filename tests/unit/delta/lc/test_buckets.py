"""Check LC-Checkpoint against the paper's algorithm, value by value, and against hostile input."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from torchrec_checknrun.delta import lc
from torchrec_checknrun.delta.lc import huffman

SEEDS = st.integers(0, 2**32 - 1)
BITS = st.integers(lc.LEAST_BITS, lc.MOST_BITS)


def weights(seed: int, shape: tuple[int, ...], spread: float = 3.0) -> torch.Tensor:
    """Make values of many magnitudes, some of them zero."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(shape) * np.exp(spread * random.standard_normal(shape))
    return torch.from_numpy((values * (random.random(shape) > 0.2)).astype(np.float32))


def plainly(weight: torch.Tensor, before: torch.Tensor, bits: int) -> list[float]:
    """Restore finite values by the paper's words: one value after the other."""
    buckets: dict[tuple[int, bool], list[float]] = {}
    changes = []
    for now, known in zip(weight.view(-1).tolist(), before.view(-1).tolist(), strict=True):
        change = float(np.float32(now) - np.float32(known))
        changes.append(change)
        if change:
            buckets.setdefault((math.frexp(change)[1], change < 0), []).append(change)
    kept = sorted(buckets, reverse=True)[: 2**bits - 1]
    restored = []
    for change, known in zip(changes, before.view(-1).tolist(), strict=True):
        key = (math.frexp(change)[1], change < 0)
        if change and key in kept:
            middle = np.float32((min(buckets[key]) + max(buckets[key])) / 2)
            known = float(np.float32(known) + middle)
        restored.append(known)
    return restored


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@settings(max_examples=examples(60))
@given(SEEDS, BITS, st.integers(0, 60), st.integers(1, 7), st.floats(0, 10))
def test_a_link_is_the_papers(seed: int, bits: int, rows: int, dim: int, spread: float) -> None:
    before = weights(seed, (rows, dim), spread)
    weight = before + weights(seed + 1, (rows, dim), spread)
    given_before = before.clone()
    payload, after = lc.encode(weight, before, bits)
    assert torch.equal(before, given_before)
    assert after.view(-1).tolist() == plainly(weight, before, bits)
    assert same_bits(lc.decode(payload, before), after)
    again, same = lc.encode(weight, before, bits)
    assert torch.equal(again, payload)
    assert same_bits(same, after)


@settings(max_examples=examples(20))
@given(SEEDS, BITS, st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
def test_twenty_links_replayed_are_what_the_writer_has(
    seed: int, bits: int, dtype: torch.dtype
) -> None:
    start = weights(seed, (30, 4), 1.0)
    now, links = start.clone(), []
    written = start.clone()
    for number in range(20):
        now = now + 0.1 * weights(seed + number, (30, 4), 1.0)
        payload, written = lc.encode(now.to(dtype), written, bits)
        links.append(payload)
    restored = start
    for payload in links:
        restored = lc.decode(payload, restored)
    assert same_bits(restored, written)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_errors_do_not_add_up(bits: int) -> None:
    """Link after link to values that stay: what one leaves out the next ones bring."""
    target, restored = weights(0, (200, 8), 2.0), torch.zeros(200, 8)
    errors = []
    for _ in range(40):
        _, restored = lc.encode(target, restored, bits)
        errors.append((restored - target).norm().item())
    assert errors[-1] < 1e-3 * errors[0]
    assert all(later <= earlier * 1.01 for earlier, later in itertools.pairwise(errors))


def test_more_bits_lose_less_and_take_more() -> None:
    before = weights(0, (500, 16), 1.0)
    weight = before + weights(1, (500, 16), 1.0)
    found = [lc.encode(weight, before, bits) for bits in (1, 2, 3, 4)]
    sizes = [len(payload) for payload, _ in found]
    errors = [(after - weight).norm().item() for _, after in found]
    assert sizes == sorted(set(sizes))
    assert errors == sorted(set(errors), reverse=True)


def test_unchanged_values_take_a_few_bytes() -> None:
    before = weights(0, (1000, 16))
    before[0, 0] = -0.0
    payload, after = lc.encode(before, before, 2)
    assert len(payload) == 6
    assert same_bits(after, before)
    assert same_bits(lc.decode(payload, before), before)


@settings(max_examples=examples(40))
@given(SEEDS, BITS)
def test_what_is_not_finite_is_stored_bit_for_bit(seed: int, bits: int) -> None:
    random = np.random.default_rng(seed)
    before, weight = weights(seed, (40, 4)), weights(seed + 1, (40, 4))
    places = random.random((4, 40, 4)) < 0.1
    weight[torch.from_numpy(places[0])] = math.nan
    weight[torch.from_numpy(places[1])] = -math.inf
    before[torch.from_numpy(places[2])] = math.nan
    before[torch.from_numpy(places[3])] = -3.3e38
    weight[torch.from_numpy(places[3])] = 3.3e38
    payload, after = lc.encode(weight, before, bits)
    assert same_bits(lc.decode(payload, before), after)
    odd = ~torch.isfinite(weight) | ~torch.isfinite(before) | torch.from_numpy(places[3])
    assert same_bits(after[odd], weight[odd])
    finite = torch.isfinite(weight)
    assert torch.isfinite(after[finite]).all()


def test_a_sum_that_would_overflow_is_stored_bit_for_bit() -> None:
    before = torch.tensor([3.0e38, -2.0e38, 1.0])
    weight = torch.tensor([3.4e38, -2.0e38 + 6.0e37, 1.0])
    weight[1] = before[1] + 7.9e37
    _, after = lc.encode(weight, before, 1)
    assert torch.isfinite(after).all()
    assert after[2] == 1


def test_denormal_changes_have_buckets_of_their_own() -> None:
    least = 2.0**-149
    before = torch.zeros(3)
    weight = torch.tensor([least, 3 * least, -least])
    payload, after = lc.encode(weight, before, 2)
    assert same_bits(after, weight)
    assert same_bits(lc.decode(payload, before), weight)


@pytest.mark.parametrize("bits", [0, 5, 2.0, True])
def test_other_bits_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match="bits must be 1 to 4"):
        lc.encode(torch.zeros(1), torch.zeros(1), bits)


def refused_or_finite(data: bytes, before: torch.Tensor) -> bool:
    """Return whether a payload was refused; if it was not, what is restored is finite."""
    if not data:
        return True
    payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        assert torch.isfinite(lc.decode(payload, before)).all()
    except ValueError:
        return True
    return False


def test_cut_or_longer_payloads_are_refused() -> None:
    before = weights(0, (700, 16))
    payload, _ = lc.encode(before + weights(1, (700, 16)), before, 3)
    data = payload.numpy().tobytes()
    for size in (*range(60), *range(60, len(data), 97), len(data) - 1):
        assert refused_or_finite(data[:size], before), size
    assert refused_or_finite(data + b"\0", before)
    assert refused_or_finite(data, before[:-1])
    assert refused_or_finite(data, torch.cat([before, before[:1]]))


@settings(max_examples=examples(60))
@given(SEEDS, BITS, st.integers(0, 10**6), st.integers(1, 255))
def test_damaged_payloads_never_do_harm(seed: int, bits: int, at: int, flip: int) -> None:
    before = weights(seed, (25, 8))
    payload, _ = lc.encode(before + weights(seed + 1, (25, 8)), before, bits)
    data = bytearray(payload.numpy().tobytes())
    data[at % len(data)] ^= flip
    refused_or_finite(bytes(data), before)


@settings(max_examples=examples(60))
@given(st.binary(min_size=1, max_size=200), st.integers(0, 300))
def test_any_bytes_are_refused_or_restored(data: bytes, count: int) -> None:
    refused_or_finite(data, torch.zeros(count))


@pytest.mark.parametrize(
    ("offset", "content", "message"),
    [
        (0, b"\5", "no payload has"),
        (1, b"\7", "no payload has"),
        (2, b"\xff\xff\xff\x7f", "no payload has"),
        (6, b"\0\0\x80\x7f", "falling exponents"),
        (6, b"\0\0\0\0", "falling exponents"),
        (10, b"\0\0\x80\x7e", "falling exponents"),
        (18, b"\1\1\1\1", "no set of codes"),
        (18, b"\0\0\0\0", "are unknown"),
        (18, b"\x10\1\2\3", "are unknown"),
        (22, b"\0\0", "other bytes"),
    ],
)
def test_each_refusal_names_its_reason(offset: int, content: bytes, message: str) -> None:
    before = torch.zeros(400)
    weight = torch.tensor([8.0, -4.0, 2.0, 1.0]).repeat(100)
    payload, _ = lc.encode(weight, before, 2)
    data = bytearray(payload.numpy().tobytes())
    data[offset : offset + len(content)] = content
    with pytest.raises(ValueError, match=message):
        lc.decode(torch.frombuffer(data, dtype=torch.uint8), before)


def test_other_predecessors_are_refused_where_the_sum_shows_it() -> None:
    before = torch.zeros(10)
    payload, _ = lc.encode(torch.full((10,), 3e38), before, 2)
    with pytest.raises(ValueError, match="belongs to other predecessors"):
        lc.decode(payload, torch.full((10,), 3e38))


def test_an_exception_has_one_place_and_no_bucket() -> None:
    before, weight = torch.zeros(8), torch.ones(8)
    weight[[2, 5]] = math.inf
    payload, _ = lc.encode(weight, before, 1)
    data = payload.numpy().tobytes()
    at = 6 + 4 + 2  # head, one value, two code lengths
    for places in ((5, 2), (2, 2), (2, 8), (1, 2)):
        wrong = bytearray(data)
        wrong[at : at + 16] = np.array(places, "<u8").tobytes()
        with pytest.raises(ValueError, match=r"in their order|in a bucket"):
            lc.decode(torch.frombuffer(wrong, dtype=torch.uint8), before)


@settings(max_examples=examples(40))
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=16).filter(any))
def test_codes_are_as_short_as_any_prefix_code(counts: list[int]) -> None:
    """Kraft's sum is one, and the mean lies within a bit of the entropy."""
    lengths = huffman.code_lengths(np.array(counts)).astype(int)
    used = [(c, int(b)) for c, b in zip(counts, lengths, strict=True) if c]
    assert [c > 0 for c in counts] == [b > 0 for b in lengths]
    if len(used) == 1:
        assert used[0][1] == 1
        return
    assert sum(2.0**-b for _, b in used) == 1
    total = sum(c for c, _ in used)
    entropy = sum(c * math.log2(total / c) for c, _ in used)
    bits = sum(c * b for c, b in used)
    assert entropy * (1 - 1e-12) <= bits < entropy + total


@pytest.mark.parametrize(
    "count", [0, 1, 7, huffman.BLOCK - 1, huffman.BLOCK, huffman.BLOCK + 1, 3 * huffman.BLOCK + 5]
)
@pytest.mark.parametrize("symbols", [1, 2, 5, 16])
def test_codes_of_any_number_of_symbols_are_decoded(count: int, symbols: int) -> None:
    random = np.random.default_rng(count + symbols)
    given = random.zipf(1.5, count).clip(max=symbols).astype(np.uint8) - 1
    lengths = huffman.code_lengths(np.bincount(given, minlength=symbols))
    if not count:
        lengths = huffman.code_lengths(np.ones(symbols, np.int64))
    packed = huffman.pack(given, lengths)
    blocks = -(-count // huffman.BLOCK)
    assert len(packed) == 2 * blocks + -(-int(lengths[given].sum(dtype=np.int64)) // 8)
    assert np.array_equal(huffman.unpack(packed, count, lengths), given)


def test_blocks_that_borrow_from_each_other_are_refused() -> None:
    given = np.arange(2 * huffman.BLOCK).astype(np.uint8) % 5
    lengths = huffman.code_lengths(np.bincount(given))
    packed = bytearray(huffman.pack(given, lengths))
    sizes = np.frombuffer(packed, "<u2", 2).copy()
    packed[:4] = (sizes + np.array([1, -1])).astype("<u2").tobytes()
    with pytest.raises(ValueError, match="longer or shorter"):
        huffman.unpack(bytes(packed), len(given), lengths)
