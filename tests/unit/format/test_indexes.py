"""The indexes of a checkpoint's files are read at the same time, and come in the files' order."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.unit.chains import Part, new_root, write
from tests.unit.compaction.compacted import WHOLE, flip
from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format.reader import read_indexes
from torchrec_checknrun.store.folder import Folder

RANKS = 12


def checkpoint() -> tuple[Folder, Any]:
    root = new_root()
    return root, write(root, 60, [Part(WHOLE, list(range(60)), 5)], ranks=RANKS)


def test_two_are_read_at_once_and_all_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    root, manifest = checkpoint()
    read, meeting = Folder.read_into, threading.Barrier(2)

    def with_another(self: Folder, memory: memoryview, name: str, offset: int) -> int:
        meeting.wait(30)
        return read(self, memory, name, offset)

    monkeypatch.setattr(Folder, "read_into", with_another)
    chunks = read_indexes(root, manifest)
    files = [file.name for file in manifest.files]
    assert [chunk.file for chunk in chunks] == sorted(
        (chunk.file for chunk in chunks), key=files.index
    )
    assert len({chunk.file for chunk in chunks}) == RANKS
    for file in files:
        numbers = [chunk.number for chunk in chunks if chunk.file == file]
        assert numbers == list(range(len(numbers)))


def test_the_first_damaged_one_is_named() -> None:
    root, manifest = checkpoint()
    for file in (manifest.files[9], manifest.files[4]):
        flip(root, manifest.id, file.name, file.index_offset + 3)
    with pytest.raises(CorruptCheckpoint, match=manifest.files[4].name):
        read_indexes(root, manifest)
