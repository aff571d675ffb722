"""Fork a child for each piece of work from a process that has imported and warmed up everything.

Importing TorchRec takes seconds, forking takes milliseconds. The forking process must have no
threads and no process groups.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import selectors
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

_PR_SET_CHILD_SUBREAPER = 36
_TAIL = 3000
"""Characters of a child's output to show when the child fails."""


def child(act: Callable[[], object], log: Path) -> int:
    """Fork a process that runs ``act`` and ends with it; return its process number.

    Args:
        log: gets its output, and its threads' stacks upon SIGUSR1.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _run_and_exit(act, log)
    return pid


def _run_and_exit(act: Callable[[], object], log: Path) -> NoReturn:
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.register(signal.SIGUSR1, file=2)
        act()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def adopt_orphans() -> None:
    """Make the processes that a killed child leaves behind this process's own children."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def tail(log: Path) -> str:
    """Return the end of a process's output."""
    return log.read_text(errors="replace")[-_TAIL:] if log.exists() else ""


@dataclass
class _Running(Generic[T]):
    """A running child and its piece."""

    piece: T
    pid: int
    descriptor: int
    folder: Path
    deadline: float
    answer: bytes = b""


def run_all(
    pieces: Sequence[T],
    act: Callable[[T, Path], Any],
    processes: int,
    seconds: Callable[[T], float],
) -> Iterator[tuple[T, Any, str]]:
    """Run every piece in a process of its own, several at once; yield them as they end.

    Args:
        act: called in the child with the piece and an empty folder; must return a JSON value.
        seconds: time limit of a piece, after which its process and descendants are killed.

    Yields:
        The piece, what ``act`` returned (None if it did not), and what went wrong, if anything.
    """
    running: list[_Running[T]] = []
    waiting = list(reversed(pieces))
    selector = selectors.DefaultSelector()
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                started = _start(waiting.pop(), act, seconds)
                running.append(started)
                selector.register(started.descriptor, selectors.EVENT_READ, started)
            ended: list[_Running[T]] = []
            for key, _ in selector.select(timeout=0.2):
                data = os.read(key.fd, 1 << 20)
                key.data.answer += data
                if not data:
                    ended.append(key.data)
            late = [one for one in running if time.monotonic() > one.deadline]
            for one in dict.fromkeys([*map(id, ended), *map(id, late)]):
                done = next(each for each in running if id(each) == one)
                running.remove(done)
                selector.unregister(done.descriptor)
                yield _end(done, hung=not any(done is each for each in ended))
    finally:
        for one_left in running:
            _kill_session(one_left.pid)


def _start(piece: T, act: Callable[[T, Path], Any], seconds: Callable[[T], float]) -> _Running[T]:
    folder = Path(tempfile.mkdtemp(prefix="campaign-"))
    reading, writing = os.pipe()

    def work() -> None:
        os.setsid()
        os.close(reading)
        (folder / "work").mkdir()
        answer = json.dumps(act(piece, folder / "work")).encode()
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(answer)

    pid = child(work, folder / "log")
    os.close(writing)
    return _Running(piece, pid, reading, folder, time.monotonic() + seconds(piece))


def _end(one: _Running[T], hung: bool) -> tuple[T, Any, str]:
    problem = ""
    if hung:
        with suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGUSR1)
        time.sleep(0.3)
        problem = "it hung"
    _kill_session(one.pid)
    _, status = os.waitpid(one.pid, 0)
    os.close(one.descriptor)
    answer = None
    try:
        answer = json.loads(one.answer) if not hung else None
    except ValueError:
        problem = f"it ended without an answer (status {status})"
    if problem:
        problem += f"; its output ends in:\n{tail(one.folder / 'log')}"
    shutil.rmtree(one.folder, ignore_errors=True)
    return one.piece, answer, problem


def _kill_session(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def warm_up(act: Callable[[], object]) -> None:
    """Run slow first uses once in this process, and freeze the objects made by them.

    Args:
        act: runs with a process group of one rank that has no threads.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        act()
    finally:
        dist.destroy_process_group()
    gc.collect()
    gc.freeze()
