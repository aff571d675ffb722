"""A file is written behind: in order, one run of bytes at a time, each failure told."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import NoReturn

import pytest

from torchrec_checknrun.errors import StorageFailed
from torchrec_checknrun.store.deadlines import _in_flight
from torchrec_checknrun.store.folder import Folder

NAME = "rank-00000.bin"


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_runs_of_bytes_follow_each_other(folder: Folder) -> None:
    seen: list[bytes | memoryview] = []
    done: list[int] = []
    with folder.write_behind(NAME) as file:
        offsets = [
            file.append((b"ab", memoryview(b"cde")), seen.append, lambda: done.append(0)),
            file.append((), seen.append, lambda: done.append(1)),
            file.append((b"f",)),
        ]
        file.flush()
        assert done == [0, 1]
    assert offsets == [0, 5, 5]
    assert seen == [b"ab", b"cde"]
    assert folder.read(NAME) == b"abcdef"


def test_the_next_bytes_wait_for_the_last(folder: Folder) -> None:
    go, begun = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        begun.set()
        go.wait(60)

    with folder.write_behind(NAME) as file:
        file.append((b"a",), hold)
        begun.wait(60)
        threading.Timer(0.1, go.set).start()
        file.append((b"b",))
        assert go.is_set()
    assert folder.read(NAME) == b"ab"


@pytest.mark.parametrize("last", [False, True])
def test_a_failure_is_told_and_leaves_nothing(folder: Folder, last: bool) -> None:
    done: list[int] = []

    def fail(_: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    def write() -> None:
        with folder.write_behind(NAME) as file:
            file.append((b"a",), fail, lambda: done.append(0))
            if not last:
                file.append((b"b",))

    with pytest.raises(StorageFailed, match=NAME):
        write()
    assert done == [0]
    assert folder.names() == []


def test_without_any_thread(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "checknrun-write":
            raise RuntimeError("can't start new thread at interpreter shutdown")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    seen: list[str] = []
    with folder.write_behind(NAME) as file:
        file.append((b"a",), lambda _: seen.extend(call.what for call in tuple(_in_flight)))
        file.append((b"b",))
    # the interpreter's exit gives up what is silent for too long
    assert any(NAME in what for what in seen)
    assert folder.read(NAME) == b"ab"
    assert all(thread.name != "checknrun-write" for thread in threading.enumerate())
