"""Offer the few file operations that a checkpoint needs, durable, on a folder or any fsspec URL.

On a local disk "written" means fsync of the file and of its folder. Transient errors are retried;
permanent ones and silence become a ``StorageFailed`` that names the path and the remedy. The
operations themselves are ``local.LocalStore``'s on a disk, ``driver.DriverStore``'s elsewhere.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from typing import TypeVar

from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from torchrec_checknrun.errors import CheckpointExists, StorageFailed
from torchrec_checknrun.store.behind import WriteBehind, write_behind
from torchrec_checknrun.store.deadlines import TIMEOUT_SECONDS, Patience, given_up
from torchrec_checknrun.store.driver import DriverStore
from torchrec_checknrun.store.file_copy import NO_COPY, CopyTo, file_copy
from torchrec_checknrun.store.local import LocalStore
from torchrec_checknrun.store.new_file import NewFile, require_all
from torchrec_checknrun.store.retry import masked, retrying, storage_failed
from torchrec_checknrun.store.urls import opened, parts_of, require_place

T = TypeVar("T")

_RETRIED = 0.9
"""Part of an operation's time limit for retries: the last error is reported within the limit."""
_PUTS = 3
"""Tries to put a small record that doesn't read back unchanged."""


class Folder:
    """A folder of checkpoints, or of one checkpoint's files.

    Args:
        url: a path or any fsspec URL (``s3://bucket/run``).
        timeout_seconds: the longest wait for a storage that doesn't answer.

    Attributes:
        url: opens the same folder again, in any process; may contain a password.
        name: the last part of the path.
        patience: bounds all waits for this storage.

    Raises:
        ValueError: the URL is empty, or lacks a slash, as ``pathlib.Path("s3://bucket")``.
        StorageFailed: the storage refused an operation or didn't answer; all methods raise it.
        CorruptCheckpoint: on a local disk, a symbolic link is in place of a file or a directory in
            the folder; all methods raise it.
    """

    def __init__(
        self, url: str | os.PathLike[str], timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        self.url = os.fspath(url)
        require_place(self.url)
        self.patience = Patience(timeout_seconds)
        try:  # some drivers call the store here
            self._fs, path = self.patience.call(lambda: opened(self.url), f"opening {self}")
        except OSError as error:
            raise storage_failed(error, f"opening {self}") from error
        while type(self._fs) is DirFileSystem and isinstance(self._fs.fs, LocalFileSystem):
            path, self._fs = self._fs._join(path), self._fs.fs  # a disk, so links must be refused
        self._path = path.rstrip("/")
        self.name = self._path.rsplit("/", 1)[-1]
        self._local = isinstance(self._fs, LocalFileSystem)
        self._below: tuple[str, ...] = ()
        protocols = self._fs.protocol
        self._s3 = "s3" in ((protocols,) if isinstance(protocols, str) else protocols)
        if self._local:
            # A relative path must mean the same folder after the process changes its directory.
            self.url = self._path or "/"
        elif self.url.startswith("dir::"):
            # fsspec joins the path that follows "dir::" twice: the path alone can have children.
            self.url = f"dir://{self._path}{self.url[3:]}"

    @classmethod
    def of(cls, root: str | os.PathLike[str] | Folder) -> Folder:
        """Open a path or URL; a folder stays as it is, with its time limit."""
        return root if isinstance(root, Folder) else cls(root)

    def __str__(self) -> str:
        return masked(self.url)

    def __truediv__(self, name: str) -> Folder:
        before, path, after = parts_of(self.url)
        folder = self._at(f"{self._path}/{name}", f"{before}{path}/{name}{after}")
        folder._below = (*self._below, name)
        return folder

    @property
    def parent(self) -> Folder:
        """Return the folder that contains this one."""
        before, path, after = parts_of(self.url)
        folder = self._at(self._path.rpartition("/")[0], before + path.rpartition("/")[0] + after)
        folder._below = self._below[:-1]
        return folder

    @property
    def place(self) -> str:
        """Return the text that all spellings of the folder have in common: on a disk the path
        without links.
        """
        if not self._local:
            return self.url.rstrip("/")
        return self.patience.call(lambda: os.path.realpath(self.url), f"opening {self}")

    @property
    def outermost(self) -> tuple[str, tuple[str, ...]]:
        """Return the URL of the root that this folder was reached from, and the names from there
        on.

        Another process opens the folder by these; links are followed up to the root, not below.
        """
        folder = self
        for _ in self._below:
            folder = folder.parent
        return folder.url, self._below

    def _at(self, path: str, url: str) -> Folder:
        """Return another folder of the same store."""
        folder = copy(self)
        folder._path, folder._below = path, ()
        folder.name = path.rsplit("/", 1)[-1]
        folder.url = (path or "/") if self._local else url
        return folder

    @property
    def _store(self) -> LocalStore | DriverStore:
        if not self._local:
            return DriverStore(self._fs, self._path, self._s3, len(self._below) > 1)
        length = sum(len(name) + 1 for name in self._below)
        return LocalStore(self._path[: len(self._path) - length], self._below)

    def _do(self, act: Callable[[], T], what: str) -> T:
        """Run an operation with retries, within the storage's time limit."""
        most = self.patience.seconds * _RETRIED
        return self.patience.call(lambda: retrying(act, what, most), masked(what))

    def is_link(self, name: str) -> bool:
        """Tell whether an entry is a symbolic link, which only local disks have."""
        return self._local and self._do(
            lambda: self._store.is_link(name), f"looking at {self}/{name}"
        )

    def is_special(self, name: str) -> bool:
        """Tell whether an entry is neither a file nor a directory: a link, a pipe, a device."""
        return self._local and self._do(
            lambda: self._store.is_special(name), f"looking at {self}/{name}"
        )

    def names(self) -> list[str]:
        """Return the names of the folder's entries, sorted; none where there is no folder."""
        return sorted(self._do(self._store.list, f"listing {self}"))

    def sizes(self, of: str | None = None) -> dict[str, int]:
        """Return the bytes of each file directly in the folder, by name, in one operation.

        Args:
            of: a folder within this one, which is looked into instead.
        """
        folder = self if of is None else self / of
        return self._do(folder._store.sizes, f"listing {folder}")

    def size(self, name: str) -> int | None:
        """Return the bytes of a file; None where there is none."""
        return self._do(lambda: self._store.size(name), f"looking at {self}/{name}")

    def modified(self, name: str) -> float | None:
        """Return the time a file was last written, by the store's clock, in seconds since 1970.

        Returns:
            None where the store keeps no such times, or the file doesn't exist.
        """
        return self._do(lambda: self._store.modified(name), f"looking at {self}/{name}")

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return a file's bytes, or a part of them, shorter where the file ends.

        Raises:
            FileNotFoundError: the file doesn't exist.
        """
        return self._see(lambda: self._store.read(name, offset, length), name)

    def read_into(self, memory: memoryview, name: str, offset: int) -> int:
        """Fill memory with a part of a file; on a local disk without another copy.

        Args:
            memory: bytes, writable; must not be used any more after a ``StorageUnreachable``.

        Returns:
            Number of bytes read: fewer than asked for where the file ends.

        Raises:
            FileNotFoundError: the file doesn't exist.
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
        """Run a read with ``_do``; a path through a file is a file that doesn't exist."""

        def see() -> T:
            try:
                return act()
            except NotADirectoryError as error:
                path = error.filename
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error

        return self._do(see, f"reading {self}/{name}")

    def create(self, durable: bool = False) -> None:
        """Make the folder; object stores have no folders to make.

        Args:
            durable: make its own entry in its parent durable, too.
        """
        self._do(self._store.create, f"making {self}")
        if durable:
            self.sync()

    @contextmanager
    def write(self, name: str) -> Iterator[NewFile]:
        """Open a new file; durable and of the right size once the block ends without an error.

        After an error nothing of the file is left.

        Raises:
            CheckpointExists: an entry of that name exists.
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
                f"{self}/{name} is there already, though this job has not written it: stop the "
                "process that writes to this directory, too, and save again"
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

    @contextmanager
    def write_behind(self, name: str, copy: CopyTo = NO_COPY) -> Iterator[WriteBehind]:
        """Open a new file that a thread writes; see ``write``.

        Args:
            copy: where the same bytes go as well, if there is room.
        """
        what = f"writing {self}/{name}"
        with (
            file_copy(copy) as also,
            self.write(name) as file,
            write_behind(file, self.patience, what, also) as behind,
        ):
            yield behind

    def _discard(self, file: NewFile, name: str) -> None:
        what = f"giving up {self}/{name}"
        with suppress(Exception):
            self.patience.call(file.drop, what)
        self.patience.call(lambda: self._store.delete(name), what)

    def put(self, name: str, data: bytes, new: bool = False) -> None:
        """Write a whole small file, durable and atomic for readers, and read it back.

        Args:
            new: refuse to replace a file. With a store that can't check this while it writes, the
                check comes before.

        Raises:
            FileExistsError: ``new`` is set and the file exists with other content.
            StorageFailed: the file doesn't read back unchanged.
        """
        what = f"writing {self}/{name}"

        def put() -> None:
            self._store.put(name, data, new)
            if new and given_up():
                self._store.delete(name)  # the caller was told that the put failed

        for _ in range(_PUTS):
            try:
                self._do(put, what)
            except FileExistsError:
                # An earlier try may have succeeded with its answer lost.
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
                raise FileExistsError(errno.EEXIST, "another writer put the file, too", name)
            if new and found is not None:
                self.delete(name)  # a part of our data, so no other writer's
        require_all(f"{self}/{name}", len(data), None if found is None else len(found), "it has")
        raise StorageFailed(
            errno.EIO, f"{what}: the file reads back changed: the storage is not to be relied on"
        )

    def _drop_part(self, name: str, data: bytes) -> None:
        """Delete the part that a failed put has left, visible to readers of a non-atomic store."""
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
        """Remove a file, or a link but not its target, if it exists."""
        self._do(lambda: self._store.delete(name), f"deleting {self}/{name}")

    def remove(self) -> None:
        """Remove the folder itself, if it exists and is empty."""
        with suppress(Exception):  # an empty folder does no harm
            self.patience.call(self._store.remove, f"deleting {self}")

    def sync(self) -> None:
        """Make the folder's own entry in its parent durable."""
        self._sync_with(self._store.sync_entry, f"making {self} durable")

    def _sync(self, what: str) -> None:
        self._sync_with(self._store.sync, what)

    def _sync_with(self, sync: Callable[[], None], what: str) -> None:
        """Sync without retries: after a failed fsync the result of another one means nothing."""
        if not self._local:
            return
        try:
            self.patience.call(sync, what)
        except OSError as error:
            raise storage_failed(error, what) from error
