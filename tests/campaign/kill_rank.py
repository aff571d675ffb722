"""Run a rank that may be killed: restore, compare, train, record, save."""

from __future__ import annotations

import datetime
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist

from tests.campaign.board import Board
from tests.campaign.kill_plan import LIFE_STEPS, RANKS, SPEC, Kill, Phase, Trial
from tests.campaign.record import Record, Values, values_of
from tests.crash.faulty_store import Faults, faulty_disk
from tests.distributed.models import Job
from tests.distributed.states import Part, local_parts
from torchrec_checknrun import Checkpointer, CheckpointReport, PerRank
from torchrec_checknrun.errors import RootInUse, SaveFailed
from torchrec_checknrun.store.folder import Folder

T = TypeVar("T")


@dataclass
class Dice:
    """A generator, as a state of one rank."""

    generator: torch.Generator = field(default_factory=torch.Generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


@dataclass
class History:
    """A list that grows, as a state that all ranks share."""

    steps: list[int] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = list(state["steps"])


@dataclass
class Origin:
    """The life that trained last: after rounding, lives train the same step differently."""

    life: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"life": self.life}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.life = state["life"]


class Run:
    """A job with all its state.

    Args:
        ranks: number of ranks in the process group.
        life: the number of the life that trains.
    """

    def __init__(self, trial: Trial, root: str, ranks: int, life: int = 0) -> None:
        self.trial = trial
        self.origin, self._life = Origin(), life
        self.job = Job.build(SPEC, trial.plan(ranks))
        self.dice, self.history = Dice(), History()
        self.dice.generator.manual_seed(17 + dist.get_rank())
        self.declared = self.states()
        self.saver: Checkpointer = trial.checkpointer(
            root, model=self.job.model, state=self.declared
        )

    def states(self) -> dict[str, Any]:
        """Return the state objects as the Checkpointer gets them."""
        own = {"origin": self.origin} if self.trial.links else {}
        return {
            "optimizer": self.job.optimizer,
            "job": self.job,
            "history": self.history,
            "dice": PerRank(self.dice, merge=lambda states: states[0]),
            **own,
        }

    def train(self) -> None:
        """Train a step."""
        self.job.train()
        if self.trial.links:
            self.origin.life = self._life
        torch.rand(3, generator=self.dice.generator)
        self.history.steps.append(self.job.steps)

    def values(self) -> Values:
        """Copy all of this rank's state."""
        plain = {"steps": torch.tensor(self.job.steps), "history": torch.tensor(self.history.steps)}
        states = [Part(f"state/{n}", tuple(v.shape), (0,) * v.dim(), v) for n, v in plain.items()]
        own = self.dice.generator.get_state()
        name = f"own/{dist.get_rank()}"
        return values_of([*local_parts(self.job), *states, Part(name, tuple(own.shape), (0,), own)])


def join(rank: int, ranks: int, listener: socket.socket) -> None:
    """Join the process group; rank 0 holds its store."""
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        ranks,
        is_master=rank == 0,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=30),
        master_listen_fd=os.dup(listener.fileno()) if rank == 0 else None,
    )
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=30)
    )


class Bomb(Faults):
    """A kill at the chosen storage operation of this process.

    Args:
        explode: kills; called with the operation's name.
    """

    def __init__(self, kill: Kill, explode: Callable[[str], None]) -> None:
        super().__init__()
        self._kill = kill
        self._explode = explode
        self._done = 0
        self._label = threading.local()
        self._counting = threading.Lock()

    def _carry_out(
        self,
        name: str,
        act: Callable[[], T],
        changes: bool,
        half: Callable[[], object] | None,
    ) -> T:
        label = getattr(self._label, "text", "")
        with self._counting:
            self._done += self._kill.target in f"{label} {name}"
            now = self._done == self._kill.number and self._kill.target in f"{label} {name}"
        where = f"{label} {self._kill.how} {name}".strip()
        if now and self._kill.how == "before":
            self._explode(where)
        if now and self._kill.how == "half" and half is not None:
            half()
            self._explode(where)
        done = act()
        if now:
            self._explode(where)
        return done

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Watch all operations on the local disk."""
        with ExitStack() as patches:
            patches.enter_context(faulty_disk(self))
            for method in ("put", "delete", "read", "read_into"):
                patches.enter_context(mock.patch.object(Folder, method, self._labelled(method)))
            yield

    def _labelled(self, method: str) -> Callable[..., Any]:
        real = getattr(Folder, method)

        def call(folder: Folder, *args: Any, **options: Any) -> Any:
            name = next((str(a) for a in args if isinstance(a, str)), "")
            self._label.text = f"{method} {_kind_of_file(name)}:"
            try:
                return real(folder, *args, **options)
            finally:
                self._label.text = ""

        return call


def _kind_of_file(name: str) -> str:
    for start, kind in (("rank-", "rank file"), ("epoch-", "claim"), ("manifest", "manifest")):
        if name.startswith(start):
            return kind
    return "other file"


@dataclass
class Life:
    """A rank's assignment for one life.

    Attributes:
        number: of the life, from 0.
        kill: ends the life; None: the life ends normally.
    """

    trial: Trial
    folder: Path
    board: Board
    number: int
    kill: Kill | None
    listener: socket.socket

    @property
    def root(self) -> str:
        return str(self.folder / "root")

    def problem(self, text: str) -> None:
        """Write a violation to a file that outlives this process."""
        self.note("problems", f"life {self.number}: {text}")

    def note(self, file: str, value: object) -> None:
        """Append a line to a file of the trial."""
        with (self.folder / file).open("a") as lines:
            lines.write(json.dumps(value) + "\n")

    def run_rank(self, rank: int) -> None:
        """Run one life of a rank."""
        torch.set_num_threads(1)
        logging.disable(logging.ERROR)
        self.board.set(rank, "pid", os.getpid())
        if self.trial.torchrun and not self.trial.elastic:
            os.environ["TORCHELASTIC_RUN_ID"] = f"trial-{self.trial.seed}"
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(self.number)
        if self.kill is not None and self.kill.kind == "operation" and self.kill.rank == rank:
            with Bomb(self.kill, self._explode).armed():
                self._live(rank)
        else:
            self._live(rank)

    def _explode(self, where: str) -> None:
        assert self.kill is not None
        self.board.fired = True
        self.note("points", where)
        pids = self.board.pids(self.kill.victims)
        for pid in sorted(pids, key=lambda pid: pid == os.getpid()):  # this process last
            os.kill(pid, signal.SIGKILL)

    def _live(self, rank: int) -> None:
        board = self.board
        join(rank, RANKS, self.listener)
        run = Run(self.trial, self.root, RANKS, self.number)
        record = Record(self.folder / "record", rank, self.trial.links)
        board.set(rank, "phase", Phase.RESTORE)
        try:  # orphans may commit at any moment, also while nothing is found to restore
            report = run.saver.restore()
            if report is not None:
                at = report.step, run.origin.life
                for problem in record.differences(*at, run.values()):
                    self.problem(f"silent: restored {report.id} at rank {rank}: {problem}")
                if report.passed_over:
                    self.note("passed-over", [self.number, list(report.passed_over)])
                board.set(rank, "compared", 1)
            step = 0 if report is None else report.step
            board.set(rank, "restored", step)
            board.set(rank, "phase", Phase.TRAIN)
            while run.job.steps < step + LIFE_STEPS:
                run.train()
                at = run.job.steps, run.origin.life
                for problem in record.note(*at, run.values()):
                    self.problem(f"silent: step {run.job.steps} at rank {rank}: {problem}")
                self._save(rank, run)
                board.set(rank, "steps", run.job.steps - step)
        except RootInUse as error:
            board.set(rank, "refused", 1)
            self.note("refused", str(error))
            run.saver.__exit__(RootInUse, error, None)
            return
        board.set(rank, "phase", Phase.CLOSE)
        run.saver.mark_all()
        self._tell(rank, run.saver.save)
        run.saver.close()
        board.set(rank, "phase", Phase.DONE)

    def _save(self, rank: int, run: Run) -> None:
        self._tell(rank, run.saver.step)
        if self.trial.explicit and run.job.steps % 3 == 0:
            self._tell(rank, lambda: run.saver.save(wait=run.job.steps % 2 == 0))

    def _tell(self, rank: int, act: Callable[[], CheckpointReport | None]) -> None:
        try:
            report = act()
        except SaveFailed as error:
            self.board.set(rank, "failed", self.board.get(rank, "failed") + 1)
            self.note("failed", str(error))
            return
        if report is not None:
            self.board.set(rank, "durable", report.step)
            self.board.set(rank, "told", self.board.get(rank, "told") + 1)
