"""Claims: the records in ``writers/`` that name a root's writers and the checkpoints that count.

A claim names its holder, a process, described well enough to tell whether it still lives on this
machine. A claim that exists but can't be read is never ignored: while a damaged claim might decide
which checkpoints count, readers raise ``ClaimDamaged``.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from msgspec import Meta, to_builtins
from msgspec.structs import replace

from torchrec_checknrun.errors import (
    ClaimDamaged,
    CorruptCheckpoint,
    StorageFailed,
    StorageUnreachable,
)
from torchrec_checknrun.format.checks import Count, Measure, Record, Text, seal, unseal
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.store.retry import tells_nothing

FOLDER = "writers"
"""The folder of claims in a root, beside the checkpoints."""
LEASE_SECONDS = 60.0
"""Seconds that a writer on another machine is presumed alive after its last sign of life."""
LAST_EPOCH = 10**18 - 1
"""The highest epoch that fits into a claim's name."""
_Lease = Annotated[float, Meta(gt=0, le=86400)]
"""Seconds that a claim may last."""
_NAME = re.compile(r"epoch-([0-9]{8}|[1-9][0-9]{8,17})\.json")
_TEMPORARY = re.compile(r"\.(epoch-([0-9]{8,18})\.json|probe-[0-9a-f]+)\.[0-9a-f]+|probe-[0-9a-f]+")
_MOST_BYTES = 1 << 24
"""The largest claim that is read."""
_PAUSE = 0.05
"""Seconds before a claim that can't be read is read again."""


class Holder(Record, frozen=True):
    """A process that trains.

    Attributes:
        run: torchrun's run id, or one of the process's own; the same after a restart by torchrun.
        attempt: the number of restarts by torchrun.
        machine: a boot of a machine, or of a container.
        pid, started: the process beyond doubt: its id, and its start in clock ticks since boot.
    """

    run: Text
    attempt: Count
    host: Text
    machine: Text
    pid: Count
    started: Count

    @classmethod
    def this_process(cls) -> Holder:
        """Return the holder that describes this process."""
        run = os.environ.get("TORCHELASTIC_RUN_ID") or _own_run()
        if run == "none":  # torchrun's default, which many runs share: name torchrun's process
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
        """Return whether the process is known to have ended; always False for another machine's."""
        return self._known_here and _has_ended(self.pid, self.started)

    @property
    def alive_here(self) -> bool:
        """Return whether the process is known to be alive on this machine, perhaps stopped."""
        return self._known_here and _started(self.pid) == self.started

    @property
    def _known_here(self) -> bool:
        return self.machine == _machine() and _started(os.getpid()) is not None

    def precedes(self, other: Holder) -> bool:
        """Return whether torchrun has started the other holder in this one's place."""
        return self.run == other.run and self.attempt < other.attempt

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (run {self.run}, attempt {self.attempt})"


class Claim(Record, frozen=True):
    """A writer's claim to a root for one epoch.

    Attributes:
        seconds: how long the claim lasts after its last renewal.
        earlier: ids of the checkpoints that were committed when the epoch began, and of those that
            the holder was restored from, whoever wrote them; None until listed.
        uses: ids of the checkpoints that the holder was restored from: its next one needs them.
        released: whether the holder has given the root up.
        renewals: how often the claim was renewed.
        idle: at the last renewal, seconds since the last call of the holder's training loop.
        before: until ``earlier`` is listed, the last claim with a list, which still decides what
            counts; None if there is none. Not part of the file.
    """

    epoch: Count
    holder: Holder
    seconds: _Lease = LEASE_SECONDS
    earlier: tuple[Text, ...] | None = None
    uses: tuple[Text, ...] = ()
    released: bool = False
    renewals: Count = 0
    idle: Measure = 0.0
    before: Claim | None = None

    @property
    def name(self) -> str:
        """Return the name of the claim's file."""
        return claim_name(self.epoch)

    def admits(self, id: str, epoch: int) -> bool:
        """Return whether a committed checkpoint counts while this claim is the latest."""
        decides = self if self.earlier is not None else self.before
        if decides is None or decides.earlier is None:
            return True
        return epoch >= decides.epoch or id in decides.earlier

    def to_bytes(self) -> bytes:
        """Encode the claim's file."""
        content = to_builtins(self)
        del content["before"]
        return seal("claim", content)


@dataclass(frozen=True)
class Claims:
    """All claims of a root.

    Attributes:
        latest: the readable claim with the highest epoch.
        damaged: by file name, why a claim can't be read.
        undecided: file names of the damaged claims that may decide which checkpoints count.
        forbidden: file names of the damaged claims that may be sound: this process can't read them.
        highest: the highest epoch of any claim, 0 without one.
        names: all names in the folder of claims.
    """

    root: Folder
    latest: Claim | None
    damaged: dict[str, str]
    undecided: tuple[str, ...]
    forbidden: frozenset[str]
    highest: int
    names: Sequence[str] = ()

    def decided(self) -> Claim | None:
        """Return the latest claim.

        Raises:
            ClaimDamaged: a claim that can't be read might decide otherwise.
        """
        self.require_readable()
        if not self.undecided:
            return self.latest
        raise ClaimDamaged(
            f"{self.root} has a damaged claim ({self._doubts()}) that may decide which checkpoints "
            "count: nothing is restored, saved or deleted here until it is fixed. A live writer "
            f"rewrites it within a minute; otherwise run `checknrun repair {self.root}`"
        )

    def require_readable(self) -> None:
        """Check that no claim that may decide is kept from this process: a repair would lose it.

        Raises:
            ClaimDamaged: there is such a claim.
        """
        if self.forbidden.intersection(self.undecided):
            raise ClaimDamaged(
                f"{self.root} has a claim that this process can't read ({self._doubts()}) and that "
                "may decide which checkpoints count: nothing is restored, saved, deleted or "
                "repaired here until it can be read"
            )

    def counts(self, id: str, epoch: int) -> bool | None:
        """Return whether a committed checkpoint counts; None if only a damaged claim could tell."""
        if any(epoch < (claim_epoch(name) or 0) for name in self.undecided):
            return None
        return self.latest is None or self.latest.admits(id, epoch)

    def _doubts(self) -> str:
        return "; ".join(f"{FOLDER}/{name}: {self.damaged[name]}" for name in self.undecided)


def latest_claim(root: Folder) -> Claim | None:
    """Return the claim with the highest epoch; None where there is none.

    Raises:
        ClaimDamaged: a claim that can't be read might be the one that decides.
    """
    return read_claims(root).decided()


def read_claims(root: Folder, every: bool = False) -> Claims:
    """Read the claims of a root, including which of them can't be read.

    Args:
        every: also read older claims, which no longer make a difference.

    Raises:
        StorageFailed: the claims can't be listed, or the storage doesn't answer.
        CorruptCheckpoint: the folder of claims is a file or a link.
    """
    found = _read_claims(root, every)
    if found.damaged:  # perhaps just being written, or cleaned up
        time.sleep(_PAUSE)
        found = _read_claims(root, every)
    return found


def read_claim(folder: Folder, epoch: int) -> Claim:
    """Read one claim in ``writers/``.

    Raises:
        FileNotFoundError: there is no such claim.
        ValueError, CorruptCheckpoint: the claim is damaged.
    """
    return parse_claim(read_bytes(folder, epoch), epoch)


def read_bytes(folder: Folder, epoch: int) -> bytes:
    """Read a claim's file in ``writers/``; raise as ``read_claim``."""
    return folder.read(claim_name(epoch), 0, _MOST_BYTES + 1)


def parse_claim(data: bytes, epoch: int) -> Claim:
    """Parse a claim's file.

    Raises:
        ValueError: the claim is damaged, or of another epoch.
    """
    claim = unseal(data, Claim, _MOST_BYTES, frozenset({"before"}))
    if claim.epoch != epoch:
        raise ValueError(f"the claim of epoch {claim.epoch}, renamed or copied")
    return claim


def require_claim(root: Folder, id: str, epoch: int) -> None:
    """Check that the claim under which a checkpoint was committed exists, or a later one.

    Raises:
        ClaimDamaged: the claim was deleted, and with it the list of checkpoints that count.
    """
    folder = root / FOLDER
    if max(epochs(folder.names()), default=0) >= epoch:
        return
    try:
        read_claim(folder, epoch)  # where a listing lags behind
    except (FileNotFoundError, ValueError, CorruptCheckpoint):
        raise ClaimDamaged(
            f"{root}/{id} was committed in epoch {epoch}, but {FOLDER}/ has no claim of that epoch "
            "or a later one: it was deleted, or the checkpoint was copied here. Only that claim "
            f"lists the checkpoints that count: run `checknrun repair {root}` to rewrite it"
        ) from None


def epochs(names: Iterable[str]) -> list[int]:
    """Return the epochs of all claims among the names in ``writers/``, ascending."""
    return sorted(epoch for name in names if (epoch := claim_epoch(name)) is not None)


def claim_epoch(name: str) -> int | None:
    """Parse the epoch from a file name; None if the name is not a claim's."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def claim_name(epoch: int) -> str:
    """Return the file name of an epoch's claim.

    Raises:
        CorruptCheckpoint: the epoch is too high for a name.
    """
    if epoch > LAST_EPOCH:
        raise CorruptCheckpoint(
            f"{FOLDER}/epoch-{LAST_EPOCH}.json has the last number, which no run reaches: if "
            "nothing writes to this root, delete it"
        )
    return f"epoch-{epoch:08d}.json"


def temporary_epoch(name: str) -> int | None:
    """Parse the epoch from the temporary name of a claim in ``writers/``; 0 for any other temporary
    name, None for names that stay.
    """
    match = _TEMPORARY.fullmatch(name)
    return int(match[2] or 0) if match else None


def _read_claims(root: Folder, every: bool) -> Claims:
    latest: Claim | None = None
    damaged: dict[str, str] = {}
    forbidden: set[str] = set()
    undecided: tuple[str, ...] | None = None
    folder = root / FOLDER
    names = folder.names()
    numbers = epochs(names)
    if not numbers and (root.size(FOLDER) is not None or root.is_special(FOLDER)):
        raise CorruptCheckpoint(
            f"{root}/{FOLDER} is no directory, where the directory of claims should be: put the "
            "directory back, or remove the file and run `checknrun repair`"
        )
    for epoch in reversed(numbers):
        try:
            claim = read_claim(folder, epoch)
        except FileNotFoundError:
            damaged[claim_name(epoch)] = "listed, but missing"
            continue
        except StorageUnreachable:
            raise
        except (ValueError, CorruptCheckpoint, StorageFailed) as error:
            damaged[claim_name(epoch)] = str(error)
            if tells_nothing(error):
                forbidden.add(claim_name(epoch))
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
    highest = max(numbers, default=0)
    return Claims(root, latest, damaged, undecided, frozenset(forbidden), highest, names)


@cache
def _own_run() -> str:
    """Draw a run id for a process without torchrun, once per process."""
    return secrets.token_hex(8)


@cache
def _machine() -> str:
    """Identify the scope in which process ids are unique: a boot and a process-id namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _has_ended(pid: int, started: int) -> bool:
    """Return whether a process of this machine is known to have ended. ``/proc`` may hide the
    processes of other users (hidepid): an invisible process may be alive.
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
    """Return the start of a process of this machine, in clock ticks since boot; None if the process
    has ended or is hidden.
    """
    seen = _seen(pid)
    return None if seen is None or seen[0] else seen[1]


def _seen(pid: int) -> tuple[bool, int] | None:
    """Return whether a process is dead, and its start; None if ``/proc`` doesn't show it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat[stat.rindex(")") + 2 :].split()
    return state in "ZX", int(fields[18])
