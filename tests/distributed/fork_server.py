"""Fork worker processes from one that has imported TorchRec: a start takes milliseconds.

Started by ``python -m tests.distributed.fork_server SOCKET``. Nothing but imports happens before a
fork: no thread, no group, no generator is used, so that a fork knows as little as a new process. A
fork has the hash seed of its server, so neighbouring ranks are forked from different servers: an
order of a set that differs between ranks must show in the tests as well.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).parents[2]
SERVERS = 2
START_SECONDS = 240.0
"""Seconds for the imports, on a busy machine."""
IMPORTED = (
    *("pytest", "hypothesis", "tests.distributed.small_job", "tests.distributed.zoo"),
    "torch.distributed.optim",  # compiles TorchScript for a second, where TorchRec first needs it
)
PR_SET_PDEATHSIG = 1
RUNNING = 1 << 16
"""Stands for the status of a fork that has not ended."""


class ForkServer:
    """A process that forks others; it ends, and they with it, when this object is dropped.

    Args:
        here: it is a fork of this process, which has imported TorchRec and has no threads.
    """

    def __init__(self, here: bool = False) -> None:
        mine, its = socket.socketpair()
        self._folder = tempfile.TemporaryDirectory(prefix="fork-server-")
        self._log = Path(self._folder.name) / "log"
        self._log.touch()
        with its:
            self.pid = self._fork_here(mine, its) if here else self._spawn(its)
        mine.settimeout(START_SECONDS)
        self._socket = mine
        self._answers = mine.makefile("rb")
        self._asking = threading.Lock()

    def _spawn(self, its: socket.socket) -> int:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(its.fileno())],
                cwd=REPOSITORY,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
                pass_fds=[its.fileno()],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self._process.pid

    def _fork_here(self, mine: socket.socket, its: socket.socket) -> int:
        if (pid := os.fork()) == 0:
            code = 1
            try:
                mine.close()  # it ends when the other process has closed its own
                os.setsid()
                main(its.detach())
                code = 0
            except BaseException:
                self._log.write_text(traceback.format_exc())
            finally:
                os._exit(code)
        return pid

    def fork(self, module: str, argument: str, log: Path, environment: dict[str, str]) -> int:
        """Call ``main(argument)`` of a module in a new process; return its process id."""
        request = {"module": module, "argument": argument, "log": str(log), "env": environment}
        return self._ask(request)

    def status(self, pid: int) -> int | None:
        """Return the exit status of a fork, negative for a signal; None while it runs."""
        status = self._ask({"status of": pid})
        return None if status == RUNNING else status

    def close(self) -> None:
        """Kill all forks, and wait for the end of the server, a child of this process."""
        self._answers.close()
        self._socket.close()
        os.waitpid(self.pid, 0)

    def _ask(self, request: dict[str, Any]) -> int:
        with self._asking:
            return self._asked(request)

    def _asked(self, request: dict[str, Any]) -> int:
        answer = b""
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            answer = self._answers.readline()
            return int(answer)
        except (OSError, ValueError) as error:
            text = self._log.read_text(errors="replace")
            raise OSError(f"the fork server doesn't answer: {error!r}\n{text[-4000:]}") from error
        finally:
            if not answer:
                server.cache_clear()  # it may still answer: the next start gets new servers


@cache
def server(number: int) -> ForkServer:
    """Start one of this process's servers, unless it runs; return it."""
    assert number < SERVERS
    return ForkServer()


def main(descriptor: int) -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
    with socket.socket(fileno=descriptor) as connection:
        requests = connection.makefile("rb")
        ended: dict[int, int] = {}
        for line in requests:
            ended |= _bury()
            request = json.loads(line)
            if "status of" in request:
                answer = ended.get(request["status of"], RUNNING)
            else:
                answer = os.fork()
                if answer == 0:
                    os.close(descriptor)
                    _become(request)
                ended.pop(answer, None)  # of an earlier process of this number
            connection.sendall(f"{answer}\n".encode())


def _bury() -> dict[int, int]:
    """Reap the forks that have ended; return their exit statuses."""
    found: dict[int, int] = {}
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    except ChildProcessError:
        pass
    return found


def _become(request: dict[str, Any]) -> None:
    """Turn a fork into the process asked for; end with it."""
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        with open(request["log"], "ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.environ.clear()
        os.environ.update(request["env"])
        np.random.seed()  # as in a new process; Python's own generator does so at each fork
        importlib.import_module(request["module"]).main(request["argument"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]))
