"""On a real SIGTERM all ranks save at one step, and nobody waits for the dead."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.crash import preempted
from torchrec_checknrun.schedule.preemption import EXIT_CODE

REPOSITORY = Path(__file__).parents[2]
GIVES_UP_SECONDS = preempted.GRACE_SECONDS / 2
"""Less than the grace time that ranks here would wait; two seconds on an idle machine."""


class Job:
    """A job of ranks in processes of their own; this process keeps the store, and outlives them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[BaseProcess] = []
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(
        self, run: Callable[..., None], ranks: int = 2, port: int | None = None, **more: Any
    ) -> None:
        # Each is a fork of a process that has imported torch.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.crash.preempted"])
        for rank in range(ranks):
            arguments = (rank, ranks, port or self._store.port, str(self.folder))
            process = context.Process(target=run, args=arguments, kwargs=more)
            process.start()
            self.processes.append(process)
        for rank in range(ranks):
            self.wait_for(rank, "ready")

    def said(self, rank: int) -> list[str]:
        file = self.folder / f"rank-{rank}"
        return file.read_text().splitlines() if file.exists() else []

    def wait_for(self, rank: int, what: str) -> None:
        deadline = time.monotonic() + 60
        while what not in self.said(rank):
            assert time.monotonic() < deadline, f"rank {rank} is not {what}"
            time.sleep(0.005)

    def kill(self, rank: int, number: signal.Signals = signal.SIGTERM) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def end(self, rank: int, seconds: float = 60) -> tuple[float, int | None]:
        """Join a rank; return the seconds until its end, and its exit code."""
        started = time.monotonic()
        self.processes[rank].join(seconds)
        return time.monotonic() - started, self.processes[rank].exitcode

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.stop()


@pytest.mark.parametrize("to", [[0, 1], [0], [1]])
def test_all_ranks_save_at_the_same_step(job: Job, to: list[int]) -> None:
    """Save on all ranks even where only one node's ranks get the signal."""
    job.start(preempted.train)
    for rank in to:
        job.kill(rank)
    assert [job.end(rank)[1] for rank in range(2)] == [EXIT_CODE] * 2
    assert job.said(0) == job.said(1)
    _, saves, unwound = job.said(0)
    assert re.fullmatch(r"saves \d+", saves)
    assert unwound == f"unwound by SystemExit({EXIT_CODE})"


def test_slow_steps_are_not_counted_ahead(job: Job) -> None:
    """Run the step that is running, and one more."""
    job.start(preempted.train, seconds=0.8)
    job.kill(0)
    assert [job.end(rank)[1] for rank in range(2)] == [EXIT_CODE] * 2
    assert job.said(0) == job.said(1)
    assert int(job.said(0)[1].removeprefix("saves ")) <= 3  # the signal comes in one of the first


def test_a_handler_of_the_application_decides(job: Job) -> None:
    job.start(preempted.go_on)
    job.kill(1)
    assert [job.end(rank)[1] for rank in range(2)] == [0, 0]
    assert job.said(0) == job.said(1)
    assert job.said(0)[2:] == [f"told [{signal.SIGTERM:d}]", "done"]


def test_no_step_comes_in_the_grace_time(job: Job) -> None:
    job.start(preempted.stuck, grace=1.0)
    job.kill(0)
    took, code = job.end(0)
    assert code == EXIT_CODE
    assert 0.9 < took < GIVES_UP_SECONDS
    assert job.end(1, GIVES_UP_SECONDS)[1] == EXIT_CODE
    assert job.said(0) == ["ready"]  # not unwound: the main thread is stuck


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_peer(job: Job, how: signal.Signals) -> None:
    job.start(preempted.stuck)
    job.kill(1, how)
    job.kill(0)
    took, code = job.end(0)
    assert code == EXIT_CODE
    assert took <= GIVES_UP_SECONDS


def test_a_lost_store(job: Job) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job.start(preempted.lose_the_store, port=port)
    job.kill(1, signal.SIGKILL)
    job.kill(0)
    took, code = job.end(0)
    assert code == EXIT_CODE
    assert took <= GIVES_UP_SECONDS


def test_a_peer_lost_in_the_grace_time(job: Job) -> None:
    """Lose a peer that answered the first roll call, and might have saved."""
    job.start(preempted.stuck)
    job.kill(0)
    job.kill(1)
    time.sleep(1.0)
    job.kill(1, signal.SIGKILL)
    took, code = job.end(0)
    assert code == EXIT_CODE
    assert took <= GIVES_UP_SECONDS


def test_a_peer_that_failed(job: Job) -> None:
    job.start(preempted.fail)
    assert job.end(1)[1] == 1
    job.kill(0)
    took, code = job.end(0)
    assert code == EXIT_CODE
    assert took <= GIVES_UP_SECONDS


def test_torchrun_ends_the_others_when_one_has_died(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    started = subprocess.run(
        [*torchrun, "--nproc-per-node=2", "-m", "tests.crash.preempted", str(tmp_path)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    ended = time.time()
    assert started.returncode != 0
    text = started.stdout
    assert "only 1 of 2 ranks answer after SIGTERM" in text
    killed = float((tmp_path / "rank-1").read_text().split()[-1])
    assert ended - killed <= GIVES_UP_SECONDS
    assert (tmp_path / "rank-0").read_text() == "ready\n"
