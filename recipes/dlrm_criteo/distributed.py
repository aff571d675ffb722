"""Set up the process group of a job that is killed and restarted: clean exit, quick failure.

Out of the box, two faults of torchrun and gloo look like a hang. A rank that fails can wait, while
exiting, for transfers that its peers will never finish; and a rank that finishes early tears down
connections that the others still use. A third fault, upon restarts, is solved by
``torchrec_checknrun.elastic``.
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

from torchrec_checknrun.elastic import init_process_group


@dataclass(frozen=True)
class Worker:
    """The role of this process in the job."""

    rank: int
    world_size: int
    attempt: int  # number of restarts by torchrun
    device: torch.device


@contextmanager
def process_group(timeout_seconds: float) -> Iterator[Worker]:
    """Join the default process group, as torchrun's worker or as one process without torchrun.

    When the body raises, a worker prints the error and exits at once, waiting for no peer; torchrun
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
    # Stay until no peer needs this rank's connections.
    dist.barrier()
    dist.destroy_process_group()


def _init_process_group(timeout: timedelta) -> Worker:
    environ = os.environ
    device = _device(int(environ.get("LOCAL_RANK", 0)))
    init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        timeout=timeout,
    )
    return Worker(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        attempt=int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
        device=device,
    )


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
