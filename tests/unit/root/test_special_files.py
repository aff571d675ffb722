"""Keep what holds a pipe, a device, a socket or a directory where a file is expected, and tell."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.chains import write
from tests.unit.root.commits import ROWS, leftover, part, write_full
from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.root.catalog import inventory
from torchrec_checknrun.root.chain import newest
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.verify import verify
from torchrec_checknrun.writers.claims import FOLDER

Replace = Callable[[Path], None]


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched, socket.socket(socket.AF_UNIX) as bound:
        patched.chdir(path.parent)  # a socket's path has at most 107 bytes
        bound.bind(path.name)


def a_device(path: Path) -> None:
    try:
        os.mknod(path, 0o20600, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root makes devices")


def a_directory(path: Path) -> None:
    path.mkdir()


KINDS = pytest.mark.parametrize("make", [a_pipe, a_socket, a_device, a_directory])


@pytest.fixture
def root(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path / "run")
    folder.create()
    return folder


@pytest.fixture
def made(root: Folder) -> list[Manifest]:
    first = write(root, ROWS, part())
    return [first, write_full(root, first)]


@KINDS
def test_in_place_of_a_manifest(root: Folder, made: list[Manifest], make: Replace) -> None:
    """Take the directory for a damaged checkpoint: its rank files may be all that is left."""
    path = Path(root.url, made[1].id, MANIFEST_NAME)
    path.unlink()
    make(path)
    other = leftover(root, 3)
    before = (root / made[1].id).names()
    chain, problems = newest(root)
    assert chain is not None
    assert chain.head.id == made[0].id
    assert "manifest.json is a symbolic link, or no file" in problems[0]
    (listed,) = (one for one in inventory(root).checkpoints if one.id == made[1].id)
    assert listed.status == "broken"
    assert "manifest.json is a symbolic link, or no file" in str(listed.problem)
    done = prune(root, Retention(1))
    assert done.leftovers == (other,)
    (problem,) = done.problems
    assert f"{made[1].id} stays: " in problem
    assert "manifest.json is a symbolic link, or no file" in problem
    assert (root / made[1].id).names() == before
    assert root.names() == sorted(one.id for one in made)


@pytest.mark.parametrize("make", [a_pipe, a_socket, a_device])
def test_in_place_of_a_checkpoint(root: Folder, made: list[Manifest], make: Replace) -> None:
    shutil.rmtree(Path(root.url, made[1].id))
    make(Path(root.url, made[1].id))
    assert prune(root, Retention(1)).leftovers == ()
    assert made[1].id in root.names()
    chain, _ = newest(root)
    assert chain is not None
    assert chain.head.id == made[0].id


@pytest.mark.parametrize("make", [a_pipe, a_socket, a_device])
def test_in_place_of_the_claims(root: Folder, made: list[Manifest], make: Replace) -> None:
    make(Path(root.url, FOLDER))
    for read in (newest, inventory, lambda root: prune(root, Retention(1))):
        with pytest.raises(CorruptCheckpoint, match="writers is no directory, where the directory"):
            read(root)
    (problem,) = (one for one in verify(root.url) if one.problems)
    assert problem.id == FOLDER
    assert set(root.names()) == {FOLDER, *(one.id for one in made)}
