"""Refuse links planted in a root: write and delete nothing outside the root."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.examples import examples
from torchrec_checknrun.errors import CheckNRunError, CheckpointExists, CorruptCheckpoint
from torchrec_checknrun.root.deletion import delete_checkpoint
from torchrec_checknrun.save.process import _open
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.export import save_in_place

PRECIOUS = b"precious"
ID = "seq-000001_step-00000001_0badcafe"


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """Make a directory outside the root, with the package's file names, that must not change."""
    outside = tmp_path / "outside"
    outside.mkdir()
    names = ("rank-00000.bin", "manifest.json", "pinned", "epoch-00000001.json", "values.json")
    for name in names:
        (outside / name).write_bytes(PRECIOUS)
    yield outside
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == dict.fromkeys(
        names, PRECIOUS
    )


@pytest.fixture
def root(tmp_path: Path) -> Folder:
    """Make a root behind a link, as users' roots may be."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    return Folder(tmp_path / "link" / "run")


def write(folder: Folder) -> None:
    with folder.write("rank-00000.bin") as file:
        file.write(b"x" * 100)


def test_a_root_may_be_reached_through_links(root: Folder, tmp_path: Path) -> None:
    (root / ID).create()
    write(root / ID)
    (root / ID).put("manifest.json", b"{}", new=True)
    assert sorted(path.name for path in (tmp_path / "disk" / "run" / ID).iterdir()) == [
        "manifest.json",
        "rank-00000.bin",
    ]


@pytest.mark.parametrize("link", ["symbolic", "hard", "dangling"])
def test_a_rank_file_that_is_there_already(
    root: Folder, outside: Path, tmp_path: Path, link: str
) -> None:
    folder = root / ID
    folder.create()
    planted = tmp_path / "link" / "run" / ID / "rank-00000.bin"
    if link == "hard":
        os.link(outside / planted.name, planted)
    else:
        planted.symlink_to((outside if link == "symbolic" else tmp_path / "none") / planted.name)
    with pytest.raises(CheckpointExists, match=r"rank-00000\.bin is there already"):
        write(folder)
    folder.delete(planted.name)
    assert folder.names() == []
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("new", [False, True])
def test_a_record_that_is_a_link(root: Folder, outside: Path, tmp_path: Path, new: bool) -> None:
    folder = root / ID
    folder.create()
    planted = tmp_path / "link" / "run" / ID / "manifest.json"
    planted.symlink_to(outside / planted.name)
    if new:
        with pytest.raises(CorruptCheckpoint, match=r"manifest\.json is a symbolic link"):
            folder.put(planted.name, b"{}", new=True)
    else:
        folder.put(planted.name, b"{}")  # the link itself is replaced
        assert folder.read(planted.name) == b"{}"
        assert not planted.is_symlink()


OPERATIONS: dict[str, Callable[[Folder], object]] = {
    "names": Folder.names,
    "sizes": Folder.sizes,
    "size": lambda folder: folder.size("rank-00000.bin"),
    "read": lambda folder: folder.read("rank-00000.bin"),
    "write": write,
    "put": lambda folder: folder.put("manifest.json", b"{}"),
    "put new": lambda folder: folder.put("other.json", b"{}", new=True),
    "delete": lambda folder: folder.delete("rank-00000.bin"),
    "create": Folder.create,
    "create within": lambda folder: (folder / "writers").create(),
    "modified": lambda folder: folder.modified("rank-00000.bin"),
    "delete all": delete_checkpoint,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_checkpoint_directory_that_became_a_link(
    root: Folder, outside: Path, tmp_path: Path, name: str
) -> None:
    root.create()
    (tmp_path / "link" / "run" / ID).symlink_to(outside)
    with pytest.raises(CorruptCheckpoint, match=rf"{ID} is a symbolic link"):
        OPERATIONS[name](root / ID)
    (root / ID).remove()  # silent, without effect


def test_the_write_process_does_not_follow_it_either(
    root: Folder, outside: Path, tmp_path: Path
) -> None:
    root.create()
    (tmp_path / "link" / "run" / ID).symlink_to(outside)
    folder = _open(*(root / ID).outermost, timeout_seconds=60)
    assert folder.url == (root / ID).url
    with pytest.raises(CorruptCheckpoint, match="is a symbolic link"):
        write(folder)


def test_nor_does_a_store_of_another_name(outside: Path, tmp_path: Path) -> None:
    root = Folder(f"dir::file://{tmp_path}/run")
    root.create()
    (Path(root.url) / ID).symlink_to(outside)
    with pytest.raises(CorruptCheckpoint, match="is a symbolic link"):
        write(root / ID)


def test_a_link_within_a_checkpoint_is_deleted_not_what_it_points_to(
    root: Folder, outside: Path, tmp_path: Path
) -> None:
    folder = root / ID
    folder.create()
    write(folder)
    for name in ("manifest.json", "pinned"):
        (tmp_path / "link" / "run" / ID / name).symlink_to(outside / name)
    delete_checkpoint(folder)
    assert root.names() == []


@contextmanager
def attacker(act: Callable[[], object]) -> Iterator[None]:
    """Repeat an action in another thread during the block."""
    stop = threading.Event()

    def attack() -> None:
        while not stop.is_set():
            with suppress(OSError):
                act()

    thread = threading.Thread(target=attack, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("what", ["rank-00000.bin", "manifest.json", "directory", "writers"])
def test_a_link_planted_meanwhile_does_no_harm(
    root: Folder, outside: Path, tmp_path: Path, what: str
) -> None:
    """Fail and name the link, or act only in the right place."""
    run = tmp_path / "disk" / "run"
    root.create()
    done: list[str] = []

    def plant() -> None:
        for path in list(run.glob("seq-*")) if what != "writers" else [run / "writers"]:
            if what in ("directory", "writers"):
                os.rename(path, tmp_path / f"moved-{len(list(tmp_path.iterdir()))}")
                os.symlink(outside, path)
            else:
                os.symlink(outside / what, path / what)

    with attacker(plant):
        for number in range(examples(60)):
            folder = root / f"seq-{number:06d}_step-00000001_0badcafe"
            with suppress(CheckNRunError, OSError):
                folder.create()
                write(folder)
                folder.put("manifest.json", b"{}", new=True)
                (root / "writers").create()
                (root / "writers").put("epoch-00000001.json", b"{}")
                done.append(folder.name)
            with suppress(CheckNRunError, OSError):
                delete_checkpoint(folder)
    if what != "directory":
        for path in run.glob("seq-*"):
            path.unlink() if path.is_symlink() else None


def test_exported_files_go_into_the_target_only(tmp_path: Path, outside: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "values.json").symlink_to(outside / "values.json")

    def save(place: Path) -> None:
        (place / "values.json").write_bytes(b"{}")

    save_in_place(target, save)
    assert (target / "values.json").read_bytes() == b"{}"
    assert [path.name for path in target.iterdir()] == ["values.json"]


def test_the_metadata_of_an_export_come_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leave no checkpoint for ``dcp.load`` that lacks files, wherever an export is killed."""
    moved: list[str] = []
    move = os.replace

    def replace(source: Path, target: Path, **options: Any) -> None:
        if Path(target).parent == tmp_path:  # leases of other tests' writers move theirs
            moved.append(target.name)
        move(source, target, **options)

    def save(place: Path) -> None:
        for name in (".metadata", *(f"__{rank}_0.distcp" for rank in range(20))):
            (place / name).write_bytes(b"")

    monkeypatch.setattr(os, "replace", replace)
    save_in_place(tmp_path, save)
    assert len(moved) == 21
    assert moved[-1] == ".metadata"
