"""Tolerate delayed listings, unreadable files, and things that are not checkpoints."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.chains import Part, write
from tests.unit.console import Console
from tests.unit.root.commits import ROWS, leftover, write_full
from torchrec_checknrun.errors import (
    CheckNRunError,
    CorruptCheckpoint,
    StorageFailed,
    StorageUnreachable,
)
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.root.catalog import inventory
from torchrec_checknrun.root.chain import newest
from torchrec_checknrun.root.counting import counting_ids, is_newest
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.pruner import Pruner
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.store import folder as filesystem
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.verify import verify
from torchrec_checknrun.writers.claims import FOLDER, latest_claim
from torchrec_checknrun.writers.lease import Lease

ALL = [Part((0, 8), list(range(ROWS)), 5)]


@pytest.fixture
def root(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path / "run")
    folder.create()
    return folder


def three(root: Folder) -> list[Manifest]:
    """Commit full checkpoints."""
    made = [write(root, ROWS, ALL)]
    for _ in range(2):
        made.append(write_full(root, made[-1]))
    return made


@pytest.mark.parametrize("shown", [0, 1])
def test_a_listing_that_lags_behind(
    root: Folder, monkeypatch: pytest.MonkeyPatch, shown: int
) -> None:
    """Continue a run although new files are listed with a delay."""
    first = Lease(root)
    first.acquire(lambda _: ())
    first.release()
    real = Folder.names
    monkeypatch.setattr(Folder, "names", lambda f: real(f)[:shown] if f.name == FOLDER else real(f))
    if not shown:
        (root / FOLDER).delete(first.claim.name if first._claim else "epoch-00000001.json")
    lease = Lease(root, seconds=0.2)
    lease.acquire(lambda before: counting_ids(root, before))
    made = write(root, ROWS, ALL, epoch=lease.claim.epoch)
    lease.use([made.id])
    lease.check()
    before = lease.claim.renewals
    deadline = time.monotonic() + 20
    while lease.claim.renewals < before + 2:  # the claim is renewed as well
        assert time.monotonic() < deadline
        time.sleep(0.02)
    chain, _ = newest(root)
    assert chain is not None
    assert chain.head.id == made.id
    lease.release()
    monkeypatch.undo()
    claim = latest_claim(root)
    assert claim is not None
    assert claim.released


def deny(monkeypatch: pytest.MonkeyPatch, *parts: str) -> None:
    """Refuse paths with given parts as the system would (tests may run as root)."""

    def refuse(path: Any) -> None:
        if any(part in os.fspath(path) for part in parts):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))

    for module, name in ((os, "open"), (os, "lstat"), (os, "listdir"), (os, "scandir")):
        real = getattr(module, name)

        def guarded(path: Any, *args: Any, _real: Any = real, **kwargs: Any) -> Any:
            if isinstance(path, (str, os.PathLike)):
                within = kwargs.get("dir_fd")
                folder = "" if within is None else os.readlink(f"/proc/self/fd/{within}")
                refuse(os.path.normpath(os.path.join(folder, path)))
            return _real(path, *args, **kwargs)

        monkeypatch.setattr(module, name, guarded)
    real_open = open

    def guarded_open(path: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, (str, os.PathLike)):
            refuse(path)
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", guarded_open)
    monkeypatch.setattr("fsspec.implementations.local.open", guarded_open, raising=False)


@pytest.mark.parametrize("what", ["manifest.json", "rank-00000.bin", ""])
def test_verify_goes_on_after_what_it_may_not_read(
    root: Folder, monkeypatch: pytest.MonkeyPatch, console: Console, what: str
) -> None:
    first, second, third = three(root)
    with monkeypatch.context() as patched:
        deny(patched, f"{second.id}/{what}" if what else second.id)
        found = {one.id: one.problems for one in verify(root.url)}
        assert found[first.id] == found[third.id] == ()
        assert found[second.id]
        assert all("permission was refused" in text for text in found[second.id])
        assert all(second.id in text for text in found[second.id])
        told = console.run("verify", root)
        assert told.code == 1
        inventory(root)
    assert not any(one.problems for one in verify(root.url))


def test_verify_goes_on_without_the_claims(root: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    three(root)
    lease = Lease(root)
    lease.acquire(lambda before: counting_ids(root, before))
    lease.release()
    deny(monkeypatch, f"/{FOLDER}/")
    found = verify(root.url)
    assert [one.id for one in found if one.problems] == ["writers/epoch-00000001.json"]
    with pytest.raises(CheckNRunError, match=r"epoch-00000001\.json.*permission was refused"):
        newest(root)


def test_storage_that_does_not_answer_is_no_damage(
    root: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    three(root)

    def away(folder: Folder, *args: Any) -> Any:
        raise StorageUnreachable(errno.ETIMEDOUT, "it didn't answer")

    monkeypatch.setattr(Folder, "read_into", away)
    with pytest.raises(StorageUnreachable):
        verify(root.url)


def test_permission_errors_name_path_and_remedy(
    root: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = three(root)
    deny(monkeypatch, made[2].id)
    with pytest.raises(StorageFailed, match=rf"{made[2].id}.*check the owner, the mode"):
        (root / made[2].id).read("manifest.json")
    with pytest.raises(StorageFailed, match=rf"{made[2].id}.*check the owner, the mode"):
        (root / made[2].id).names()
    chain, problems = newest(root)
    assert chain is not None
    assert chain.head.id == made[1].id
    assert "permission was refused" in problems[0]


def test_a_directory_nobody_may_read_is_no_fresh_start(
    root: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take an unreadable directory for a checkpoint with a user's name; other content is known."""
    for name in ("final", "lost+found", ".snapshots"):
        (root / name).create()
        (root / name).put("manifest.json", b"x")
    deny(monkeypatch, "/final", "/lost+found", "/.snapshots")
    chain, problems = newest(root)
    assert chain is None
    (problem,) = problems
    assert problem.startswith("final: ")
    assert "check the owner" in problem


def test_odd_leftovers_stop_no_other_deletion(
    root: Folder, tmp_path: Path, console: Console, caplog: pytest.LogCaptureFixture
) -> None:
    made = three(root)
    odd = [leftover(root, 1) for _ in range(1)]
    others = [leftover(root, number) for number in (2, 3)]
    Path(root.url, odd[0], "a folder").mkdir()
    Path(root.url, odd[0], "a link").symlink_to(tmp_path)
    Path(root.url, others[0], FOLDER).symlink_to(tmp_path)
    Path(root.url, made[0].id, "theirs").mkdir()
    (tmp_path / "precious").write_text("x")
    done = prune(root, Retention(1))
    assert list(done.verdict.delete) == [made[1].id, made[0].id]
    assert set(done.leftovers) == {others[1]}
    assert {made[1].id, others[1]}.isdisjoint(root.names())
    assert len(done.problems) == 3
    assert any("['a folder'], which no checkpoint has: remove" in text for text in done.problems)
    assert (root / odd[0]).names() == ["a folder"]
    assert (root / made[0].id).names() == ["theirs"]
    assert (tmp_path / "precious").exists()
    assert "a folder" in console.run("prune", root, "--keep", "1").out
    with caplog.at_level("WARNING"):
        for _ in range(2):
            pruner = Pruner(lambda _: prune(root, Retention(1)))
            pruner.start(made[0])
            pruner.wait(60)
    assert any("a folder" in record.message for record in caplog.records)


def test_what_fails_is_told_when_all_else_is_deleted(
    root: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = three(root)
    bad, good = leftover(root, 2), leftover(root, 3)
    real = Folder.delete

    def delete(folder: Folder, name: str) -> None:
        if folder.name in (bad, made[1].id):
            raise StorageFailed(errno.EACCES, f"deleting {folder}/{name}: permission was refused")
        real(folder, name)

    monkeypatch.setattr(Folder, "delete", delete)
    with pytest.raises(StorageFailed, match=made[1].id):
        prune(root, Retention(1))
    assert {made[0].id, good}.isdisjoint(root.names())


def test_temporaries_in_checkpoints_go(root: Folder) -> None:
    made = three(root)
    for name in (".manifest.json.01234567", ".pinned.89abcdef"):
        (root / made[2].id).put(name, b"half")
    os.utime(Path(root.url, made[2].id, ".manifest.json.01234567"), (0, 0))
    prune(root, Retention(1))
    names = (root / made[2].id).names()
    assert ".pinned.89abcdef" in names
    assert ".manifest.json.01234567" not in names


def test_new_parents_of_the_root_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(filesystem.os, "fsync", fsync)
    Folder(tmp_path / "a" / "b" / "run").create()
    assert synced == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]
    Folder(tmp_path / "a" / "b" / "run").create()
    assert len(synced) == 3


def test_one_of_a_users_own_naming_that_cannot_be_read(
    root: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = three(root)
    (root / "final").create()
    (root / "final").put("rank-00000.bin", b"x")
    (root / "final").put("manifest.json", b"x")
    real = Folder.read

    def read(folder: Folder, name: str, *args: Any) -> bytes:
        if folder.name == "final":
            raise StorageFailed(errno.EIO, f"reading {folder}/{name}: input/output error")
        return real(folder, name, *args)

    monkeypatch.setattr(Folder, "read", read)
    found = {one.id: one.problems for one in verify(root.url)}
    assert "input/output error" in found["final"][0]
    assert not any(found[one.id] for one in made)
    with pytest.raises(StorageFailed, match=r"final/manifest\.json: input/output error"):
        newest(root)  # nothing tells the checkpoint's age
    assert is_newest(root, None, made[2])
    assert not is_newest(root, None, made[1])


@pytest.mark.parametrize("own", [True, False])
def test_an_older_one_is_not_the_newest_while_others_cannot_be_read(
    root: Folder, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    made = three(root)
    deny(monkeypatch, f"{made[2].id if own else made[0].id}/")
    assert is_newest(root, None, made[1] if own else made[2]) is not own


def test_a_file_in_the_place_of_the_claims(root: Folder) -> None:
    three(root)
    root.put(FOLDER, b"")
    with pytest.raises(CorruptCheckpoint, match="writers is no directory, where the directory of"):
        newest(root)
    (problem,) = (one for one in verify(root.url) if one.problems)
    assert problem.id == FOLDER
