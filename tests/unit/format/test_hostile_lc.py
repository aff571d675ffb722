"""Refuse hostile chains of tables stored by ``lc``: checksums are valid, content is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples import some_of
from tests.golden.make_deltas import LC_BITS
from tests.unit.format.test_hostile_deltas import (
    TABLE,
    Change,
    assert_found_by_digests,
    assert_refused,
    in_codec,
    in_deltas,
    in_weight,
    other_rows,
    swapped,
    without_deltas,
    without_link,
)

pytestmark = pytest.mark.usefixtures("small_operations")

GOLDEN = Path(__file__).parents[2] / "golden" / "lc"
CHANGES: dict[str, tuple[str, Change]] = {
    "a base with links": ("differences in a full", in_weight(0, parameters={"link": True})),
    "a base of another type": ("take", in_weight(0, parameters={"values": "fp16"})),
    "a base of an unknown type": ("fp8", in_weight(0, parameters={"values": "fp8"})),
    "a link that says it is none": ("take", without_link),
    "links of another codec": ("another codec|another version", in_weight(2, codec={
        "name": "delta", "version": 1, "step": 0.5})),
    "another codec": ("nothing can build on|can't be decoded|take", in_weight(2, codec={
        "name": "exact", "version": 1})),
    "exceptions": ("can't hold", in_weight(2, exceptions={"rows": 0, "bytes": 0})),
    "a newer version": ("version 2", in_codec(version=2)),
    "an unknown option": ("unexpected|argument", in_codec(power=2)),
    "other bits than the payload's": ("other than 4 bits", in_codec(bits=LC_BITS[TABLE] + 1)),
    "bits of no codec": ("one of", in_codec(bits=5)),
    "bits of text": ("one of", in_codec(bits="3")),
    "other digests in the end": ("digest", in_deltas(-1, after="0" * 16)),
    "other digests in between": ("digest", in_deltas(2, before="0" * 16)),
    "a link without digests": ("as differences", without_deltas),
    "other rows": ("digest|predecessor|other bytes", other_rows),
    "links that changed places": ("digest|predecessor|rows", swapped),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_hostile_chains_are_refused(name: str) -> None:
    assert_refused(GOLDEN, *CHANGES[name])


@pytest.mark.parametrize("seed", some_of(range(60), *range(15)))
def test_random_payloads_are_refused_or_have_another_digest(seed: int) -> None:
    assert_found_by_digests(GOLDEN, seed)
