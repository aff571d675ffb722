"""Lose one of two nodes, each with a network and a shared memory of its own: its peers have copies.

A node is a network namespace with a mount of its own on /dev/shm, which needs root and the ``ip``
command; without these the test is skipped.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.fork_server import REPOSITORY
from torchrec_checknrun.native import has_extension

pytestmark = pytest.mark.skipif(not has_extension(), reason="the extension was not built")

PORT = 29431


class Nodes:
    """Two nodes.

    Args:
        memory: a folder in shared memory, of which each node has a part as its own.
    """

    def __init__(self, memory: Path) -> None:
        self._memory, name = memory, secrets.token_hex(3)
        self._names = [f"ck{name}{node}" for node in range(2)]

    def make(self) -> None:
        for node, name in enumerate(self._names):
            self.memory(node).mkdir()
            _ip("netns", "add", name)
        one, other = self._names
        _ip(
            *("link", "add", "eth0", "netns", one, "type", "veth"),
            *("peer", "eth0", "netns", other),
        )
        for node, name in enumerate(self._names):
            _ip("-n", name, "addr", "add", f"10.77.0.{node + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")

    def memory(self, node: int) -> Path:
        return self._memory / str(node)

    def lose(self, node: int) -> None:
        """Lose all that a node had in memory."""
        shutil.rmtree(self.memory(node))
        self.memory(node).mkdir()

    def live(self, folder: Path, lost: list[int] | None) -> list[tuple[int, str]]:
        """Run a life of two ranks on each node; return how torchrun has ended on each."""
        log = [(folder / f"log-{node}").open("w+") for node in range(2)]
        commands = [
            subprocess.Popen(
                self._command(node, folder, lost),
                cwd=REPOSITORY,
                env=_environment(),
                stdout=log[node],
                stderr=subprocess.STDOUT,
            )
            for node in range(2)
        ]
        try:
            codes = [command.wait(240) for command in commands]
        finally:
            for command in commands:  # the program itself, after three exec: it ends its ranks
                command.terminate()
                command.wait(60)
        return [(code, Path(file.name).read_text()) for code, file in zip(codes, log, strict=True)]

    def _command(self, node: int, folder: Path, lost: list[int] | None) -> list[str]:
        options = [
            *("--nnodes=2", f"--node-rank={node}", "--nproc-per-node=2", "--max-restarts=0"),
            *("--master-addr=10.77.0.1", f"--master-port={PORT}"),
        ]
        program = ["-m", "tests.distributed.two_nodes", str(folder), json.dumps(lost)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *options, *program]
        enter = ["ip", "netns", "exec", self._names[node], "unshare", "--mount"]
        mount = f'mount --bind {self.memory(node)} /dev/shm && exec "$@"'
        return [*enter, "sh", "-c", mount, "node", *torchrun]

    def end(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _environment() -> dict[str, str]:
    own = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    return {**os.environ, **own}


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with tempfile.TemporaryDirectory(prefix="checknrun-test-", dir="/dev/shm") as memory:
        made = Nodes(Path(memory))
        try:
            made.make()
        except (OSError, subprocess.CalledProcessError) as error:
            made.end()
            pytest.skip(f"no network namespaces here: {error}")
        yield made
        made.end()


@pytest.mark.slow  # test_peer_copies.py loses machines without starting torchrun
def test_a_lost_nodes_ranks_read_nothing_from_the_storage(nodes: Nodes, tmp_path: Path) -> None:
    for code, log in nodes.live(tmp_path, None):
        assert code != 0
        assert "SIGKILL" in log, log[-3000:]
    for node in range(2):  # each holds the other's copies
        found = {path.parent.parent.name[0] for path in nodes.memory(node).glob("*/held/*/*/*.bin")}
        assert found == ({"2", "3"} if node == 0 else {"0", "1"})
    nodes.lose(1)
    for code, log in nodes.live(tmp_path, [2, 3]):
        assert code == 0, log[-3000:]
    for rank in range(4):
        read, sources, step = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert (read, step) == (0, 11)
        assert sources == ["images", "images", "peer", "peer"]
