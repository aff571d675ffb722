"""Write a new file and count: bytes handed over, reported and found must be the same number.

``write`` of a file or a driver may take fewer bytes than given, and tells only by its result. A
file that lacks bytes must not become part of a checkpoint.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from torchrec_checknrun.errors import StorageFailed
from torchrec_checknrun.store.retry import storage_failed

SLICE_BYTES = 64 << 20
"""The most bytes handed over at once, so that progress can be seen."""
SYNC_BYTES = 256 << 20
"""Bytes after which a local file is synced while it is written: the final sync is short then."""


class Sink(Protocol):
    """A target of bytes: a new file of a disk or of a store."""

    def write(self, data: memoryview) -> int | None:
        """Take bytes; return their number, None if unknown."""

    def commit(self) -> int | None:
        """Make all bytes durable and close; return their number, None if unknown."""

    def discard(self) -> None:
        """Close without making anything more visible."""


class NewFile:
    """A writer that hands all bytes to a sink, and counts.

    Args:
        sink: empty.
        name: the file's name in errors.
    """

    def __init__(self, sink: Sink, name: str) -> None:
        self._sink = sink
        self._name = name
        self._position = 0
        self._busy = threading.Lock()
        self._dropped = self._closed = False

    def tell(self) -> int:
        """Return the number of bytes handed over."""
        return self._position

    def write(self, data: Any) -> int:
        """Hand over all of ``data``; return its size in bytes.

        Raises:
            StorageFailed: the sink took no bytes, or claims more than were given.
        """
        plain = memoryview(data)
        if not plain.nbytes:
            return 0
        view = plain.cast("B")
        with self._busy:
            try:
                done = 0
                while done < len(view):
                    done += self._hand_over(view[done : done + SLICE_BYTES])
            finally:
                if self._dropped:
                    self._close()
        return len(view)

    def _hand_over(self, piece: memoryview) -> int:
        self._require_open()
        count = self._of_the_sink(lambda: self._sink.write(piece))
        if count is None:
            count = len(piece)  # unknown: the size of the finished file decides
        if not 0 < count <= len(piece):
            raise StorageFailed(
                errno.EIO,
                f"{self._name}: {len(piece)} bytes were handed over, but the storage reports "
                f"{count}: its driver is faulty, use another version of it",
            )
        self._position += count
        return count

    def commit(self) -> None:
        """Make the file durable and close it.

        Raises:
            StorageFailed: the sink reports another number of bytes than were handed over.
        """
        with self._busy:
            self._require_open()
            try:
                reported = self._of_the_sink(self._sink.commit)
                self._closed = True
            finally:
                if self._dropped:
                    self._close()
        if reported is not None:
            require_all(self._name, self._position, reported, "it reports")

    def _of_the_sink(self, act: Callable[[], int | None]) -> int | None:
        """Run an operation of the sink; make a storage's failure of any error."""
        try:
            return act()
        except OSError:
            raise
        except Exception as error:  # drivers have their own
            raise storage_failed(error, f"writing {self._name}") from error

    def _require_open(self) -> None:
        if self._dropped or self._closed:
            raise StorageFailed(errno.EIO, f"{self._name} was given up while it was written")

    def drop(self) -> None:
        """Close the file without waiting.

        A thread that is writing closes the file itself: otherwise its next bytes could go to
        another file that has got the same descriptor.
        """
        self._dropped = True
        if self._busy.acquire(blocking=False):
            try:
                self._close()
            finally:
                self._busy.release()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            with suppress(Exception):  # the file is not used any more
                self._sink.discard()


def require_all(name: str, wanted: int, found: int | None, where: str) -> None:
    """Refuse a file with another size than the bytes handed over.

    Raises:
        StorageFailed: the numbers differ.
    """
    if found != wanted:
        raise StorageFailed(
            errno.EIO,
            f"{name}: {wanted} bytes were handed over, but {where} "
            f"{'none' if found is None else found}: the storage has not kept what it was given",
        )


class DescriptorSink:
    """A new file of a local disk, by its descriptor, without any buffer."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unsynced = 0

    def write(self, data: memoryview) -> int:
        count = os.write(self._descriptor, data)
        self._unsynced += count
        if self._unsynced >= SYNC_BYTES:
            os.fdatasync(self._descriptor)
            self._unsynced = 0
        return count

    def commit(self) -> int:
        os.fsync(self._descriptor)
        size = os.fstat(self._descriptor).st_size
        self.discard()
        return size

    def discard(self) -> None:
        # Closed once, even if that fails: afterwards the number may be another file's.
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class DriverSink:
    """A new file of a fsspec store."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: memoryview) -> int | None:
        count = self._file.write(data)
        return None if count is None else int(count)

    def commit(self) -> int | None:
        reported: int | None = None
        with suppress(AttributeError, NotImplementedError, ValueError, OSError):
            reported = self._file.tell()  # many drivers can't tell
        self._file.close()
        return reported

    def discard(self) -> None:
        with suppress(Exception):
            self._file.discard()
        self._file.forced = True  # keeps close() from sending the buffer
        self._file.close()
