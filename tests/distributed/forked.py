"""Run a module as a script in a fork that has TorchRec imported: a start takes 1 s, not 5."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.distributed.fork_server import ForkServer, server


class Forked:
    """A script's process, with what tests and recipes need of ``subprocess.Popen``.

    Args:
        words: the name of a module or a file, and its arguments.
        log: file that what it prints is added to.
        of: the server that forks it.
        environment: its variables, in place of this process's.
    """

    def __init__(
        self,
        *words: str,
        log: Path,
        of: ForkServer | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        log.touch()
        self._server = of or server(0)
        variables = dict(os.environ) if environment is None else environment
        self.pid = self._server.fork(__name__, json.dumps(words), log, variables)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""
        if self.returncode is None:
            self.returncode = self._server.status(self.pid)
        return self.returncode

    def wait(self, timeout: float = 600.0) -> int:
        """Wait for the end; return the exit status.

        Raises:
            subprocess.TimeoutExpired: the process does not end.
        """
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask the process to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process, and wait for its end."""
        self.send_signal(signal.SIGKILL)
        self.wait(60)


def main(argument: str) -> None:
    """Become the script; called in the fork."""
    module, *words = json.loads(argument)
    sys.argv = [module, *words]
    if module.endswith(".py"):
        runpy.run_path(module, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
