"""Run cases from pytest on one rank of a worker pool, and answer with their results.

Started by a worker pool, which calls ``main``. Each case gets a process group of its
own, so that one case's collectives and groups are nothing to the next.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import logging
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

CASE_TIMEOUT = timedelta(seconds=150)
"""The patience with a busy machine; less than a case has."""


def main(address: str) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    _send(connection, {"rank": rank, "pid": os.getpid()})
    cases: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_receive, args=(connection, cases), daemon=True).start()
    for number in itertools.count():
        case = cases.get()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"case{number}", store),
            rank=rank,
            world_size=world_size,
            timeout=CASE_TIMEOUT,
        )
        answer = _run(case)
        if "error" in answer:
            _send(connection, answer)
            os._exit(1)  # the ranks may be out of step now: pytest starts new ones
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()  # what the group held; each group left has a thread that wakes every 10 ms
        _send(connection, answer)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, cases: queue.Queue[dict[str, Any]]) -> None:
    """Queue cases; end the process when pytest is gone, also in the middle of a case."""
    for line in connection.makefile("rb"):
        cases.put(json.loads(line))
    os._exit(0)


def _run(case: dict[str, Any]) -> dict[str, Any]:
    try:
        function: Callable[..., Any] = getattr(
            importlib.import_module(case["module"]), case["function"]
        )
        _freeze_modules()
        return {"result": function(**case["arguments"])}
    except BaseException:
        return {"error": traceback.format_exc()}


_modules = 0


def _freeze_modules() -> None:
    """Exempt all that modules hold from the collection after each case.

    That collection is there for the case's own objects, and would go through all of TorchRec.
    """
    global _modules
    if len(sys.modules) > _modules:
        _modules = len(sys.modules)
        gc.freeze()
