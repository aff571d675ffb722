"""Followers keep what they read from being deleted: for a while, and a few checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.small_roots import put
from torchrec_checknrun import Retention
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.root import followers
from torchrec_checknrun.root.followers import (
    FOLDER,
    HOLD_SECONDS,
    MOST_HELD,
    MOST_RENEWALS,
    RENEW_SECONDS,
    Announcement,
    announced,
    delete_silent,
    held_by_followers,
)
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.store.folder import Folder


def shift(path: Path, seconds: float) -> None:
    now = path.stat().st_mtime
    os.utime(path, (now + seconds, now + seconds))


def records(root: Path) -> list[Path]:
    return sorted((root / FOLDER).iterdir())


def numbers(*manifests: Manifest) -> dict[str, int]:
    return {manifest.id: manifest.sequence for manifest in manifests}


def test_what_is_read_stays(tmp_path: Path) -> None:
    root = Folder(tmp_path)
    full = put(root, 1)
    read = put(root, 2, full)
    last = [put(root, number) for number in (3, 4)]
    with announced(root, read.id, large=True):
        assert set(prune(root, Retention(keep=1)).verdict.keep) == {full.id, read.id, last[1].id}
    assert records(tmp_path) == []
    assert set(prune(root, Retention(keep=1)).verdict.keep) == {last[1].id}


def test_a_pruning_that_removes_the_folder_of_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right before a record is put there."""
    root = Folder(tmp_path)
    read, last = put(root, 1), put(root, 2)
    Announcement(root, read.id)  # of one that was killed
    shift(records(tmp_path)[0], -2 * MOST_RENEWALS * RENEW_SECONDS)
    folder, put_file, removed = root / FOLDER, Folder.put, list[str]()

    def put_late(self: Folder, name: str, *rest: Any) -> None:
        if self.name == FOLDER and not removed:
            removed.append(name)
            delete_silent(root, last.id)
            assert FOLDER not in root.names()
        put_file(self, name, *rest)

    monkeypatch.setattr(Folder, "put", put_late)
    with announced(root, read.id, large=True):
        assert len(folder.names()) == 1
        assert held_by_followers(root, numbers(read, last)) == {read.id}
    assert removed


def test_a_silent_follower_holds_nothing_for_long(tmp_path: Path) -> None:
    root = Folder(tmp_path)
    old, new = put(root, 1), put(root, 2)
    Announcement(root, old.id)
    (record,) = records(tmp_path)
    shift(record, -HOLD_SECONDS + 30)
    assert held_by_followers(root, numbers(old, new)) == {old.id}
    shift(tmp_path / new.id / MANIFEST_NAME, 60)
    assert held_by_followers(root, numbers(old, new)) == set()


def test_a_clock_that_is_ahead_outdates_no_other(tmp_path: Path) -> None:
    root = Folder(tmp_path)
    ahead, old, new = (put(root, number) for number in (1, 2, 3))
    Announcement(root, ahead.id)
    (record,) = records(tmp_path)
    shift(record, 86_400)
    Announcement(root, old.id)
    assert held_by_followers(root, numbers(ahead, old, new)) == {ahead.id, old.id}


class Clock(SimpleNamespace):
    """The clock of a follower's process."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("seconds", [RENEW_SECONDS + 1, HOLD_SECONDS - 10])
def test_a_follower_that_never_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Renewed for hours, as often as possible or as seldom, a record keeps a chain for one."""
    clock = Clock()
    monkeypatch.setattr(followers, "time", clock)
    root = Folder(tmp_path)
    old = put(root, 1)
    reading = Announcement(root, old.id)
    new, began = put(root, 2), clock.now
    held = 0.0

    def is_kept() -> bool:
        (record,) = records(tmp_path)
        for path in (record, tmp_path / new.id / MANIFEST_NAME):
            os.utime(path, (clock.now, clock.now))  # the store's clock
        return old.id in prune(root, Retention(keep=1), dry_run=True).verdict.keep

    while clock.now < began + 3 * 3600:
        if is_kept():
            held = clock.now - began
        clock.now += seconds
        reading.renew()
    assert held > 0.9 * MOST_RENEWALS * RENEW_SECONDS
    assert held <= MOST_RENEWALS * RENEW_SECONDS + HOLD_SECONDS
    assert set(prune(root, Retention(keep=1)).verdict.delete) == {old.id}


def test_records_of_killed_followers_go(tmp_path: Path) -> None:
    """Delete with checkpoints what is long silent, whatever it is; never what may be renewed."""
    root = Folder(tmp_path)
    first, second, third = (put(root, number) for number in (1, 2, 3))
    for _ in range(3):
        Announcement(root, third.id)
    silent, live, junk = records(tmp_path)
    junk.write_bytes(b"")
    hour = MOST_RENEWALS * RENEW_SECONDS
    for record in (silent, junk):
        shift(record, -hour - 60)
    shift(live, -hour + 60)
    assert prune(root, Retention(keep=3)).verdict.delete == {}
    assert prune(root, Retention(keep=2), dry_run=True).verdict.delete.keys() == {first.id}
    assert len(records(tmp_path)) == 3
    assert prune(root, Retention(keep=2)).verdict.delete.keys() == {first.id}
    assert records(tmp_path) == [live]
    shift(live, -120)
    assert prune(root, Retention(keep=1)).verdict.delete.keys() == {second.id}
    assert not (tmp_path / FOLDER).exists()


def test_a_follower_that_hung_announces_itself_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(followers, "time", clock)
    root = Folder(tmp_path)
    for number in (1, 2, 3):
        read = put(root, number)
    reading = Announcement(root, read.id)
    shift(records(tmp_path)[0], -MOST_RENEWALS * RENEW_SECONDS - 60)
    prune(root, Retention(keep=2))
    assert not (tmp_path / FOLDER).exists()
    clock.now += RENEW_SECONDS + 1
    reading.renew()
    assert len(records(tmp_path)) == 1
    reading.close()
    assert records(tmp_path) == []


@pytest.mark.parametrize("first", [1, 999_997])
def test_many_followers_hold_the_newest_few(tmp_path: Path, first: int) -> None:
    """Hold the newest ones also where their numbers get another digit."""
    root = Folder(tmp_path)
    all = [put(root, number) for number in range(first, first + 6)]
    for each in all:
        Announcement(root, each.id)
        shift(tmp_path / each.id / MANIFEST_NAME, each.sequence - first)
    assert held_by_followers(root, numbers(*all)) == {each.id for each in all[-MOST_HELD:]}
    shift(tmp_path / all[-1].id / MANIFEST_NAME, 2 * HOLD_SECONDS)
    assert held_by_followers(root, numbers(*all)) == set()


def test_damaged_records_hold_nothing(tmp_path: Path) -> None:
    root = Folder(tmp_path)
    old = put(root, 1)
    Announcement(root, old.id)
    (record,) = records(tmp_path)
    record.write_bytes(record.read_bytes()[:-3])
    assert held_by_followers(root, numbers(old)) == set()
    assert held_by_followers(root / "none", numbers(old)) == set()


@pytest.mark.parametrize("kind", ["directory", "link", "huge"])
def test_what_is_no_record_hides_no_other(tmp_path: Path, kind: str) -> None:
    root = Folder(tmp_path)
    old = put(root, 1)
    Announcement(root, old.id)
    other = tmp_path / FOLDER / "0000000000000000.json"
    if kind == "directory":
        other.mkdir()
    elif kind == "link":
        other.symlink_to(other)
    else:
        other.write_bytes(bytes(1 << 20))
    assert held_by_followers(root, numbers(old)) == {old.id}


def test_a_root_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Folder(tmp_path)
    old = put(root, 1)

    def refuse(self: Folder, *_: object) -> None:
        raise OSError(30, "read-only")

    monkeypatch.setattr(Folder, "create", refuse)
    with announced(root, old.id, large=True) as reading:
        assert reading is not None
        reading.renew()
    assert not (tmp_path / FOLDER).exists()
