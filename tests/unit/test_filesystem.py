"""Folders: the same on a disk and in an fsspec store, and whole files or none."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from torchrec_checknrun.filesystem import Folder

CONTENT = bytes(range(256)) * 4


@pytest.fixture(params=["path", "str", "file url", "spaces", "glob", "trailing slash", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    if request.param == "memory":
        yield Folder("memory://tests/filesystem/run")
        fsspec.filesystem("memory").rm("/tests", recursive=True)
        return
    urls: dict[str, str | Path] = {
        "path": tmp_path / "run",
        "str": str(tmp_path / "run"),
        "file url": f"file://{tmp_path}/run",
        "spaces": tmp_path / "my runs" / "a run",
        "glob": tmp_path / "run[1]*",
        "trailing slash": f"{tmp_path}/run/",
    }
    yield Folder(urls[request.param])


def test_files(folder: Folder) -> None:
    assert folder.names() == []
    assert folder.size("a.bin") is None
    folder.create()
    folder.create()
    folder.put("b.json", CONTENT)
    with folder.write("a.bin") as file:
        file.write(CONTENT[:100])
        file.write(CONTENT[100:])
    with folder.write("empty"):
        pass
    assert folder.names() == ["a.bin", "b.json", "empty"]
    assert [folder.size(name) for name in folder.names()] == [len(CONTENT), len(CONTENT), 0]
    assert folder.read("a.bin") == folder.read("b.json") == CONTENT
    assert folder.read("empty") == b""
    folder.sync()


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 10), (5, None), (1000, 100), (1024, 5), (3, 0), (1020, 4)]
)
def test_read_a_part(folder: Folder, offset: int, length: int | None) -> None:
    folder.create()
    folder.put("a.bin", CONTENT)
    wanted = CONTENT[offset:] if length is None else CONTENT[offset : offset + length]
    assert folder.read("a.bin", offset, length) == wanted


@pytest.mark.parametrize(("offset", "length"), [(0, 4), (3, 5), (0, 100), (2, 0), (100, 5)])
def test_read_into_memory(folder: Folder, offset: int, length: int) -> None:
    folder.create()
    folder.put("a.bin", CONTENT)
    memory = bytearray(b"." * length)
    wanted = CONTENT[offset : offset + length]
    assert folder.read_into(memoryview(memory), "a.bin", offset) == len(wanted)
    assert memory == wanted + b"." * (length - len(wanted))


def test_read_into_memory_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may give less than it was asked for."""
    (tmp_path / "a.bin").write_bytes(CONTENT)
    preadv = os.preadv

    def little(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(descriptor, [buffers[0][:3]], offset)

    monkeypatch.setattr(os, "preadv", little)
    memory = bytearray(8)
    assert Folder(tmp_path).read_into(memoryview(memory), "a.bin", 1) == min(8, len(CONTENT) - 1)
    assert memory.startswith(CONTENT[1:9])


def test_missing_files(folder: Folder) -> None:
    folder.create()
    with pytest.raises(FileNotFoundError):
        folder.read_into(memoryview(bytearray(1)), "a.bin", 0)
    with pytest.raises(FileNotFoundError):
        folder.read("a.bin")
    with pytest.raises(FileNotFoundError):
        (folder / "none").read("a.bin")


def test_folders_in_folders(folder: Folder) -> None:
    child = folder / "seq-1"
    child.create()
    child.put("manifest.json", b"{}")
    assert folder.names() == ["seq-1"]
    assert folder.size("seq-1") is None
    assert child.name == "seq-1"
    assert child.names() == ["manifest.json"]
    assert child.parent.names() == ["seq-1"]
    assert child.parent.url == (folder / "other").parent.url
    assert child.parent.name == folder.name
    assert Folder(str(child)).read("manifest.json") == b"{}"
    assert str(child).endswith("/seq-1")


def test_a_folder_at_the_top_of_a_store() -> None:
    folder = Folder("memory://run")
    folder.create()
    folder.put("a.json", b"x")
    try:
        assert "run" in folder.parent.names()
        assert (folder.parent / "run").read("a.json") == b"x"
        assert Folder(str(folder.parent / "run")).names() == ["a.json"]
    finally:
        fsspec.filesystem("memory").rm("/run", recursive=True)


def test_files_of_others_are_seen_at_once(folder: Folder) -> None:
    """Another process writes: nothing may be remembered of an earlier look."""
    folder.create()
    assert folder.names() == []
    assert folder.size("a.bin") is None
    Folder(folder.url).put("a.bin", b"x")
    assert folder.names() == ["a.bin"]
    assert folder.size("a.bin") == 1


def test_put_replaces(folder: Folder) -> None:
    folder.create()
    folder.put("a.json", b"old, and longer")
    folder.put("a.json", b"new")
    assert folder.read("a.json") == b"new"
    assert folder.names() == ["a.json"]


@pytest.mark.parametrize("what", ["rename", "fsync"])
def test_an_interrupted_put_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    folder = Folder(tmp_path)
    folder.put("a.json", b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, what, fail)
        with pytest.raises(OSError, match="No space left"):
            folder.put("a.json", b"new")
        with pytest.raises(OSError, match="No space left"):
            folder.put("b.json", b"new")
    assert folder.names() == ["a.json"]
    assert folder.read("a.json") == b"old"


def test_what_is_written_is_synced_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File, rename, folder, in this order: otherwise a power cut can leave an empty manifest."""
    calls: list[str] = []
    fsync, rename, link = os.fsync, os.rename, os.link

    def record_fsync(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        calls.append("sync folder" if is_folder else "sync file")
        fsync(descriptor)

    def record_rename(source: str, target: str) -> None:
        calls.append("rename")
        rename(source, target)

    def record_link(source: str, target: str) -> None:
        calls.append("link")
        link(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    monkeypatch.setattr(os, "link", record_link)
    folder = Folder(tmp_path)
    folder.put("a.json", b"x")
    assert calls == ["sync file", "rename", "sync folder"]
    calls.clear()
    folder.put("b.json", b"x", new=True)
    assert calls == ["sync file", "link", "sync folder"]
    calls.clear()
    with folder.write("a.bin") as file:
        file.write(b"x")
        assert calls == []
    assert calls == ["sync file", "sync folder"]


def test_a_failing_write_is_not_hidden(folder: Folder) -> None:
    folder.create()
    with pytest.raises(ValueError, match="encoder"), folder.write("a.bin"):
        raise ValueError("encoder")


def test_a_relative_path_stays_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra, for one, may change the working directory after a checkpointer is made."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    folder = Folder("runs/one")
    folder.create()
    folder.put("a.json", b"x")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert folder.names() == ["a.json"]
    assert Folder(f"{folder}/a").parent.names() == ["a.json"]
    (folder / "child").create()
    assert folder.parent.names() == ["one"]
    assert folder.names() == ["a.json", "child"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert Folder(tmp_path / "file").names() == []
    with pytest.raises(OSError, match="file"):
        Folder(tmp_path / "file").create()


def test_unknown_protocol() -> None:
    with pytest.raises(ValueError, match="nosuch"):
        Folder("nosuch://bucket/run")
