"""Refuse to write into another root that has come in place of a run's own while it goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.distributed.states import State, gather
from tests.unit.run.jobs import checkpointer, make_job, restored, train
from torchrec_checknrun.errors import RootInUse, SaveFailed
from torchrec_checknrun.root.catalog import inventory
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers.lease import FOLDER

pytestmark = pytest.mark.usefixtures("one_rank")


def run(root: Path, lives: int) -> State:
    """Train a run of several lives, each of a step and a checkpoint; return its last state."""
    for _ in range(lives):
        job = make_job(lives)
        with checkpointer(root, job) as saver:
            saver.restore()
            train(job, saver)
            saver.save()
    return gather(job)


def statuses(root: Path) -> set[str]:
    """Return the kinds of what was committed there."""
    found = {str(one.status) for one in inventory(Folder(root)).checkpoints}
    return found - {"uncommitted"}


@pytest.fixture
def other(tmp_path: Path) -> tuple[Path, State]:
    """Make another run's root, of a lower epoch, with its last state."""
    root = tmp_path / "other"
    return root, run(root, 2)


def test_a_link_is_changed_and_put_back(tmp_path: Path, other: tuple[Path, State]) -> None:
    """Hide nothing of the other root, at a save or at the end; go on once the link is right."""
    run(tmp_path / "own", 4)
    link = tmp_path / "current"
    link.symlink_to(tmp_path / "own")
    job = make_job()
    with checkpointer(link, job) as saver:
        saver.restore()
        train(job, saver)
        saver.save()
        link.unlink()
        link.symlink_to(other[0])
        claims = {path: path.read_bytes() for path in (other[0] / FOLDER).iterdir()}
        for _ in range(2):
            train(job, saver)
            with pytest.raises(RootInUse, match=r"another folder is in place of .*current"):
                saver.save()
        assert {path: path.read_bytes() for path in (other[0] / FOLDER).iterdir()} == claims
        link.unlink()
        link.symlink_to(tmp_path / "own")
        saver.save()
        link.unlink()
        link.symlink_to(other[0])
    assert {path: path.read_bytes() for path in (other[0] / FOLDER).iterdir()} == claims
    assert statuses(other[0]) == statuses(tmp_path / "own") == {"restorable"}
    assert restored(tmp_path / "own", gather(job)) == []
    assert restored(*other) == []


def test_a_copy_takes_the_place(tmp_path: Path, other: tuple[Path, State]) -> None:
    own = tmp_path / "own"
    run(own, 4)
    job = make_job()
    with checkpointer(own, job) as saver:
        saver.restore()
        train(job, saver)
        saver.save()
        own.rename(tmp_path / "moved")
        shutil.copytree(other[0], own)
        train(job, saver)
        with pytest.raises(RootInUse, match="put the run's own folder back"):
            saver.save()
    assert statuses(own) == {"restorable"}
    assert restored(own, other[1]) == []


def test_claims_are_deleted_in_the_own_root(tmp_path: Path) -> None:
    """Know a root by its checkpoints, those of this process included, and save there."""
    own = tmp_path / "own"
    job = make_job()
    with checkpointer(own, job) as saver:
        saver.restore()
        for _ in range(3):
            train(job, saver)
            saver.save()
            shutil.rmtree(own / FOLDER)
    assert statuses(own) == {"restorable"}
    assert restored(own, gather(job)) == []


def test_an_older_copy_of_the_own_root(tmp_path: Path) -> None:
    """Go on in a backup of the run's own root: a full checkpoint upon what is there."""
    own = tmp_path / "own"
    run(own, 2)
    shutil.copytree(own, tmp_path / "backup")
    job = make_job()
    with checkpointer(own, job) as saver:
        saver.restore()
        train(job, saver)
        saver.save()
        own.rename(tmp_path / "moved")
        shutil.copytree(tmp_path / "backup", own)
        train(job, saver)
        with pytest.raises(SaveFailed, match="was deleted"):
            saver.save()
        saver.save()
    assert statuses(own) == {"restorable"}
    assert restored(own, gather(job)) == []
