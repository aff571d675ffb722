"""A file while it is being written: bytes handed over, reported and found must be the same number.

``write`` of a file or a driver may take fewer bytes than it was given, and says so only in what it
returns. A file that lacks some must not become part of a checkpoint.
"""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from typing import Any, Protocol

from torchrec_checknrun.errors import StorageFailed

SLICE_BYTES = 64 << 20
"""At most so many bytes are handed over at once, so that progress can be seen."""
SYNC_BYTES = 256 << 20
"""After so many a local file is made durable as far as it is written: the end needn't wait long."""


class Sink(Protocol):
    """Where bytes go."""

    def write(self, data: memoryview) -> int | None:
        """Take bytes; return how many, None if that is not known."""

    def commit(self) -> int | None:
        """Make all of it durable and close; return how many bytes it has taken, if known."""

    def discard(self) -> None:
        """Close without making anything visible that isn't yet."""


class NewFile:
    """Hands bytes to a sink, all of them, and counts.

    Args:
        sink: empty.
        name: for errors.
    """

    def __init__(self, sink: Sink, name: str) -> None:
        self._sink = sink
        self._name = name
        self._position = 0
        self._busy = threading.Lock()
        self._dropped = self._closed = False

    def tell(self) -> int:
        """Return how many bytes were handed over."""
        return self._position

    def write(self, data: Any) -> int:
        """Hand over all of ``data``; return its size in bytes.

        Raises:
            StorageFailed: the sink took none, or says that it took more than there was.
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
        count = self._sink.write(piece)
        if count is None:
            count = len(piece)  # not known: what is found in the end decides
        if not 0 < count <= len(piece):
            raise StorageFailed(
                errno.EIO,
                f"{self._name}: {len(piece)} bytes were to be written, and the storage says that "
                f"it has taken {count}: its driver is not to be relied on",
            )
        self._position += count
        return count

    def commit(self) -> None:
        """Make the file durable and close it.

        Raises:
            StorageFailed: it reports another number of bytes than were handed over.
        """
        with self._busy:
            self._require_open()
            try:
                reported = self._sink.commit()
                self._closed = True
            finally:
                if self._dropped:
                    self._close()
        if reported is not None:
            require_all(self._name, self._position, reported, "it reports")

    def _require_open(self) -> None:
        if self._dropped or self._closed:
            raise StorageFailed(errno.EIO, f"{self._name} was given up while it was written")

    def drop(self) -> None:
        """Close the file without waiting. If a thread is writing to it, that one closes it: else
        its next bytes could go to whatever has got the same descriptor.
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
            with suppress(Exception):  # nothing of it is used
                self._sink.discard()


def require_all(name: str, wanted: int, found: int | None, where: str) -> None:
    """Refuse a file of another size than what was written to it.

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
        # Closed once, whatever comes of it: afterwards the number may be another file's.
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
            reported = self._file.tell()  # many can't say
        self._file.close()
        return reported

    def discard(self) -> None:
        with suppress(Exception):
            self._file.discard()
        self._file.forced = True  # what is buffered is not to be sent when it is closed
        self._file.close()
