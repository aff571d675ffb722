"""Report storage that is missing, full, silent or odd; never take it for empty."""

from __future__ import annotations

import errno
import logging
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.unit.console import Console
from tests.unit.root.commits import commit
from tests.unit.root.two_ranks import seen_by_rank_0
from torchrec_checknrun.dcp import StorageReader
from torchrec_checknrun.errors import (
    CheckNRunError,
    ClaimDamaged,
    CorruptCheckpoint,
    RootNotShared,
    StorageFailed,
    StorageUnreachable,
)
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import MANIFEST_NAME, is_plain_name
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.recovery.missing_root import protect_existing
from torchrec_checknrun.root import shared_root
from torchrec_checknrun.root.catalog import inventory
from torchrec_checknrun.root.chain import newest
from torchrec_checknrun.root.checkpoints import committed
from torchrec_checknrun.root.counting import counting_ids
from torchrec_checknrun.root.lineage import Lineage
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.retention import PINNED, Retention, is_pinned, pin, pin_problem
from torchrec_checknrun.root.writer import RootWriter
from torchrec_checknrun.store import deadlines, local
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.store.local import LocalStore
from torchrec_checknrun.store.new_file import DescriptorSink, NewFile
from torchrec_checknrun.tools import takeover
from torchrec_checknrun.writers import claims, lease, liveness
from torchrec_checknrun.writers.claims import FOLDER, Holder
from torchrec_checknrun.writers.lease import Lease


@pytest.fixture
def root(tmp_path: Path) -> Folder:
    root = Folder(tmp_path / "run")
    root.create()
    return root


@pytest.mark.parametrize("below", ["", "/deeper/run"])
def test_a_link_to_nothing_is_no_fresh_start(tmp_path: Path, below: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "unmounted" / "runs")
    root = Folder(f"{tmp_path}/link{below}")
    for act in (root.names, root.create, lambda: newest(root), (root / FOLDER).sizes):
        with pytest.raises(StorageFailed, match=r"link is a link to .*unmounted.*mounted\?"):
            act()
    (tmp_path / "unmounted" / "runs").mkdir(parents=True)
    assert newest(root) == (None, [])
    root.create()


def test_a_full_disk_is_pruned(root: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    living = Lease(root)
    living.acquire(lambda _: ())
    made = [commit(root, living.claim.epoch) for _ in range(4)]

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "put", full)
        done = prune(root, Retention(2))
    assert list(done.verdict.delete) == [made[1].id, made[0].id]
    assert committed(root) == [made[3].id, made[2].id]
    living.release()


def damaged_claim(root: Folder) -> Path:
    writer = Lease(root)
    writer.acquire(lambda _: ())
    commit(root, writer.claim.epoch)
    path = Path(root.url) / FOLDER / writer.claim.name
    writer.release()
    path.write_bytes(path.read_bytes() + b"x")
    return path


@pytest.mark.parametrize("times", ["future", "none"])
def test_repair_without_usable_times(
    root: Folder, monkeypatch: pytest.MonkeyPatch, times: str
) -> None:
    path = damaged_claim(root)
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    if times == "future":
        os.utime(path, (time.time() + 864000,) * 2)
    else:
        monkeypatch.setattr(LocalStore, "modified", lambda *_: None)
    takeover.repair(root)
    assert sum(slept) >= liveness.LEASE_SECONDS
    assert newest(root)[0] is not None


def test_repair_sees_a_writer_that_lives(root: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    path = damaged_claim(root)
    os.utime(path, (time.time() + 864000,) * 2)

    def write_again(_: float) -> None:
        path.write_bytes(path.read_bytes() + b"y")

    monkeypatch.setattr(time, "sleep", write_again)
    with pytest.raises(CheckNRunError, match="a live writer rewrites it"):
        takeover.repair(root)


def test_a_claim_is_released_in_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Folder(tmp_path / "run", timeout_seconds=60)
    held = Lease(root)
    held.acquire(lambda _: ())
    monkeypatch.setattr(lease, "EXIT_SECONDS", 0.1)
    with held._lock:  # as a hanging renewal does
        began = time.monotonic()
        held.release()
        assert time.monotonic() - began < 5
    deadline = time.monotonic() + 10
    while held in Lease._held and time.monotonic() < deadline:
        time.sleep(0.01)
    assert held not in Lease._held


def test_a_failed_run_does_not_wait_for_deletions(
    root: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RootWriter(root, Lineage(), Retention(2))
    waited: list[bool] = []
    monkeypatch.setattr(writer, "wait_for_pruning", lambda: waited.append(True))
    writer.close(failed=True)
    assert not waited
    writer.close()
    assert waited


def test_a_deleted_claim_leaves_what_it_decided_undecided(root: Folder) -> None:
    for _ in range(2):
        writer = Lease(root)
        writer.acquire(lambda before: counting_ids(root, before), force=True)
        made, name = commit(root, writer.claim.epoch), writer.claim.name
        writer.release()
    (root / FOLDER).delete(name)
    with pytest.raises(ClaimDamaged):
        newest(root)
    found = inventory(root)
    assert {one.status for one in found.checkpoints} == {"undecided"}
    assert made.id in found.problems[0]
    assert "checknrun repair" in found.problems[0]


def test_a_name_that_is_no_unicode(root: Folder, caplog: pytest.LogCaptureFixture) -> None:
    made = commit(root)
    copy = os.fsencode(root.url) + b"/copy-\xe9"
    os.rename((root / made.id).url, copy)
    kept = commit(root)
    with caplog.at_level(logging.WARNING):
        assert committed(root) == [kept.id]
    assert "copy-\\udce9" in caplog.text
    writer = Lease(root)
    writer.acquire(lambda before: counting_ids(root, before))
    writer.release()
    assert not is_plain_name(os.fsdecode(b"copy-\xe9"))


def test_others_directories_that_cannot_be_listed(
    root: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = commit(root)
    (root / "others").create()
    (root / "others").put(MANIFEST_NAME, b'{"of": "another program"}')
    real = Folder.names

    def names(folder: Folder) -> list[str]:
        if folder.name == "others":
            raise StorageFailed(errno.EACCES, "permission was refused")
        return real(folder)

    monkeypatch.setattr(Folder, "names", names)
    assert committed(root) == [made.id]
    found, problems = newest(root)
    assert found is not None
    assert not problems


def test_a_file_that_was_given_up_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, before = LocalStore(str(tmp_path)), descriptors()
    monkeypatch.setattr(local, "given_up", lambda: True)
    with pytest.raises(TimeoutError):
        store.new_file("rank-00000.bin", again=False)
    assert store.list() == []
    assert descriptors() == before


def test_a_commit_that_was_given_up_and_fails_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors()
    file = NewFile(DescriptorSink(os.open(tmp_path / "a", os.O_CREAT | os.O_WRONLY)), "a")

    def fsync(_: int) -> None:
        file.drop()  # by a thread that has waited in vain
        raise OSError(errno.EIO, "no disk")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="no disk"):
        file.commit()
    assert descriptors() == before


def test_a_descriptor_is_closed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = NewFile(DescriptorSink(os.open(tmp_path / "a", os.O_CREAT | os.O_WRONLY)), "a")
    real, closed = os.close, []

    def close(descriptor: int) -> None:
        closed.append(descriptor)
        real(descriptor)
        raise OSError(errno.EDQUOT, "told when it is closed")

    with monkeypatch.context() as patched:
        patched.setattr(os, "close", close)
        with pytest.raises(OSError, match="told when"):
            file.commit()
        file.drop()
    assert len(closed) == 1


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_directory_in_the_place_of_a_pin(root: Folder) -> None:
    made = [commit(root) for _ in range(3)]
    pin(root, made[1].id)
    (root / made[1].id).put(PINNED, b"damaged")
    (root / made[0].id / PINNED).create()
    assert is_pinned(root / made[0].id)
    assert list(prune(root, Retention(1)).verdict.delete) == []
    with pytest.raises(CorruptCheckpoint, match=made[0].id):
        takeover.repair(root)
    assert pin_problem(root, made[1].id) is None


def test_hidden_processes_may_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take processes hidden by hidepid=2 of ``/proc`` for alive."""
    here = Holder.this_process()
    real = claims._seen
    monkeypatch.setattr(claims, "_seen", lambda pid: real(pid) if pid == here.pid else None)
    other = Holder("a run", 0, here.host, here.machine, os.getppid(), 7)
    assert not other.gone
    assert not other.alive_here

    def refuse(pid: int, _: int) -> None:
        raise PermissionError if pid == 8 else ProcessLookupError

    monkeypatch.setattr(os, "kill", refuse)
    assert not Holder("a run", 0, here.host, here.machine, 8, 7).gone
    assert Holder("a run", 0, here.host, here.machine, 9, 7).gone


def test_a_restore_waits_as_long_as_the_root(root: Folder) -> None:
    patient = Folder(root.url, timeout_seconds=7) / "some"
    assert StorageReader(patient)._folder.patience is patient.patience


@pytest.mark.parametrize(
    "command", [["prune", "--keep", "1"], ["repair"], ["unlock"], ["adopt", "some-id"]]
)
def test_a_mistyped_root_is_told(tmp_path: Path, console: Console, command: list[str]) -> None:
    commit(Folder(tmp_path / "run"))
    name, *more = command
    for typed, told in (("rnu", "does not exist"), ("empty", "is empty")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        result = console.run(name, tmp_path / typed, *more)
        assert result.code == 2
        assert told in " ".join(result.err.split())
        assert not result.out


def test_adopt_looks_before_it_speaks(root: Folder, console: Console) -> None:
    made = commit(root)
    missing = console.run("adopt", root.url, "nosuch", "--yes")
    assert missing.code == 2
    assert "committed when" not in missing.out + missing.err
    assert "counts already" in console.run("adopt", root.url, made.id, "--yes").out


def test_a_rank_that_cannot_look_says_why(root: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(root)
    monkeypatch.setattr(shared_root, "PATIENCE_SECONDS", -1.0)
    with pytest.raises(RootNotShared, match=r"rank 0 on here sees .* rank 1 on .* can't"):
        shared_root.require_shared(root, seen_by_rank_0(), "some", "nothing")

    def refuse(*_: object) -> bytes:
        raise StorageFailed(errno.EACCES, "permission was refused")

    monkeypatch.setattr(Folder, "read", refuse)
    with pytest.raises(StorageFailed, match=r"rank 1 on .* permission was refused"):
        shared_root.require_shared(root, seen_by_rank_0(), "some", MANIFEST_NAME)


def test_a_rank_looks_no_longer_than_the_others_wait(tmp_path: Path) -> None:
    began, root = time.monotonic(), Folder(tmp_path, timeout_seconds=1.0)
    with pytest.raises(RootNotShared):
        shared_root.require_shared(root, seen_by_rank_0(), "some", MANIFEST_NAME)
    assert 0.4 < time.monotonic() - began < 1.0


class Attempt:
    """One fresh start by torchrun."""

    def __init__(self, root: Folder, number: int, patched: pytest.MonkeyPatch) -> None:
        patched.setenv("TORCHELASTIC_RUN_ID", "a run")
        patched.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
        self.root, self.lineage = root, Lineage()
        self.writer = RootWriter(root, self.lineage, Retention(1))
        protect_existing(root, Ranks(timedelta(seconds=5)), self.writer)
        self.writer.claim()

    def save(self) -> Manifest:
        made = commit(self.root, self.writer.epoch)
        self.lineage.committed(made)
        self.writer._prune(made)
        return made

    def die(self) -> None:
        self.writer.lease._stop.set()
        Lease._held.remove(self.writer.lease)


def test_what_a_fresh_start_leaves_stays_after_a_restart(
    root: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, stays = commit(root), []
    for number in range(3):
        attempt = Attempt(root, number, monkeypatch)
        made = [attempt.save() for _ in range(3)]
        stays.append(made[-1].id)
        attempt.die()
    assert set(committed(root)) == {old.id, *stays}


def test_a_fresh_start_on_storage_that_is_silent(
    root: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse a fresh start that could protect nothing from deletion."""
    commit(root)
    writer = RootWriter(root, Lineage(), Retention(1))

    def silent(_: Folder) -> list[str]:
        raise deadlines.silent("listing", 1.0, 1.0)

    monkeypatch.setattr(Folder, "names", silent)
    with pytest.raises(StorageUnreachable):
        protect_existing(root, Ranks(timedelta(seconds=5)), writer)


def test_a_fresh_start_beside_damage_says_so(
    root: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    made = commit(root)
    (root / made.id).delete(made.files[0].name)
    with caplog.at_level(logging.WARNING):
        protect_existing(
            root, Ranks(timedelta(seconds=5)), RootWriter(root, Lineage(), Retention(1))
        )
    assert "none can be restored" in caplog.text
    assert "none committed" not in caplog.text
