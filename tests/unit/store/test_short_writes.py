"""Compare the bytes given, reported and found, even if a driver or disk lies."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from torchrec_checknrun.errors import StorageFailed
from torchrec_checknrun.store import new_file
from torchrec_checknrun.store.folder import Folder

CONTENT = bytes(range(256)) * 4


class LyingFile:
    """A new file of a store that lies about the bytes it took."""

    def __init__(self, file: Any, how: str) -> None:
        self._file, self._how = file, how

    def write(self, data: Any) -> Any:
        half = memoryview(data)[: len(data) // 2]
        if self._how == "takes half and says so":
            return self._file.write(half or data)
        if self._how == "takes half and says all":
            self._file.write(half)
            return len(data)
        if self._how == "takes half and says nothing":
            self._file.write(half)
            return None
        self._file.write(data)
        return {
            "takes all and says nothing": None,
            "takes all and says half": len(half),
            "takes all and says none": 0,
            "takes all and says more": len(data) + 1,
            "takes all and says less than none": -1,
        }.get(self._how, len(data))

    def tell(self) -> Any:
        if self._how == "can't tell":
            raise OSError("not seekable")
        told = self._file.tell()
        return told - 1 if self._how == "tells less" else told

    def close(self) -> None:
        self._file.close()


class LyingStore(MemoryFileSystem):
    """A store in memory that does not always keep the objects as put."""

    protocol = "lying"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    how: ClassVar[str] = ""
    times: ClassVar[int] = 1000

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        plain: str = super()._strip_protocol(str(path).removeprefix("lying://"))
        return plain

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super().open(path, mode, **options)
        return LyingFile(file, self.how) if "w" in mode else file

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = super().info(path, **options)
        return {**found, "size": found["size"] - (self.how == "shows less")}

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if LyingStore.times > 0:
            LyingStore.times -= 1
            part = value[: len(value) // 2]
            changed = {"half": part, "none": b"", "other": value[::-1], "half, and fails": part}
            value = changed.get(self.how, value)
        if mode == "create" and self.exists(path):
            raise FileExistsError(path)
        with MemoryFileSystem.open(self, path, "wb") as file:
            file.write(value)
        if self.how == "half, and fails":
            raise OSError(errno.ENOSPC, "says the test")


fsspec.register_implementation("lying", LyingStore, clobber=True)


@pytest.fixture
def folder() -> Iterator[Callable[[str, int], Folder]]:
    def made(how: str, times: int = 1000) -> Folder:
        LyingStore.how, LyingStore.times = how, times
        return Folder("lying://run")

    yield made
    LyingStore.store.clear()


def write(folder: Folder) -> None:
    with folder.write("rank-00000.bin") as file:
        for start in range(0, len(CONTENT), 100):
            assert file.write(CONTENT[start : start + 100]) == len(CONTENT[start : start + 100])
        assert file.tell() == len(CONTENT)


@pytest.mark.parametrize(
    "how", ["honest", "takes half and says so", "takes all and says nothing", "can't tell"]
)
def test_all_bytes_get_there(folder: Callable[..., Folder], how: str) -> None:
    write(folder(how))
    assert folder(how).read("rank-00000.bin") == CONTENT


@pytest.mark.parametrize(
    "how",
    [
        "takes half and says all",
        "takes half and says nothing",
        "takes all and says half",
        "takes all and says none",
        "takes all and says more",
        "takes all and says less than none",
        "tells less",
        "shows less",
    ],
)
def test_a_file_that_lacks_bytes_is_refused(folder: Callable[..., Folder], how: str) -> None:
    with pytest.raises(StorageFailed, match=r"rank-00000\.bin"):
        write(folder(how))
    assert folder("honest").names() == []  # no part of the file is left


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("how", ["half", "none"])
def test_small_records_are_put_again(folder: Callable[..., Folder], how: str, new: bool) -> None:
    folder(how, 1).put("manifest.json", CONTENT, new=new)
    assert folder("honest").read("manifest.json") == CONTENT


@pytest.mark.parametrize("how", ["half", "none", "other"])
def test_small_records_that_do_not_read_back_are_refused(
    folder: Callable[..., Folder], how: str
) -> None:
    with pytest.raises(StorageFailed, match=r"a\.json"):
        folder(how).put("a.json", CONTENT)


@pytest.mark.parametrize("how", ["half", "none", "other"])
def test_of_a_new_record_nothing_torn_is_left(folder: Callable[..., Folder], how: str) -> None:
    error = FileExistsError if how == "other" else StorageFailed
    with pytest.raises(error):
        folder(how).put("manifest.json", CONTENT, new=True)
    if how != "other":  # the file may be another writer's
        assert folder("honest").names() == []


def test_a_put_that_fails_half_way_leaves_nothing(folder: Callable[..., Folder]) -> None:
    with pytest.raises(StorageFailed, match="says the test"):
        folder("half, and fails").put("epoch-00000001.json", CONTENT, new=True)
    assert folder("honest").names() == []


@pytest.mark.parametrize("most", [1, 7, 1 << 20])
def test_a_disk_that_takes_few_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    real = os.write
    monkeypatch.setattr(new_file.os, "write", lambda fd, data: real(fd, data[:most]))
    folder = Folder(tmp_path)
    write(folder)
    folder.put("manifest.json", CONTENT, new=True)
    assert folder.read("rank-00000.bin") == folder.read("manifest.json") == CONTENT


@pytest.mark.parametrize("said", [0, -1, "all"])
def test_a_disk_that_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: int | str) -> None:
    real = os.write

    def half(descriptor: int, data: memoryview) -> int:
        real(descriptor, data[: len(data) // 2])
        return len(data) if isinstance(said, str) else said

    folder = Folder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(new_file.os, "write", half)
        with pytest.raises(StorageFailed, match=r"rank-00000\.bin"):
            write(folder)
        with pytest.raises(StorageFailed, match=r"manifest\.json"):
            folder.put("manifest.json", CONTENT, new=True)
    assert folder.names() == []
