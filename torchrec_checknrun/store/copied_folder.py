"""Read files from copies in this machine's memory where there are any, else from the storage.

A copy is as good as its file: a reader verifies the checksums of either. One that is damaged is
found so, and the reader has the storage itself, ``storage``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchrec_checknrun.store.folder import Folder


@dataclass
class Taken:
    """The bytes that were read from copies, by any thread."""

    bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, count: int) -> None:
        """Count bytes."""
        with self._lock:
            self.bytes += count


class CopiedFolder(Folder):
    """A folder whose ``read_into`` looks into copies first; all else is the storage's.

    Args:
        storage: the folder itself.
        copies: local folders that have some of its files, by the same names below.

    Attributes:
        storage: as given.
        taken: what came from copies; shared with the folders within.
    """

    def __init__(self, storage: Folder, copies: Sequence[Path]) -> None:
        self.__dict__.update(vars(storage))
        self.storage, self.taken = storage, Taken()
        self._copies = tuple(copies)

    def read_into(self, memory: memoryview, name: str, offset: int) -> int:
        """Fill memory with a part of a file, from the first copy that has all of the part."""
        for copies in self._copies:
            if _fill(memory, copies.joinpath(*self._below, name), offset):
                self.taken.add(len(memory))
                return len(memory)
        return super().read_into(memory, name, offset)


def _fill(memory: memoryview, path: Path, offset: int) -> bool:
    """Fill memory from a file; return whether the file has as much."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        done = 0
        while done < len(memory):
            count = os.preadv(file, [memory[done:]], offset + done)
            if count == 0:
                return False
            done += count
        return True
    except OSError:
        return False
    finally:
        os.close(file)
