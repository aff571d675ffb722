"""Let followers tell which checkpoint they are reading, so that retention waits for them a while.

A follower that begins to read much puts a small record into ``.followers/``, and renews it while it
reads. A record counts for some minutes after its last renewal, by the store's times of records and
manifests alone, and for an hour of renewals: a follower that hangs, or is gone, holds nothing for
long. Where a follower can't write, or the store keeps no times, nothing is held; a follower whose
files are gone plans anew.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from torchrec_checknrun.errors import CorruptCheckpoint, StorageUnreachable
from torchrec_checknrun.format.checks import Count, Record, Text, seal, unseal
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.store.folder import Folder

logger = logging.getLogger(__name__)

FOLDER = ".followers"
HOLD_SECONDS = 300.0
"""Seconds that a record counts after its last renewal."""
RENEW_SECONDS = 60.0
"""Seconds between a reading follower's renewals of its record."""
MOST_RENEWALS = 60
"""Renewals after which a record no longer counts: an hour of reading, however seldom renewed."""
MOST_HELD = 3
"""Checkpoints that all followers together may hold."""
_MOST_BYTES = 1 << 12
_PUTS = 2
"""Tries to put a record: a pruning may remove the empty folder right before."""


class Reading(Record, frozen=True):
    """A follower's record: the checkpoint that it reads, and for how many renewals' time."""

    id: Text
    renewals: Count


class Announcement:
    """A follower's record of one read.

    Args:
        id: the checkpoint that is read, with all that it needs.
    """

    def __init__(self, root: Folder, id: str) -> None:
        self._folder = root / FOLDER
        self._name = f"{secrets.token_hex(8)}.json"
        self._id = id
        self._renewals = 0
        self._began = self._written = time.monotonic()
        self._possible = True
        self._put()

    def renew(self) -> None:
        """Renew the record, if it is time to."""
        now = time.monotonic()
        if self._possible and now - self._written > RENEW_SECONDS:
            self._renewals = int((now - self._began) // RENEW_SECONDS)  # also those left out
            self._put()

    def close(self) -> None:
        """Delete the record."""
        if self._possible:
            with suppress(OSError, CorruptCheckpoint):
                self._folder.delete(self._name)

    def _put(self) -> None:
        self._written = time.monotonic()
        content = {"id": self._id, "renewals": self._renewals}
        for _ in range(_PUTS):
            try:
                self._folder.create()  # also later: a pruning may have removed it
                self._folder.put(self._name, seal("reading", content))
                return
            except (OSError, CorruptCheckpoint) as error:
                problem = error
        # A read-only root: nothing is held.
        logger.info("%s can't be told that %s is being read: %s", self._folder, self._id, problem)
        self._possible = False


@contextmanager
def announced(root: Folder, id: str, large: bool) -> Iterator[Announcement | None]:
    """Announce the read of a checkpoint while a block runs; only if it is large."""
    announcement = Announcement(root, id) if large else None
    try:
        yield announcement
    finally:
        if announcement is not None:
            announcement.close()


def held_by_followers(root: Folder, numbers: Mapping[str, int]) -> set[str]:
    """Return the checkpoints that followers are reading, the newest few.

    Args:
        numbers: the sequence numbers of all checkpoints, by id; the newest one's time counts as
            now.
    """
    newest_first = sorted(numbers, key=lambda id: (numbers[id], id), reverse=True)
    folder = root / FOLDER
    found: dict[str, float] = {}
    newest: float | None = None
    try:
        for name in folder.names():
            when = folder.modified(name)
            reading = _read(folder, name)
            if when is None or reading is None or reading.renewals > MOST_RENEWALS:
                continue
            if reading.id in numbers:
                found[reading.id] = max(when, found.get(reading.id, when))
        if found:
            newest = (root / newest_first[0]).modified(MANIFEST_NAME)
    except (OSError, CorruptCheckpoint) as error:
        logger.info("%s can't be read: no checkpoint is held for followers: %s", folder, error)
        return set()
    if newest is None:
        newest = max(found.values(), default=0.0)
    # Not by the records' times: that of a clock that is ahead would outdate all others.
    fresh = {id for id, when in found.items() if newest - when <= HOLD_SECONDS}
    return set([id for id in newest_first if id in fresh][:MOST_HELD])


def delete_silent(root: Folder, newest: str) -> None:
    """Delete the records of followers that were killed: those that a live one would have renewed,
    or given up, long ago. One that lives after all writes its record again.

    Args:
        newest: the newest checkpoint, whose time counts as now.

    Raises:
        StorageUnreachable: the storage doesn't answer.
    """
    folder = root / FOLDER
    try:
        names = folder.names()
        now = (root / newest).modified(MANIFEST_NAME) if names else None
        if now is None:
            return
        for name in names:
            when = folder.modified(name)
            if when is not None and now - when > MOST_RENEWALS * RENEW_SECONDS:
                folder.delete(name)
        folder.remove()  # unless there are others
    except StorageUnreachable:
        raise
    except (OSError, CorruptCheckpoint) as error:
        logger.info("%s: records of followers that are gone stay: %s", folder, error)


def _read(folder: Folder, name: str) -> Reading | None:
    """Return a record; None if there is none that can be read: it hides no other."""
    try:
        return unseal(folder.read(name, 0, _MOST_BYTES + 1), Reading, _MOST_BYTES)
    except StorageUnreachable:
        raise
    except (OSError, ValueError, CorruptCheckpoint) as error:  # the last: no file, but a directory
        if not isinstance(error, FileNotFoundError):
            logger.info("%s/%s holds nothing, since it can't be read: %s", folder, name, error)
        return None
