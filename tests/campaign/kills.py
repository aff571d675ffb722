"""Kill ranks, their agent and their write processes, and check what the next life restores.

A trial is a run on two ranks that is killed and started again several times. Every life compares
its restored state with the record of that step, bit for bit; the step must not precede the last one
reported durable. At the end of a trial every listed checkpoint is restored.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.campaign import forks
from tests.campaign.board import Board
from tests.campaign.kill_plan import AGENT, RANKS, WRITERS, Kill, Phase, Trial, draw
from tests.campaign.kill_rank import Life, Run
from tests.campaign.outcome import Outcome
from tests.campaign.record import Record
from tests.distributed import lc_bound, references
from tests.distributed.states import State, gather, scramble
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.root.catalog import inventory
from torchrec_checknrun.root.checkpoints import committed, read_manifest
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.verify import verify
from torchrec_checknrun.writers.claims import read_claims

KILLS = 4
"""Kills per trial."""
LIFE_SECONDS = 150.0
TRIAL_SECONDS = 600.0


def run(seed: int, number: int, folder: Path, variant: str = "thread") -> Outcome:
    """Run a trial in this process, which must run nothing else.

    Args:
        variant: ``thread`` or ``process``: the background that writes; ``agent``: ranks under
            torchrun's agent; a method of ``LINKS``: rows stored as differences.
    """
    forks.adopt_orphans()
    trial = draw(f"{seed}/{number}/{variant}", KILLS, variant)
    return _Trial(trial, number, folder).run()


class _Trial:
    """A run with all its lives."""

    def __init__(self, trial: Trial, number: int, folder: Path) -> None:
        self._trial = trial
        self._number = number
        self._folder = folder
        self._outcome = Outcome()
        self._orphans: list[int] = []
        self._boards: list[Board] = []
        self._beside: set[int] = set()
        """Lives that began while ranks of an earlier one were alive."""
        (folder / "record").mkdir()

    def run(self) -> Outcome:
        counts = self._outcome.counts
        for number, kill in enumerate([*self._trial.kills, None]):
            self._live(number, kill)
            if any(failure.kind == "hung" for failure in self._outcome.failures):
                break
        self._wait_for_orphans()
        self._look_at_all()
        self._read_notes()
        counts["trials"] += 1
        counts["lives"] += len(self._boards)
        for board in self._boards:
            counts["restores compared"] += sum(board.get(r, "compared") for r in range(RANKS))
            counts["saves reported durable"] += board.most("told")
        return self._outcome

    def _fail(self, kind: str, what: str) -> None:
        self._outcome.fail(self._number, kind, f"{what} [{self._trial}]")

    def _live(self, number: int, kill: Kill | None) -> None:
        durable = max((board.most("durable") for board in self._boards), default=0)
        beside = self._alive_orphans()
        if beside:
            self._beside.add(number)
        newest = self._newest()
        board = Board()
        self._boards.append(board)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(64)
            life = Life(self._trial, self._folder, board, number, kill, listener)
            logs = [self._folder / f"log-{number}-{rank}" for rank in range(RANKS)]
            act = _torchrun_agent if self._trial.elastic else _agent
            agent = forks.child(lambda: act(life, logs), self._folder / "log-agent")
            board.agent = agent
        killed = self._until_end(agent, board, kill)
        if kill is not None and AGENT in kill.victims and killed:
            self._orphans += [board.get(rank, "pid") for rank in range(RANKS)]
            if self._trial.wait_for_orphans:
                self._wait_for_orphans()
        self._judge(number, board, killed, durable, newest, beside, logs)
        if kill is None or not killed:
            return
        self._outcome.counts["kills"] += 1
        self._outcome.counts[f"kills of {_name(kill.victims)}"] += 1
        phase = Phase(max(board.get(rank, "phase") for rank in range(RANKS))).name.lower()
        self._outcome.counts[f"kills in {phase}, by {kill.kind}"] += 1

    def _until_end(self, agent: int, board: Board, kill: Kill | None) -> bool:
        """Wait for a life's end and kill its victims; return whether something was killed."""
        deadline = time.monotonic() + LIFE_SECONDS
        waiting = kill is not None and kill.kind == "moment"
        killed = False
        while os.waitpid(agent, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                stuck = [board.get(rank, "pid") for rank in range(RANKS)]
                self._show_stacks(stuck)
                for pid in [agent, *stuck]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                logs = sorted(self._folder.glob("log-*"))[-RANKS:]
                self._fail("hung", "\n".join(map(forks.tail, logs)))
                os.waitpid(agent, 0)
                break
            if waiting and kill is not None and board.reached(kill.rank, kill.phase, kill.step):
                time.sleep(kill.delay)
                waiting = False
                for pid in board.pids(kill.victims):
                    killed |= _kill(pid)
            time.sleep(0.001)
        return killed or board.fired

    def _show_stacks(self, pids: list[int]) -> None:
        """Have processes write their threads' stacks into their logs."""
        for pid in pids:
            if _is_alive(pid):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.3)

    def _judge(
        self,
        number: int,
        board: Board,
        killed: bool,
        durable: int,
        newest: Manifest | None,
        beside: bool,
        logs: list[Path],
    ) -> None:
        if board.most("refused"):
            self._outcome.counts["lives refused beside orphans"] += 1
            if not beside:
                self._fail("error", f"life {number} was refused, and no other process was there")
            self._wait_for_orphans()
            return
        if not killed and any(board.get(r, "phase") != Phase.DONE for r in range(RANKS)):
            text = "\n".join(map(forks.tail, logs))
            self._fail("error", f"life {number} ended by itself: {text}")
        if not killed and not beside and board.most("failed"):
            self._fail("error", f"life {number}: a save failed, and nothing was killed")
        for restored in {board.get(rank, "restored") for rank in range(RANKS)} - {-1}:
            self._outcome.counts["fresh starts before the first commit"] += restored == 0
            if restored < durable:
                what = f"life {number} restored step {restored}, and {durable} was reported durable"
                self._fail("lost", what)
            elif newest is not None and not beside and restored != newest.step:
                self._fail("silent", f"life {number} restored step {restored}, not {newest.id}")

    def _newest(self) -> Manifest | None:
        """Find the newest manifest, whether or not its checkpoint counts."""
        root = Folder(self._folder / "root")
        names = [name for name in committed(root) if (root / name).size("manifest.json")]
        return read_manifest(root, names[0]) if names else None

    def _alive_orphans(self) -> bool:
        return any(_is_alive(pid) for pid in self._orphans)

    def _wait_for_orphans(self) -> None:
        """Wait until the ranks without an agent have ended, as they must."""
        deadline = time.monotonic() + LIFE_SECONDS
        while self._alive_orphans() and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._alive_orphans():
            self._show_stacks(self._orphans)
            logs = sorted(self._folder.glob("log-*"))
            self._fail("hung", "ranks outlive their agent: " + "\n".join(map(forks.tail, logs)))
            for pid in self._orphans:
                _kill(pid)
        self._orphans = []

    def _look_at_all(self) -> None:
        """Restore every listed checkpoint, on one rank."""
        log = self._folder / "log-look"
        pid = forks.child(lambda: _look(self._trial, self._folder), log)
        _, status = os.waitpid(pid, 0)
        if status:
            self._fail("error", f"restoring all checkpoints: {forks.tail(log)}")

    def _read_notes(self) -> None:
        counts = self._outcome.counts
        for problem in self._lines("problems"):
            kind = next((k for k in ("lost", "silent") if f"{k}:" in problem), "error")
            self._fail(kind, problem)
        for where in self._lines("points"):
            counts[f"kills at: {where}"] += 1
        for compared, links in self._lines("looked"):
            counts["listed checkpoints compared"] += compared
            counts["links among them"] += links
        counts["saves that failed and said so"] += len(self._lines("failed"))
        counts["problems of replaced writers' checkpoints"] += len(self._lines("of-replaced"))
        for number, problems in self._lines("passed-over"):
            # Ranks that have lost their agent continue to delete old checkpoints.
            if number not in self._beside:
                self._fail("lost", f"life {number} skipped {problems}")

    def _lines(self, file: str) -> list[Any]:
        path = self._folder / file
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]


def _agent(life: Life, logs: list[Path]) -> None:
    """Start the ranks; when one ends, end the other, as torchrun does."""
    left = {forks.child(partial(life.run_rank, rank), logs[rank]) for rank in range(RANKS)}
    while left:
        pid, status = os.wait()
        left.discard(pid)
        if status and left:
            time.sleep(life.kill.grace if life.kill is not None else 0.0)
            for other in left:
                with suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)


def _torchrun_agent(life: Life, logs: list[Path]) -> None:
    """Start the ranks by torchrun's own agent, which forks them."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=RANKS,
        run_id=f"trial-{life.number}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.05,
        start_method="fork",
    )

    agent = os.getpid()

    def run_rank() -> None:
        life.run_rank(int(os.environ["RANK"]))
        # In torch, a function that has returned waits forever for its agent.
        threading.Thread(target=_end_without, args=(agent,), daemon=True).start()

    elastic_launch(config, run_rank)()


def _end_without(parent: int) -> None:
    """End this process once its parent is gone."""
    while os.getppid() == parent:
        time.sleep(0.05)
    os._exit(0)


def _look(trial: Trial, folder: Path) -> None:
    """Verify and restore all checkpoints of a trial on one rank, against the ranks' records."""
    torch.set_num_threads(1)
    life = Life(trial, folder, Board(), len(trial.kills) + 1, None, socket.socket())
    root = Folder(life.root)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not committed(root):
        return
    listed = inventory(root).checkpoints
    claims = read_claims(root, every=True)
    # A replaced writer may commit upon what its successor then prunes: that counts for nobody.
    none = {m.id for c in listed if (m := c.manifest) and claims.counts(m.id, m.epoch) is False}
    for found in verify(root.url):
        for problem in found.problems:
            if found.id in none:
                life.note("of-replaced", problem)
            else:
                life.problem(f"verify: {problem}")
    reader = Run(trial, life.root, 1)
    record = Record(folder / "record", 0, trial.links)
    compared = 0
    states: dict[str, tuple[State, State]] = {}
    for checkpoint in [None, *(c.id for c in listed if c.status in ("restorable", "abandoned"))]:
        scramble(reader.job)
        report = reader.saver.restore(checkpoint)
        if report is None:
            life.problem("lost: there are checkpoints, and none is restored")
            continue
        wanted = record.whole(report.step, reader.origin.life, RANKS)
        wanted = {name: value for name, value in wanted.items() if not name.startswith("own/")}
        found_state = gather(reader.job)
        found_state |= {
            name: values
            for (name, _), (_, values) in reader.values().items()
            if name.startswith("state/")
        }
        states[report.id] = found_state, wanted
        compared += 1
    links = 0
    for id, (found_state, wanted) in states.items():
        parent = read_manifest(root, id).parent
        links += bool(trial.links) and parent is not None
        if trial.links == "lc":
            before = None if parent is None else states[parent.id]
            problems = lc_bound.differences(found_state, wanted, before)
        else:
            log_state = trial.links == "logdelta"
            linked = bool(trial.links)
            problems = references.differences(found_state, wanted, None, linked, log_state)
        for difference in problems:
            life.problem(f"silent: {id}: {difference}")
    life.note("looked", [compared, links])


def _name(victims: tuple[int, ...]) -> str:
    if victims == (AGENT,):
        return "the agent"
    if victims[0] in WRITERS:
        return "a write process"
    return "both ranks" if len(victims) > 1 else f"rank {victims[0]}"


def _is_alive(pid: int) -> bool:
    """Return whether a process runs; reap an ended child of this process."""
    if pid <= 0:
        return False
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] not in "ZX"


def _kill(pid: int) -> bool:
    """Kill a process of this trial, if it still belongs to the trial."""
    with suppress(ProcessLookupError, OSError):
        if os.getpgid(pid) == os.getpgid(0) and _is_running(pid):
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def _is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat[stat.rindex(")") + 2] not in "ZX"
