"""Digest encoded state alike for the same content, whatever the order of its keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.entries import fields
from torchrec_checknrun.format.chunk import EncodedChunk, state_chunk
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
    ],
)
def test_what_differs_is_named(one: Any, other: Any, named: list[str]) -> None:
    first, second = chunk_of(one), chunk_of(other)
    mine, theirs = digest_of(first), digest_of(second)
    assert mine.whole != theirs.whole
    assert set(named) >= set(mine.differing(theirs, fields(first)["tree"])) != set()


def test_a_digest_is_small() -> None:
    digest = digest_of(chunk_of({f"key {i}": i for i in range(10_000)}))
    assert len(digest.whole) + len(digest.parts) <= 16 + 4 * 512
