"""Note when training did a step, when it was committed, and when predictions saw it.

All times are those of ``time.time`` on this machine: the trainer's log is read as it is written, a
commit has its manifest's time in the store, and a version is seen when the server first names it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from recipes.dlrm_criteo.job import Event, Job
from recipes.dlrm_criteo.online_demo.served import Server
from torchrec_checknrun.format.names import parse_id

_POLL_SECONDS = 0.05


class Moment(NamedTuple):
    """A training step, and when something happened to it."""

    step: int
    time: float


@dataclass(frozen=True)
class Seen:
    """A version that the server has named, and what it said of it."""

    step: int
    time: float
    bytes_read: int


def lags(events: Sequence[Moment], shown: Sequence[Moment]) -> list[float]:
    """Return how long each event had to wait until a version of its step, or a later one, was
    shown; events that no version shows are left out.
    """
    versions = sorted(shown, key=lambda moment: moment.time)
    found = []
    for step, when in events:
        after = next((version.time for version in versions if version.step >= step), None)
        if after is not None:
            found.append(after - when)
    return found


class Watch:
    """Threads that follow the trainer, the publications and the server.

    Attributes:
        steps: when each step was trained.
        samples: trained until each step, by the trainer's own count.
        pids: the trainer's processes.
        checkpoints, publications: when each was committed, by its id.
        seen: the versions that the server has named, by id.
    """

    def __init__(self, job: Job, publications: Path, checkpoints: Path, server: Server) -> None:
        self._job, self._server = job, server
        self.publications: dict[str, Moment] = {}
        self.checkpoints: dict[str, Moment] = {}
        self._roots = {publications: self.publications, checkpoints: self.checkpoints}
        self.steps: list[Moment] = []
        self.samples: dict[int, int] = {0: 0}
        self.pids: list[int] = []
        self.seen: dict[str, Seen] = {}
        self.trained = threading.Event()
        """Set once training has ended well."""
        self._error: Exception | None = None
        self._ends = threading.Event()
        self._look_thread = self._start(self._look)
        self._start(self._follow_trainer)

    @property
    def trained_samples(self) -> int:
        return self.samples[self.steps[-1].step] if self.steps else 0

    def check(self) -> None:
        """Raise what has ended a thread, such as a trainer or a server that failed."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Look at nothing any more; the trainer is followed until it ends, or is ended."""
        self._ends.set()
        self._look_thread.join(60)

    def _start(self, what: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                what()
            except Exception as error:
                self._error = self._error or error

        thread = threading.Thread(target=guarded, name=what.__name__, daemon=True)
        thread.start()
        return thread

    def _follow_trainer(self) -> None:
        for event in self._job.events():
            self._note(event)
        self.trained.set()

    def _note(self, event: Event) -> None:
        if event["event"] == "start":
            self.pids = event["pids"]
        elif event["event"] == "step":
            self.samples[event["step"]] = event["samples"]
            self.steps.append(Moment(event["step"], time.time()))

    def _look(self) -> None:
        while not self._ends.wait(_POLL_SECONDS):
            for root, found in self._roots.items():
                for manifest in root.glob("seq-*/manifest.json"):
                    if manifest.parent.name not in found:
                        self._committed(manifest, found)
            version = self._server.version()
            now = time.time()
            if version is not None and version["id"] not in self.seen:
                self.seen[version["id"]] = Seen(version["step"], now, version["bytes_read"])

    def _committed(self, manifest: Path, found: dict[str, Moment]) -> None:
        name = parse_id(manifest.parent.name)
        with suppress(FileNotFoundError):  # pruned in between
            if name is not None:
                found[manifest.parent.name] = Moment(name.step, manifest.stat().st_mtime)
