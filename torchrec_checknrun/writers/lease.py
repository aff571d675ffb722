"""The lease: the right of a single writer to commit checkpoints to a root.

Each writer claims an epoch, a number higher than all before, and renews the claim while it lives.
Another writer is refused until the claim has not been renewed for a lease, or its holder is known
to be gone. Should the earlier writer wake up again, it finds the later claim and stops; readers
ignore anything it committed in between: a claim lists the checkpoints that existed when its epoch
began, and of earlier epochs only those count.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import ClassVar

from msgspec.structs import replace

from torchrec_checknrun.errors import CorruptCheckpoint, RootInUse, StorageFailed
from torchrec_checknrun.store.deadlines import EXIT_SECONDS
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers.claims import (
    FOLDER,
    LEASE_SECONDS,
    Claim,
    Claims,
    Holder,
    claim_name,
    epochs,
    latest_claim,
    parse_claim,
    read_bytes,
    read_claim,
    read_claims,
)
from torchrec_checknrun.writers.liveness import clean_up, is_fresh, newer_epochs, standing_of
from torchrec_checknrun.writers.same_root import Signs

__all__ = ["FOLDER", "LEASE_SECONDS", "Claim", "Holder", "Lease", "latest_claim"]

logger = logging.getLogger(__name__)

_RENEWALS = 4
"""Renewals per duration of a claim."""


class Lease:
    """The right of one process to write to a root. Used on rank 0 only.

    Args:
        seconds: how long the claim lasts after its last renewal.
        remakes: make the root again where it was deleted or moved meanwhile. A checkpoint's own
            directory must stay deleted: what is left of it would look like one more checkpoint.

    Attributes:
        signs: marks of the root, to know it again; leases of one claim in this process share them.
    """

    _held: ClassVar[list[Lease]] = []
    """The leases of this process. Leases of one root share its claim: none may overwrite what
    another needs.
    """

    def __init__(
        self, root: Folder, seconds: float = LEASE_SECONDS, *, remakes: bool = True
    ) -> None:
        self._root = root
        self._remakes = remakes
        self._folder = root / FOLDER
        self._seconds = seconds
        self._claim: Claim | None = None
        self.signs = Signs()
        self._written: bytes | None = None
        """The claim's file as this lease has written it; None if another has."""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._moved = time.monotonic()

    @property
    def claim(self) -> Claim:
        """Return the claim that was acquired."""
        assert self._claim is not None, "no epoch was claimed"
        return self._claim

    def acquire(
        self,
        committed: Callable[[Claim | None], Iterable[str]],
        uses: Iterable[str] = (),
        *,
        above: int = 0,
        force: bool = False,
        expected: int | None = None,
    ) -> None:
        """Claim the next epoch, and renew the claim from now on.

        Args:
            committed: lists the ids of the checkpoints that count under the previous claim.
            uses: ids of the checkpoints that this process was restored from.
            above: an epoch in use, even if its claim no longer exists.
            force: take the root from a writer that may be alive, or whose claim is damaged.
            expected: the highest epoch when the caller decided; another one refuses.

        Raises:
            RootInUse: another writer lives, was faster, or came after the caller decided.
            ClaimDamaged: the root has checkpoints, and the claim that lists them can't be read.
        """
        holder = Holder.this_process()
        claims = read_claims(self._root)
        latest = claims.latest
        if expected is not None and claims.highest != expected:
            by = self._who(claims.highest)
            raise RootInUse(
                f"{self._root} was claimed by {by} meanwhile: nothing was changed; try again"
            )
        # From the same listing: a later claim is either seen, or takes this number.
        number = max(claims.highest, above) + 1
        if not force:
            self._require_decided(claims, committed)
        if not force and latest is not None and latest.holder == holder and not latest.released:
            claim = latest  # an earlier Checkpointer of this process, which was not closed
        else:
            if not force and latest is not None:
                self._refuse_unless_free(latest, holder)
            claim = self._take(number, holder, tuple(uses))
        if claim.earlier is None:  # new, or the storage failed after an earlier attempt
            # Listed only now: checkpoints committed before the claim was made count.
            earlier = _united(committed(latest), claim.uses)
            claim = replace(claim, earlier=earlier, before=None)
            try:
                self._record(claim)
            except Exception:
                self._withdraw(claim.epoch, claim.to_bytes())
                raise
            self._forget_older(claim)
        self.signs.before = latest
        for other in self._beside(claim):
            self._lock, self.signs = other._lock, other.signs
        self._claim = claim
        Lease._held.append(self)
        if claim.uses != tuple(uses):
            self.use(uses)
        threading.Thread(target=self._renew, name="checknrun-lease", daemon=True).start()
        try:
            clean_up(self._root, self._folder.names(), below=claim.epoch)
        except Exception as error:
            logger.warning("temporary files in %s stay: %s", self._folder, error)

    def use(self, ids: Iterable[str]) -> None:
        """Name in the claim, at once, the checkpoints that this process was restored from."""
        with self._lock:
            if self._claim is not None:
                uses, earlier = tuple(ids), self._claim.earlier
                if earlier is not None:
                    earlier = _united(earlier, uses)
                self._claim = replace(self._claim, earlier=earlier, uses=uses)
                self._put()

    def progressed(self) -> None:
        """Note a call of the training loop: renewals alone prove only that a thread lives."""
        self._moved = time.monotonic()

    def check(self) -> None:
        """Check, before and after a commit, that the root is still this process's. Write a claim
        anew that was damaged or deleted meanwhile.

        Raises:
            RootInUse: another writer has taken the root over.
            StorageFailed: the storage refused.
        """
        with self._lock:
            if self._claim is None:
                raise RootInUse(f"{self._root} was given up by this process")
            epoch = self.claim.epoch
            if (ours := self._is_ours()) is None:
                name = self.claim.name
                logger.warning("%s/%s was damaged or deleted: rewriting it", self._folder, name)
                ours = self._write()
        if not ours:
            by = self._who(max([epoch, *newer_epochs(self._root, epoch)]))
            raise RootInUse(
                f"{self._root} was taken over by {by}: this process commits nothing more to it. If "
                "both are meant to run, give each its own root"
            )

    def release(self, forget: bool = False) -> None:
        """Give the root up, so that the next writer needn't wait. If the storage doesn't answer
        within the time that a process may take to end, the claim expires instead.

        Args:
            forget: delete the claim, since the folder never gets another writer.
        """
        self._stop.set()
        thread = threading.Thread(
            target=self._give_up, args=(forget,), name="checknrun-release", daemon=True
        )
        with suppress(RuntimeError):  # the interpreter is about to end
            thread.start()
            thread.join(min(EXIT_SECONDS, self._root.patience.timeout_seconds))
            if thread.is_alive():
                logger.warning("the claim of %s could not be released: it expires", self._root)

    def _give_up(self, forget: bool) -> None:
        with self._lock, suppress(Exception):  # it expires
            claim, self._claim = self._claim, None
            if claim is None:
                return
            Lease._held.remove(self)
            if self._beside(claim) or newer_epochs(self._root, claim.epoch):
                return
            if forget:
                self._folder.delete(claim.name)
                self._folder.remove()
            else:
                self.signs.is_gone(self._root, claim)  # refuses another root
                self._folder.put(claim.name, replace(claim, released=True).to_bytes())

    def _who(self, epoch: int) -> str:
        """Describe the holder of an epoch for errors."""
        try:
            return str(read_claim(self._folder, epoch).holder)
        except (FileNotFoundError, ValueError, CorruptCheckpoint):
            return "another writer"

    def _beside(self, claim: Claim) -> list[Lease]:
        """List this process's other leases of the same claim."""
        return [
            other
            for other in tuple(Lease._held)
            if other is not self
            and other._root.url == self._root.url
            and (other._claim is not None and other._claim.epoch == claim.epoch)
        ]

    def _require_decided(
        self, claims: Claims, committed: Callable[[Claim | None], Iterable[str]]
    ) -> None:
        """Refuse a root with checkpoints if a damaged claim might decide which of them count."""
        if not claims.undecided:
            return
        claims.require_readable()
        if next(iter(committed(None)), None) is not None:
            claims.decided()
        for name in claims.undecided:
            if is_fresh(self._root, name, watch=True):
                raise RootInUse(
                    f"{self._folder}/{name} is damaged and was written less than "
                    f"{LEASE_SECONDS:.0f} s ago: give this run a root of its own; or, if no other "
                    "process writes there, start this run again in a minute"
                )

    def _refuse_unless_free(self, latest: Claim, holder: Holder) -> None:
        standing = standing_of(self._root, latest, holder, watch=True)
        if standing.free:
            return
        by = f"{self._root} is written to by {latest.holder}, which {standing.why}"
        if standing.state != "alive":
            raise RootInUse(
                f"{by}: end that process; or revoke its right to commit with "
                f"`checknrun unlock {self._root}`, which names the consequences"
            )
        if latest.holder.alive_here:
            raise RootInUse(
                f"{by}: give this run a root of its own, or end that process; or, if this root is "
                f"a copy of the one that it writes to, run `checknrun unlock {self._root}`"
            )
        left = latest.seconds - max(standing.age or 0.0, 0.0)
        raise RootInUse(
            f"{by}, and whose claim lasts for another {left:.0f} s: give this run a root of its "
            "own; or, if that process is gone, wait until its claim has expired"
        )

    def _take(self, epoch: int, holder: Holder, uses: tuple[str, ...]) -> Claim:
        name = claim_name(epoch)
        self._make_folder()
        claim = Claim(epoch, holder, self._seconds, uses=uses)
        data = claim.to_bytes()
        try:
            self._folder.put(name, data, new=True)
        except FileExistsError:
            if self._withdraw(epoch, data):  # an attempt before has failed within the put
                raise
            raise RootInUse(
                f"{self._root} was claimed at the same moment by {self._who(epoch)}: give this run "
                "a root of its own"
            ) from None
        except Exception:
            self._withdraw(epoch, data)
            raise
        # In a store without conditional puts, the last of two simultaneous ones wins.
        if newer_epochs(self._root, epoch) or self._read_back(epoch) != claim:
            raise RootInUse(
                f"{self._root} was claimed at the same moment by another writer: give this run a "
                "root of its own"
            )
        return claim

    def _withdraw(self, epoch: int, data: bytes) -> bool:
        """Delete what a failed put has left of a claim; return whether there was such a part.

        Such a part would keep all writers out, this one included, until it is old: nobody can tell
        whose it is. A claim begins with its checksum, which no other process's has.
        """
        with suppress(Exception):
            found = read_bytes(self._folder, epoch)
            if data.index(b",") < len(found) < len(data) and data.startswith(found):
                self._folder.delete(claim_name(epoch))
                return True
        return False

    def _forget_older(self, claim: Claim) -> None:
        """Delete the claims older than the one before this, now that this one has its list. Keep
        later ones: they may have no list yet.
        """
        with suppress(StorageFailed):  # they decide nothing, and a user may be forbidden to delete
            older = [epoch for epoch in epochs(self._folder.names()) if epoch < claim.epoch]
            for epoch in older[:-1]:
                self._folder.delete(claim_name(epoch))

    def _read_back(self, epoch: int) -> Claim | None:
        """Read a claim just written; a store may show it with a delay."""
        for pause in (0.05, 0.2, 1.0, 0.0):
            try:
                return read_claim(self._folder, epoch)
            except FileNotFoundError:
                time.sleep(pause)
            except (ValueError, CorruptCheckpoint):
                return None
        raise StorageFailed(
            errno.ENOENT,
            f"{self._folder}/{claim_name(epoch)} was written, but can't be found: start the run "
            "again",
        )

    def _renew(self) -> None:
        while not self._stop.wait(self._seconds / _RENEWALS):
            with self._lock:
                if self._claim is None or not self._put():
                    return  # ``check`` raises before the next commit

    def _put(self) -> bool:
        """Renew the claim; return False once another writer is known to have the root."""
        try:
            return self._is_ours() is not False and self._write()
        except Exception as error:
            logger.warning("the claim of %s was not renewed: %s", self._root, error)
            return True

    def _is_ours(self) -> bool | None:
        """Return whether the root is still this process's; None if the claim is damaged or gone."""
        epoch = self.claim.epoch
        if newer_epochs(self._root, epoch):
            return False
        try:
            data = read_bytes(self._folder, epoch)
            # The very bytes that were written here name this holder: nothing to parse.
            return data == self._written or parse_claim(data, epoch).holder == self.claim.holder
        except (FileNotFoundError, ValueError, CorruptCheckpoint):
            return None

    def _write(self) -> bool:
        """Write the claim with the knowledge of all its leases; return False if another writer has
        just taken the epoch.
        """
        together = [self, *self._beside(self.claim)]
        uses = _united(*(lease.claim.uses for lease in together))
        earlier = _united(*(lease.claim.earlier or () for lease in together))
        for lease in together:  # restored checkpoints count even after their lease is released
            lease._claim = replace(lease.claim, earlier=earlier)
        renewals = 1 + max(lease.claim.renewals for lease in together)
        idle = max(0.0, time.monotonic() - max(lease._moved for lease in together))
        self._claim = replace(self.claim, renewals=renewals, idle=round(idle, 3))
        try:
            gone = self.signs.is_gone(self._root, self.claim)
            if gone and self._remakes:  # perhaps with its folder, or the whole root
                self._make_folder()
            self._record(replace(self.claim, uses=uses), new=gone)
        except FileExistsError:
            return False
        return True

    def _make_folder(self) -> None:
        self._root.create()
        self._folder.create()

    def _record(self, claim: Claim, new: bool = False) -> None:
        """Put the claim's file, and remember its bytes."""
        data = claim.to_bytes()
        self._folder.put(claim.name, data, new=new)
        self._written = data


def _united(*ids: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(id for some in ids for id in some))
