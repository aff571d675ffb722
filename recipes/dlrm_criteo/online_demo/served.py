"""Ask the server of the followed model, which runs in a process of its own."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from recipes.dlrm_criteo.job import start_script
from recipes.dlrm_criteo.samples import Samples

_HOST = "127.0.0.1"
_TAIL_LINES = 40


class Answer(NamedTuple):
    """Probabilities, and the version of the model that gave all of them."""

    predictions: np.ndarray  # float64 (n,)
    id: str
    step: int


class ServerFailed(RuntimeError):
    """The server ended, or answered with an error."""


class Server:
    """A process of ``recipes.dlrm_criteo.serve``; as a context manager it leaves none behind.

    Args:
        run_dir: where its output goes, to ``server.log``.
        overrides: of the server; the port is chosen here.
        module: the server; tests replace it.
    """

    def __init__(
        self,
        run_dir: Path,
        overrides: Sequence[str],
        module: str = "recipes.dlrm_criteo.serve",
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._log = run_dir / "server.log"
        self.host = _HOST
        self.port = _free_port()
        self._process = start_script(module, *overrides, f"port={self.port}", log=self._log)
        self.pid = self._process.pid
        self._connections = threading.local()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def predict(self, samples: Samples) -> Answer:
        """Ask for the probabilities of clicks."""
        question = {"dense": samples.dense.tolist(), "ids": samples.sparse.tolist()}
        status, found = self._ask("POST", "/predict", json.dumps(question))
        if status != 200:
            raise ServerFailed(f"the server answered {status} to /predict: {found}")
        version = found["version"]
        return Answer(np.array(found["predictions"]), version["id"], version["step"])

    def version(self) -> dict[str, Any] | None:
        """Ask what is served; None before the first version, and before the server listens."""
        try:
            status, found = self._ask("GET", "/version")
        except OSError:
            if self._process.poll() is not None:
                tail = self._log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
                raise ServerFailed(
                    f"the server ended with exit status {self._process.returncode}:\n"
                    + "\n".join(tail)
                ) from None
            return None
        return found if status == 200 and found.get("id") else None

    def _ask(self, method: str, path: str, body: str | None = None) -> tuple[int, Any]:
        """Send a request on this thread's own connection; return status and content."""
        connection = getattr(self._connections, "open", None)
        if connection is None:
            connection = http.client.HTTPConnection(_HOST, self.port, timeout=60)
            self._connections.open = connection
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ConnectionError(f"{method} {path} on port {self.port}: {error!r}") from error
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port
