"""Run a module as a script in a fork that has TorchRec imported: a start takes 1 s, not 5."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.distributed.fork_server import servers


class Forked:
    """A script's process, with a little of ``subprocess.Popen``.

    Args:
        words: the module's name, and its arguments.
        log: file that gets what it prints.
    """

    def __init__(self, *words: str, log: Path) -> None:
        log.touch()
        self._server, *_ = servers()
        self.pid = self._server.fork(__name__, json.dumps(words), log, dict(os.environ))

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""
        return self._server.status(self.pid)

    def wait(self, timeout: float) -> int:
        """Wait for the end; return the exit status."""
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            assert time.monotonic() < end, f"process {self.pid} does not end"
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process, and wait for its end."""
        self.send_signal(signal.SIGKILL)
        self.wait(60)


def main(argument: str) -> None:
    """Become the script; called in the fork."""
    module, *words = json.loads(argument)
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
