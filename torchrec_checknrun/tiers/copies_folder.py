"""Lay out one rank's folder of copies in shared memory: what it holds of others, keeps of its own,
sends, and was sent back.

The folder above is open to all users, so this one is used only if it is a directory of this user
alone. The folder outlives the process, as images do, and is swept by the same rules.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from torchrec_checknrun.format.rank_file import rank_file_name
from torchrec_checknrun.tiers.peer_tier import PeerTier

_HELD, _KEPT, _OUTBOX, _FETCHED = "held", "kept", "outbox", "fetched"
_NAME = re.compile(r"checknrun-(\d+)-([0-9a-f]{16})-(\d+)of(\d+)\.copies")


class CopiesFolder:
    """The copies of one rank of a run.

    Args:
        path: of the folder, or of the rank's image, beside which it lies.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.with_suffix(".copies")

    def make(self) -> None:
        """Make the folder for this user alone.

        Raises:
            OSError: it can't be made, or something else has its name.
        """
        self.path.mkdir(mode=0o700, exist_ok=True)
        self._require_own()
        os.utime(self.path)  # by which others see that the run is not over

    @property
    def is_safe(self) -> bool:
        """Return whether there is a folder, of this user alone."""
        try:
            self._require_own()
        except OSError:
            return False
        return True

    def held(self, owner: int, shards: str) -> PeerTier:
        """Return the copies of another rank.

        Args:
            shards: a digest of its shards: copies of other ones don't fit.
        """
        return PeerTier(self.path / _HELD / f"{owner}-{shards}", rank_file_name(owner))

    @property
    def held_bytes(self) -> int:
        """Return the bytes of all copies of other ranks, unfinished ones included."""
        files = (self.path / _HELD).glob("*/*/*")
        return sum(path.stat().st_size for path in files if path.is_file())

    @property
    def kept_path(self) -> Path:
        """Return the folder in which this rank's own files stay for the next restore: a root
        without manifests.
        """
        return self.path / _KEPT

    def kept(self, rank: int) -> PeerTier:
        """Return this rank's own files that stay here."""
        return PeerTier(self.kept_path, rank_file_name(rank))

    def outbox(self, rank: int) -> PeerTier:
        """Return the copies of this rank's own file, until it is known where they belong."""
        return PeerTier(self.path / _OUTBOX, rank_file_name(rank))

    def new_outgoing(self, rank: int, id: str) -> Path:
        """Empty the outbox; return where the copy of a checkpoint's file may be written.

        Raises:
            OSError: the place can't be written to.
        """
        self.empty_outbox()
        self.make()
        path = self.path / _OUTBOX / id / rank_file_name(rank)
        path.parent.mkdir(mode=0o700, parents=True)
        return path

    def empty_outbox(self) -> None:
        """Give the outbox's memory back."""
        shutil.rmtree(self.path / _OUTBOX, ignore_errors=True)

    @property
    def fetched_path(self) -> Path:
        """Return the folder for lost files of this rank that others send back: a root without
        manifests.
        """
        return self.path / _FETCHED

    def fetched(self, rank: int) -> PeerTier:
        """Return this rank's own files that others have sent back."""
        return PeerTier(self.fetched_path, rank_file_name(rank))

    def forget_fetched(self) -> None:
        """Give the memory of what was fetched back."""
        shutil.rmtree(self.fetched_path, ignore_errors=True)

    def remove(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.path, ignore_errors=True)

    def sweep(self, keep_hours: float) -> Iterator[str]:
        """Remove this user's copies that are over: of this run on another number of ranks, and of
        other runs that have not saved for some hours and have no image; yield what was removed, as
        text.

        Remove images that are over first: a run that has some may take days from one checkpoint to
        the next, and needs its copies until then.
        """
        mine = _NAME.fullmatch(self.path.name)
        assert mine is not None
        for path in self.path.parent.glob("checknrun-*.copies"):
            found = _NAME.fullmatch(path.name)
            if found is None or found[1] != mine[1] or (found[2], found[4]) == (mine[2], mine[4]):
                continue
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                continue  # another rank of this machine sweeps, too
            old = status.st_mtime <= time.time() - keep_hours * 3600
            images = path.parent.glob(f"checknrun-{found[1]}-{found[2]}-*of{found[4]}.image")
            over = found[2] == mine[2] or (old and not any(images))
            if stat.S_ISDIR(status.st_mode) and over:
                shutil.rmtree(path, ignore_errors=True)
                yield f"removed the copies {path}: their run is over, or has other ranks now"

    def _require_own(self) -> None:
        found = os.lstat(self.path)
        of_others = found.st_uid != os.geteuid() or found.st_mode & 0o077
        if not stat.S_ISDIR(found.st_mode) or of_others:
            raise OSError(f"{self.path} is no directory of this user alone")


def folders_of_run(own: Path) -> list[CopiesFolder]:
    """Return the folders of all ranks of a run on this machine, whatever their number; the rank's
    own first.

    Args:
        own: path of the rank's own folder.
    """
    mine = _NAME.fullmatch(own.name)
    assert mine is not None
    found = sorted(own.parent.glob(f"checknrun-{mine[1]}-{mine[2]}-*of*.copies"))
    found.sort(key=lambda path: path != own)
    return [folder for folder in map(CopiesFolder, found) if folder.is_safe]
