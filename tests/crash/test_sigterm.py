"""On a real SIGTERM all ranks save at one step, and nobody waits for the dead."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.crash import preempted
from tests.crash.save_sweep import alone
from tests.distributed.forked import Forked
from tests.distributed.on_write import build, differences
from tests.distributed.states import gather
from torchrec_checknrun.schedule.preemption import EXIT_CODE

GIVES_UP_SECONDS = preempted.GRACE_SECONDS / 2
"""Less than the grace time that ranks here would wait; two seconds on an idle machine."""


class Job:
    """A job of ranks in processes of their own; this process keeps the store, and outlives them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Forked] = []
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(
        self, run: Callable[..., None], ranks: int = 2, port: int | None = None, **more: Any
    ) -> None:
        given = {"world_size": ranks, "port": port or self._store.port, "folder": str(self.folder)}
        arguments = json.dumps({**given, **more})
        for rank in range(ranks):
            words = ("tests.crash.preempted", run.__name__, str(rank), arguments)
            self.processes.append(Forked(*words, log=self.folder / f"log-{rank}"))
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
        self.processes[rank].send_signal(number)

    def end(self, rank: int, seconds: float = 60) -> tuple[float, int]:
        """Wait for a rank; return the seconds until its end, and its exit status."""
        started = time.monotonic()
        status = self.processes[rank].wait(seconds)
        return time.monotonic() - started, status

    def stop(self) -> None:
        for process in self.processes:
            process.kill()


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
    log = tmp_path / "log"
    words = ("--standalone", "--nproc-per-node=2", "-m", "tests.crash.preempted", str(tmp_path))
    status = Forked("tests.distributed.forked_torchrun", *words, log=log).wait(120)
    ended = time.time()
    assert status != 0
    assert "only 1 of 2 ranks answer after SIGTERM" in log.read_text()
    killed = float((tmp_path / "rank-1").read_text().split()[-1])
    assert ended - killed <= GIVES_UP_SECONDS
    assert (tmp_path / "rank-0").read_text() == "ready\n"


def test_while_a_hook_waits(tmp_path: Path) -> None:
    """Save once the hook goes on, within the grace time."""
    root, log = tmp_path / "root", tmp_path / "log"
    run = Forked("tests.crash.terminated", str(root), log=log)
    assert run.wait(200) == 128 + signal.SIGTERM, log.read_text()
    *_, trained = re.findall(r"^trained (\d+)$", log.read_text(), re.MULTILINE)
    assert len(list(root.glob("*/manifest.json"))) == 2
    with alone():
        job = build()
        job.train(int(trained))
        assert differences(root, gather(job)) == []
