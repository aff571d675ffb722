"""Run an S3 server for tests, SeaweedFS on loopback, that can be killed and started again."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

KEY, SECRET = "checknrun-tests", "a-secret-that-must-not-leak"
ADMIN_KEY, ADMIN_SECRET = "checknrun-admin", "another-secret"
"""Credentials of the user who may make buckets."""
_START_SECONDS = 90.0
# Beside this Python, whether or not its environment is activated.
WEED = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


class Server:
    """A ``weed server`` with its data in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        ports = _free_ports(4)
        self._ports = dict(zip(("master", "volume", "filer", "s3"), ports, strict=True))
        self.url = f"http://127.0.0.1:{self._ports['s3']}"
        identities = [
            {
                "name": key,
                "credentials": [{"accessKey": key, "secretKey": secret}],
                "actions": ["Read", "Write", "List", *more],
            }
            for key, secret, more in ((KEY, SECRET, []), (ADMIN_KEY, ADMIN_SECRET, ["Admin"]))
        ]
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))
        (folder / "data").mkdir()

    def start(self) -> None:
        """Start the server; return when it answers."""
        assert WEED is not None, "SeaweedFS is not installed"
        command = [
            *(WEED, "server", "-s3", "-ip=127.0.0.1"),
            f"-dir={self._folder / 'data'}",
            f"-s3.config={self._folder / 's3.json'}",
            *(f"-{name}.port={port}" for name, port in self._ports.items()),
            *(f"-{name}.port.grpc={port + 10000}" for name, port in self._ports.items()),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"),
            "-master.volumeSizeLimitMB=64",
            "-volume.max=1000",  # a bucket takes seven
        ]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no S3 server: {(self._folder / 'log').read_text()[-3000:]}")
            time.sleep(0.2)

    def kill(self) -> None:
        """Kill the server as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self.url, timeout=2).close()
        except urllib.error.HTTPError as error:
            return error.code == 403  # the server answers, and wants credentials
        except OSError:
            return False
        return True


def _free_ports(count: int) -> list[int]:
    """Find ports below those of connections, with the one 10,000 above each free as well."""
    found: list[int] = []
    candidate = 18000 + time.time_ns() // 1000 % 3000
    while len(found) < count:
        candidate += 1
        try:
            for port in (candidate, candidate + 10000):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", port))
        except OSError:
            continue
        found.append(candidate)
    return found
