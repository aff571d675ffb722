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
    Place(place).write(number, [content[:7], content[7:]])
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
