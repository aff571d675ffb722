"""Tell what a user may not read; never take it for absent, and let all the rest work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.console import Console
from tests.unit.rights import bound, folder_of_bound, forbid
from tests.unit.root.two_ranks import seen_by_rank_0
from tests.unit.small_roots import FILE, ids, put
from torchrec_checknrun.errors import StorageFailed
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.root import shared_root
from torchrec_checknrun.root.chain import newest
from torchrec_checknrun.root.followers import FOLDER, Announcement, held_by_followers
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.retention import Retention, write_pin
from torchrec_checknrun.serve.plan import Glance
from torchrec_checknrun.store.folder import Folder


@pytest.fixture
def path() -> Iterator[Path]:
    with folder_of_bound() as path, bound():
        yield path


@pytest.fixture
def root(path: Path) -> Folder:
    return Folder(path)


@pytest.mark.parametrize("name", ["lost+found", ".followers", "somebody's"])
def test_a_follower_looks_on_beside_what_is_of_others(
    root: Folder, path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = put(root, 1)
    (root / name).create()
    forbid(path / name)
    glance = Glance(root)
    assert not glance.is_quiet(None)
    assert glance.is_quiet(first)
    assert newest(root)[1] == []
    assert (name in caplog.text) == (name == "somebody's")  # the others are well known
    second = put(root, 2)
    assert not glance.is_quiet(first)
    assert ids(newest(root)[0]) == [second.id]


def test_a_user_named_checkpoint_that_becomes_readable_is_looked_at(
    root: Folder, path: Path
) -> None:
    first = put(root, 1)
    final = put(root, 2, name="final")
    forbid(path / "final")
    glance = Glance(root)
    glance.is_quiet(None)
    assert glance.is_quiet(first)
    (path / "final").chmod(0o700)
    assert not glance.is_quiet(first)
    assert ids(newest(root)[0]) == [final.id]


def test_a_user_named_checkpoint_whose_manifest_may_not_be_read_is_told(
    root: Folder, path: Path
) -> None:
    """Find it by its directory's names; it may be the newest."""
    first = put(root, 1)
    put(root, 2, first, name="final")
    forbid(path / "final" / MANIFEST_NAME)
    chain, problems = newest(root)
    assert ids(chain) == [first.id]
    assert [problem.split(":")[0] for problem in problems] == ["final"]
    assert "permission was refused" in problems[0]
    with pytest.raises(StorageFailed, match=r"final.*permission was refused"):
        newest(root, answers=True)
    with pytest.raises(StorageFailed, match=r"final.*permission was refused"):
        newest(root, resumes=True)


@pytest.mark.parametrize("which", ["directory", "manifest"])
def test_nothing_goes_that_a_checkpoint_may_need_whose_parents_are_unknown(
    root: Folder, path: Path, which: str
) -> None:
    first = put(root, 1)
    put(root, 2, first, name="final")
    put(root, 3)
    forbid(path / "final" if which == "directory" else path / "final" / MANIFEST_NAME)
    for dry_run in (True, False):
        with pytest.raises(StorageFailed, match=r"final.*permission was refused"):
            prune(root, Retention(1), dry_run=dry_run)
    assert (path / first.id / FILE.name).exists()
    (path / "final").chmod(0o700)
    (path / "final" / MANIFEST_NAME).chmod(0o600)
    prune(root, Retention(2))
    assert (path / first.id / FILE.name).exists()


def test_one_record_of_a_follower_that_may_not_be_read_hides_no_other(
    root: Folder, path: Path
) -> None:
    old, new = put(root, 1), put(root, 2)
    Announcement(root, old.id)
    (record,) = (path / FOLDER).iterdir()
    numbers = {manifest.id: manifest.sequence for manifest in (old, new)}
    for name in ("0.json", "z.json"):  # listed before it, and after
        (path / FOLDER / name).write_bytes(record.read_bytes())
        forbid(path / FOLDER / name)
    assert held_by_followers(root, numbers) == {old.id}


def test_show_tells_of_newer_ones_that_it_passes_over(
    root: Folder, path: Path, console: Console
) -> None:
    first, second = put(root, 1), put(root, 2)
    forbid(path / second.id)
    shown = console.run("show", path, "--json")
    assert shown.document["id"] == first.id
    assert f"passed over: {second.id}: " in shown.err
    assert "permission was refused" in shown.err
    asked = console.run("show", path, second.id)
    assert asked.code == 2
    assert "permission was refused" in asked.err


def test_a_rank_that_may_not_look_says_so_at_once(root: Folder, path: Path) -> None:
    """Wait only for what may come: other ranks wait for the answer."""
    first = put(root, 1)
    forbid(path / first.id / MANIFEST_NAME)
    began = time.monotonic()
    with pytest.raises(StorageFailed, match=r"rank 1 on .* permission was refused"):
        shared_root.require_shared(root, seen_by_rank_0(), first.id, MANIFEST_NAME)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("how", ["forbidden", "damaged"])
def test_report_tells_what_it_leaves_out(
    root: Folder, path: Path, console: Console, how: str
) -> None:
    first, second = put(root, 1), put(root, 2)
    if how == "damaged":
        (path / second.id / MANIFEST_NAME).write_bytes(b"")
    else:
        forbid(path / second.id)
    told = console.run("report", path, "--json")
    assert [point["id"] for point in told.document["checkpoints"]] == [first.id]
    assert f"left out: {second.id}: " in told.err


@pytest.mark.parametrize("which", ["directory", "pin"])
def test_a_pin_that_may_not_be_read_is_not_repaired(
    root: Folder, path: Path, console: Console, which: str
) -> None:
    """Change nothing: it may be sound, or the checkpoint may have none."""
    first = put(root, 1)
    write_pin(root, first.id)
    pin = path / first.id / "pinned"
    content = pin.read_bytes()
    forbid(pin if which == "pin" else path / first.id)
    repaired = console.run("repair", path, "--yes")
    assert (repaired.code, repaired.err) == (0, "")
    assert "permission was refused" in repaired.out
    assert "nothing to repair" in repaired.out
    (path / first.id).chmod(0o700)
    assert pin.stat().st_mode & 0o777 == (0 if which == "pin" else 0o644)
    pin.chmod(0o600)
    assert pin.read_bytes() == content
