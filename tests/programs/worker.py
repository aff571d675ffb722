"""Run programs in forks: each in a fresh process that has everything imported, and may be killed.

Started by a worker pool, which calls ``main``, once for all programs, since the imports take
longer than a program. Nothing but imports happens before a fork: no thread, no group, no
generator is used, so that a fork knows as little of the runs before it as a new process.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.programs import dlrm_schedule, quickstart, transformer, two_towers, variations

IMPORTED = (dlrm_schedule, quickstart, transformer, two_towers, variations)
PR_SET_PDEATHSIG = 1


def main(address: str) -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    _send(connection, {"rank": int(os.environ["RANK"]), "pid": os.getpid()})
    for number, line in enumerate(connection.makefile("rb")):
        _send(connection, {"result": _in_fork(number, json.loads(line))})


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _in_fork(number: int, case: dict[str, Any]) -> dict[str, Any]:
    """Return ``value``, or ``error`` with a traceback, or the ``signal`` that killed the fork."""
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
    with tempfile.TemporaryFile("w+") as answer:
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            json.dump(_run(number, case), answer)
            answer.flush()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code < 0:
            return {"signal": -code}
        answer.seek(0)
        result: dict[str, Any] = json.load(answer)
        return result


def _run(number: int, case: dict[str, Any]) -> dict[str, Any]:
    try:
        torch.set_num_threads(1)
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
        )
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"fork{number}", store),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=60),
        )
        function: Callable[..., Any] = getattr(
            importlib.import_module(case["module"]), case["function"]
        )
        value = function(**case["arguments"])
        dist.barrier()
        return {"value": value}
    except BaseException:
        return {"error": traceback.format_exc()}
