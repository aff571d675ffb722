"""Keep workers: start them once per number of ranks, send them one case after another.

Each is a process with the environment that torchrun gives to a rank. A case that fails or hangs
fails its own test; the workers are replaced for the next one.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.distributed.fork_server import SERVERS, START_SECONDS, ForkServer, server

WORKER = "tests.distributed.worker"
GRACE_SECONDS = 3.0
"""Time that the other ranks get to answer after one has failed."""


class CaseFailed(Exception):
    """A case raised on some rank, hung, or killed a worker; the message has the tracebacks."""


class WorkerPool:
    """A pool of ``world_size`` processes that run the same function together.

    Args:
        worker: the module that every process is.
    """

    def __init__(self, world_size: int, worker: str = WORKER) -> None:
        self.world_size = world_size
        self._worker = worker
        self._store: dist.TCPStore | None = None
        self._servers: list[ForkServer] = []
        self._connections: list[socket.socket] = []
        self._pids: list[int] = []
        self._folder = tempfile.TemporaryDirectory(prefix="workers-")
        self._starts = 0

    def run(
        self, function: Callable[..., Any], *, timeout: float = 180.0, **arguments: Any
    ) -> list[Any]:
        """Call a module's function with JSON arguments on all ranks; return their JSON results.

        Raises:
            CaseFailed: the case raised, or did not end in time, on some rank.
        """
        if self._store is None:
            self._start()
        case = {
            "module": function.__module__,
            "function": function.__qualname__,
            "arguments": arguments,
        }
        for connection in self._connections:
            connection.sendall(json.dumps(case).encode() + b"\n")
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.world_size and time.monotonic() < deadline:
            missing = [c for r, c in enumerate(self._connections) if r not in answers]
            left = max(0.0, deadline - time.monotonic())
            for ready in select.select(missing, [], [], left)[0]:
                rank = self._connections.index(ready)
                answers[rank] = _receive(ready) or {"error": "the worker died"}
                if "error" in answers[rank]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        for rank in range(self.world_size):
            answers.setdefault(rank, {"error": f"no answer (in {timeout:g} s, or after a failure)"})
        errors = [f"rank {r}: {a['error']}" for r, a in sorted(answers.items()) if "error" in a]
        if errors:
            self.stop()
            raise CaseFailed("\n".join([f"{function.__qualname__}({arguments})", *errors]))
        return [answers[rank]["result"] for rank in range(self.world_size)]

    def stop(self) -> None:
        """Kill the workers; the next case gets new ones."""
        for connection in self._connections:
            connection.close()
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._store, self._servers, self._connections, self._pids = None, [], [], []

    def _start(self) -> None:
        self._starts += 1
        folder = Path(self._folder.name)
        address, log = str(folder / f"socket{self._starts}"), folder / f"log{self._starts}"
        log.touch()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            listener.settimeout(START_SECONDS)
            try:
                # All start before one is waited for.
                self._servers = [server(n) for n in range(min(SERVERS, self.world_size))]
                for rank in range(self.world_size):
                    parent = self._servers[rank % SERVERS]
                    environment = self._environment(rank, self._store.port)
                    self._pids.append(parent.fork(self._worker, address, log, environment))
                found = [listener.accept()[0] for _ in range(self.world_size)]
            except OSError as error:
                self.stop()
                text = log.read_text(errors="replace")
                raise CaseFailed(f"the workers don't start: {error!r}\n{text[-4000:]}") from error
        hellos = {connection: _receive(connection) for connection in found}
        self._connections = sorted(found, key=lambda connection: hellos[connection]["rank"])

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        """Return what torchrun gives to a rank on one node."""
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "ROLE_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": f"{Path(self._folder.name).name}-{self._starts}",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        }


def _receive(connection: socket.socket) -> dict[str, Any]:
    """Receive the next message; return an empty one if the worker is gone."""
    data = b""
    with suppress(OSError):
        while not data.endswith(b"\n"):
            part = connection.recv(1 << 16)
            if not part:
                return {}
            data += part
    message: dict[str, Any] = json.loads(data) if data.endswith(b"\n") else {}
    return message
