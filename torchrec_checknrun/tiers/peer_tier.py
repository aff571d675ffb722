"""The tier between: copies of one rank's files in another rank's shared memory.

A copy is the very bytes of the rank's file in the storage, with their checksums. A copy appears by
a rename, so that a kill leaves none or all of it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from torchrec_checknrun.errors import CheckNRunError
from torchrec_checknrun.format.names import parse_id
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tiers.exchange import PIECE
from torchrec_checknrun.tiers.own_check import check_rank_file
from torchrec_checknrun.tiers.tier import NotHeld, Piece, Version

_PART = ".part"


class IncomingCopy:
    """A copy that is being written; ``keep`` makes it one.

    Raises:
        OSError: there is no room for it, or the place can't be written to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(f"{path}{_PART}", flags, 0o600)

    def write(self, piece: Piece) -> None:
        """Append bytes."""
        left = memoryview(piece)
        while len(left):
            left = left[os.write(self._file, left) :]

    def keep(self) -> None:
        """End the copy: from here on it is one."""
        os.close(self._file)
        os.rename(f"{self._path}{_PART}", self._path)

    def drop(self) -> None:
        """Remove what was written."""
        os.close(self._file)
        Path(f"{self._path}{_PART}").unlink(missing_ok=True)
        with suppress(OSError):
            self._path.parent.rmdir()  # unless there is a copy of before


class PeerTier:
    """Copies of one rank's files, in memory of this machine.

    Args:
        folder: a directory of this user alone, or a missing one.
        file: name of the rank's files.
    """

    def __init__(self, folder: Path, file: str) -> None:
        self._folder, self._file = folder, file

    def put(self, version: Version, pieces: Iterable[Piece]) -> None:
        """Keep a copy of the rank's file of a checkpoint; see ``Tier``."""
        copy = self.receive(version.id)
        try:
            for piece in pieces:
                copy.write(piece)
        except BaseException:
            copy.drop()
            raise
        copy.keep()

    def receive(self, id: str) -> IncomingCopy:
        """Begin a copy whose pieces come one after the other.

        Raises:
            OSError: the place can't be written to.
        """
        return IncomingCopy(self.path(id))

    def path(self, id: str) -> Path:
        """Return where the copy of a checkpoint's file is, or would be."""
        return self._folder / id / self._file

    def newest(self) -> Version | None:
        """Return the newest checkpoint of which there is a copy; see ``Tier``."""
        found = [id for name in self.sizes() if (id := parse_id(name)) is not None]
        newest = max(found, key=lambda id: id.age, default=None)
        return None if newest is None else Version(newest.step, newest.name)

    def get(self, version: Version) -> Iterator[memoryview]:
        """Return a copy's bytes; see ``Tier``."""
        size = self.verify(version.id)
        return (
            memoryview(self.read(version.id, at, min(PIECE, size - at)))
            for at in range(0, size, PIECE)
        )

    def verify(self, id: str) -> int:
        """Check all of a copy; return its bytes.

        Raises:
            NotHeld: it is missing or damaged.
        """
        try:
            return check_rank_file(Folder(self._folder) / id, self._file).size
        except (CheckNRunError, OSError) as error:
            raise NotHeld(str(error)) from error

    def read(self, id: str, at: int, size: int) -> bytes:
        """Return bytes of a copy; zeros in place of those that are gone, which checksums find."""
        try:
            with self.path(id).open("rb", buffering=0) as file:
                file.seek(at)
                return file.read(size).ljust(size, b"\0")
        except OSError:
            return bytes(size)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each copy, by checkpoint."""
        found = {}
        for path in self._folder.glob(f"*/{self._file}"):
            if path.is_file() and not path.is_symlink():
                found[path.parent.name] = path.stat().st_size
        return found

    def keep_only(self, ids: Iterable[str]) -> None:
        """Remove all other copies."""
        kept = set(ids)
        for path in self._folder.glob("*"):
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)
