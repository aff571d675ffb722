"""Put each operation of a folder to a store: in memory, on S3, and wherever ``CHECKNRUN_STORE`` is.

``CHECKNRUN_STORE=abfs://container/tests python -m pytest tests/object_store/test_any_store.py``
tells whether checkpoints can be kept there. A new folder is made for each test, and removed.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from torchrec_checknrun.store.folder import Folder

STORE = os.environ.get("CHECKNRUN_STORE")
MIB = 1 << 20
CONTENT = bytes(range(200))
ODD = "ü #%?+&=.json"


@pytest.fixture(params=["memory", "s3", *(["store"] if STORE else [])])
def folder(request: pytest.FixtureRequest) -> Iterator[Folder]:
    urls = {"memory": "memory://tests/any", "store": STORE}
    url = urls.get(request.param) or f"{request.getfixturevalue('bucket')}/any"
    folder = Folder(f"{url}/{uuid.uuid4().hex}/run")
    folder.create()
    yield folder
    for each in folder.names():
        folder.delete(each)
    folder.remove()
    folder.parent.remove()


def test_no_file(folder: Folder) -> None:
    for offset, length in [(0, None), (0, 0), (5, None), (5, 6)]:
        with pytest.raises(FileNotFoundError):
            folder.read("a", offset, length)
    assert folder.names() == []
    assert folder.sizes() == {}
    assert folder.size("a") is None
    assert folder.modified("a") is None
    folder.delete("a")


@pytest.mark.parametrize("mib", [0, 1, 7, 40])
def test_files_of_several_sizes(folder: Folder, mib: int) -> None:
    with folder.write("a") as file:
        for number in range(mib):
            file.write(bytes([number]) * MIB)
    assert folder.size("a") == mib * MIB
    assert folder.read("a") == b"".join(bytes([number]) * MIB for number in range(mib))
    if mib > 1:
        assert folder.read("a", MIB - 1, 2) == b"\0\1"
        assert folder.read("a", (mib - 1) * MIB) == bytes([mib - 1]) * MIB
    memory = bytearray(10)
    assert folder.read_into(memoryview(memory), "a", 0) == min(10, mib * MIB)


def test_parts_of_a_file(folder: Folder) -> None:
    folder.put("a", CONTENT)
    parts = [(0, None), (0, 10), (7, 20), (7, None), (3, 0), (200, 5), (200, None), (300, 5)]
    for offset, length in parts:
        end = None if length is None else offset + length
        assert folder.read("a", offset, length) == CONTENT[offset:end], (offset, length)
    assert folder.read("a", 0, 500) == CONTENT


def test_an_empty_file(folder: Folder) -> None:
    folder.put("a", b"")
    assert [folder.read("a"), folder.read("a", 0, 0), folder.read("a", 0, 9)] == [b""] * 3
    assert folder.sizes() == {"a": 0}


def test_records_that_are_replaced_and_records_that_are_not(folder: Folder) -> None:
    folder.put("a", b"one")
    folder.put("a", b"other")
    assert folder.read("a") == b"other"
    folder.put("new", b"one", new=True)
    folder.put("new", b"one", new=True)  # as after an answer that was lost
    with pytest.raises(FileExistsError):
        folder.put("new", b"other", new=True)
    assert folder.read("new") == b"one"


def test_a_listing(folder: Folder) -> None:
    for name in ("b", "a", ODD):
        folder.put(name, name.encode())
    assert folder.names() == sorted(["a", "b", ODD])
    assert folder.sizes() == {name: len(name.encode()) for name in ("a", "b", ODD)}
    assert folder.read(ODD) == ODD.encode()
    assert folder.parent.names() == ["run"]
    assert folder.parent.sizes() == {}
    assert folder.parent.size("run") is None
    assert (folder / "a" / "deeper").names() == []
    with pytest.raises(FileNotFoundError):
        (folder / "a").read("deeper")


def test_the_time_of_a_file(folder: Folder) -> None:
    folder.put("a", CONTENT)
    assert abs((folder.modified("a") or 0.0) - time.time()) < 300


def test_a_file_that_is_given_up(folder: Folder) -> None:
    def begin(file: Any) -> None:
        file.write(bytes(30 * MIB))
        raise ValueError("given up")

    with pytest.raises(ValueError, match="given up"), folder.write("a") as file:
        begin(file)
    assert folder.names() == []


def test_a_folder_is_removed_when_it_is_empty(folder: Folder) -> None:
    inner = folder / "inner"
    inner.create()
    inner.put("a", CONTENT)
    inner.remove()
    assert inner.names() == ["a"]
    inner.delete("a")
    inner.remove()
    assert inner.names() == []
    assert folder.names() == []
