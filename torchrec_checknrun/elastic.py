"""Join the process group in every attempt of a job that torchrun restarts.

torchrun's agent keeps one key-value store for all attempts. ``init_process_group`` of PyTorch lets
gloo publish addresses there under names that all attempts share, so a restarted worker may find its
dead predecessor's address and fail (``connectFullMesh … connection refused``) or hang. Here every
attempt gets names of its own.
"""

from __future__ import annotations

import os
import secrets
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

DEFAULT_TIMEOUT = timedelta(minutes=30)
_POLL = timedelta(milliseconds=200)
_NAMES = "torchrec_checknrun.elastic"


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: dist.Store | None = None,
    **options: Any,
) -> None:
    """Initialize the default process group with a store that no earlier attempt has used.

    Call this in place of ``torch.distributed.init_process_group`` in a script that torchrun starts.
    A process that no launcher started (no ``RANK`` in the environment) gets a group of its own.
    Where the ranks meet in a way of the program's own, torch's function is called as it is.

    Args:
        backend: as of ``torch.distributed.init_process_group``; None: gloo, and NCCL beside it
            where CUDA is available.
        init_method, store: the program's own meeting place; None or ``"env://"``: the launcher's.
        timeout: how long this call and later collectives wait for the other ranks; None: half an
            hour.
        world_size, rank: -1: those that the launcher tells.
        options: all else that ``torch.distributed.init_process_group`` takes, such as
            ``device_id``.

    Raises:
        torch.distributed.DistError: another rank did not come in time, or the store is gone.
    """
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if timeout is None:
        timeout = DEFAULT_TIMEOUT
    elsewhere = store is not None or init_method not in (None, "env://")
    if not elsewhere and rank == -1 and "RANK" not in os.environ:
        store, rank, world_size = dist.HashStore(), 0, 1
    elif not elsewhere and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        rank = int(os.environ["RANK"]) if rank == -1 else rank
        world_size = int(os.environ["WORLD_SIZE"]) if world_size == -1 else world_size
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        agents = dist.TCPStore(address, port, is_master=False, timeout=timeout)
        store = attempt_store(agents, rank, world_size, timeout)
    # Else rank 0 opens a store at MASTER_PORT, which ends with the attempt.
    dist.init_process_group(
        backend,
        init_method if elsewhere or store is None else None,
        timeout=timeout,
        world_size=world_size,
        rank=rank,
        store=store,
        **options,
    )


def attempt_store(
    store: dist.Store, rank: int, world_size: int, timeout: timedelta = DEFAULT_TIMEOUT
) -> dist.Store:
    """Return a view of a store whose keys only the living ranks of this attempt know.

    torchrun's restart count does not name an attempt: agents on several nodes count differently,
    since a node whose workers were restarted because of another node's failure does not count. So
    rank 0 draws a name and hands the name to each rank in answer to a question that this rank's
    process has just asked. Answers to dead processes' questions reach nobody.

    Args:
        store: outlives attempts; the same for all ranks.
        timeout: how long to wait for rank 0, or for the others.
    """
    shared = dist.PrefixStore(_NAMES, store)
    if rank != 0:
        question = secrets.token_hex(8)
        shared.set(f"question/{rank}", question)
        shared.wait([f"answer/{question}"], timeout)
        name = shared.get(f"answer/{question}").decode()
        shared.set(f"{name}/{rank}", "heard")
        return dist.PrefixStore(name, store)
    name = f"attempt-{secrets.token_hex(8)}"
    for other in range(1, world_size):
        shared.wait([f"question/{other}"], timeout)
        _answer(shared, other, name, timeout)
    return dist.PrefixStore(name, store)


def _answer(shared: dist.Store, rank: int, name: str, timeout: timedelta) -> None:
    """Answer a rank's newest question until this rank has heard the name."""
    answered = ""
    waited = timedelta()
    while True:
        question = shared.get(f"question/{rank}").decode()
        if question != answered:
            shared.set(f"answer/{question}", name)
            answered = question
        try:
            shared.wait([f"{name}/{rank}"], _POLL)
            return
        except dist.DistStoreError:
            waited += _POLL
            if waited >= timeout:
                raise
