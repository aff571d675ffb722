"""One writer per run: who may commit checkpoints to a root.

Each writer claims an epoch, a number that is higher than all before, and renews its claim while it
lives. Another one is refused until the claim has expired, or its holder is known to be gone. Should
the earlier writer wake up again, it finds the later claim and stops; had it committed something in
between, readers ignore that: a claim names the checkpoints that were there when its epoch began,
and of earlier epochs only those count.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import ClassVar

from torchrec_checknrun.errors import CorruptCheckpoint, RootInUse
from torchrec_checknrun.filesystem import Folder
from torchrec_checknrun.untrusted import (
    Check,
    as_count,
    as_measure,
    as_text,
    list_of,
    optional,
    parse_json,
    record,
)

logger = logging.getLogger(__name__)

FOLDER = "writers"
"""Where the claims are, beside the checkpoints."""
LEASE_SECONDS = 60.0
"""How long after its last sign of life a writer on another machine is waited for."""
_RENEWALS = 4
"""In that time."""
_NAME = re.compile(r"epoch-([0-9]{8}|[1-9][0-9]{8,17})\.json")
_LAST = 10**18 - 1
_MOST_BYTES = 1 << 24


@dataclass(frozen=True)
class Holder:
    """A process that trains.

    Attributes:
        run: torchrun's run id, or one of the process's own; the same after a restart by torchrun.
        attempt: which restart by torchrun it is.
        machine: this boot of this machine, or of this container.
        pid, started: the process beyond doubt: its number, and when it began, in clock ticks.
    """

    run: str
    attempt: int
    host: str
    machine: str
    pid: int
    started: int

    @classmethod
    def this_process(cls) -> Holder:
        """Who asks."""
        run = os.environ.get("TORCHELASTIC_RUN_ID") or _own_run()
        if run == "none":  # torchrun's default, of which there may be many: name its process
            run = f"{_machine()}/{os.getppid()}"
        return cls(
            run=run,
            attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            started=_started(os.getpid()) or 0,
        )

    @property
    def gone(self) -> bool:
        """Whether it is known to have ended; on another machine that can't be known."""
        if self.machine != _machine() or _started(os.getpid()) is None:
            return False
        return _started(self.pid) != self.started

    def precedes(self, other: Holder) -> bool:
        """Whether torchrun has started the other in its place."""
        return self.run == other.run and self.attempt < other.attempt

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (run {self.run}, attempt {self.attempt})"


@dataclass(frozen=True)
class Claim:
    """An epoch of a root.

    Attributes:
        expires: by the holder's clock, seconds since 1970; 0 when it was given up.
        earlier: ids of the checkpoints that were committed when it began, and of those that its
            holder was restored from, whoever wrote them; None until they are listed.
        uses: ids of the checkpoints that the holder was restored from: its next one needs them.
        before: until ``earlier`` is listed, the last claim that has a list: that one decides what
            counts, as it did. None if there is none. Not part of the file.
    """

    epoch: int
    holder: Holder
    expires: float
    earlier: tuple[str, ...] | None = None
    uses: tuple[str, ...] = ()
    before: Claim | None = field(default=None, compare=False)

    @property
    def alive(self) -> bool:
        """Whether its holder may still be at work."""
        return self.expires > time.time() and not self.holder.gone

    @property
    def name(self) -> str:
        """Its file's name."""
        return _file_name(self.epoch)

    def admits(self, id: str, epoch: int) -> bool:
        """Whether a committed checkpoint counts while this is the latest claim."""
        decides = self if self.earlier is not None else self.before
        if decides is None or decides.earlier is None:
            return True
        return epoch >= decides.epoch or id in decides.earlier

    def to_bytes(self) -> bytes:
        """Its file."""
        content = asdict(replace(self, before=None))
        del content["before"]
        return json.dumps(content).encode()


def latest_claim(root: Folder) -> Claim | None:
    """The claim with the highest epoch; None where there is none that can be read."""
    latest: Claim | None = None
    for epoch in reversed(_epochs(root)):
        claim = _read(root, epoch)
        if claim is None:
            continue
        if latest is None:
            latest = claim
        if claim.earlier is not None:
            return latest if latest is claim else replace(latest, before=claim)
    return latest


class Lease:
    """This process's right to write to a root. Used on rank 0 only.

    Args:
        root: of the checkpoints.
        seconds: how long the claim lasts after its last renewal.
    """

    _held: ClassVar[list[Lease]] = []
    """This process's. Those of one root share its claim: none may overwrite what another needs."""

    def __init__(self, root: Folder, seconds: float = LEASE_SECONDS) -> None:
        self._root = root
        self._folder = root / FOLDER
        self._seconds = seconds
        self._claim: Claim | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()

    @property
    def claim(self) -> Claim:
        """The epoch that was claimed."""
        assert self._claim is not None, "no epoch was claimed"
        return self._claim

    def acquire(
        self, committed: Callable[[Claim | None], Iterable[str]], uses: Iterable[str] = ()
    ) -> None:
        """Claims the next epoch, and renews the claim from now on.

        Args:
            committed: lists the ids of the checkpoints that count under the claim before.
            uses: ids of those that this process was restored from.

        Raises:
            RootInUse: another writer lives, or was faster.
        """
        holder = Holder.this_process()
        # First, so that whoever claims from now on is either seen, or has taken that number.
        number = max(_epochs(self._root), default=0) + 1
        latest = latest_claim(self._root)
        if latest is not None and latest.holder == holder and latest.expires > 0:
            claim = latest  # an earlier Checkpointer of this process, which was not closed
        else:
            if latest is not None:
                self._refuse_unless_free(latest, holder)
            claim = self._take(number, holder, tuple(uses), latest)
        if claim.earlier is None:  # new, or the storage failed when it was
            # Listed only now: what was committed before the claim was made does count.
            earlier = _united(committed(latest), claim.uses)
            claim = replace(claim, earlier=earlier, before=None)
            self._folder.put(claim.name, claim.to_bytes())
        for other in self._beside(claim):
            self._lock = other._lock
        self._claim = claim
        Lease._held.append(self)
        if claim.uses != tuple(uses):
            self.use(uses)
        threading.Thread(target=self._renew, name="checknrun-lease", daemon=True).start()

    def use(self, ids: Iterable[str]) -> None:
        """Names the checkpoints that this process was restored from meanwhile, at once."""
        with self._lock:
            if self._claim is not None:
                uses, earlier = tuple(ids), self._claim.earlier
                if earlier is not None:
                    earlier = _united(earlier, uses)
                self._claim = replace(self._claim, earlier=earlier, uses=uses)
                self._put()

    def check(self) -> None:
        """To be called before a commit.

        Raises:
            RootInUse: another writer has taken the root over.
        """
        newer = [epoch for epoch in _epochs(self._root) if epoch > self.claim.epoch]
        if newer:
            by = _read(self._root, newer[-1])
            raise RootInUse(
                f"{self._root} was taken over by {by.holder if by else 'another writer'}: this "
                "process commits nothing more to it. If both are meant to run, give each its own "
                "root"
            )

    def release(self, forget: bool = False) -> None:
        """Gives the root up, so that the next writer needn't wait.

        Args:
            forget: delete the claim: the folder has one writer only, ever.
        """
        self._stop.set()
        with self._lock, suppress(Exception):  # it expires
            claim, self._claim = self._claim, None
            if claim is None:
                return
            Lease._held.remove(self)
            if self._beside(claim) or _epochs(self._root)[-1:] != [claim.epoch]:
                return
            if forget:
                self._folder.delete(claim.name)
                self._folder.remove()
            else:
                self._folder.put(claim.name, replace(claim, expires=0.0).to_bytes())

    def _beside(self, claim: Claim) -> list[Lease]:
        """Others of this process that hold the claim."""
        return [
            other
            for other in tuple(Lease._held)
            if other is not self
            and other._root.url == self._root.url
            and (other._claim is not None and other._claim.epoch == claim.epoch)
        ]

    def _refuse_unless_free(self, latest: Claim, holder: Holder) -> None:
        if not latest.alive or latest.holder.precedes(holder):
            return
        left = latest.expires - time.time()
        raise RootInUse(
            f"{self._root} is written to by {latest.holder}, whose claim lasts for another "
            f"{left:.0f} s: give this run a root of its own; or, if that process is gone, wait "
            "until its claim has expired"
        )

    def _take(
        self, epoch: int, holder: Holder, uses: tuple[str, ...], latest: Claim | None
    ) -> Claim:
        self._root.create()
        self._folder.create()
        claim = Claim(epoch, holder, time.time() + self._seconds, uses=uses)
        try:
            self._folder.put(claim.name, claim.to_bytes(), new=True)
        except FileExistsError:
            other = _read(self._root, epoch)
            raise RootInUse(
                f"{self._root} was claimed at the same moment by "
                f"{other.holder if other else 'another writer'}: give this run a root of its own"
            ) from None
        # Where the store has no conditional put, the last of two that came at once has won.
        if _read(self._root, epoch) != claim or _epochs(self._root)[-1] != epoch:
            raise RootInUse(
                f"{self._root} was claimed at the same moment by another writer: give this run a "
                "root of its own"
            )
        # Until the new one has a list, the last that has one decides.
        needed = latest.before or latest if latest is not None else claim
        for earlier in _epochs(self._root)[:-2]:
            if earlier < needed.epoch:
                self._folder.delete(_file_name(earlier))
        return claim

    def _renew(self) -> None:
        while not self._stop.wait(self._seconds / _RENEWALS):
            with self._lock:
                if self._claim is None or not self._put():
                    return  # ``check`` says so before the next commit

    def _put(self) -> bool:
        """Writes the claim, which lasts anew; whether the epoch is still ours, as far as known."""
        together = [self, *self._beside(self.claim)]
        uses = _united(*(lease.claim.uses for lease in together))
        earlier = _united(*(lease.claim.earlier or () for lease in together))
        for lease in together:  # it counts for good, also when the one that restored it is closed
            lease._claim = replace(lease.claim, earlier=earlier)
        try:
            if _epochs(self._root)[-1:] != [self.claim.epoch]:
                return False
            self._claim = replace(self.claim, expires=time.time() + self._seconds)
            self._folder.put(self.claim.name, replace(self.claim, uses=uses).to_bytes())
        except Exception as error:
            logger.warning("the claim of %s was not renewed: %s", self._root, error)
        return True


def _united(*ids: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(id for some in ids for id in some))


def _epochs(root: Folder) -> list[int]:
    matches = (_NAME.fullmatch(name) for name in (root / FOLDER).names())
    return sorted(int(match[1]) for match in matches if match)


def _file_name(epoch: int) -> str:
    if epoch > _LAST:
        raise CorruptCheckpoint(
            f"{FOLDER}/epoch-{_LAST}.json takes up the last number, which no run gets to: if "
            "nothing writes to this root, delete it"
        )
    return f"epoch-{epoch:08d}.json"


def _read(root: Folder, epoch: int) -> Claim | None:
    """A claim; None if it is gone, or not one."""
    try:
        data = (root / FOLDER).read(_file_name(epoch), 0, _MOST_BYTES + 1)
        fields = record(parse_json(data, _MOST_BYTES), _CLAIM)
    except (FileNotFoundError, ValueError, CorruptCheckpoint):
        return None
    return Claim(**fields) if fields["epoch"] == epoch else None


_HOLDER: dict[str, Check] = {
    **dict.fromkeys(("run", "host", "machine"), as_text),
    **dict.fromkeys(("attempt", "pid", "started"), as_count),
}
_CLAIM: dict[str, Check] = {
    "epoch": as_count,
    "holder": lambda value: Holder(**record(value, _HOLDER)),
    "expires": as_measure,
    "earlier": optional(lambda value: tuple(list_of(as_text)(value))),
    "uses": lambda value: tuple(list_of(as_text)(value)),
}


@cache
def _own_run() -> str:
    """Of a process without torchrun: the same at every call."""
    return secrets.token_hex(8)


@cache
def _machine() -> str:
    """Where a process number means the same process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> int | None:
    """When a process of this machine began, in clock ticks since boot; None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat[stat.rindex(")") + 2 :].split()
    return None if state in "ZX" else int(fields[18])
