"""Use stores whose fsspec drivers tell things in ways of their own, seen in adlfs, gcsfs, sshfs and
pyarrow's HDFS.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from torchrec_checknrun.errors import StorageFailed, StorageUnreachable
from torchrec_checknrun.store import retry
from torchrec_checknrun.store.driver import DriverStore
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.store.retry import is_transient, tells_nothing

CONTENT = bytes(range(200))


class Answer:
    """An answer of a web service, as its client keeps it with an error."""

    def __init__(self, status: int) -> None:
        self.status_code = status


class HttpResponseError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"the service said {status}")
        self.status_code = status
        self.response = Answer(status)


class Azure(MemoryFileSystem):
    """Refuse ranges that begin at the end or are empty; missing files have an answer as cause."""

    protocol = "azurelike"

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> Any:
        try:
            size = self.info(path)["size"]
        except FileNotFoundError as error:
            raise FileNotFoundError(path) from HttpResponseError(404) or error
        if start is not None and start == end:
            raise ValueError("Required Content-Range response header is missing or malformed.")
        if (start is not None or end is not None) and (start or 0) >= size:
            raise HttpResponseError(416)
        return super().cat_file(path, start, end, **kwargs)


class Hdfs(MemoryFileSystem):
    """Open files that are read from their beginning as streams; an unknown time is None."""

    protocol = "hdfslike"

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> Any:
        if start == 0:
            raise OSError("only valid on seekable files")
        return super().cat_file(path, start, end, **kwargs)

    def modified(self, path: str) -> datetime | None:
        return super().modified(path) if self.exists(path) else None


class Ssh(MemoryFileSystem):
    """Return whole files whatever is asked for."""

    protocol = "sshlike"

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> Any:
        return super().cat_file(path)


@pytest.fixture(params=[Azure, Hdfs, Ssh])
def folder(request: pytest.FixtureRequest) -> Iterator[Folder]:
    fsspec.register_implementation(request.param.protocol, request.param, clobber=True)
    yield Folder(f"{request.param.protocol}://drivers/run")
    MemoryFileSystem.store.clear()


def test_read_parts(folder: Folder) -> None:
    folder.put("a", CONTENT)
    for offset, length in [(0, None), (0, 10), (7, 20), (190, 50), (7, None), (3, 0), (0, 0)]:
        end = None if length is None else offset + length
        assert folder.read("a", offset, length) == CONTENT[offset:end], (offset, length)


@pytest.mark.parametrize(("offset", "length"), [(200, 5), (200, None), (300, 5), (300, None)])
def test_read_beyond_the_end(folder: Folder, offset: int, length: int | None) -> None:
    folder.put("a", CONTENT)
    if "sshlike" not in folder.url or length is None:
        assert folder.read("a", offset, length) == b""


def test_read_an_empty_file(folder: Folder) -> None:
    folder.put("a", b"")
    assert [folder.read("a"), folder.read("a", 0, 0), folder.read("a", 0, 9)] == [b""] * 3


@pytest.mark.parametrize(("offset", "length"), [(0, None), (0, 0), (5, None), (5, 6)])
def test_read_no_file(folder: Folder, offset: int, length: int | None) -> None:
    with pytest.raises(FileNotFoundError):
        folder.read("a", offset, length)
    assert folder.modified("a") is None


def test_a_bucket_is_never_removed() -> None:
    """Azure's driver deletes a container with all that it holds."""
    removed = []

    class Containers(MemoryFileSystem):
        def rmdir(self, path: str) -> None:
            removed.append(path)

    for path in ("container", "container/run"):
        DriverStore(Containers(), path, s3=False, may_be_file=False).remove()
    assert removed == ["container/run"]


def forbidden() -> OSError:
    """Make gcsfs' error, which has no number."""
    return OSError("Forbidden: https://storage.googleapis.com/b/o\nno access")


@pytest.mark.parametrize(
    "error",
    [forbidden(), HttpResponseError(403), HttpResponseError(401), RuntimeError("out of order")],
    ids=repr,
)
def test_an_error_of_a_driver_says_nothing_of_what_was_to_be_read(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Otherwise a restore would pass over a checkpoint that it may not read."""
    folder.put("a", CONTENT)

    def fail(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(folder._fs, "cat_file", fail)
    with pytest.raises(StorageFailed) as caught:
        folder.read("a", 5, 10)
    assert tells_nothing(caught.value)


def test_a_refused_read_is_that_where_sizes_are_not_told_either(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise HttpResponseError(403)

    folder.put("a", CONTENT)
    monkeypatch.setattr(folder._fs, "cat_file", fail)
    monkeypatch.setattr(folder._fs, "info", lambda path: {"type": "file", "size": None})
    with pytest.raises(StorageFailed, match="credentials") as caught:
        folder.read("a", 5, 10)
    assert tells_nothing(caught.value)


def test_a_refusal_names_credentials(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise HttpResponseError(403)

    monkeypatch.setattr(folder._fs, "ls", fail)
    with pytest.raises(StorageFailed, match="credentials") as caught:
        folder.names()
    assert caught.value.errno == errno.EACCES


@pytest.mark.parametrize("new", [True, False])
def test_a_bucket_that_is_not_there(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, new: bool
) -> None:
    """Google's driver tells it with the address alone."""

    def fail(*arguments: Any, **options: Any) -> None:
        raise FileNotFoundError("https://storage.googleapis.com/upload/storage/v1/b/runs/o")

    monkeypatch.setattr(folder._fs, "pipe_file", fail)
    with pytest.raises(StorageFailed, match="no such bucket or folder: check its name, or create"):
        folder.put("a", CONTENT, new)


@pytest.mark.parametrize("where", ["write", "close"])
def test_a_driver_whose_upload_fails(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    class File:
        closed = False

        def write(self, data: memoryview) -> int:
            if where == "write":
                raise RuntimeError("Failed to upload block")
            return len(data)

        def close(self) -> None:
            raise RuntimeError("Failed to upload block")

    monkeypatch.setattr(folder._fs, "open", lambda *arguments, **options: File())
    told = r"writing .*/run/a.*Failed to upload block"
    with pytest.raises(StorageFailed, match=told), folder.write("a") as file:
        file.write(CONTENT)


class ServiceRequestError(Exception):
    """An error with the name of azure-core's for a connection that was refused."""


def test_transient_errors_of_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    by_answer = Exception("of requests, which keeps the status in the answer")
    by_answer.response = Answer(503)  # type: ignore[attr-defined]  # as requests sets it
    assert all(map(is_transient, (by_answer, HttpResponseError(429), ServiceRequestError())))
    assert not is_transient(HttpResponseError(404))
    monkeypatch.setenv("CHECKNRUN_RETRY_SECONDS", "0")

    def act() -> None:
        raise ServiceRequestError("refused")

    with pytest.raises(StorageUnreachable):
        retry.retrying(act, "reading x")
