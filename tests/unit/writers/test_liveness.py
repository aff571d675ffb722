"""Judge the liveness of writers by the store's times, never by a host's clock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.console import Console
from torchrec_checknrun.errors import RootInUse
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers import liveness
from torchrec_checknrun.writers.claims import FOLDER, Claim, Holder, latest_claim
from torchrec_checknrun.writers.lease import Lease

FAR = Holder("another run", 0, "far", "another", 7, 7)


@pytest.fixture
def root(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path / "run")
    (folder / FOLDER).create()
    return folder


@pytest.fixture
def lease(root: Folder) -> Iterator[Lease]:
    made = Lease(root)
    yield made
    made.release()


def put(root: Folder, claim: Claim, age: float = 0.0) -> None:
    (root / FOLDER).put(claim.name, claim.to_bytes())
    then = time.time() - age
    os.utime(Path(root.url, FOLDER, claim.name), (then, then))


def acquire(lease: Lease) -> None:
    lease.acquire(lambda _: ())


def claims_only(root: Folder) -> bool:
    return all(name.startswith("epoch-") for name in (root / FOLDER).names())


@pytest.mark.parametrize("hours", [-9, 9])
def test_this_hosts_clock_is_not_asked(
    root: Folder, lease: Lease, monkeypatch: pytest.MonkeyPatch, hours: float
) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600 * hours)
    then = real() - 50
    put(root, Claim(1, FAR, earlier=()))
    os.utime(Path(root.url, FOLDER, "epoch-00000001.json"), (then, then))
    with pytest.raises(RootInUse, match=r"which renews its claim, and whose claim lasts for anoth"):
        acquire(lease)
    os.utime(Path(root.url, FOLDER, "epoch-00000001.json"), (then - 11, then - 11))
    acquire(lease)
    assert lease.claim.epoch == 2
    assert claims_only(root)


def test_a_claim_from_the_future(root: Folder, lease: Lease, console: Console) -> None:
    put(root, Claim(1, FAR, earlier=()), age=-3600)
    with pytest.raises(RootInUse, match=r"3[56]\d\d s in the future .*`checknrun unlock"):
        acquire(lease)
    put(root, Claim(1, FAR, earlier=()), age=-20)  # a small difference is not reported
    with pytest.raises(RootInUse, match="lasts for another 60 s"):
        acquire(lease)
    put(root, Claim(1, FAR, earlier=()), age=-3600)
    told = console.run("unlock", root)
    assert told.code == 2
    assert "process 7 on far" in told.out
    assert "its next save fails" in told.out
    with pytest.raises(RootInUse):
        acquire(lease)
    assert console.run("unlock", root, "--yes").code == 0
    acquire(lease)
    assert lease.claim.epoch == 3


def test_alive_without_progress(root: Folder, lease: Lease) -> None:
    put(root, Claim(1, FAR, earlier=(), idle=290.0), age=5)
    with pytest.raises(RootInUse, match="lasts for another 55 s"):
        acquire(lease)
    put(root, Claim(1, FAR, earlier=(), idle=296.0), age=5)
    with pytest.raises(RootInUse, match=r"has made no progress for 301 s.*`checknrun unlock"):
        acquire(lease)
    put(root, Claim(1, FAR, earlier=(), idle=296.0), age=61)
    acquire(lease)  # elsewhere, and not renewed any more


def test_a_holder_that_lives_here_is_never_replaced(
    root: Folder, lease: Lease, console: Console
) -> None:
    """Keep a holder with an old claim: a stopped process may continue at any time."""
    code = (
        "import sys; from torchrec_checknrun.store.folder import Folder\n"
        "from torchrec_checknrun.writers.lease import Lease\n"
        "lease = Lease(Folder(sys.argv[1])); lease.acquire(lambda _: ()); print(flush=True)\n"
        "sys.stdin.readline()\n"
        "try: lease.check()\n"
        "except Exception as error: print(type(error).__name__, error, flush=True)"
    )
    command = [sys.executable, "-c", code, root.url]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        try:
            os.kill(process.pid, signal.SIGSTOP)
            claim = latest_claim(root)
            assert claim is not None
            put(root, claim, age=100)
            with pytest.raises(RootInUse, match="is alive on this host: give this run a root of"):
                acquire(lease)
            with pytest.raises(RootInUse, match=r"a copy of the one that it writes to.* unlock"):
                acquire(lease)
            put(root, claim, age=4000)
            with pytest.raises(RootInUse, match=r"alive on this host, but has made no progress .*"):
                acquire(lease)
            done = console.run("unlock", root, "--yes")
            assert f"process {process.pid} on" in done.out
            acquire(lease)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        assert "RootInUse" in process.stdout.readline()


def test_free_roots_need_no_unlocking(root: Folder, lease: Lease, console: Console) -> None:
    assert "nobody has claimed it" in console.run("unlock", root, "--yes").out
    acquire(lease)
    lease.release()
    assert "has given the root up" in console.run("unlock", root, "--yes").out
    claim = latest_claim(root)
    assert claim is not None
    assert claim.epoch == 1


def test_progress_is_the_training_loops(root: Folder) -> None:
    lease = Lease(root, seconds=0.2)
    acquire(lease)

    def written() -> Claim:
        claim = latest_claim(root)
        assert claim is not None
        return claim

    deadline = time.monotonic() + 30
    while written().idle < 0.3:  # renewed, but without a step
        assert time.monotonic() < deadline
        time.sleep(0.02)
    idle = written().idle
    lease.progressed()
    while written().idle >= idle:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    lease.release()


class TestWithoutTimes:
    """Watch a claim for a whole lease in a store without times."""

    @pytest.fixture(autouse=True)
    def no_times(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Folder, "modified", lambda folder, name: None)

    def test_one_that_is_not_renewed(self, root: Folder, lease: Lease) -> None:
        put(root, Claim(1, FAR, seconds=0.4, earlier=()))
        began = time.monotonic()
        acquire(lease)
        assert time.monotonic() - began >= 0.4

    def test_one_that_is_renewed(self, root: Folder, lease: Lease) -> None:
        claim = Claim(1, FAR, seconds=20.0, earlier=())
        put(root, claim)
        timer = threading.Timer(0.5, lambda: put(root, replace(claim, renewals=1)))
        timer.start()
        with pytest.raises(RootInUse, match="which renews its claim"):
            acquire(lease)
        timer.join()

    def test_nobody_else_waits(self, root: Folder) -> None:
        claim = Claim(1, FAR, earlier=())
        put(root, claim)
        assert not liveness.standing_of(root, claim).free
        assert liveness.seems_alive(root, claim)


def test_memory_keeps_times() -> None:
    root = Folder("memory://tests/liveness")
    (root / FOLDER).put("x", b"")
    first = (root / FOLDER).modified("x")
    assert first is not None
    assert abs(first - time.time()) < 60
    assert (root / FOLDER).modified("y") is None
    assert not liveness.is_fresh(root, "x", seconds=-1)


class TestTemporaries:
    def test_those_of_killed_writers_go(self, root: Folder, lease: Lease) -> None:
        put(root, Claim(3, FAR, earlier=(), released=True))
        old, fresh = ".epoch-00000004.json.00000001", ".epoch-00000004.json.00000002"
        names = [old, fresh, ".epoch-00000003.json.00000003", "probe-0123456789abcdef"]
        for name in [*names, ".notes"]:
            (root / FOLDER).put(name, b"half")
        for name in (old, names[-1]):
            os.utime(Path(root.url, FOLDER, name), (0, 0))
        acquire(lease)
        left = [n for n in (root / FOLDER).names() if not n.startswith("epoch-")]
        assert left == [fresh, ".notes"]  # another writer may just have lost against this one

    def test_a_probe_goes_also_where_its_time_cannot_be_told(
        self, root: Folder, lease: Lease, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(folder: Folder, name: str) -> Any:
            raise OSError(5, "no")

        put(root, Claim(1, FAR, earlier=()))
        monkeypatch.setattr(Folder, "modified", fail)
        with pytest.raises(OSError, match="no"):
            acquire(lease)
        assert claims_only(root)
