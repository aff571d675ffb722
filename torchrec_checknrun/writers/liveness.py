"""Judge whether a claim's holder may still be at work: by process on this host, else by file times.

No host's clock is used. A claim's age is the store's time of a probe just written, minus the
store's time of the claim, which its holder renews: one clock has stamped both. A process known to
live on this host, or a claim with a time in the future, is replaced only at a user's request.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from torchrec_checknrun.errors import CheckNRunError, CorruptCheckpoint, RootInUse
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers.claims import (
    FOLDER,
    LAST_EPOCH,
    LEASE_SECONDS,
    Claim,
    Holder,
    claim_name,
    epochs,
    read_claims,
    temporary_epoch,
)

logger = logging.getLogger(__name__)

_STUCK_LEASES = 5
"""Leases without a call of the training loop after which a living holder may be stuck."""
_LOOKS = 20
"""The number of looks at a claim while watching for a renewal."""

State = Literal["free", "alive", "stuck", "future"]
"""The state of a claim:

- free: nobody is known to hold it, or its lease has expired;
- alive: its holder is at work;
- stuck: its holder lives but makes no progress;
- future: its time is in the future, so that its age is unknown.
"""


@dataclass(frozen=True)
class Standing:
    """The state of a claim, with the reason.

    Attributes:
        why: completes "the holder …".
        age: seconds since the last renewal by the store's times; None where it keeps none.
    """

    state: State
    why: str
    age: float | None = None

    @property
    def free(self) -> bool:
        """Return whether another writer may claim the root."""
        return self.state == "free"


def standing_of(
    root: Folder, claim: Claim, asking: Holder | None = None, watch: bool = False
) -> Standing:
    """Judge whether a claim's holder may still be at work.

    Args:
        asking: the holder that would take its place; None for a mere look.
        watch: if the store keeps no times, watch for a lease whether the claim is renewed;
            otherwise presume the holder alive.

    Raises:
        StorageFailed: the storage refused.
    """
    known = _known(claim, asking)
    if known is not None:
        return known
    folder = root / FOLDER
    with probe(folder) as now:
        age = _age(folder, claim.name, now)
    here = claim.holder.alive_here
    if age is None:
        renewed = here or not watch or _is_renewed(folder, claim)
        if not renewed:
            return Standing("free", f"has not renewed its claim for {claim.seconds:.0f} s")
        return _alive(claim, claim.idle, None, here)
    if age < -claim.seconds:
        why = f"wrote its claim {-age:.0f} s in the future by the store's own time"
        return Standing("future", why, age)
    if not here and age > claim.seconds:
        return Standing("free", f"has not renewed its claim for {age:.0f} s", age)
    return _alive(claim, claim.idle + max(age, 0.0), age, here)


def seems_alive(root: Folder, claim: Claim) -> bool:
    """Return whether a claim's holder is probably at work. For listings, which write no probe: by
    this host's clock.
    """
    if _known(claim, None) is not None:
        return False
    age = _age(root / FOLDER, claim.name, time.time())
    return claim.holder.alive_here or age is None or age <= claim.seconds


def is_abandoned(folder: Folder) -> bool:
    """Return whether nobody is at work in a folder: it has no claim, or none that is renewed.

    Raises:
        StorageFailed: the storage refused.
    """
    claims = read_claims(folder)
    if any(is_fresh(folder, name) for name in claims.damaged):
        return False
    return claims.latest is None or standing_of(folder, claims.latest).free


def is_fresh(
    root: Folder, name: str, seconds: float = LEASE_SECONDS, *, watch: bool = False
) -> bool:
    """Return whether a file of ``writers/`` was written within a lease, by the store's times; True
    if these don't tell.

    Args:
        watch: if the store keeps no times, or the file's is in the future, watch for a lease
            whether the file is written again.
    """
    folder = root / FOLDER
    with probe(folder) as now:
        age = _age(folder, name, now)
    if watch and (age is None or age < -seconds):
        why = "the store keeps no times" if age is None else f"its time is {-age:.0f} s from now"
        logger.warning(
            "%s/%s: %s: watching for %.0f s whether it is written again", folder, name, why, seconds
        )
        return _changes(folder, name, _content(folder, name), seconds)
    return age is None or age <= seconds


def clean_up(
    root: Folder,
    names: Iterable[str],
    below: int = 0,
    others: Iterable[tuple[str, str]] = (),
) -> None:
    """Delete temporary files of killed processes.

    Args:
        names: the names in ``writers/``; a temporary file's is never used again.
        below: nobody writes claims of lower epochs any more; other files stay until they are a
            lease old, by the store's times.
        others: temporary files outside ``writers/``: checkpoint ids and names.

    Raises:
        StorageFailed: the storage refused.
    """
    epochs = {name: epoch for name in names if (epoch := temporary_epoch(name)) is not None}
    others = [*others]
    if not epochs and not others:
        return
    folder = root / FOLDER
    temporary = [(folder, name, epoch) for name, epoch in epochs.items()]
    temporary += [(root / id, name, 0) for id, name in others]
    with probe(folder) as now:
        for folder, name, epoch in temporary:
            age = _age(folder, name, now)
            if 0 < epoch < below or (age is not None and age > LEASE_SECONDS):
                folder.delete(name)


@contextmanager
def probe(folder: Folder) -> Iterator[float | None]:
    """Write a small file and yield the store's time of it, in seconds since 1970; None if the store
    keeps no times. Delete the file afterwards.
    """
    name = f"probe-{secrets.token_hex(8)}"
    folder.create()
    folder.put(name, b"")
    try:
        yield folder.modified(name)
    finally:
        with suppress(CheckNRunError, OSError):  # the next writer deletes it
            folder.delete(name)


def _known(claim: Claim, asking: Holder | None) -> Standing | None:
    """Return a claim's state if known without a look at any clock."""
    if claim.released:
        return Standing("free", "has given the root up")
    if asking is not None and claim.holder.precedes(asking):
        return Standing("free", "was replaced by torchrun")
    if claim.holder.gone:
        return Standing("free", "has ended")
    return None


def _alive(claim: Claim, idle: float, age: float | None, here: bool) -> Standing:
    where = "is alive on this host" if here else "renews its claim"
    if idle > _STUCK_LEASES * claim.seconds:
        return Standing("stuck", f"{where}, but has made no progress for {idle:.0f} s", age)
    return Standing("alive", where, age)


def _age(folder: Folder, name: str, now: float | None) -> float | None:
    written = folder.modified(name)
    return None if written is None or now is None else now - written


def _is_renewed(folder: Folder, claim: Claim) -> bool:
    """Watch for a lease whether a claim changes."""
    return _changes(folder, claim.name, claim.to_bytes(), claim.seconds)


def _changes(folder: Folder, name: str, before: bytes | None, seconds: float) -> bool:
    """Watch for so many seconds whether a file changes or disappears."""
    for _ in range(_LOOKS):
        time.sleep(seconds / _LOOKS)
        if _content(folder, name) != before:
            return True
    return False


def _content(folder: Folder, name: str) -> bytes | None:
    """Read a file; None if there is none that can be read."""
    try:
        return folder.read(name)
    except (FileNotFoundError, CorruptCheckpoint):
        return None


def newer_epochs(root: Folder, epoch: int) -> list[int]:
    """List the epochs that were claimed after one. The next of them is also looked for by its name:
    a listing may lag behind.
    """
    folder = root / FOLDER
    newer = [other for other in epochs(folder.names()) if other > epoch]
    if not newer and epoch < LAST_EPOCH and folder.size(claim_name(epoch + 1)) is not None:
        return [epoch + 1]
    return newer


def require_no_newer(root: Folder, epoch: int) -> None:
    """Check that nobody has claimed a root since an epoch.

    Raises:
        RootInUse: somebody has.
    """
    if newer := newer_epochs(root, epoch):
        raise RootInUse(
            f"{root} was claimed meanwhile (epoch {max(newer)}), by a run or by `checknrun adopt`, "
            "`repair` or `unlock`: what counts and what is used may be others now. Prune again"
        )
