"""Return row ids unchanged, in the fewest bytes, and notice damage."""

import itertools
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format import row_ids

FIRST = st.one_of(st.integers(0, 100), st.integers(2**31 - 50, 2**33))
SORTED_IDS = st.builds(
    lambda first, gaps: np.cumsum([first, *gaps]).astype(np.int64),
    FIRST,
    st.one_of(
        st.lists(st.integers(1, 1), max_size=60),
        st.lists(st.integers(1, 3), max_size=60),
        st.lists(st.integers(1, 70), max_size=60),
        st.lists(st.integers(1, 5000), max_size=20),
    ),
)


def encode(ids: np.ndarray) -> tuple[str, bytes, int, int, int]:
    encoding, data = row_ids.encode(ids)
    return encoding, data, int(ids[0]), int(ids[-1]), len(ids)


def plain_gaps(ids: list[int]) -> bytes:
    """Encode the rows skipped between ids as LEB128, number by number."""
    octets = []
    for before, after in itertools.pairwise(ids):
        gap = after - before - 1
        while gap > 0x7F:
            octets.append(gap & 0x7F | 0x80)
            gap >>= 7
        octets.append(gap)
    return bytes(octets)


def plain_bitmap(ids: list[int]) -> bytes:
    bits = sum(1 << (i - ids[0]) for i in ids)
    return bits.to_bytes((ids[-1] - ids[0]) // 8 + 1, "little")


def compressed(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(content)


def all_layouts(ids: list[int]) -> dict[str, bytes]:
    """Return every possible encoding of given ids."""
    if ids[-1] - ids[0] + 1 == len(ids):
        return {"range": b""}
    layouts = {"gaps": plain_gaps(ids)}
    if (ids[-1] - ids[0]) // 8 + 1 <= 16 * len(ids):
        layouts["bitmap"] = plain_bitmap(ids)
    return layouts | {f"{name}_zstd": compressed(data) for name, data in layouts.items()}


@settings(max_examples=examples(300), deadline=None)
@given(SORTED_IDS)
def test_round_trip_in_the_fewest_bytes(ids: np.ndarray) -> None:
    encoding, data, first, last, count = encode(ids)
    decoded = row_ids.decode(encoding, data, first, last, count)
    assert decoded.dtype == np.int64
    assert decoded.tolist() == ids.tolist()
    layouts = all_layouts(ids.tolist())
    assert data == layouts[encoding]
    assert len(data) == min(map(len, layouts.values()))


@settings(max_examples=examples(200), deadline=None)
@given(SORTED_IDS, st.data())
def test_every_encoding_is_read(ids: np.ndarray, data: st.DataObject) -> None:
    layouts = all_layouts(ids.tolist())
    encoding = data.draw(st.sampled_from(sorted(layouts)))
    content = data.draw(st.sampled_from([bytes, bytearray, memoryview]))(layouts[encoding])
    decoded = row_ids.decode(encoding, content, int(ids[0]), int(ids[-1]), len(ids))
    assert decoded.dtype == np.int64
    assert decoded.tolist() == ids.tolist()


def test_the_layouts_are_fixed() -> None:
    """Keep the bytes, which are a format, whatever code makes them."""
    assert row_ids.encode(np.array([5, 6, 7])) == ("range", b"")
    assert row_ids.encode(np.array([5, 6, 8, 14])) == ("bitmap", bytes([0b00001011, 0b10]))
    assert row_ids.encode(np.array([5, 300])) == ("gaps", bytes([0x26 | 0x80, 0x02]))
    assert row_ids.encode(np.array([2**40])) == ("range", b"")
    longest = [0, 2**63 - 1]
    assert row_ids.encode(np.array(longest)) == ("gaps", bytes([0xFE, *[0xFF] * 7, 0x7F]))
    assert row_ids.decode("gaps", plain_gaps(longest), 0, 2**63 - 1, 2).tolist() == longest


# Columns: the bytes per row that zstd can reach, at these shares of uniformly random rows.
@pytest.mark.parametrize(
    ("share", "encoding", "bytes_per_row"),
    [
        (0.001, "gaps_zstd", 1.67),
        (0.01, "gaps_zstd", 1.14),
        (0.1, "gaps_zstd", 0.61),
        (0.25, "bitmap_zstd", 0.42),
        (0.5, "bitmap", 0.255),
    ],
)
def test_bytes_per_random_row(share: float, encoding: str, bytes_per_row: float) -> None:
    ids = np.cumsum(np.random.default_rng(0).geometric(share, 150_000))
    chosen, data, first, last, count = encode(ids)
    assert chosen == encoding
    assert len(data) <= bytes_per_row * count
    assert np.array_equal(row_ids.decode(chosen, data, first, last, count), ids)


@pytest.mark.parametrize("seed", range(12))
def test_crowded_rows_take_the_fewest_bytes(seed: int) -> None:
    """Try clusters of rows of all densities among gaps of all lengths, across block edges."""
    rng = np.random.default_rng(seed)
    gaps = [
        np.append(rng.geometric(10 ** rng.uniform(-2.2, 0), 3000), rng.integers(1, 10**5))
        for _ in range(50)
    ]
    ids = np.cumsum(np.concatenate(gaps)).astype(np.int64)
    encoding, data, first, last, count = encode(ids)
    assert np.array_equal(row_ids.decode(encoding, data, first, last, count), ids)
    present = np.zeros(last - first + 1, dtype=np.bool_)
    present[ids - first] = True
    bitmap = np.packbits(present, bitorder="little").tobytes()
    least = min(len(compressed(plain_gaps(ids.tolist()))), len(compressed(bitmap)))
    assert len(data) <= 1.01 * least


def test_few_rows_far_apart_need_no_memory_for_what_lies_between() -> None:
    ids = np.arange(1000) * 10**12
    tracemalloc.start()
    encoding, data, first, last, count = encode(ids)
    assert np.array_equal(row_ids.decode(encoding, data, first, last, count), ids)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_memory_is_a_few_bytes_per_row(share: float) -> None:
    ids = np.cumsum(np.random.default_rng(0).geometric(share, 1_000_000))
    tracemalloc.start()
    encoding, data, first, last, count = encode(ids)
    encoding_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    decoded = row_ids.decode(encoding, data, first, last, count)
    decoding_peak = tracemalloc.get_traced_memory()[1] - decoded.nbytes
    tracemalloc.stop()
    assert encoding_peak < 6 * len(ids)
    assert decoding_peak < 6 * len(ids)


@settings(max_examples=examples(200), deadline=None)
@given(SORTED_IDS, st.data())
def test_damage_is_noticed_or_harmless(ids: np.ndarray, data: st.DataObject) -> None:
    """Return sorted, distinct ids with the promised first, last and count, or refuse them."""
    encoding, content, first, last, count = encode(ids)
    encoding = data.draw(st.sampled_from([encoding, *row_ids.ENCODINGS]))
    damaged = data.draw(st.one_of(st.just(content), st.binary(max_size=len(content) + 3)))
    first += data.draw(st.sampled_from([0, 0, 1, -1]))
    count += data.draw(st.sampled_from([0, 0, 1, -1, -count]))
    try:
        decoded = row_ids.decode(encoding, damaged, first, last, count)
    except CorruptCheckpoint:
        return
    assert len(decoded) == count
    assert (decoded[0], decoded[-1]) == (first, last)
    assert bool((np.diff(decoded) > 0).all())


def streamed(content: bytes) -> bytes:
    """Make a frame that doesn't state its size."""
    compressor = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return compressor.compress(content) + compressor.flush()


def test_a_bomb_is_refused_unopened() -> None:
    """Refuse to unpack a small frame of more bytes than the rows can need."""
    bomb = compressed(bytes(2**28))
    tracemalloc.start()
    for encoding in ("gaps_zstd", "bitmap_zstd"):
        with pytest.raises(CorruptCheckpoint, match=str(2**28)):
            row_ids.decode(encoding, bomb, 0, 999, 100)
        with pytest.raises(CorruptCheckpoint):  # nor trusted to know the size of a span of its own
            row_ids.decode(encoding, bomb, 0, 2**31 - 1, 100)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("encoding", "data", "first", "last", "count"),
    [
        ("range", b"", 0, 4, 4),  # one row too few
        ("range", b"", 0, -1, 0),  # no rows
        ("range", b"", 9, 4, -4),
        ("bitmap", b"\x0b", 0, 3, 4),  # bits don't add up to the count
        ("bitmap", b"\x0b", 0, 9, 3),  # too short for the span
        ("bitmap", b"\x0a", 0, 3, 2),  # the first row is missing
        ("bitmap", b"\x03", 0, 3, 2),  # the last row is missing
        ("offsets", bytes([0, 0, 0, 0, 3, 0, 0, 0]), 0, 3, 2),  # an unknown encoding
        ("offsets", b"", 0, 0, 0),
        ("runs", b"", 0, 0, 1),
        ("range", b"\x00", 0, 3, 4),  # bytes where none are expected
        ("range", b"", -4, -1, 4),
        ("range", b"", 2**63 - 1, 2**63, 2),  # beyond int64
        ("gaps", b"\x01", 0, 3, 2),  # ends before the last row
        ("gaps", b"\x03", 0, 3, 2),  # ends after the last row
        ("gaps", b"\x01\x00", 0, 3, 2),  # one gap more
        ("gaps", b"\x00", 0, 3, 3),  # one gap fewer
        ("gaps", b"\x00\x81", 0, 131, 3),  # the last gap doesn't end
        ("gaps", b"\x80\x80", 0, 3, 2),  # no gap ends
        ("gaps", b"", 0, 3, 2**50),
        ("gaps", b"\xff" * 9 + b"\x01", 0, 2**62, 2),  # over 63 bits
        ("gaps", b"\xff" * 8 + b"\x7f" + b"\xff" * 8 + b"\x7f" + b"\x02", 0, 2, 4),  # wraps to 2
        ("gaps", b"\xfd" + b"\xff" * 7 + b"\x7f" + b"\xff" * 8 + b"\x7f", 0, 2**63 - 2, 3),
        ("gaps_zstd", b"", 0, 3, 2),
        ("gaps_zstd", b"\x02", 0, 3, 2),  # not compressed
        ("gaps_zstd", compressed(b"\x02")[:-1], 0, 3, 2),
        ("gaps_zstd", compressed(b"\x02") + b"\x00", 0, 3, 2),
        ("gaps_zstd", compressed(b"\x02") + compressed(b"\x02"), 0, 3, 2),
        ("gaps_zstd", streamed(b"\x02"), 0, 3, 2),
        ("gaps_zstd", compressed(b""), 0, 0, 1),
        ("gaps_zstd", compressed(b"\x01"), 0, 3, 2),
        ("bitmap_zstd", compressed(b"\x0b"), 0, 3, 4),
        ("bitmap_zstd", compressed(b"\x0b\x00"), 0, 3, 3),
        ("bitmap_zstd", compressed(b"\x0f"), 0, 3, 3),
        ("bitmap_zstd", compressed(b"\x0b")[4:], 0, 3, 3),
    ],
)
def test_damaged_ids_are_refused(
    encoding: str, data: bytes, first: int, last: int, count: int
) -> None:
    with pytest.raises(CorruptCheckpoint, match=f"{count} distinct rows from {first} to {last}"):
        row_ids.decode(encoding, data, first, last, count)
