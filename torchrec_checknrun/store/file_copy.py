"""Copy what is written to the storage into memory of this machine, as far as there is room.

The copy is an extra: whatever happens to it, the file itself is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple


class CopyTo(NamedTuple):
    """The destination of a copy.

    Attributes:
        path: of the copy; None: none is made.
        most: bytes that it may take.
    """

    path: str | None
    most: int = 0


NO_COPY = CopyTo(None)


class FileCopy:
    """A copy of a new file's bytes; none is left of one that is not whole."""

    def __init__(self, to: CopyTo) -> None:
        self._path, self._left = to
        self._file: int | None = None
        if self._path is None:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with suppress(OSError):
            self._file = os.open(self._path, flags, 0o600)

    def write(self, piece: bytes | memoryview) -> None:
        """Append bytes; give the copy up where that fails."""
        if self._file is None:
            return
        left = memoryview(piece).cast("B")
        self._left -= len(left)
        try:
            if self._left < 0:
                raise OSError("too large")
            while len(left):
                left = left[os.write(self._file, left) :]
        except OSError:
            self.close(whole=False)

    def close(self, whole: bool) -> None:
        """End the copy.

        Args:
            whole: whether all bytes have come.
        """
        file, self._file = self._file, None
        if file is None or self._path is None:
            return
        os.close(file)
        if not whole:
            with suppress(OSError):
                os.unlink(self._path)


@contextmanager
def file_copy(to: CopyTo) -> Iterator[FileCopy]:
    """Make a copy in a block, which an error leaves without one."""
    copy = FileCopy(to)
    try:
        yield copy
    except BaseException:
        copy.close(whole=False)
        raise
    copy.close(whole=True)
