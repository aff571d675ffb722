"""Keep codes of optimizer state: digests follow from what is kept, on any parts of the rows."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.format.test_delta_reader import WORD, mix
from torchrec_checknrun.delta.grid_references import GridReferences
from torchrec_checknrun.delta.lc.references import ValueReferences
from torchrec_checknrun.delta.log_levels import MOST_CODE, NONE
from torchrec_checknrun.delta.log_references import LogReferences
from torchrec_checknrun.delta.references import References
from torchrec_checknrun.shards import Rectangle

FIRST, ROWS, COLUMNS = 1000, 24, (2, 10)


def plain_digest(state: str, codes: dict[int, int]) -> int:
    """Digest codes by global id, as format.md says."""
    start, stop = map(mix, COLUMNS)
    name = xxhash.xxh3_64_intdigest(state.encode())
    seed = mix(start ^ (stop << 1) % WORD ^ name)
    return sum((mix(id ^ seed) | 1) * (code + 2**15) for id, code in codes.items()) % WORD


def place(first: int = FIRST, rows: int = ROWS) -> Rectangle:
    return Rectangle(first, first + rows, *COLUMNS)


@settings(max_examples=examples(100))
@given(
    st.lists(
        st.dictionaries(
            st.integers(0, ROWS - 1), st.integers(1 - MOST_CODE, MOST_CODE), min_size=1
        ),
        max_size=8,
    )
)
def test_digests_follow_what_is_kept(writes: list[dict[int, int]]) -> None:
    held, known = LogReferences("momentum1", place()), dict[int, int]()
    for write in writes:
        at = np.array(sorted(write))
        codes = np.array([write[i] for i in at], np.int16)
        held.scatter(at, codes, held.gather(at))
        known |= {FIRST + i: code for i, code in write.items()}
        assert held.digest == plain_digest("momentum1", known)
        part = LogReferences("momentum1", place(FIRST + 5, 7))
        part.copy_from(held)
        inside = {id: c for id, c in known.items() if FIRST + 5 <= id < FIRST + 12}
        assert part.digest == plain_digest("momentum1", inside)
        assert np.array_equal(part.gather(np.arange(7)), held.gather(np.arange(5, 12)))
    held.clear()
    assert held.digest == 0
    assert (held.gather(np.arange(ROWS)) == NONE).all()


def test_digests_tell_states_columns_and_rows_apart() -> None:
    found = set()
    for state in ("momentum1", "momentum2"):
        for columns in ((0, 8), (8, 16)):
            for row in (0, 1):
                held = LogReferences(state, Rectangle(0, 2, *columns))
                held.scatter(np.array([row]), np.array([5], np.int16), held.gather(np.array([row])))
                found.add(held.digest)
    assert len(found) == 8


@pytest.mark.parametrize("kind", [GridReferences, ValueReferences])
def test_references_count_and_keep_states(kind: type[References]) -> None:
    bare, held = kind("t", place()), kind("t", place(), ["b", "a"])
    assert held.bytes - bare.bytes == 2 * 2 * ROWS
    assert kind.expected_bytes(place(), 2) - kind.expected_bytes(place()) == 2 * 2 * ROWS
    at = np.array([3, 9])
    put_back = held.digests_as_now()
    for state in held.states.values():
        state.scatter(at, np.array([1, 2], np.int16), state.gather(at))
    assert (
        held.digest == sum(plain_digest(name, {FIRST + 3: 1, FIRST + 9: 2}) for name in "ab") % WORD
    )
    assert (
        held.part(place(FIRST + 9, 1)).digest
        == sum(plain_digest(name, {FIRST + 9: 2}) for name in "ab") % WORD
    )
    put_back()
    assert held.digest == 0
    held.clear()
    assert all((one.gather(at) == NONE).all() for one in held.states.values())
