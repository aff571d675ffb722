"""An image that anything but its own process has changed is refused: no undo is ever skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.states import gather
from tests.examples import ALL, some_of
from tests.unit.run.jobs import train
from tests.unit.run.lives import Lives, differences
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.memory.agreement import Found
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.recovery.survival import make_image
from torchrec_checknrun.shared_memory import file as files
from torchrec_checknrun.shared_memory.areas import Areas
from torchrec_checknrun.shared_memory.header import (
    FIRST_BYTES,
    HEAD_BYTES,
    LAYOUT_BYTES,
    LINEAGE_BYTES,
    PAGE,
    USED,
    Word,
)

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(not has_extension(), reason="the extension was not built"),
]

MASKS = [1, 1 << 47, (1 << 64) - 1]
if ALL:
    MASKS += [1 << 20, 1 << 48, 1 << 63, 0x0123456789ABCDEF]


def left(lives: Lives) -> tuple[Path, Checkpointer]:
    """Leave an image in the middle of step 4, after a checkpoint of step 2."""
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    saver.save()
    train(job, saver, 1)
    job.train()
    lives.die()
    path = next(lives.memory.iterdir())
    _, saver = lives.begin()
    return path, saver


def look(saver: Checkpointer) -> Found:
    files._mapped.clear()
    image = make_image(saver._options, saver._target, saver._ranks)
    assert image is not None
    found = image.look()
    image.close(remove=False)
    return found


def each_change(content: bytes, places: Iterator[int]) -> Iterator[tuple[str, bytes]]:
    """Yield the file with one of these words changed."""
    for at in places:
        for mask in MASKS:
            words = np.frombuffer(content, np.uint64).copy()
            words[at] ^= np.uint64(mask)
            yield f"word {at} ^ {mask:x}", words.tobytes()


def of_the_first_page(content: bytes, areas: Areas) -> Iterator[int]:
    yield from USED


def of_its_records(content: bytes, areas: Areas) -> Iterator[int]:
    for start, size in ((PAGE, LAYOUT_BYTES), (FIRST_BYTES - LINEAGE_BYTES, LINEAGE_BYTES)):
        for first in (start, start + size // 2):
            used = int.from_bytes(content[first + 8 : first + 16], "little")
            assert 0 < used < size // 2
            yield from range(first // 8, first // 8 + 3)
            yield from range((first + HEAD_BYTES) // 8, (first + HEAD_BYTES + used) // 8, 7)


def of_its_journals(content: bytes, areas: Areas) -> Iterator[int]:
    for place in range(2):
        first = areas.layout.areas[f"journal-{place}"][0] // 8
        used = areas.words[Word.JOURNAL_USED + place] // 8
        words = np.frombuffer(content, np.int64)
        assert 0 < words[first + 1] < used - 3
        yield from range(first, first + 3 + int(words[first + 1]))  # header and ids
        yield from range(
            first + 3 + int(words[first + 1]), first + used, 13
        )  # rows, other segments
        yield first + used - 1


@pytest.mark.parametrize("places", [of_the_first_page, of_its_records, of_its_journals])
def test_every_changed_word_is_found(
    lives: Lives, places: Callable[[bytes, Areas], Iterator[int]]
) -> None:
    path, saver = left(lives)
    content = path.read_bytes()
    assert look(saver).done == 3
    path.write_bytes(content)
    files._mapped.clear()
    areas = Areas(files.ImageFile.open(path))
    areas.layout = areas._record.read()
    tried = 0
    for change, damaged in each_change(content, places(content, areas)):
        path.write_bytes(damaged)
        assert look(saver).missing, change
        tried += 1
    assert tried >= len(MASKS) * len(USED)
    path.write_bytes(content)
    assert look(saver).missing is None
    areas.close()


@pytest.mark.parametrize("at", some_of(USED, *range(0, len(USED), 2)))
def test_the_checkpoint_is_restored_instead(lives: Lives, at: int) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    saver.save()
    wanted = gather(job)
    train(job, saver, 1)
    job.train()
    lives.die()
    path = next(lives.memory.iterdir())
    words = np.fromfile(path, np.uint64)
    words[at] ^= np.uint64(1 << 3)
    path.write_bytes(words.tobytes())
    job, saver = lives.begin()
    report = saver.restore()
    assert report is not None
    assert report.source == "checkpoint"
    why = "does not begin as an image" if at == Word.MAGIC else f"word {at} of its first page"
    assert why in report.without_images[0]
    assert differences(job, wanted) == []


def test_a_journal_in_memory_that_was_given_back_is_no_empty_one(lives: Lives) -> None:
    path, saver = left(lives)
    content = bytearray(path.read_bytes())
    files._mapped.clear()
    areas = Areas(files.ImageFile.open(path))
    areas.layout = areas._record.read()
    for place in range(2):
        first, size = areas.layout.areas[f"journal-{place}"]
        content[first : first + size] = bytes(size)
    areas.close()
    path.write_bytes(content)
    assert "damaged" in (look(saver).missing or "")


def test_a_step_goes_on_where_a_word_is_changed_under_it(lives: Lives) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    saver.save()
    image = saver._survival._image
    assert image is not None
    areas = image._areas
    assert areas is not None
    areas.words.tensor[Word.DONE] += 1
    train(job, saver, 2)  # nobody knows the step any more: the image is given up, training goes on
    assert image.is_broken
    saver.save()
    wanted = gather(job)
    lives.die()
    job, saver = lives.begin()
    report = saver.restore()
    assert report is not None
    assert (report.source, report.step) == ("checkpoint", 4)
    assert differences(job, wanted) == []
