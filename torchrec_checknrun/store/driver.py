"""Keep files in one directory of any fsspec store but the local disk.

An object store has no rename and needs none: an object appears whole or not at all.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

from torchrec_checknrun.errors import StorageFailed
from torchrec_checknrun.store.new_file import DriverSink, NewFile
from torchrec_checknrun.store.retry import is_transient
from torchrec_checknrun.store.s3 import S3Upload


class DriverStore:
    """A directory of a fsspec store.

    Args:
        fs: a fsspec file system.
        path: the directory's path, in the file system's notation.
        s3: whether the file system is S3's.
        may_be_file: whether a file in the directory's place counts as no directory.

    Raises:
        OSError: from the driver; all methods raise it.
    """

    def __init__(self, fs: Any, path: str, s3: bool, may_be_file: bool) -> None:
        self._fs = fs
        self.path = path
        self._s3 = s3
        self._may_be_file = may_be_file

    def list(self) -> list[str]:
        """Return the names of all entries; none where there is no directory."""
        return list(self._entries(detail=False))

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file, by name."""
        found = {}
        for name, info in self._entries(detail=True).items():
            if info["type"] == "file" and not info.get("islink"):
                size = info["size"]  # None in the listings of web servers
                size = self.size(name) if size is None else int(size)
                if size is not None:
                    found[name] = size
        return found

    def is_link(self, name: str) -> bool:
        """Return False: only disks have links."""
        return False

    def is_special(self, name: str) -> bool:
        """Return False: only disks have pipes, sockets and devices."""
        return False

    def size(self, name: str) -> int | None:
        """Return the bytes of a file; None where there is none."""
        self._fs.invalidate_cache()
        try:
            info = cast("Mapping[str, Any]", self._fs.info(f"{self.path}/{name}"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        if info["type"] != "file":
            return None
        if info["size"] is None:  # of a web server that packs what it sends, for example
            raise StorageFailed(
                errno.EIO,
                f"{self.path}/{name}: the store doesn't tell its size, by which a file is known "
                "to be whole: have it send files as they are",
            )
        return int(info["size"])

    def modified(self, name: str) -> float | None:
        """Return the time a file was last written; None where file or time is unknown."""
        self._fs.invalidate_cache()
        with suppress(NotImplementedError, FileNotFoundError):
            found = self._fs.modified(f"{self.path}/{name}")
            return None if found is None else float(found.timestamp())
        return None

    def read(self, name: str, offset: int, length: int | None) -> bytes:
        """Return a part of a file's bytes, shorter where the file ends."""
        path = f"{self.path}/{name}"
        if length == 0 or (offset and length is None):
            # Stores have no empty ranges, and some drivers know none without an end.
            size = self.size(name)
            if size is None:
                raise FileNotFoundError(errno.ENOENT, "there is no such file", path)
            length = max(size - offset, 0) if length is None else 0
            if not length:
                return b""
        end = None if length is None else offset + length
        try:
            # HDFS' driver opens a file as a stream from its beginning, and then can't go there.
            data = cast(bytes, self._fs.cat_file(path, start=offset or None, end=end))
        except FileNotFoundError:
            raise
        except Exception as error:
            if length is None or is_transient(error) or not self._ends_by(name, offset):
                raise
            return b""  # stores refuse a range that begins at or after the end, each in its way
        # A web server may know no ranges, and sends the whole file.
        return data if length is None or len(data) <= length else data[offset:end]

    def _ends_by(self, name: str, offset: int) -> bool:
        with suppress(Exception):  # the error of the read counts
            size = self.size(name)
            return size is not None and size <= offset
        return False

    def create(self) -> None:
        """Make the directory; object stores have no directories to make."""
        if not self._s3:  # S3 would make a bucket, which is its owner's decision
            self._fs.makedirs(self.path, exist_ok=True)

    def new_file(self, name: str, again: bool) -> NewFile:
        """Open a new file."""
        path = f"{self.path}/{name}"
        sink = S3Upload(self._fs, path) if self._s3 else DriverSink(self._fs.open(path, "wb"))
        return NewFile(sink, path)

    def put(self, name: str, data: bytes, new: bool) -> None:
        """Write a whole object.

        Raises:
            FileExistsError: ``new`` is set and the object exists.
        """
        path = f"{self.path}/{name}"
        try:
            self._put(path, data, new)
        except FileNotFoundError as error:  # Google's driver names an address alone
            raise StorageFailed(
                errno.ENOENT,
                f"writing {path}: there is no such bucket or folder: check its name, or create it "
                f"({error})",
            ) from error

    def _put(self, path: str, data: bytes, new: bool) -> None:
        if not new:
            self._fs.pipe_file(path, data)
            return
        self._fs.invalidate_cache()
        # Not by ``exists``: most drivers' say no of any error, a timeout too.
        with suppress(FileNotFoundError, NotADirectoryError):
            self._fs.info(path)
            raise FileExistsError(errno.EEXIST, "there is such a file", path)
        try:
            self._fs.pipe_file(path, data, mode="create")
        except (OSError, NotImplementedError, TypeError) as error:
            if isinstance(error, FileExistsError) or code(error) in ("PreconditionFailed", "412"):
                raise FileExistsError(errno.EEXIST, "there is such a file", path) from error
            if getattr(error, "errno", errno.ENOSYS) != errno.ENOSYS:
                raise
            self._fs.pipe_file(path, data)  # the store can't write conditionally

    def delete(self, name: str) -> None:
        """Remove a file, if it exists."""
        with suppress(FileNotFoundError, NotADirectoryError):
            self._fs.rm_file(f"{self.path}/{name}")

    def remove(self) -> None:
        """Remove the directory itself, which must be empty."""
        if self._s3:  # some servers list a directory until it is deleted as an object
            bucket, key, _ = self._fs.split_path(self.path)
            self._fs.call_s3("delete_object", Bucket=bucket, Key=f"{key}/")
        elif "/" in self.path:  # Azure's driver would delete a container with all that it holds
            self._fs.rmdir(self.path)

    def sync(self) -> None:
        """Do nothing: a store's accepted writes are durable."""

    def sync_entry(self) -> None:
        """Do nothing."""

    def _entries(self, detail: bool) -> dict[str, dict[str, Any]]:
        self._fs.invalidate_cache()
        try:
            entries = list(self._fs.ls(self.path, detail=detail))
        except FileNotFoundError as error:
            if code(error) == "NoSuchBucket":  # folders are made when needed, buckets are not
                raise StorageFailed(
                    errno.ENOENT,
                    f"listing {self._fs.unstrip_protocol(self.path)}: no such bucket: check its "
                    "name, or create the bucket",
                ) from error
            return {}
        except NotADirectoryError:
            if self._may_be_file:
                return {}
            raise
        found = {}
        for entry in entries:
            path = str(entry["name"] if detail else entry).rstrip("/")
            if path != self.path:  # some stores list the folder itself among its content
                found[path.rsplit("/", 1)[-1]] = entry if detail else {}
        return found


def code(error: BaseException) -> str:
    """Return S3's code of an error; empty for other errors."""
    response = getattr(error.__cause__, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, Mapping) else ""
