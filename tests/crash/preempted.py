"""Run one rank of a job that gets SIGTERM: trains, or is stuck in C++, and reports its end.

Started by ``Forked`` with a function's name, its rank and its other arguments in JSON, or by
torchrun with a folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.schedule.schedule import Schedule
from torchrec_checknrun.schedule.triggers import OnSigterm

TIMEOUT = timedelta(seconds=60)
GRACE_SECONDS = 50.0
"""Long enough that a busy machine gives up before half of it."""


class Rank:
    """A rank that has joined the job; ``say`` appends to the file that the test reads."""

    def __init__(
        self, rank: int, world_size: int, port: int, folder: str, keeps_store: bool = False
    ) -> None:
        self._file = Path(folder) / f"rank-{rank}"
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=keeps_store, timeout=TIMEOUT, wait_for_workers=False
        )
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT
        )
        self.store = store
        self.ranks = Ranks(TIMEOUT)

    def say(self, what: str) -> None:
        with open(self._file, "a") as file:
            file.write(what + "\n")

    @contextlib.contextmanager
    def schedule(self, grace: float) -> Iterator[Schedule]:
        made = Schedule([OnSigterm(grace)], self.ranks)
        self.say("ready")
        try:
            yield made
        except BaseException as error:
            made.close(failed=True)
            self.say(f"unwound by {error!r}")
            raise
        made.close()


def train(rank: int, world_size: int, port: int, folder: str, seconds: float = 0.01) -> None:
    """Train steps with a collective each, until SIGTERM ends them."""
    job = Rank(rank, world_size, port, folder)
    with job.schedule(GRACE_SECONDS) as schedule:
        for step in range(1, 10_000):
            time.sleep(seconds)
            dist.all_reduce(torch.ones(1))
            if schedule.due(step):
                job.say(f"saves {step}")
                dist.barrier()
                schedule.end()


def go_on(rank: int, world_size: int, port: int, folder: str) -> None:
    """Train under a handler of the application, which stops the loop."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    job = Rank(rank, world_size, port, folder)
    with job.schedule(GRACE_SECONDS) as schedule:
        for step in range(1, 10_000):
            time.sleep(0.01)
            dist.all_reduce(torch.ones(1))
            if schedule.due(step):
                job.say(f"saves {step}")
                dist.barrier()
                schedule.end()
                job.say(f"told {told}")
                break
    dist.barrier()
    job.say("done")


def stuck(rank: int, world_size: int, port: int, folder: str, grace: float = GRACE_SECONDS) -> None:
    """Wait in C++, where no Python handler runs."""
    job = Rank(rank, world_size, port, folder)
    with job.schedule(grace):
        job.store.wait(["never"], TIMEOUT)


def lose_the_store(rank: int, world_size: int, port: int, folder: str) -> None:
    """Keep the store on rank 1; wait in another collective on the others."""
    job = Rank(rank, world_size, port, folder, keeps_store=rank == 1)
    elsewhere = dist.HashStore()
    with job.schedule(GRACE_SECONDS):
        elsewhere.wait(["never"], TIMEOUT)


def fail(rank: int, world_size: int, port: int, folder: str) -> None:
    """Raise on rank 1, which stays a while on its way out; wait on the others."""
    job = Rank(rank, world_size, port, folder)
    with job.schedule(GRACE_SECONDS):
        if rank == 1:
            raise RuntimeError("no more data")
        job.store.wait(["never"], TIMEOUT)


def die(folder: str) -> None:
    """Kill rank 1 from within once all are stuck, under torchrun."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    job = Rank(rank, world_size, int(os.environ["MASTER_PORT"]), folder)
    with job.schedule(GRACE_SECONDS):
        dist.barrier()
        if rank == 1:
            job.say(f"killed {time.time()}")
            os.kill(os.getpid(), signal.SIGKILL)
        job.store.wait(["never"], TIMEOUT)


def main(name: str, rank: str, arguments: str) -> None:
    run = {each.__name__: each for each in (train, go_on, stuck, lose_the_store, fail)}[name]
    run(int(rank), **json.loads(arguments))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        die(sys.argv[1])
    else:
        main(*sys.argv[1:])
