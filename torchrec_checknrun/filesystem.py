"""The few file operations a checkpoint needs, on a folder or any fsspec URL, and made durable.

On a local disk "written" means fsync of the file and of its folder. An object store has no rename
and needs none: an object appears whole or not at all. What fails for a moment is tried again; what
fails for good is a ``StorageFailed`` that names the path and the remedy.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from typing import IO, Any, TypeVar, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from torchrec_checknrun.errors import CorruptCheckpoint, StorageFailed
from torchrec_checknrun.retries import masked, retrying, storage_failed
from torchrec_checknrun.s3_upload import S3Upload

T = TypeVar("T")

_NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK})


class Folder:
    """A folder of checkpoints (or of one checkpoint's files).

    Args:
        url: a path or any fsspec URL (``s3://bucket/run``).

    Raises:
        StorageFailed: the storage refused an operation, or didn't answer for a minute; all methods
            do.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.url = os.fspath(url)
        """Opens the same folder again, in any process; may hold a password."""
        try:
            self._fs, path = fsspec.core.url_to_fs(self.url)
        except OSError as error:  # some stores are asked at once
            raise storage_failed(error, f"opening {self}") from error
        self._path = path.rstrip("/")
        self._local = isinstance(self._fs, LocalFileSystem)
        self._depth = 0
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
        folder._depth = self._depth + 1
        return folder

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._path.rsplit("/", 1)[-1]

    @property
    def parent(self) -> Folder:
        """The folder that this one is in."""
        before, path, after = _parts(self.url)
        return self._at(self._path.rpartition("/")[0], before + path.rpartition("/")[0] + after)

    def _at(self, path: str, url: str) -> Folder:
        """Another folder of the same store."""
        folder = copy(self)
        folder._path, folder._depth = path, 0
        folder.url = (path or "/") if self._local else url
        return folder

    def is_link(self, name: str) -> bool:
        """Whether something in the folder is a symbolic link, which only local disks have."""
        return self._local and os.path.islink(f"{self._path}/{name}")

    def _refuse_links(self, name: str | None = None) -> None:
        """Nothing is read or written through links out of the root, nor waited for in pipes.

        Raises:
            CorruptCheckpoint: the folder, if it is within a root, is a symbolic link, or the file
                is anything but a plain one.
        """
        if not self._local:
            return
        if self._depth and os.path.islink(self._path):
            raise CorruptCheckpoint(
                f"{self} is a symbolic link: checkpoints are plain files in directories of their "
                "root; remove it, or copy there what it points to"
            )
        with suppress(FileNotFoundError):
            if name is not None and not stat.S_ISREG(self._mode(name)):
                raise CorruptCheckpoint(
                    f"{self}/{name} is a symbolic link, or no file: checkpoints are plain files in "
                    "directories of their root; remove it, or copy there what it points to"
                )

    def _mode(self, name: str) -> int:
        what = f"looking at {self}/{name}"
        return _retrying_to_see(lambda: os.lstat(f"{self._path}/{name}").st_mode, what)

    def names(self) -> list[str]:
        """What is directly in the folder, sorted; nothing where there is no folder."""
        return sorted(self._list(detail=False))

    def sizes(self) -> dict[str, int]:
        """Bytes of all files that are directly in the folder, with one look."""
        found = self._list(detail=True)
        return {
            name: int(info["size"])
            for name, info in found.items()
            if info["type"] == "file" and not info.get("islink")
        }

    def _list(self, detail: bool) -> dict[str, dict[str, Any]]:
        self._refuse_links()

        def look() -> list[Any]:
            self._fs.invalidate_cache()
            return list(self._fs.ls(self._path, detail=detail))

        try:
            entries = retrying(look, f"listing {self}")
        except FileNotFoundError as error:
            if _code(error) == "NoSuchBucket":  # a folder is made when it is needed, a bucket isn't
                raise StorageFailed(
                    errno.ENOENT, f"listing {self}: no such bucket: check its name, or make it"
                ) from error
            return {}
        except OSError as error:
            if error.errno == errno.ENOTDIR and self._depth > 1:
                return {}  # a file lies where a checkpoint would; as a root it is a mistake
            raise
        found = {}
        for entry in entries:
            path = str(entry["name"] if detail else entry).rstrip("/")
            if path != self._path:  # some stores list the folder itself among its content
                found[path.rsplit("/", 1)[-1]] = entry if detail else {}
        return found

    def size(self, name: str) -> int | None:
        """Bytes of a file, or None where there is none."""

        def look() -> dict[str, Any]:
            self._fs.invalidate_cache()
            return cast("dict[str, Any]", self._fs.info(f"{self._path}/{name}"))

        try:
            info = _retrying_to_see(look, f"looking at {self}/{name}")
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def modified(self, name: str) -> float | None:
        """Return when a file was last written, by the store's clock, in seconds since 1970.

        Returns:
            None where the store keeps no such times, or there is no such file.
        """

        def look() -> float | None:
            self._fs.invalidate_cache()
            with suppress(NotImplementedError, FileNotFoundError):
                return float(self._fs.modified(f"{self._path}/{name}").timestamp())
            return None

        return retrying(look, f"looking at {self}/{name}")

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """A file's bytes, or a part of them (shorter where the file ends).

        Raises:
            FileNotFoundError: there is no such file.
        """
        self._refuse_links(name)
        end = None if length is None else offset + length
        path = f"{self._path}/{name}"

        def get() -> bytes:
            try:
                return cast(bytes, self._fs.cat_file(path, start=offset, end=end))
            except OSError as error:
                if _code(error) in ("InvalidRange", "416"):
                    return b""  # it begins where the object ends
                raise

        if length == 0 and self._s3:  # no range of S3's
            if self.size(name) is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return b""
        return _retrying_to_see(get, f"reading {self}/{name}")

    def read_into(self, memory: memoryview, name: str, offset: int) -> int:
        """Fills memory with a part of a file, which no other copy is made of on a local disk.

        Args:
            memory: bytes, writable.

        Returns:
            How many bytes there were: fewer than asked for where the file ends.

        Raises:
            FileNotFoundError: there is no such file.
        """
        if not len(memory):
            return 0
        self._refuse_links(name)
        if not self._local:
            data = self.read(name, offset, len(memory))
            memory[: len(data)] = data
            return len(data)

        def fill() -> int:
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

        return _retrying_to_see(fill, f"reading {self}/{name}")

    def create(self) -> None:
        """Make the folder and its parents, durably (object stores have none to make)."""
        if self._s3:  # there it would make a bucket, which is for its owner to do
            return
        made = _missing(self._path) if self._local else []
        retrying(lambda: self._fs.makedirs(self._path, exist_ok=True), f"making {self}")
        for path in made:
            self._sync_folder(os.path.dirname(path))

    @contextmanager
    def write(self, name: str) -> Iterator[IO[bytes]]:
        """Opens a new file; when the block ends without an error, it is durable.

        After an error nothing of it is left.
        """
        self._refuse_links()
        path, what = f"{self._path}/{name}", f"writing {self}/{name}"
        file: Any = retrying(lambda: self._open_new(path), what)
        try:
            yield file
            if self._local:
                file.flush()
                os.fsync(file.fileno())
            if isinstance(file, S3Upload):
                file.commit()
            else:
                file.close()
        except BaseException as error:
            with suppress(Exception):  # the first error counts
                self._discard(file, path)
            if isinstance(error, OSError):
                raise storage_failed(error, what) from error
            raise
        self._sync_folder(self._path)

    def _open_new(self, path: str) -> Any:
        if self._local:
            return open(path, "wb")
        return S3Upload(self._fs, path) if self._s3 else self._fs.open(path, "wb")

    def _discard(self, file: Any, path: str) -> None:
        if isinstance(file, S3Upload):
            file.discard()
            return
        if not self._local:
            with suppress(Exception):
                file.discard()
            file.forced = True  # what is buffered is not to be sent when it is closed
        with suppress(Exception):
            file.close()
        if self._local:
            os.unlink(path)
        elif self._fs.exists(path):
            self._fs.rm_file(path)

    def put(self, name: str, data: bytes, new: bool = False) -> None:
        """Writes a whole small file so that readers see all of it or none of it, and durably.

        Args:
            new: only if there is no such file yet. A store that can't check that while it writes
                is asked before.

        Raises:
            FileExistsError: there is one, with other content.
        """
        self._refuse_links()
        put = self._put_locally if self._local else self._put_object
        try:
            retrying(lambda: put(name, data, new), f"writing {self}/{name}")
        except FileExistsError:
            # Perhaps by an earlier try, of which the answer was lost.
            if self.read(name) != data:
                raise
            self._sync_folder(self._path)

    def _put_object(self, name: str, data: bytes, new: bool) -> None:
        path = f"{self._path}/{name}"
        if not new:
            self._fs.pipe_file(path, data)
            return
        self._fs.invalidate_cache()
        if self._fs.exists(path):
            raise FileExistsError(errno.EEXIST, "there is such a file", path)
        try:
            self._fs.pipe_file(path, data, mode="create")
        except (OSError, NotImplementedError, TypeError) as error:
            if isinstance(error, FileExistsError) or _code(error) in ("PreconditionFailed", "412"):
                raise FileExistsError(errno.EEXIST, "there is such a file", path) from error
            if getattr(error, "errno", errno.ENOSYS) != errno.ENOSYS:
                raise
            self._fs.pipe_file(path, data)  # the store knows no such condition

    def _put_locally(self, name: str, data: bytes, new: bool) -> None:
        target = f"{self._path}/{name}"
        temporary = f"{self._path}/.{name}.{secrets.token_hex(4)}"
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if not (new and _link(temporary, target)):
                os.rename(temporary, target)
        finally:
            with suppress(OSError):
                os.unlink(temporary)
        self._sync_folder(self._path)

    def delete(self, name: str) -> None:
        """Removes a file, if it is there."""
        self._refuse_links()

        def remove() -> None:
            with suppress(FileNotFoundError, NotADirectoryError):
                self._fs.rm_file(f"{self._path}/{name}")

        retrying(remove, f"deleting {self}/{name}")

    def remove(self) -> None:
        """Removes the folder itself, if it is there and empty."""
        with suppress(Exception):  # an empty folder does no harm
            if self._s3:  # some servers go on listing it, unless it is deleted as an object
                bucket, key, _ = self._fs.split_path(self._path)
                self._fs.call_s3("delete_object", Bucket=bucket, Key=f"{key}/")
            else:
                self._fs.rmdir(self._path)

    def sync(self) -> None:
        """Makes the folder's own entry in its parent durable."""
        self._sync_folder(self._path.rsplit("/", 1)[0] or "/")

    def _sync_folder(self, path: str) -> None:
        if not self._local:
            return
        what = f"making what is in {path} durable"
        descriptor = retrying(lambda: os.open(path, os.O_RDONLY), what)
        try:
            os.fsync(descriptor)
        except OSError as error:
            raise storage_failed(error, what) from error
        finally:
            os.close(descriptor)


def _missing(path: str) -> list[str]:
    """List a folder and those above it, as far as they aren't there, the highest first."""
    missing: list[str] = []
    while path and not os.path.lexists(path):
        missing.insert(0, path)
        path = os.path.dirname(path)
    return missing


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


def _retrying_to_see(act: Callable[[], T], what: str) -> T:
    """``retrying``; within what is no folder, there is no file."""

    def see() -> T:
        try:
            return act()
        except NotADirectoryError as error:
            path = error.filename
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error

    return retrying(see, what)


def _link(temporary: str, target: str) -> bool:
    """Gives a file its name unless that is taken; False where the file system has no links."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "there is such a file", target) from error
        return False
    return True


def _code(error: BaseException) -> str:
    """What S3 has called an error; empty if it wasn't S3."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))
