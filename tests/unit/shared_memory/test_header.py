"""Words and records of an image: a kill leaves the old ones or the new ones, damage is found."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_checknrun.native import has_extension
from torchrec_checknrun.shared_memory.file import NoImage
from torchrec_checknrun.shared_memory.header import (
    HEAD_BYTES,
    PAGE,
    USED,
    Place,
    Record,
    Word,
    Words,
    as_piece,
)

pytestmark = pytest.mark.skipif(not has_extension(), reason="the extension was not built")


class Note(msgspec.Struct):
    text: str


def memory(size: int = 512) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def test_words_are_kept() -> None:
    words = Words(memory(PAGE))
    words.clear()
    words.publish(Word.DONE, 17)
    words.publish(Word.FLOOR, -1)
    assert (words[Word.DONE], words[Word.FLOOR], words[Word.READY]) == (17, -1, 0)


@given(st.sampled_from(USED), st.integers(-(1 << 47), (1 << 47) - 1), st.data())
def test_every_flipped_bit_and_every_moved_word_is_found(
    at: int, value: int, data: st.DataObject
) -> None:
    page = memory(PAGE)
    words = Words(page)
    words.clear()
    words.publish(at, value)
    words.verify()
    assert words[at] == value
    for bit in range(64):
        words.tensor[at] ^= torch.tensor(1 << bit if bit < 63 else -(1 << 63))
        with pytest.raises(NoImage, match=f"word {at} of its first page is damaged"):
            words.verify()
        words.tensor[at] ^= torch.tensor(1 << bit if bit < 63 else -(1 << 63))
    other = data.draw(st.sampled_from([place for place in USED if place != at]))
    words.tensor[other] = words.tensor[at]
    with pytest.raises(NoImage, match=f"word {other} "):
        words.verify()


def test_memory_that_was_never_written_holds_no_words() -> None:
    with pytest.raises(NoImage, match="damaged"):
        Words(memory(PAGE)).verify()


@pytest.mark.parametrize("value", [1 << 47, -(1 << 47) - 1])
def test_a_value_that_is_too_large_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match="more than 48 bits"):
        Words(memory(PAGE)).publish(Word.DONE, value)


@given(st.lists(st.text(max_size=40), min_size=1, max_size=6))
def test_the_newest_value_is_read(texts: list[str]) -> None:
    place = memory()
    for text in texts:
        Record(place, Note).write(Note(text))
        assert Record(place, Note).read().text == text


@given(st.text(max_size=40), st.text(max_size=40), st.integers(0, 255), st.data())
def test_a_torn_record_leaves_the_one_before(
    before: str, after: str, noise: int, data: st.DataObject
) -> None:
    place = memory()
    record = Record(place, Note)
    record.write(Note(before))
    old = place.clone()
    record.write(Note(after))
    torn = old.clone()
    changed = (old != place).nonzero().reshape(-1).tolist()
    # Any part of what the write has stored, in any order, but not the number, which comes last and
    # was taken away first.
    number = set(range(256, 264))
    torn[256:264] = 255
    stored = [at for at in changed if at not in number and data.draw(st.booleans())]
    torn[stored] = place[stored]
    assert Record(torn, Note).read().text == before


@given(st.text(max_size=40), st.text(max_size=40), st.data())
def test_damage_never_brings_the_value_before_back(
    before: str, after: str, data: st.DataObject
) -> None:
    place = memory()
    for text in (before, after):
        Record(place, Note).write(Note(text))
    size = len(msgspec.json.encode(Note(after)))
    at = 256 + data.draw(st.sampled_from([*range(24), *range(HEAD_BYTES, HEAD_BYTES + size)]))
    place[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(NoImage, match="damaged"):
        Record(place, Note).read()


@given(st.binary(max_size=60), st.integers(0, 1 << 40), st.data())
def test_every_changed_byte_is_found(content: bytes, number: int, data: st.DataObject) -> None:
    place = memory()
    Place(place).write(number, [as_piece(content[:7]), as_piece(content[7:])])
    found = Place(place).read()
    assert found is not None
    assert (found[0], bytes(found[1])) == (number, content)
    used = [*range(24), *range(HEAD_BYTES, HEAD_BYTES + len(content))]
    at = data.draw(st.sampled_from(used))
    place[at] ^= data.draw(st.integers(1, 255))
    assert Place(place).read() is None


@given(st.binary(min_size=512, max_size=512))
def test_noise_is_no_record(noise: bytes) -> None:
    with pytest.raises(NoImage, match="damaged"):
        Record(torch.tensor(list(noise), dtype=torch.uint8), Note).read()


def test_a_value_of_another_kind_is_refused() -> None:
    place = memory()
    Record(place, Note).write({"other": 3})
    with pytest.raises(NoImage, match="damaged"):
        Record(place, Note).read()


def test_a_value_that_is_too_large_is_refused_and_the_one_before_stays() -> None:
    record = Record(memory(), Note)
    record.write(Note("short"))
    with pytest.raises(NoImage, match="more than"):
        record.write(Note("x" * 300))
    assert record.read().text == "short"


@given(
    st.lists(st.sampled_from([0, 1, 3, 8, 63, 64, 65, 4095, 4096, 4097, 9000]), max_size=6),
    st.integers(0, 1 << 40),
    st.data(),
)
def test_pieces_of_any_sizes_are_one_content(
    sizes: list[int], number: int, data: st.DataObject
) -> None:
    """Read what was written in pieces, and find every flipped bit and every other number."""
    chance = torch.Generator().manual_seed(sum(sizes))
    pieces = [torch.randint(0, 256, (n,), dtype=torch.uint8, generator=chance) for n in sizes]
    place = memory(HEAD_BYTES + sum(sizes) + 3)
    Place(place).write(number, pieces)
    whole = torch.cat([torch.empty(0, dtype=torch.uint8), *pieces])
    assert Place(place).read() == (number, whole.numpy().data)
    one_piece = memory(HEAD_BYTES + sum(sizes) + 3)
    Place(one_piece).write(number, [whole])
    assert torch.equal(one_piece, place)
    used = [*range(24), *range(HEAD_BYTES, HEAD_BYTES + sum(sizes))]
    at, bit = data.draw(st.sampled_from(used)), data.draw(st.integers(0, 7))
    place[at] ^= 1 << bit
    assert Place(place).read() is None


def plain_check(content: bytes, seed: int) -> int:
    """Return the check that csrc/block_check.h describes, word by word."""
    mix, whole = 0x9E3779B97F4A7C15, (1 << 64) - 1
    keys = [((seed ^ i) * mix + i) & whole for i in range(8)]
    lanes = [0] * 8
    padded = content + bytes(-len(content) % 64)
    for at in range(0, len(padded), 8):
        lane, word = at // 8 % 8, int.from_bytes(padded[at : at + 8], "little")
        mixed = word ^ keys[lane]
        swapped = (word << 32 | word >> 32) & whole
        lanes[lane] = (lanes[lane] + swapped + (mixed & 0xFFFFFFFF) * (mixed >> 32)) & whole
        keys[lane] = (keys[lane] + mix) & whole
    found = len(content) ^ mix ^ keys[0]
    for value in lanes:
        found = (found ^ value) * mix & whole
        found ^= found >> 32
    return found - (1 << 64) if found >> 63 else found


@given(st.binary(max_size=300), st.integers(0, 1 << 40))
def test_the_check_is_the_same_in_vectors_of_any_width(content: bytes, seed: int) -> None:
    assert torch.ops.checknrun.record_check(as_piece(content), seed) == plain_check(content, seed)


def test_a_content_that_does_not_fit_is_refused() -> None:
    place = memory(HEAD_BYTES + 10)
    with pytest.raises(ValueError, match="11 bytes for a place of 10"):
        Place(place).write(1, [torch.ones(4, dtype=torch.uint8), torch.ones(7, dtype=torch.uint8)])
    assert Place(place).read() is None
