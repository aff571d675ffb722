"""Claims: the records in ``writers/`` that say who may write to a root, and what counts in it.

A claim that is there and can't be read is never taken for none: while a damaged one might have had
the last word on which checkpoints count, whoever asks is told so (``ClaimDamaged``).
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path

from torchrec_checknrun.errors import (
    ClaimDamaged,
    CorruptCheckpoint,
    StorageFailed,
    StorageUnreachable,
)
from torchrec_checknrun.format.checks import (
    Check,
    as_count,
    as_flag,
    as_measure,
    as_text,
    check_object,
    list_of,
    optional,
    seal,
    unseal,
)
from torchrec_checknrun.store.folder import Folder

FOLDER = "writers"
"""Where the claims are, beside the checkpoints."""
LEASE_SECONDS = 60.0
"""How long after its last sign of life a writer on another machine is waited for."""
LAST_EPOCH = 10**18 - 1
_LONGEST_LEASE = 86400.0
_NAME = re.compile(r"epoch-([0-9]{8}|[1-9][0-9]{8,17})\.json")
_TEMPORARY = re.compile(r"\.(epoch-([0-9]{8,18})\.json|probe-[0-9a-f]+)\.[0-9a-f]+|probe-[0-9a-f]+")
_MOST_BYTES = 1 << 24
_PAUSE = 0.05
"""Seconds before a claim that can't be read is read again."""


@dataclass(frozen=True)
class Claim:
    """An epoch of a root.

    Attributes:
        seconds: how long after its last renewal the holder is waited for.
        earlier: ids of the checkpoints that were committed when it began, and of those that its
            holder was restored from, whoever wrote them; None until they are listed.
        uses: ids of the checkpoints that the holder was restored from: its next one needs them.
        released: the holder has given the root up.
        renewals: how often the claim was renewed.
        idle: seconds since the holder's training loop had last called, at the last renewal.
        before: until ``earlier`` is listed, the last claim that has a list: that one decides what
            counts, as it did. None if there is none. Not part of the file.
    """

    epoch: int
    holder: Holder
    seconds: float = LEASE_SECONDS
    earlier: tuple[str, ...] | None = None
    uses: tuple[str, ...] = ()
    released: bool = False
    renewals: int = 0
    idle: float = 0.0
    before: Claim | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """The name of its file."""
        return claim_name(self.epoch)

    def admits(self, id: str, epoch: int) -> bool:
        """Whether a committed checkpoint counts while this is the latest claim."""
        decides = self if self.earlier is not None else self.before
        if decides is None or decides.earlier is None:
            return True
        return epoch >= decides.epoch or id in decides.earlier

    def to_bytes(self) -> bytes:
        """Return the content of its file."""
        content = asdict(replace(self, before=None))
        del content["before"]
        return seal("claim", content)


@dataclass(frozen=True)
class Claims:
    """All that the claims of a root say.

    Attributes:
        latest: the highest one that can be read.
        damaged: by file name, what is wrong with those that can't.
        undecided: names of the damaged ones of which each may have had the last word.
        highest: the highest number that any has, 0 without one.
    """

    root: Folder
    latest: Claim | None
    damaged: dict[str, str]
    undecided: tuple[str, ...]
    highest: int

    def decided(self) -> Claim | None:
        """Return the latest claim.

        Raises:
            ClaimDamaged: one that can't be read might say something else.
        """
        if not self.undecided:
            return self.latest
        what = "; ".join(f"{FOLDER}/{name}: {self.damaged[name]}" for name in self.undecided)
        raise ClaimDamaged(
            f"{self.root} has a damaged claim ({what}), which says which checkpoints count: "
            "nothing is restored, saved or deleted here until that is settled. A writer that lives "
            f"writes it anew within a minute; else `checknrun repair {self.root}` does"
        )

    def counts(self, id: str, epoch: int) -> bool | None:
        """Whether a committed checkpoint counts; None if only a damaged claim could tell."""
        if any(epoch < (claim_epoch(name) or 0) for name in self.undecided):
            return None
        return self.latest is None or self.latest.admits(id, epoch)


def latest_claim(root: Folder) -> Claim | None:
    """Return the claim with the highest epoch; None where there is none.

    Raises:
        ClaimDamaged: a file that is there can't be read, and might be what decides.
    """
    return read_claims(root).decided()


def read_claims(root: Folder, every: bool = False) -> Claims:
    """Read the claims of a root, and say which of them can't be read.

    Args:
        every: also those that can't make a difference any more.

    Raises:
        StorageFailed: the storage refused to list them, or doesn't answer.
        CorruptCheckpoint: there is no directory under their name, but something else.
    """
    found = _read_claims(root, every)
    if found.damaged:  # perhaps one that was just being written, or cleaned up
        time.sleep(_PAUSE)
        found = _read_claims(root, every)
    return found


def _read_claims(root: Folder, every: bool) -> Claims:
    latest: Claim | None = None
    damaged: dict[str, str] = {}
    undecided: tuple[str, ...] | None = None
    numbers = epochs(root)
    if not numbers and root.size(FOLDER) is not None:
        raise CorruptCheckpoint(
            f"{root}/{FOLDER} is a file, where the directory of claims should be, which say what "
            "counts: put that back, or remove the file and run `checknrun repair`"
        )
    for epoch in reversed(numbers):
        try:
            claim = read_claim(root, epoch)
        except FileNotFoundError:
            damaged[claim_name(epoch)] = "it is listed, but not there"
            continue
        except StorageUnreachable:
            raise
        except (ValueError, CorruptCheckpoint, StorageFailed) as error:
            damaged[claim_name(epoch)] = str(error)
            continue
        if latest is None:
            latest = claim
        if claim.earlier is not None and undecided is None:
            undecided = tuple(damaged)
            if latest is not claim:
                latest = replace(latest, before=claim)
            if not every:
                break
    if undecided is None:
        undecided = tuple(damaged)
    return Claims(root, latest, damaged, undecided, max(numbers, default=0))


def read_claim(root: Folder, epoch: int) -> Claim:
    """Read one claim.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError, CorruptCheckpoint: it is damaged.
    """
    data = (root / FOLDER).read(claim_name(epoch), 0, _MOST_BYTES + 1)
    fields = check_object(unseal(data, "claim", _MOST_BYTES), _CLAIM)
    if fields["epoch"] != epoch:
        raise ValueError(f"it is the claim of epoch {fields['epoch']}: it was renamed or copied")
    return Claim(**fields)


def require_claim(root: Folder, id: str, epoch: int) -> None:
    """Check that the claim is there under which a checkpoint was committed, or a later one.

    Raises:
        ClaimDamaged: it was deleted, and with it the list of what counts.
    """
    if max(epochs(root), default=0) >= epoch:
        return
    try:
        read_claim(root, epoch)  # where a listing lags behind
    except (FileNotFoundError, ValueError, CorruptCheckpoint):
        raise ClaimDamaged(
            f"{root}/{id} was committed in epoch {epoch}, but {FOLDER}/ has no claim of that epoch "
            "or a later one: it was deleted, or the checkpoint was copied here. Only that claim "
            f"says which checkpoints count: `checknrun repair {root}` writes it anew"
        ) from None


def epochs(root: Folder) -> list[int]:
    """List the numbers of all files that are named as claims, ascending."""
    return sorted(n for name in (root / FOLDER).names() if (n := claim_epoch(name)) is not None)


def claim_epoch(name: str) -> int | None:
    """Return the epoch that a file's name stands for; None if no claim is named so."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def claim_name(epoch: int) -> str:
    """Return the name of an epoch's file.

    Raises:
        CorruptCheckpoint: no file has so high a number.
    """
    if epoch > LAST_EPOCH:
        raise CorruptCheckpoint(
            f"{FOLDER}/epoch-{LAST_EPOCH}.json takes up the last number, which no run gets to: if "
            "nothing writes to this root, delete it"
        )
    return f"epoch-{epoch:08d}.json"


def temporary_epoch(name: str) -> int | None:
    """Return the epoch of a claim that was being written under a temporary name, 0 for anything
    else that is temporary in ``writers/``; None for what stays.
    """
    match = _TEMPORARY.fullmatch(name)
    return int(match[2] or 0) if match else None


def _as_lease(value: object) -> float:
    seconds = as_measure(value)
    if not 0 < seconds <= _LONGEST_LEASE:
        raise ValueError(f"{seconds} is not a lease: 0 to {_LONGEST_LEASE:g} seconds are")
    return seconds


_HOLDER: dict[str, Check] = {
    **dict.fromkeys(("run", "host", "machine"), as_text),
    **dict.fromkeys(("attempt", "pid", "started"), as_count),
}
_CLAIM: dict[str, Check] = {
    **dict.fromkeys(("epoch", "renewals"), as_count),
    "holder": lambda value: Holder(**check_object(value, _HOLDER)),
    "seconds": _as_lease,
    "idle": as_measure,
    "released": as_flag,
    "earlier": optional(lambda value: tuple(list_of(as_text)(value))),
    "uses": lambda value: tuple(list_of(as_text)(value)),
}


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
        """Describe this process."""
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
        """Whether the process is known to have ended; on another machine that can't be known."""
        return self._known_here and _has_ended(self.pid, self.started)

    @property
    def alive_here(self) -> bool:
        """Whether the process is known to be alive, on this machine; a stopped one is."""
        return self._known_here and _started(self.pid) == self.started

    @property
    def _known_here(self) -> bool:
        return self.machine == _machine() and _started(os.getpid()) is not None

    def precedes(self, other: Holder) -> bool:
        """Whether torchrun has started the other in this one's place."""
        return self.run == other.run and self.attempt < other.attempt

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (run {self.run}, attempt {self.attempt})"


@cache
def _own_run() -> str:
    """Return a run id for a process without torchrun: the same at every call."""
    return secrets.token_hex(8)


@cache
def _machine() -> str:
    """Name the place where a process number means the same process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _has_ended(pid: int, started: int) -> bool:
    """Return whether a process of this machine is known to have ended. Where ``/proc`` hides the
    processes of others (hidepid), one that isn't seen may well live.
    """
    seen = _seen(pid)
    if seen is not None:
        return seen != (False, started)
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass
    return False


def _started(pid: int) -> int | None:
    """Return when a process of this machine began, in clock ticks since boot; None if it ended, or
    is hidden.
    """
    seen = _seen(pid)
    return None if seen is None or seen[0] else seen[1]


def _seen(pid: int) -> tuple[bool, int] | None:
    """Return whether a process is dead, and when it began; None if ``/proc`` doesn't say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat[stat.rindex(")") + 2 :].split()
    return state in "ZX", int(fields[18])
