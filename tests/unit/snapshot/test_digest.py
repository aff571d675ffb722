"""Digest encoded state alike for the same content, whatever the order of its keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.unit.entries import fields
from torchrec_checknrun.dense.wrappers import OF_EACH_RANK
from torchrec_checknrun.format.chunk import EncodedChunk, state_chunk
from torchrec_checknrun.format.entries import BlockEntry
from torchrec_checknrun.snapshot.digest import Digest
from torchrec_checknrun.values.state import encode_state


def chunk_of(value: Any) -> EncodedChunk:
    return state_chunk("state", None, *encode_state(value, "state"))


def digest_of(chunk: EncodedChunk) -> Digest:
    return Digest.of(chunk.entry, chunk.pieces)


def example() -> dict[Any, Any]:
    return {
        "a": torch.arange(6).view(2, 3),
        "b": {"x": [1, 2.5, None, "text"], "y": (b"raw", np.float32(3))},
        3: [],
        "": {},
        "empty": torch.empty(0, 4),
    }


def reordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reordered(item) for key, item in reversed(value.items())}
    return value


def test_the_order_of_keys_does_not_count() -> None:
    one, other = chunk_of(example()), chunk_of(reordered(example()))
    assert one.entry != other.entry
    assert digest_of(one) == digest_of(other)


def test_staged_content_has_the_same_digest() -> None:
    chunk = chunk_of(example())
    staged = EncodedChunk(chunk.entry, [memoryview(chunk.getvalue())])
    assert digest_of(staged) == digest_of(chunk)


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        ({"a": 1}, {"a": 2}, ["a"]),
        ({"a": 1}, {"a": 1.0}, ["a"]),
        ({"a": 1}, {"a": True}, ["a"]),
        ({"a": 0.0}, {"a": -0.0}, ["a"]),
        ({"a": None}, {}, ["", "a"]),
        ({"a": [1, 2]}, {"a": [2, 1]}, ["a[0]"]),
        ({"a": [1]}, {"a": (1,)}, ["a"]),
        ({"a": []}, {"a": {}}, ["a"]),
        ({"a": {"b": 1}}, {"a.b": 1}, ["", "a"]),
        ({1: 2}, {"1": 2}, ["[1]"]),
        ({"a": {"b": torch.zeros(2), "c": 1}}, {"a": {"b": torch.ones(2), "c": 1}}, ["a.b"]),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2, 1)}, ["a"]),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.int32)}, ["a"]),
        ({"a": torch.zeros(2)}, {"a": np.zeros(2, np.float32)}, ["a"]),
        ({"a": np.float64(1)}, {"a": np.array(1.0)}, ["a"]),
        ({"a": b"x"}, {"a": b"y"}, ["a"]),
        ({"a": [0] * 9000}, {"a": [0] * 8999 + [1]}, ["a[8192]"]),
        ({"a": [1, torch.zeros(2)]}, {"a": [1, torch.ones(2)]}, ["a[1]"]),
        ({"a": [torch.zeros(2), None]}, {"a": [torch.ones(2), None]}, ["a[0]"]),
    ],
)
def test_what_differs_is_named(one: Any, other: Any, named: list[str]) -> None:
    first, second = chunk_of(one), chunk_of(other)
    mine, theirs = digest_of(first), digest_of(second)
    assert mine.whole != theirs.whole
    assert set(named) >= set(mine.differing(theirs, fields(first)["tree"])) != set()


def test_bytes_of_other_chunks_than_states_count() -> None:
    entry = BlockEntry(path=("a",), dtype="float32", size=(2,), part=((0, 2),), shard=((0, 2),))
    one, same, other = (Digest.of(entry, [b"1234", last]) for last in (b"5678", b"5678", b"5679"))
    assert one == same
    assert one.whole != other.whole
    assert one.alike != other.alike
    assert Digest.of(replace(entry, path=("b",)), [b"12345678"]).whole != one.whole


@pytest.mark.parametrize(
    ("change", "counts", "must_be_alike"),
    [
        ({"state": {"weight": torch.ones(2)}}, True, True),
        ({"wrappers": {"optimizer": {"scale": 2.0, OF_EACH_RANK: 1.0}}}, True, False),
        ({"wrappers": {"optimizer": {"scale": 1.0, OF_EACH_RANK: 2.0}}}, False, False),
        ({"state": {"weight": torch.zeros(2), OF_EACH_RANK: 2.0}}, True, True),
    ],
)
def test_what_ranks_may_have_of_their_own(
    change: dict[str, Any], counts: bool, must_be_alike: bool
) -> None:
    """Overlook a rank's own norm of gradients; let wrappers, and nothing else, differ."""
    optimizer: dict[str, Any] = {
        "state": {"weight": torch.zeros(2)},
        "param_groups_of": [""],
        "wrappers": {"optimizer": {"scale": 1.0, OF_EACH_RANK: 1.0}},
    }
    one, other = (digest_of(chunk_of(value)) for value in (optimizer, {**optimizer, **change}))
    assert (one.whole != other.whole) == counts
    assert (one.alike != other.alike) == must_be_alike


def test_a_digest_is_small() -> None:
    digest = digest_of(chunk_of({f"key {i}": i for i in range(10_000)}))
    assert len(digest.whole) + len(digest.parts) <= 16 + 4 * 512
