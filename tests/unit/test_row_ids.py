"""Row ids come back as they were, in the fewest bytes, and damage is noticed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_checknrun import row_ids
from torchrec_checknrun.errors import CorruptCheckpoint

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


@settings(max_examples=200, deadline=None)
@given(SORTED_IDS)
def test_round_trip_in_the_fewest_bytes(ids: np.ndarray) -> None:
    encoding, data, first, last, count = encode(ids)
    decoded = row_ids.decode(encoding, data, first, last, count)
    assert decoded.dtype == np.int64
    assert decoded.tolist() == ids.tolist()
    span = last - first + 1
    sizes = {"bitmap": (span + 7) // 8, "offsets": 4 * count}
    if span == count:
        sizes["range"] = 0
    assert encoding in sizes
    assert len(data) == sizes[encoding] == min(sizes.values())


def test_layouts() -> None:
    """The bytes are a format: they don't depend on how they are made."""
    assert row_ids.encode(np.array([5, 6, 7])) == ("range", b"")
    assert row_ids.encode(np.array([5, 6, 8, 14])) == ("bitmap", bytes([0b00001011, 0b10]))
    assert row_ids.encode(np.array([5, 300])) == ("offsets", bytes([0, 0, 0, 0, 39, 1, 0, 0]))
    assert row_ids.encode(np.array([2**40])) == ("range", b"")


def test_the_widest_span_of_offsets() -> None:
    ids = np.array([7, 2**32 + 6])
    encoding, data, first, last, count = encode(ids)
    assert encoding == "offsets"
    assert row_ids.decode(encoding, data, first, last, count).tolist() == ids.tolist()


@settings(max_examples=200, deadline=None)
@given(SORTED_IDS, st.data())
def test_damage_is_noticed_or_harmless(ids: np.ndarray, data: st.DataObject) -> None:
    """Whatever is decoded has the promised first, last and count, sorted and distinct."""
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


@pytest.mark.parametrize(
    ("encoding", "data", "first", "last", "count"),
    [
        ("range", b"", 0, 4, 4),  # a row too few
        ("range", b"", 0, -1, 0),  # no rows
        ("range", b"", 9, 4, -4),
        ("bitmap", b"\x0b", 0, 3, 4),  # bits don't add up to the count
        ("bitmap", b"\x0b", 0, 9, 3),  # too short for the span
        ("bitmap", b"\x0a", 0, 3, 2),  # the first row isn't there
        ("bitmap", b"\x03", 0, 3, 2),  # the last row isn't there
        ("offsets", bytes([0, 0, 0, 0, 3, 0, 0]), 0, 3, 2),  # cut off
        ("offsets", bytes([0, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0, 5, 0, 0, 0]), 0, 5, 4),  # unsorted
        ("offsets", bytes([0, 0, 0, 0, 3, 0, 0, 0, 3, 0, 0, 0]), 0, 3, 3),  # one twice
        ("offsets", b"", 0, 0, 0),
        ("runs", b"", 0, 0, 1),
    ],
)
def test_decode_errors(encoding: str, data: bytes, first: int, last: int, count: int) -> None:
    with pytest.raises(CorruptCheckpoint, match=f"{count} distinct rows from {first} to {last}"):
        row_ids.decode(encoding, data, first, last, count)
