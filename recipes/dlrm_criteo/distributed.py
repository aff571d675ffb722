"""The process group of a job that is killed and restarted: rendezvous, clean exit, quick failure.

Three things go wrong with torchrun and gloo out of the box, and each looks like a hang: after a
restart the workers find their dead predecessors' addresses in the agent's store, which outlives
them; a rank that fails can wait, while it exits, for transfers that its peers will never finish;
and a rank that finishes early tears down connections that the others still use.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Worker:
    """Who this process is in the job."""

    rank: int
    world_size: int
    attempt: int  # how often torchrun has restarted the workers
    device: torch.device


@contextmanager
def process_group(timeout_seconds: float) -> Iterator[Worker]:
    """The default process group, for torchrun's workers or for one process without torchrun.

    When the body raises, a worker prints the error and exits at once, waiting for nobody; torchrun
    ends the others. A SystemExit (SIGTERM's, say) gives the exit status.
    """
    worker = _init_process_group(timedelta(seconds=timeout_seconds))
    try:
        yield worker
    except BaseException as error:
        if worker.world_size == 1:
            dist.destroy_process_group()
            raise
        status = 1
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            status = error.code
        else:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # interpreter shutdown would join gloo's threads, which wait for the peers
    # Nobody leaves while a peer may still need its connections.
    dist.barrier()
    dist.destroy_process_group()


def _init_process_group(timeout: timedelta) -> Worker:
    environ = os.environ
    if "RANK" not in environ:  # not started by torchrun or the like
        worker = Worker(0, 1, 0, _device(0))
        store: dist.Store | None = dist.HashStore()
    else:
        worker = Worker(
            rank=int(environ["RANK"]),
            world_size=int(environ["WORLD_SIZE"]),
            attempt=int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
            device=_device(int(environ.get("LOCAL_RANK", 0))),
        )
        store = _agent_store(worker, timeout)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if worker.device.type == "cuda" else "gloo",
        store=store,
        rank=worker.rank,
        world_size=worker.world_size,
        timeout=timeout,
    )
    return worker


def _agent_store(worker: Worker, timeout: timedelta) -> dist.Store | None:
    """The store that torchrun's agent keeps over restarts, under a name of this attempt's own."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None  # nobody keeps a store: init_process_group makes one at MASTER_ADDR:MASTER_PORT
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timeout,
    )
    return dist.PrefixStore(f"attempt{worker.attempt}", store)


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise RuntimeError(
            f"local rank {local_rank} has no GPU of its own: this machine has "
            f"{torch.cuda.device_count()}; lower --nproc_per_node, or hide the GPUs with "
            "CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
