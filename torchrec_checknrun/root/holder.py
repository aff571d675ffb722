"""The process that holds a root: which one it is beyond doubt, and whether it is known to live."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path


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
