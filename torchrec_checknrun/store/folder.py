"""The few file operations a checkpoint needs, on a folder or any fsspec URL, and made durable.

On a local disk "written" means fsync of the file and of its folder. What fails for a moment is
tried again; what fails for good, or isn't answered in time, is a ``StorageFailed`` that names the
path and the remedy. How it is done on a disk is ``local_store``'s, elsewhere ``driver_store``'s.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from typing import TypeVar

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from torchrec_checknrun.errors import CheckpointExists, StorageFailed
from torchrec_checknrun.store.deadlines import TIMEOUT_SECONDS, Patience, given_up
from torchrec_checknrun.store.driver import DriverStore
from torchrec_checknrun.store.local import LocalStore
from torchrec_checknrun.store.new_file import NewFile, require_all
from torchrec_checknrun.store.retry import masked, retrying, storage_failed

T = TypeVar("T")

_RETRIED = 0.9
"""Of the time that an operation may take: then its last error is told."""
_PUTS = 3
"""How often a small record is put that doesn't read back as it was."""


class Folder:
    """A folder of checkpoints (or of one checkpoint's files).

    Args:
        url: a path or any fsspec URL (``s3://bucket/run``).
        timeout_seconds: how long a storage that doesn't answer may be waited for.

    Attributes:
        url: opens the same folder again, in any process; may hold a password.
        patience: bounds all waits for this storage.

    Raises:
        StorageFailed: the storage refused an operation, or didn't answer; all methods do.
        CorruptCheckpoint: on a local disk, something in the folder that should be a file or a
            directory is a symbolic link; all methods do.
    """

    def __init__(
        self, url: str | os.PathLike[str], timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        self.url = os.fspath(url)
        self.patience = Patience(timeout_seconds)
        try:  # some stores are asked at once
            self._fs, path = self.patience.call(
                lambda: fsspec.core.url_to_fs(self.url), f"opening {self}"
            )
        except OSError as error:
            raise storage_failed(error, f"opening {self}") from error
        while type(self._fs) is DirFileSystem and isinstance(self._fs.fs, LocalFileSystem):
            path, self._fs = self._fs._join(path), self._fs.fs  # a disk has links, by any name
        self._path = path.rstrip("/")
        self._local = isinstance(self._fs, LocalFileSystem)
        self._below: tuple[str, ...] = ()
        protocols = self._fs.protocol
        self._s3 = "s3" in ((protocols,) if isinstance(protocols, str) else protocols)
        if self._local:
            # A relative path must mean the same folder when the process has gone elsewhere.
            self.url = self._path or "/"
        elif self.url.startswith("dir::"):
            # Its files are at the path that follows, taken twice: the first alone has children.
            self.url = f"dir://{self._path}{self.url[3:]}"

    def __str__(self) -> str:
        return masked(self.url)

    def __truediv__(self, name: str) -> Folder:
        before, path, after = _parts(self.url)
        folder = self._at(f"{self._path}/{name}", f"{before}{path}/{name}{after}")
        folder._below = (*self._below, name)
        return folder

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._path.rsplit("/", 1)[-1]

    @property
    def parent(self) -> Folder:
        """The folder that this one is in."""
        before, path, after = _parts(self.url)
        folder = self._at(self._path.rpartition("/")[0], before + path.rpartition("/")[0] + after)
        folder._below = self._below[:-1]
        return folder

    @property
    def outermost(self) -> tuple[str, tuple[str, ...]]:
        """The URL of the root that this folder was reached from, and the names on the way: links
        are followed to the one, but not from there on. Another process opens it by these.
        """
        folder = self
        for _ in self._below:
            folder = folder.parent
        return folder.url, self._below

    def _at(self, path: str, url: str) -> Folder:
        """Another folder of the same store."""
        folder = copy(self)
        folder._path, folder._below = path, ()
        folder.url = (path or "/") if self._local else url
        return folder

    @property
    def _store(self) -> LocalStore | DriverStore:
        if not self._local:
            return DriverStore(self._fs, self._path, self._s3, len(self._below) > 1)
        length = sum(len(name) + 1 for name in self._below)
        return LocalStore(self._path[: len(self._path) - length], self._below)

    def _do(self, act: Callable[[], T], what: str) -> T:
        """Run an operation, again where that helps, and for no longer than the storage may take."""
        most = self.patience.seconds * _RETRIED
        return self.patience.call(lambda: retrying(act, what, most), masked(what))

    def is_link(self, name: str) -> bool:
        """Whether something in the folder is a symbolic link, which only local disks have."""
        return self._local and self._do(
            lambda: self._store.is_link(name), f"looking at {self}/{name}"
        )

    def names(self) -> list[str]:
        """What is directly in the folder, sorted; nothing where there is no folder."""
        return sorted(self._do(self._store.list, f"listing {self}"))

    def sizes(self) -> dict[str, int]:
        """Bytes of all files that are directly in the folder, with one look."""
        return self._do(self._store.sizes, f"listing {self}")

    def size(self, name: str) -> int | None:
        """Bytes of a file, or None where there is none."""
        return self._do(lambda: self._store.size(name), f"looking at {self}/{name}")

    def modified(self, name: str) -> float | None:
        """Return when a file was last written, by the store's clock, in seconds since 1970.

        Returns:
            None where the store keeps no such times, or there is no such file.
        """
        return self._do(lambda: self._store.modified(name), f"looking at {self}/{name}")

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """A file's bytes, or a part of them (shorter where the file ends).

        Raises:
            FileNotFoundError: there is no such file.
        """
        return self._see(lambda: self._store.read(name, offset, length), name)

    def read_into(self, memory: memoryview, name: str, offset: int) -> int:
        """Fills memory with a part of a file, which no other copy is made of on a local disk.

        Args:
            memory: bytes, writable; not to be used any more after a ``StorageUnreachable``.

        Returns:
            How many bytes there were: fewer than asked for where the file ends.

        Raises:
            FileNotFoundError: there is no such file.
        """
        if not len(memory):
            return 0
        store = self._store
        if isinstance(store, LocalStore):
            return self._see(lambda: store.read_into(memory, name, offset), name)
        data = self.read(name, offset, len(memory))
        memory[: len(data)] = data
        return len(data)

    def _see(self, act: Callable[[], T], name: str) -> T:
        """``_do``; within what is no folder, there is no file."""

        def see() -> T:
            try:
                return act()
            except NotADirectoryError as error:
                path = error.filename
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error

        return self._do(see, f"reading {self}/{name}")

    def create(self) -> None:
        """Makes the folder (object stores have none to make)."""
        self._do(self._store.create, f"making {self}")

    @contextmanager
    def write(self, name: str) -> Iterator[NewFile]:
        """Opens a new file; when the block ends without an error, it is durable, and the storage
        has as many bytes as it was given.

        After an error nothing of it is left.

        Raises:
            CheckpointExists: something of that name is there.
        """
        what, tries = f"writing {self}/{name}", 0

        def begin() -> NewFile:
            nonlocal tries
            tries += 1
            return self._store.new_file(name, again=tries > 1)

        try:
            file = self._do(begin, what)
        except FileExistsError as error:
            raise CheckpointExists(
                f"{self}/{name} is there already, though nothing was written to it: something else "
                "writes to this directory; find out what, and save again"
            ) from error
        try:
            yield file
            try:
                self.patience.call(file.commit, what)
            except OSError as error:
                raise storage_failed(error, what) from error
            require_all(f"{self}/{name}", file.tell(), self.size(name), "the storage has")
        except BaseException as error:
            with suppress(Exception):  # the first error counts
                self._discard(file, name)
            if isinstance(error, OSError):
                raise storage_failed(error, what) from error
            raise
        self._sync(f"writing {self}/{name}")

    def _discard(self, file: NewFile, name: str) -> None:
        what = f"giving up {self}/{name}"
        with suppress(Exception):
            self.patience.call(file.drop, what)
        self.patience.call(lambda: self._store.delete(name), what)

    def put(self, name: str, data: bytes, new: bool = False) -> None:
        """Writes a whole small file so that readers see all of it or none of it, durably, and reads
        it back.

        Args:
            new: only if there is no such file yet. A store that can't check that while it writes
                is asked before.

        Raises:
            FileExistsError: there is one, with other content.
            StorageFailed: the storage has not kept what it was given.
        """
        what = f"writing {self}/{name}"

        def put() -> None:
            self._store.put(name, data, new)
            if new and given_up():
                self._store.delete(name)  # its writer has been told that it failed

        for _ in range(_PUTS):
            try:
                self._do(put, what)
            except FileExistsError:
                # Perhaps by an earlier try, of which the answer was lost.
                if self.read(name) != data:
                    raise
                self._sync(what)
                return
            except StorageFailed:
                if new:
                    self._drop_part(name, data)
                raise
            found = self._found(name)
            if found == data:
                return
            if new and not (found is None or data.startswith(found)):
                raise FileExistsError(errno.EEXIST, "another one was put at once", name)
            if new and found is not None:
                self.delete(name)  # a part of what was given: nobody else's
        require_all(f"{self}/{name}", len(data), None if found is None else len(found), "it has")
        raise StorageFailed(
            errno.EIO, f"{what}: it reads back as something else: the storage changes what it keeps"
        )

    def _drop_part(self, name: str, data: bytes) -> None:
        """Delete the part that a failed put has left: a store that isn't atomic shows it to all."""
        with suppress(OSError):
            found = self._found(name)
            if found is not None and found != data and data.startswith(found):
                self.delete(name)

    def _found(self, name: str) -> bytes | None:
        try:
            return self.read(name)
        except FileNotFoundError:
            return None

    def delete(self, name: str) -> None:
        """Removes a file, if it is there; of a link, only the link."""
        self._do(lambda: self._store.delete(name), f"deleting {self}/{name}")

    def remove(self) -> None:
        """Removes the folder itself, if it is there and empty."""
        with suppress(Exception):  # an empty folder does no harm
            self.patience.call(self._store.remove, f"deleting {self}")

    def sync(self) -> None:
        """Makes the folder's own entry in its parent durable."""
        self._sync_with(self._store.sync_entry, f"making {self} durable")

    def _sync(self, what: str) -> None:
        self._sync_with(self._store.sync, what)

    def _sync_with(self, sync: Callable[[], None], what: str) -> None:
        """Once: after a failed fsync nobody knows what another one would say."""
        if not self._local:
            return
        try:
            self.patience.call(sync, what)
        except OSError as error:
            raise storage_failed(error, what) from error


def _parts(url: str) -> tuple[str, str, str]:
    """What comes before a URL's path, that path (with the host), and what comes after it.

    In a chain, as ``simplecache::s3://bucket/run`` or ``zip://run::file:///a.zip``, it is the first
    path: what stands before has none.
    """
    before = ""
    while "::" in url and "/" not in url.partition("::")[0]:
        first, _, url = url.partition("::")
        before += f"{first}::"
    url, chain, after = url.partition("::")
    protocol, separator, path = url.rpartition("://")
    return before + protocol + separator, path.rstrip("/"), chain + after
