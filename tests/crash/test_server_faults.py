"""The recipe's server among faults: no answer is ever of a damaged or a mixed version."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.recipes.asked import PATIENCE, Server, some, train, wanted
from torchrec_checknrun.format.names import MANIFEST_NAME

SAMPLES = some(40)
STEPS = 10
HOUR = 3600.0


class Published:
    """A root to which the checkpoints of a run come one after the other."""

    def __init__(self, trained: Path, root: Path) -> None:
        self.root = root
        self._left = sorted(trained.glob("seq-*"))
        root.mkdir()

    def next(self) -> Path:
        """Copy the next one, files first, as a publisher does; return its folder."""
        path = self._left.pop(0)
        shutil.copytree(path, self.root / path.name, ignore=shutil.ignore_patterns(MANIFEST_NAME))
        shutil.copy2(path / MANIFEST_NAME, self.root / path.name)
        return self.root / path.name

    def is_answered(self, server: Server) -> None:
        """Check that answers are those of a model built anew from the newest whole version."""
        found = server.predict(SAMPLES)["predictions"]
        np.testing.assert_array_equal(found, wanted(self.root, SAMPLES))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    assert train(folder, STEPS) == STEPS
    assert len(list((folder / "checkpoints").glob("seq-*"))) == STEPS // 2
    return folder / "checkpoints"


@pytest.fixture
def published(trained: Path, tmp_path: Path) -> Published:
    return Published(trained, tmp_path / "root")


@pytest.fixture
def server(published: Published) -> Iterator[Server]:
    published.next()
    with Server(published.root) as server:
        server.wait_for(2)
        yield server


def wait_for_error(server: Server, part: str) -> dict[str, Any]:
    """Wait until the server tells an error; return its version."""
    until = time.monotonic() + PATIENCE
    while part not in ((version := json.loads(server.ask("GET", "/version")[1]))["error"] or ""):
        assert time.monotonic() < until, version
        time.sleep(0.05)
    found: dict[str, Any] = version
    return found


@pytest.mark.timeout(900)
def test_damage_storage_that_is_gone_and_clocks_apart(published: Published, server: Server) -> None:
    published.is_answered(server)
    # One that is damaged, and told; what is served stays, and is told to be behind.
    before = server.predict(SAMPLES)
    damaged = published.next() / "rank-00000.bin"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-60] + bytes([content[-60] ^ 1]) + content[-59:])
    version = wait_for_error(server, damaged.parent.name)
    assert (version["step"], version["lag_steps"]) == (2, 2)
    assert "dlrm_following_fails 1.0" in server.ask("GET", "/metrics")[1]
    assert server.predict(SAMPLES) == before
    damaged.write_bytes(content)
    assert server.wait_for(4)["error"] is None
    published.is_answered(server)

    # Storage that is gone for longer than several looks and pauses.
    elsewhere = published.root.with_name("elsewhere")
    published.root.rename(elsewhere)
    before = server.predict(SAMPLES)
    lags = []
    for _ in range(4):
        lags.append(wait_for_error(server, "no checkpoint any more")["lag_seconds"])
        assert server.predict(SAMPLES) == before
        time.sleep(0.3)
    assert lags == sorted(set(lags))
    elsewhere.rename(published.root)
    published.next()
    assert server.wait_for(6)["error"] is None
    published.is_answered(server)

    # A publisher whose clock, or whose store's, is an hour off, either way.
    for step, shift in ((8, -HOUR), (10, HOUR)):
        manifest = published.next() / MANIFEST_NAME
        os.utime(manifest, (time.time() + shift, time.time() + shift))
        version = server.wait_for(step)
        assert (version["error"], version["lag_steps"]) == (None, 0)
        assert 0 <= version["lag_seconds"] < HOUR / 2
        published.is_answered(server)


@pytest.mark.timeout(900)
def test_a_publisher_that_dies_before_its_manifest(
    published: Published, server: Server, trained: Path
) -> None:
    before = server.predict(SAMPLES)
    half = published.next()
    (half / MANIFEST_NAME).rename(half.parent / "manifest")  # as if it had never been put
    time.sleep(1.0)  # looks of the server
    version = json.loads(server.ask("GET", "/version")[1])
    assert (version["step"], version["lag_steps"], version["error"]) == (2, 0, None)
    assert server.predict(SAMPLES) == before
    # The next process goes on from what was committed: the run's folder, without the half one.
    again = published.root.with_name("again")
    shutil.copytree(trained.parent, again)
    for path in sorted((again / "checkpoints").glob("seq-*"))[1:]:
        shutil.rmtree(path)
    assert train(again, 4) == 4
    path = max((again / "checkpoints").glob("seq-*"))
    shutil.copytree(path, published.root / path.name)
    assert server.wait_for(4)["error"] is None
    published.is_answered(server)


@pytest.mark.timeout(900)
def test_killed_while_it_applies_a_version(published: Published) -> None:
    published.next()
    with Server(published.root, module="tests.crash.killed_server") as first:
        first.wait_for(2)
        published.is_answered(first)
        published.next()
        assert first.process.wait(PATIENCE) == -signal.SIGKILL
    files = {path for path in published.root.rglob("*") if path.is_file()}
    with Server(published.root) as second:
        second.wait_for(4)
        published.is_answered(second)
        published.next()
        second.wait_for(6)
        published.is_answered(second)
    assert files <= {path for path in published.root.rglob("*") if path.is_file()}
