"""Keep files in one directory of a local disk, reached through descriptors of directories.

Anyone who may write to a root could replace a directory or a file by a link at any moment. So no
path within a root is ever looked up as a whole: each directory is opened in the one above, without
following links, and each file is made, read, renamed or deleted in the open directory. The root
itself and the directories above may be links: these are the user's.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torchrec_checknrun.errors import CorruptCheckpoint, StorageFailed
from torchrec_checknrun.store.deadlines import given_up
from torchrec_checknrun.store.new_file import DescriptorSink, NewFile

_NO_LINKS = frozenset(
    {
        *(errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK),
        errno.EIO,  # of buckets that rclone has mounted
    }
)
_DIRECTORY = os.O_DIRECTORY | os.O_CLOEXEC
_WALK = _DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_AT_ONCE = 1 << 30
_REMEDY = (
    "checkpoints are plain files in directories of their root; remove the link, or replace it by "
    "a copy of its target"
)


class LocalStore:
    """A directory of a local disk.

    Args:
        root: the first part of the directory's path, in which links are followed.
        below: names of the directories below ``root``, in which links are refused.

    Raises:
        CorruptCheckpoint: a symbolic link below ``root``, or a file that is no plain file; all
            methods raise it.
        OSError: from the system; all methods raise it.
    """

    def __init__(self, root: str, below: tuple[str, ...] = ()) -> None:
        self._root = root or "/"
        self._below = below
        self.path = "/".join((root, *below)) or "/"

    def list(self) -> list[str]:
        """Return the names of all entries; none where there is no directory."""
        try:
            with self._listed() as descriptor:
                return os.listdir(descriptor)
        except OSError as error:
            if self._is_absent(error):
                return []
            raise

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each plain file, by name."""
        found: dict[str, int] = {}
        try:
            with self._listed() as descriptor, os.scandir(descriptor) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):  # deleted meanwhile
                        if entry.is_file(follow_symlinks=False):
                            found[entry.name] = entry.stat(follow_symlinks=False).st_size
        except OSError as error:
            if self._is_absent(error):
                return {}
            raise
        return found

    def is_link(self, name: str) -> bool:
        """Tell whether an entry is a symbolic link."""
        status = self._status(name)
        return status is not None and stat.S_ISLNK(status.st_mode)

    def is_special(self, name: str) -> bool:
        """Tell whether an entry is neither a plain file nor a directory."""
        status = self._status(name)
        return status is not None and not (
            stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
        )

    def size(self, name: str) -> int | None:
        """Return the bytes of a plain file; None where there is none."""
        status = self._status(name)
        return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None

    def modified(self, name: str) -> float | None:
        """Return the time an entry was last written; None where there is none."""
        status = self._status(name)
        return None if status is None else status.st_mtime

    def read(self, name: str, offset: int, length: int | None) -> bytes:
        """Return a part of a file's bytes, shorter where the file ends."""
        with self._opened(name) as descriptor:
            end = os.fstat(descriptor).st_size
            if length is not None:
                end = min(end, offset + length)
            pieces: list[bytes] = []
            while offset < end and (
                piece := os.pread(descriptor, min(end - offset, _AT_ONCE), offset)
            ):
                pieces.append(piece)
                offset += len(piece)
        return b"".join(pieces)

    def read_into(self, memory: memoryview, name: str, offset: int) -> int:
        """Fill memory with a part of a file; return the bytes read, fewer at the file's end."""
        done = 0
        with self._opened(name) as descriptor:
            while done < len(memory):
                count = os.preadv(descriptor, [memory[done:]], offset + done)
                if not count:
                    break
                done += count
        return done

    def create(self) -> None:
        """Make the directory and its parents, each new one durable in the directory above it."""
        _require_whole(self._root)
        _make(self._root)
        for number, name in enumerate(self._below):
            with self._directory(self._below[:number]) as parent:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=parent)
                os.close(self._enter(parent, name))  # refuses a link or a file

    def new_file(self, name: str, again: bool) -> NewFile:
        """Create and open a file.

        Args:
            again: whether an earlier try with an unknown outcome may have created the file.

        Raises:
            FileExistsError: an entry of that name, maybe a link, exists.
        """
        with self._directory() as directory:
            if again:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory)
            descriptor = os.open(name, _NEW, 0o666, dir_fd=directory)
            if given_up():
                os.close(descriptor)
                os.unlink(name, dir_fd=directory)
                raise TimeoutError(f"{self.path}/{name} was given up while it was made")
        return NewFile(DescriptorSink(descriptor), f"{self.path}/{name}")

    def put(self, name: str, data: bytes, new: bool) -> None:
        """Write a whole file durable and atomic for readers.

        Raises:
            FileExistsError: ``new`` is set and the file exists.
        """
        temporary = f".{name}.{secrets.token_hex(4)}"
        with self._directory() as directory:
            descriptor = os.open(temporary, _NEW, 0o666, dir_fd=directory)
            file = NewFile(DescriptorSink(descriptor), f"{self.path}/{name}")
            try:
                try:
                    file.write(data)
                    file.commit()
                finally:
                    file.drop()
                if given_up():
                    raise TimeoutError(f"{self.path}/{name} was given up while it was written")
                if not (new and _link(temporary, name, directory)):
                    os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
            finally:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=directory)
        self.sync()

    def delete(self, name: str) -> None:
        """Remove a file or a link, never the link's target, if it exists."""
        with suppress(FileNotFoundError, NotADirectoryError), self._directory() as directory:
            os.unlink(name, dir_fd=directory)

    def remove(self) -> None:
        """Remove the directory itself, which must be empty."""
        if not self._below:
            os.rmdir(self._root)
            return
        with self._directory(self._below[:-1]) as parent:
            os.rmdir(self._below[-1], dir_fd=parent)

    def sync(self) -> None:
        """Make the directory's entries durable."""
        with self._listed() as descriptor:
            os.fsync(descriptor)

    def sync_entry(self) -> None:
        """Make the directory's own entry in its parent durable."""
        if self._below:
            LocalStore(self._root, self._below[:-1]).sync()
        else:
            LocalStore(os.path.dirname(self._root)).sync()

    @contextmanager
    def _directory(self, below: tuple[str, ...] | None = None) -> Iterator[int]:
        """Open a descriptor for work in the directory, or in the one named by ``below``."""
        descriptor = os.open(self._root, _WALK)
        try:
            for name in self._below if below is None else below:
                inner = self._enter(descriptor, name)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _listed(self) -> Iterator[int]:
        """Open a descriptor that can be listed and synced."""
        with self._directory() as directory:
            descriptor = os.open(".", _DIRECTORY | os.O_RDONLY, dir_fd=directory)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        """Open a plain file for reading, without waiting for the writer of a pipe."""
        with self._directory() as directory:
            try:
                descriptor = os.open(name, _READ, dir_fd=directory)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENXIO):
                    raise self._no_file(name) from error
                raise
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise self._no_file(name)
            yield descriptor
        finally:
            os.close(descriptor)

    def _enter(self, parent: int, name: str) -> int:
        """Open a directory in an open one, refusing links."""
        try:
            return os.open(name, _WALK | os.O_NOFOLLOW, dir_fd=parent)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                status = os.stat(name, dir_fd=parent, follow_symlinks=False)
                if stat.S_ISLNK(status.st_mode):
                    at = self._below.index(name)
                    path = "/".join((self._root, *self._below[: at + 1]))
                    raise CorruptCheckpoint(f"{path} is a symbolic link: {_REMEDY}") from error
            raise

    def _status(self, name: str) -> os.stat_result | None:
        try:
            with self._directory() as directory:
                return os.stat(name, dir_fd=directory, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _no_file(self, name: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"{self.path}/{name} is a symbolic link, or no file: {_REMEDY}")

    def _is_absent(self, error: OSError) -> bool:
        """Tell whether an error means that the directory doesn't exist.

        A file in the directory's place counts as none; a file in place of a *root's parent* is an
        error.

        Raises:
            StorageFailed: a link on the path has no target: the directory's state is unknown.
        """
        if isinstance(error, FileNotFoundError):
            _require_whole(self._root)
            return True
        if not isinstance(error, NotADirectoryError):
            return False
        return len(self._below) > 1 or os.path.lexists(self.path)


def _require_whole(path: str) -> None:
    """Refuse a path with a link that has no target: probably a disk that is not mounted yet.

    Raises:
        StorageFailed: names the link and its target.
    """
    while path and not os.path.lexists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    if os.path.islink(path) and not os.path.exists(path):
        raise StorageFailed(
            errno.ENOENT,
            f"{path} is a link to {os.readlink(path)}, which isn't there: is it mounted? If the "
            "link is no longer wanted, remove it",
        )


def _make(path: str) -> None:
    """Make a directory and its parents, each durable in the directory above it."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    if parent != path:
        _make(parent)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(path).st_mode):  # or says why nobody can look
            raise
        return
    try:
        LocalStore(parent).sync()
    except OSError:
        with suppress(OSError):
            os.rmdir(path)  # another try would find it, and count it as durable
        raise


def _link(temporary: str, name: str, directory: int) -> bool:
    """Give a file its name unless the name is taken; return False on systems without links.

    Raises:
        FileExistsError: the name is taken.
    """
    try:
        os.link(temporary, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with suppress(FileNotFoundError):
            os.stat(name, dir_fd=directory, follow_symlinks=False)
            raise FileExistsError(errno.EEXIST, "there is such a file", name) from error
        return False
    return True
