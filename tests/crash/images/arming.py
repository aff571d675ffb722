"""Have a process kill itself at a chosen point of what the package does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

from tests.crash.images import kills as plans
from tests.crash.images.board import Board
from tests.crash.images.kills import RANKS, Kill
from torchrec_checknrun.memory import descent, image, shard_memory, step_journal
from torchrec_checknrun.recovery import held_restore, partial_recovery
from torchrec_checknrun.run import saver
from torchrec_checknrun.save.commit import CheckpointWriter
from torchrec_checknrun.save.plan import GlobalPlan

_OWNERS = {
    "RankImage": image.RankImage,
    "ShardMemory": shard_memory.ShardMemory,
    "StepJournal": step_journal.StepJournal,
    "KeptDescent": descent.KeptDescent,
    "HeldRestore": held_restore.HeldRestore,
    "Saver": saver.Saver,
    "LostRank": partial_recovery.LostRank,
}


def arm(kill: Kill, board: Board) -> None:
    """Replace what the kill is to happen in; a kill at a moment is the parent's."""

    def die() -> None:
        board.fire()
        if kill.who == plans.BOTH:
            for other in range(RANKS):
                if board.pid(other) not in (0, os.getpid()):
                    os.kill(board.pid(other), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def is_due() -> bool:
        return board.step_begun(kill.rank) >= kill.step

    if kill.kind == plans.BACKWARD:
        _in_backward(kill.delay, is_due, board.fire)
    elif kill.kind in (plans.UNCOMMITTED, plans.UNHEARD):
        _around_commit(kill.kind == plans.UNHEARD, kill.step, die)
    elif kill.kind == plans.RECOVERY:
        owner, name = kill.point.split(".")
        _around(_OWNERS[owner], name, kill.after, die)


def _in_backward(delay: float, is_due: Callable[[], bool], fire: Callable[[], None]) -> None:
    """Have a process of its own kill this one: a thread would wait until Python is free."""
    append = step_journal.StepJournal.append
    reading, writing = os.pipe()
    victim = os.getpid()
    if os.fork() == 0:
        os.close(writing)
        with suppress(OSError):  # as root: on a busy machine others would delay the kill
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        if os.read(reading, 1):
            end = time.perf_counter() + delay
            while time.perf_counter() < end:
                pass
            os.kill(victim, signal.SIGKILL)
        os._exit(0)
    os.close(reading)

    def append_and_die(journal: Any, *arguments: Any) -> None:
        append(journal, *arguments)
        if is_due():
            fire()
            os.write(writing, b"!")

    _replace(step_journal.StepJournal, "append", append_and_die)


def _around_commit(after: bool, step: int, die: Callable[[], None]) -> None:
    """Die at a differential checkpoint, whose rows no later full one makes good."""
    commit = CheckpointWriter.commit

    def commit_and_die(writer: Any, plan: GlobalPlan, summaries: Any) -> Any:
        is_due = plan.header.kind == "differential" and (plan.header.step or 0) >= step
        made = commit(writer, plan, summaries) if after or not is_due else None
        if is_due:
            time.sleep(0.02)  # training goes on meanwhile
            die()
        return made

    _replace(CheckpointWriter, "commit", commit_and_die)


def _around(owner: Any, name: str, after: bool, die: Callable[[], None]) -> None:
    own = getattr(owner, name)

    def call_and_die(*arguments: Any, **named: Any) -> Any:
        if after:
            own(*arguments, **named)
        die()

    _replace(owner, name, call_and_die)


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    mock.patch.object(owner, name, function).start()
