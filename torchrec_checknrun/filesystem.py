"""The few file operations a checkpoint needs, on a folder or any fsspec URL, and made durable.

On a local disk "written" means fsync of the file and of its folder. An object store has no rename
and needs none: an object appears whole or not at all.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import copy
from typing import IO

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Folder:
    """A folder of checkpoints (or of one checkpoint's files).

    Args:
        url: a path or any fsspec URL (``s3://bucket/run``).
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.url = os.fspath(url)
        self._fs, path = fsspec.core.url_to_fs(self.url)
        self._path = path.rstrip("/")
        self._local = isinstance(self._fs, LocalFileSystem)
        if self._local:
            # A relative path must mean the same folder when the process has gone elsewhere.
            self.url = self._path or "/"

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> Folder:
        return self._at(f"{self._path}/{name}")

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._path.rsplit("/", 1)[-1]

    @property
    def parent(self) -> Folder:
        """The folder that this one is in."""
        return self._at(self._path.rpartition("/")[0])

    def _at(self, path: str) -> Folder:
        """Another folder of the same store."""
        folder = copy(self)
        folder._path = path
        folder.url = (path or "/") if self._local else self._fs.unstrip_protocol(path)
        return folder

    def names(self) -> list[str]:
        """What is directly in the folder, sorted; nothing where there is no folder."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        # Some stores list the folder itself among its content.
        paths = {str(path).rstrip("/") for path in found} - {self._path}
        return sorted(path.rsplit("/", 1)[-1] for path in paths)

    def size(self, name: str) -> int | None:
        """Bytes of a file, or None where there is none."""
        self._fs.invalidate_cache()
        try:
            info = self._fs.info(f"{self._path}/{name}")
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """A file's bytes, or a part of them (shorter where the file ends).

        Raises:
            FileNotFoundError: there is no such file.
        """
        end = None if length is None else offset + length
        data: bytes = self._fs.cat_file(f"{self._path}/{name}", start=offset, end=end)
        return data

    def read_into(self, memory: memoryview, name: str, offset: int) -> int:
        """Fills memory with a part of a file, which no other copy is made of on a local disk.

        Args:
            memory: bytes, writable.

        Returns:
            How many bytes there were: fewer than asked for where the file ends.

        Raises:
            FileNotFoundError: there is no such file.
        """
        if not self._local:
            data = self.read(name, offset, len(memory))
            memory[: len(data)] = data
            return len(data)
        descriptor = os.open(f"{self._path}/{name}", os.O_RDONLY)
        try:
            done = 0
            while done < len(memory):
                count = os.preadv(descriptor, [memory[done:]], offset + done)
                if not count:
                    break
                done += count
            return done
        finally:
            os.close(descriptor)

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Opens a file for positioned reads, without reading ahead."""
        with self._fs.open(f"{self._path}/{name}", "rb", cache_type="none") as file:
            yield file

    def create(self) -> None:
        """Makes the folder (object stores have none to make)."""
        self._fs.makedirs(self._path, exist_ok=True)

    @contextmanager
    def write(self, name: str) -> Iterator[IO[bytes]]:
        """Opens a new file; when the block ends without an error, it is durable."""
        with self._fs.open(f"{self._path}/{name}", "wb") as file:
            yield file
            if self._local:
                file.flush()
                os.fsync(file.fileno())
        self._sync_folder(self._path)

    def put(self, name: str, data: bytes) -> None:
        """Writes a whole small file so that readers see all of it or none of it, and durably."""
        target = f"{self._path}/{name}"
        if not self._local:
            self._fs.pipe_file(target, data)
            return
        temporary = f"{self._path}/.{name}.{secrets.token_hex(4)}"
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        self._sync_folder(self._path)

    def sync(self) -> None:
        """Makes the folder's own entry in its parent durable."""
        self._sync_folder(self._path.rsplit("/", 1)[0] or "/")

    def _sync_folder(self, path: str) -> None:
        if not self._local:
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
