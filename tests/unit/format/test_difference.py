"""A difference to the parent's bytes gives them back bit for bit, or is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.examples import examples
from torchrec_checknrun.format.difference import BLOCK_BYTES, WIDTHS, difference, restored
from torchrec_checknrun.format.entries import Difference


def drifted(size: int, seed: int = 0) -> tuple[bytes, bytes]:
    """Make fp32 values and the same ones a little later, cut to ``size`` bytes."""
    random = np.random.default_rng(seed)
    before = random.standard_normal(size // 4 + 1).astype("<f4")
    after = before * (1 + 1e-4 * random.standard_normal(len(before)).astype("<f4"))
    return before.tobytes()[:size], after.tobytes()[:size]


def views(one: bytes, other: bytes) -> tuple[memoryview, memoryview]:
    return memoryview(one), memoryview(other)


@settings(max_examples=examples(100), deadline=None)
@given(
    parent=st.binary(max_size=300),
    data=st.data(),
    width=st.sampled_from(WIDTHS),
    repeats=st.sampled_from([1, 2, 2000]),
)
def test_any_bytes_come_back(parent: bytes, data: st.DataObject, width: int, repeats: int) -> None:
    parent = parent * repeats
    content = bytearray(parent)
    for at in data.draw(st.lists(st.integers(0, max(0, len(parent) - 1)), max_size=20)):
        if parent:
            content[at] ^= data.draw(st.integers(0, 255))
    found = difference(memoryview(content), memoryview(parent), width)
    if found is not None:
        payload, known = found
        assert len(payload) < len(content)
        assert bytes(restored(*views(payload, parent), known)) == content


@pytest.mark.parametrize("size", [4, 4097, BLOCK_BYTES, BLOCK_BYTES + 7, 3 * BLOCK_BYTES - 1])
@pytest.mark.parametrize("width", WIDTHS)
def test_blocks_of_any_length(size: int, width: int) -> None:
    parent, content = drifted(size)
    found = difference(*views(content, parent), width)
    if size > 1000:
        assert found is not None
    if found is not None:
        assert bytes(restored(*views(found[0], parent), found[1])) == content


def test_trained_values_are_smaller_by_their_planes() -> None:
    """Half a value's bytes are the same: the sign, the exponent and what follows it."""
    parent, content = drifted(1 << 20)
    found, plain = (difference(*views(content, parent), width) for width in (4, 1))
    assert found is not None
    assert len(found[0]) < 0.65 * len(content)
    assert plain is None or len(found[0]) < len(plain[0])


def test_nothing_in_common_is_not_stored_so() -> None:
    random = np.random.default_rng(0)
    parent, content = random.bytes(10_000), random.bytes(10_000)
    assert difference(*views(content, parent), 4) is None
    assert difference(*views(content, parent[:-1]), 4) is None
    assert difference(*views(b"", b""), 4) is None


def test_nothing_changed_takes_nothing() -> None:
    parent, _ = drifted(100_000)
    found = difference(*views(parent, parent), 4)
    assert found is not None
    assert len(found[0]) < 100


def made() -> tuple[bytes, bytes, bytes, Difference]:
    parent, content = drifted(300_000)
    found = difference(*views(content, parent), 4)
    assert found is not None
    return parent, content, *found


@pytest.mark.parametrize(
    "change", [{"raw": 299_999}, {"raw": 2**40}, {"width": 2}, {"width": 3}, {"content": "0" * 16}]
)
def test_other_descriptions_are_refused(change: dict[str, Any]) -> None:
    parent, _, payload, known = made()
    with pytest.raises(ValueError, match=r"bytes|checksum"):
        restored(*views(payload, parent), replace(known, **change))


def test_another_parent_is_refused() -> None:
    parent, _, payload, known = made()
    other = bytes([parent[0] ^ 1]) + parent[1:]
    with pytest.raises(ValueError, match="checksum"):
        restored(*views(payload, other), known)


@pytest.mark.parametrize("size", [0, 10, 299_999, 300_001])
def test_frames_of_another_size_are_refused(size: int) -> None:
    parent, _, _, known = made()
    payload = zstandard.ZstdCompressor().compress(bytes(size))
    with pytest.raises(ValueError, match="frame"):
        restored(*views(payload, parent), known)


def test_no_damage_is_taken_for_content() -> None:
    parent, content, payload, known = made()
    for at in np.linspace(0, len(payload) - 1, 60).astype(int):
        damaged = bytearray(payload)
        damaged[at] ^= 4
        try:
            found = restored(memoryview(damaged), memoryview(parent), known)
        except ValueError:
            continue
        assert bytes(found) == content
    with pytest.raises(ValueError, match=r"frame|decompressed"):
        restored(memoryview(payload[: len(payload) // 2]), memoryview(parent), known)


def test_the_page_is_enough() -> None:
    """Decode by what docs/reference/format.md says, with NumPy and zstd alone."""
    parent, content, payload, known = made()
    planes = zstandard.ZstdDecompressor().decompress(payload)
    own = b""
    for start in range(0, known.raw, 262_144):
        block = np.frombuffer(planes[start : start + 262_144], "u1")
        whole = len(block) // known.width * known.width
        own += block[:whole].reshape(known.width, -1).T.tobytes() + block[whole:].tobytes()
    found = np.frombuffer(own, "u1") ^ np.frombuffer(parent, "u1")
    assert found.tobytes() == content
    assert known.parent == xxhash.xxh3_64_hexdigest(parent)
    assert known.content == xxhash.xxh3_64_hexdigest(content)
