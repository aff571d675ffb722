"""Use folders alike on a disk and in an fsspec store, with whole files or none."""

import errno
import http.server
import os
import stat
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from torchrec_checknrun.errors import StorageUnreachable
from torchrec_checknrun.store.folder import Folder

CONTENT = bytes(range(256)) * 4


@pytest.fixture(
    params=["path", "str", "file url", "spaces", "glob", "colons", "trailing slash", "memory"]
)
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
        "colons": tmp_path / "lr::0.1" / "run",
        "trailing slash": f"{tmp_path}/run/",
    }
    yield Folder(urls[request.param])


def test_files_are_written_read_and_listed(folder: Folder) -> None:
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
    """Continue when the system returns fewer bytes than asked for."""
    (tmp_path / "a.bin").write_bytes(CONTENT)
    preadv = os.preadv

    def little(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(descriptor, [buffers[0][:3]], offset)

    monkeypatch.setattr(os, "preadv", little)
    memory = bytearray(8)
    assert Folder(tmp_path).read_into(memoryview(memory), "a.bin", 1) == min(8, len(CONTENT) - 1)
    assert memory.startswith(CONTENT[1:9])


def test_missing_files_are_named(folder: Folder) -> None:
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
    """See another process's files: no listing may be cached."""
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

    def fail(*_: object, **__: object) -> None:
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
    """Sync file, rename, folder, in this order: a power cut must not leave an empty manifest."""
    calls: list[str] = []
    fsync, rename, link = os.fsync, os.rename, os.link

    def record_fsync(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        calls.append("sync folder" if is_folder else "sync file")
        fsync(descriptor)

    def record_rename(source: str, target: str, **directories: int) -> None:
        calls.append("rename")
        rename(source, target, **directories)

    def record_link(source: str, target: str, **options: Any) -> None:
        calls.append("link")
        link(source, target, **options)

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
    """Keep the folder when the working directory changes later, by Hydra for example."""
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


@pytest.mark.parametrize("url", ["{}/lr::1/run", "file://{}/lr::1/run"])
def test_two_colons_in_a_path_begin_no_chain(tmp_path: Path, url: str) -> None:
    """Keep runs apart that fsspec would give one folder, the path before the colons."""
    folder = Folder(url.format(tmp_path))
    assert folder.url == Folder(folder.url).url == f"{tmp_path}/lr::1/run"
    folder.create()
    (folder / "child").create()
    assert [*tmp_path.iterdir()] == [tmp_path / "lr::1"]


@pytest.mark.parametrize("url", [Path("s3://bucket/run"), Path("memory://run"), "gs:/bucket"])
def test_a_url_that_has_lost_a_slash_is_refused(url: Path | str) -> None:
    """Refuse what would be a folder named ``s3:`` on this disk, in which nobody looks."""
    with pytest.raises(ValueError, match=r"give the URL '(s3|memory|gs)://.*as a string"):
        Folder(url)


@pytest.mark.parametrize("url", ["", " ", "\n"])
def test_a_name_that_is_empty_is_not_the_working_directory(url: str) -> None:
    """Refuse what an unset variable gives: a command would prune whatever root it is called in."""
    with pytest.raises(ValueError, match=r"names no folder: .*'\.'"):
        Folder(url)


@pytest.mark.parametrize("url", ["file://tmp/run", "file://localhost/tmp/run", "local://run"])
def test_a_file_url_with_a_host_is_refused(url: str) -> None:
    """Refuse what would be a folder in the working directory, another one in each."""
    with pytest.raises(ValueError, match=r"give a path, or (file|local):///"):
        Folder(url)


def test_a_place_has_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Know a folder again by any of its spellings, before and after it is made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    spellings = ["run", "./run/", f"{tmp_path}//run", f"file://{tmp_path}/a/../run", "link"]
    assert {Folder(url).place for url in spellings} == {f"{tmp_path}/run"}
    Folder("run").create()
    assert {Folder(url).place for url in spellings} == {f"{tmp_path}/run"}
    assert Folder("memory://run/").place == "memory://run"


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert Folder(tmp_path / "file").names() == []
    with pytest.raises(OSError, match="file"):
        Folder(tmp_path / "file").create()


@pytest.mark.parametrize(
    "url",
    [
        "memory://tests/filesystem/run",
        "memory:///tests/filesystem/run/",
        "dir::memory://tests/filesystem/run",
        "simplecache::memory://tests/filesystem/run",
        "dir::simplecache::memory://tests/filesystem/run",
        "dir::file://{}/run",
    ],
)
def test_a_url_opens_the_same_folder_again(tmp_path: Path, url: str) -> None:
    """Open the folder by its URL alone, as another process does."""
    root = Folder(url.format(tmp_path))
    child = root / "seq-1"
    root.create()
    child.create()
    child.put("a.json", CONTENT)
    with child.write("a.bin") as file:
        file.write(CONTENT[:100])
    again = Folder(child.url)
    assert again.names() == child.names() == ["a.bin", "a.json"]
    assert again.read("a.json") == CONTENT
    assert Folder((child / "deeper").parent.url).read("a.bin") == CONTENT[:100]
    again.put("b.json", b"x")
    assert child.read("b.json") == b"x"
    assert "seq-1" in Folder(again.parent.url).names()
    for folder in (child, root):
        for name in folder.names():
            folder.delete(name)
        folder.remove()


@pytest.mark.parametrize(
    ("url", "child", "parent"),
    [
        ("s3://bucket/run", "s3://bucket/run/seq-1", "s3://bucket"),
        ("s3://bucket/run/", "s3://bucket/run/seq-1", "s3://bucket"),
        ("file:///a/run", "/a/run/seq-1", "/a"),
        ("/a/run", "/a/run/seq-1", "/a"),
        ("memory://run", "memory://run/seq-1", "memory://"),
        ("http://h:1/a/run", "http://h:1/a/run/seq-1", "http://h:1/a"),
        ("http://u:p@h/run", "http://u:p@h/run/seq-1", "http://u:p@h"),
        ("blockcache::s3://b/run", "blockcache::s3://b/run/seq-1", "blockcache::s3://b"),
        (
            "simplecache::http://u:p@h/a/run",
            "simplecache::http://u:p@h/a/run/seq-1",
            "simplecache::http://u:p@h/a",
        ),
    ],
)
def test_urls_of_children_and_parents(url: str, child: str, parent: str) -> None:
    if "s3:" in url:
        pytest.importorskip("s3fs")
    if "http:" in url:
        pytest.importorskip("aiohttp")
    folder = Folder(url)
    assert (folder / "seq-1").url == child
    assert (folder / "seq-1").parent.url == folder.url.rstrip("/")
    assert folder.parent.url == parent


def test_in_a_chain_the_first_path_counts(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("run/seq-1/a.json", CONTENT)
    child = Folder(f"zip://run::file://{tmp_path}/a.zip") / "seq-1"
    assert child.url == f"zip://run/seq-1::file://{tmp_path}/a.zip"
    assert Folder(child.url).read("a.json") == child.read("a.json") == CONTENT


def test_a_web_server_is_read(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    (tmp_path / "run" / "seq-1").mkdir(parents=True)
    (tmp_path / "run" / "seq-1" / "a.json").write_bytes(CONTENT)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(tmp_path))

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        root = Folder(f"http://user:secret@127.0.0.1:{server.server_port}/run")
        assert root.names() == ["seq-1"]
        again = Folder((root / "seq-1").url)
        assert again.names() == ["a.json"]
        assert again.read("a.json") == CONTENT
        assert "secret" not in f"{root} {again} {again.parent}"
        server.shutdown()


def test_a_store_that_does_not_answer_when_it_is_opened() -> None:
    with pytest.raises(StorageUnreachable, match=r"opening ftp://\*\*\*@127.0.0.1:9/run") as caught:
        Folder("ftp://user:secret@127.0.0.1:9/run")
    assert "secret" not in str(caught.value)


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(ValueError, match="nosuch"):
        Folder("nosuch://bucket/run")


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EIO])
def test_a_new_record_where_there_are_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Buckets that rclone has mounted answer with an input/output error."""

    def link(*arguments: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    folder = Folder(tmp_path)
    folder.put("a", CONTENT, new=True)
    folder.put("a", CONTENT, new=True)
    with pytest.raises(FileExistsError):
        folder.put("a", b"other", new=True)
    assert folder.read("a") == CONTENT
    assert folder.names() == ["a"]
