"""Retry transient storage errors; name the remedy of permanent ones."""

from __future__ import annotations

import asyncio
import errno
import pickle
from typing import Any, ClassVar, cast

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from torchrec_checknrun.errors import CheckNRunError, SaveFailed, StorageFailed, StorageUnreachable
from torchrec_checknrun.store import retry
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.store.retry import is_transient, masked, retrying, tells_nothing


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(retry, "_LONGEST_PAUSE", 0.002)


class HTTPClientError(Exception):
    """An error with the name of botocore's."""


class ReadTimeoutError(HTTPClientError):
    pass


EndpointConnectionError = type("ConnectionError", (Exception,), {})


class WithStatus(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class ClientError(Exception):
    """An error like botocore's."""

    def __init__(self, status: int) -> None:
        super().__init__(f"a code that s3fs doesn't know, of {status}")
        self.response = {"Error": {}, "ResponseMetadata": {"HTTPStatusCode": status}}


def of_s3(status: int) -> OSError:
    """Make the error that s3fs raises for an answer of a code that it doesn't know."""
    error = OSError(errno.EIO, f"An error occurred ({status})")
    error.__cause__ = ClientError(status)
    return error


TRANSIENT = [
    TimeoutError("slow"),
    asyncio.TimeoutError("slow"),  # another one on Python 3.10
    ConnectionResetError("gone"),
    OSError(errno.EBUSY, "SlowDown"),
    OSError(errno.EREMOTEIO, "InternalError"),
    OSError(errno.ESTALE, "stale handle"),
    ReadTimeoutError("slow"),
    EndpointConnectionError("no route"),
    WithStatus(503),
    WithStatus(429),
    *map(of_s3, (408, 409, 429, 500, 502, 503, 504)),
]
LASTING = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EROFS, "Read-only file system"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    OSError(errno.EIO, "Input/output error"),
    PermissionError("AccessDenied"),
    WithStatus(403),
    WithStatus(409),
    of_s3(400),
    ValueError("something else"),
]


@pytest.mark.parametrize("error", TRANSIENT, ids=repr)
def test_transient_errors_are_tried_again(error: Exception) -> None:
    tried = []

    def act() -> str:
        tried.append(1)
        if len(tried) < 3:
            raise error
        return "done"

    assert is_transient(error)
    assert retrying(act, "reading x") == "done"
    assert len(tried) == 3


@pytest.mark.parametrize("error", LASTING, ids=repr)
def test_lasting_errors_fail_at_once(error: Exception) -> None:
    tried = []

    def act() -> None:
        tried.append(1)
        raise error

    assert not is_transient(error)
    with pytest.raises(StorageFailed, match="reading x") as caught:
        retrying(act, "reading x")
    assert len(tried) == 1
    assert type(caught.value) is StorageFailed
    assert caught.value.__cause__ is error


def test_a_refusal_of_s3_says_nothing_of_what_was_to_be_read() -> None:
    """An input/output error of a disk does; this holds on the other ranks, too."""

    def failed(error: OSError) -> BaseException:
        with pytest.raises(StorageFailed) as caught:
            retrying(lambda: (_ for _ in ()).throw(error), "reading x")
        return cast("BaseException", pickle.loads(pickle.dumps(caught.value)))

    assert tells_nothing(failed(of_s3(400)))
    assert not tells_nothing(failed(OSError(errno.EIO, "Input/output error")))


@pytest.mark.parametrize("error", [FileNotFoundError("x"), FileExistsError("x"), SaveFailed("x")])
def test_answers_are_no_failures(error: Exception) -> None:
    def act() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        retrying(act, "reading x")
    assert caught.value is error


def test_retries_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKNRUN_RETRY_SECONDS", "0.05")
    tried = []

    def act() -> None:
        tried.append(1)
        raise TimeoutError("slow")

    with pytest.raises(StorageUnreachable, match="didn't answer as it should"):
        retrying(act, "reading x")
    assert len(tried) > 2
    tried.clear()
    monkeypatch.setenv("CHECKNRUN_RETRY_SECONDS", "0")
    with pytest.raises(StorageFailed):
        retrying(act, "reading x")
    assert len(tried) == 1


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "no space is left: free some"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission was refused"),
    ],
)
def test_the_remedy_is_named(number: int, remedy: str) -> None:
    def act() -> None:
        raise OSError(number, "what the system says", "/a/file")

    with pytest.raises(StorageFailed, match=remedy) as caught:
        retrying(act, "writing /run/rank-00000.bin")
    assert caught.value.errno == number
    assert "writing /run/rank-00000.bin" in str(caught.value)
    assert "what the system says" in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))  # sent from rank to rank
    assert (type(again), str(again)) == (StorageFailed, str(caught.value))


@pytest.mark.parametrize("text", ["abc", "-1", "nan", "1 minute"])
def test_a_setting_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("CHECKNRUN_RETRY_SECONDS", text)
    with pytest.raises(CheckNRunError, match=r"CHECKNRUN_RETRY_SECONDS is .*: set it to"):
        retrying(lambda: None, "reading x")


def test_an_empty_setting_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKNRUN_RETRY_SECONDS", "")
    assert retrying(lambda: "done", "reading x") == "done"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://bucket/run", "s3://bucket/run"),
        ("reading http://u:p@h:9/run/a: no", "reading http://***@h:9/run/a: no"),
        ("ftp://token@h/run and sftp://u:p@ss@h", "ftp://***@h/run and sftp://***@h"),
        ("simplecache::webhdfs://u:p@h/run", "simplecache::webhdfs://***@h/run"),
        ("abfs://container@account/run", "abfs://container@account/run"),
        ("/runs/a@b and a@b.org", "/runs/a@b and a@b.org"),
        ("http://h/run@3", "http://h/run@3"),
    ],
)
def test_passwords_of_urls_are_masked(text: str, shown: str) -> None:
    assert masked(text) == shown


def test_no_password_in_the_log_or_in_errors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CHECKNRUN_RETRY_SECONDS", "0.01")

    def act() -> None:
        raise TimeoutError("no answer of ftp://user:secret@host/run")

    with pytest.raises(StorageUnreachable, match=r"ftp://\*\*\*@host/run/a: .*") as caught:
        retrying(act, "reading ftp://user:secret@host/run/a")
    assert "retrying in" in caplog.text
    assert "secret" not in caplog.text + str(caught.value)


class OftenSilent(MemoryFileSystem):
    """A store of whose looks some fail, with fsspec's own ``exists`` and ``pipe_file``."""

    protocol = "often-silent"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    failing: ClassVar[int] = 0
    exists = AbstractFileSystem.exists

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        plain: str = super()._strip_protocol(str(path).removeprefix("often-silent://"))
        return plain

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        if OftenSilent.failing:
            OftenSilent.failing -= 1
            raise TimeoutError("says the test")
        found: dict[str, Any] = super().info(path, **options)
        return found

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        AbstractFileSystem.pipe_file(self, path, value, mode, **options)


fsspec.register_implementation("often-silent", OftenSilent, clobber=True)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_new_record_replaces_none_that_was_not_seen(failing: int) -> None:
    """The ``exists`` of fsspec says no of any error: another writer's claim would be replaced."""
    folder = Folder("often-silent://run/writers")
    folder.put("epoch-00000001.json", b"another writer's")
    OftenSilent.failing = failing
    with pytest.raises(FileExistsError):
        folder.put("epoch-00000001.json", b"ours", new=True)
    assert folder.read("epoch-00000001.json") == b"another writer's"
    OftenSilent.failing = failing
    folder.put("epoch-00000002.json", b"ours", new=True)
    assert folder.read("epoch-00000002.json") == b"ours"
