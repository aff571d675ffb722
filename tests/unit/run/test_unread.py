"""Keep what a restore could not read: it is not known to be damaged."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.states import State, gather
from tests.unit.run.jobs import checkpointer, make_job, restored, train
from tests.unit.run.lives import Lives, by_images
from torchrec_checknrun import Full
from torchrec_checknrun.errors import StorageFailed, StorageUnreachable, UnsupportedFormat
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.root.chain import newest
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.store.local import LocalStore

pytestmark = pytest.mark.usefixtures("one_rank")


def fail(patch: pytest.MonkeyPatch, id: str, file: str, number: int) -> None:
    """Let each read of a file of a checkpoint fail."""
    for name in ("read", "read_into"):
        real = getattr(LocalStore, name)

        def read(store: LocalStore, *args: Any, _real: Any = real) -> Any:
            if store.path.endswith(id) and file in args:
                raise OSError(number, os.strerror(number))
            return _real(store, *args)

        patch.setattr(LocalStore, name, read)


def saved(root: Path, saves: int = 3) -> tuple[str, State]:
    """Save full checkpoints; return the newest one's id and state."""
    job = make_job()
    with checkpointer(root, job, policy=Full()) as saver:
        saver.restore()
        for _ in range(saves):
            train(job, saver)
            saver.save()
    chain, _ = newest(Folder(root))
    assert chain is not None
    return chain.head.id, gather(job)


@pytest.mark.parametrize("file", [MANIFEST_NAME, "rank-00000.bin"])
@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EACCES, "check the owner, the mode"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENOMEM, "too little memory"),
    ],
)
def test_a_process_that_may_not_or_can_not_read_goes_on_from_nothing_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, number: int, remedy: str
) -> None:
    """Raise: an older checkpoint would be gone on from, and the newest deleted as abandoned."""
    id, state = saved(tmp_path)
    with checkpointer(tmp_path, make_job(seed=5), retention=Retention(1)) as saver:
        with monkeypatch.context() as patch:
            fail(patch, id, file, number)
            with pytest.raises(StorageFailed, match=f"{id}/{file}.*{remedy}"):
                saver.restore()
        report = saver.restore()
    assert report is not None
    assert report.id == id
    assert restored(tmp_path, state) == []


def of_a_newer_release(path: Path) -> bytes:
    """Make a manifest one of a newer release's; return its earlier bytes."""
    data = path.read_bytes()
    document = json.loads(data)
    document["manifest"]["format_version"] = 99
    path.write_text(json.dumps(document))
    return data


def test_nothing_older_than_a_newer_release_s_checkpoint_is_gone_on_from(tmp_path: Path) -> None:
    """Raise as for what may not be read: that release reads it."""
    id, state = saved(tmp_path)
    path = tmp_path / id / MANIFEST_NAME
    data = of_a_newer_release(path)
    with checkpointer(tmp_path, make_job(seed=5), retention=Retention(1)) as saver:
        with pytest.raises(UnsupportedFormat, match=rf"{id}.*version 99.*upgrade"):
            saver.restore()
        path.write_bytes(data)
        report = saver.restore()
    assert report is not None
    assert report.id == id
    assert restored(tmp_path, state) == []


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_run_that_restores_nothing_saves_beside_a_newer_release_s_checkpoint(
    tmp_path: Path, resume: str
) -> None:
    """Delete nothing that is there: what that release needs isn't known."""
    id, _ = saved(tmp_path)
    before = sorted(tmp_path.iterdir())
    of_a_newer_release(tmp_path / id / MANIFEST_NAME)
    job = make_job(seed=5)
    with checkpointer(tmp_path, job, retention=Retention(1), resume=resume) as saver:
        if resume == "never":
            assert saver.restore() is None
        for _ in range(3):
            train(job, saver)
            saver.save()
    assert {*before} <= {*tmp_path.iterdir()}


def test_an_unread_one_is_passed_over_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fall back past a bad sector, or what looks like one; delete nothing of it."""
    id, _ = saved(tmp_path)
    job = make_job(seed=5)
    with checkpointer(tmp_path, job, retention=Retention(1), policy=Full()) as saver:
        with monkeypatch.context() as patch:
            fail(patch, id, "rank-00000.bin", errno.EIO)
            report = saver.restore()
        assert report is not None
        assert report.id != id
        for _ in range(3):
            train(job, saver)
            saver.save()
    assert f"{id} may be sound: this run deletes nothing of that" in caplog.text
    assert (tmp_path / id / MANIFEST_NAME).exists()


def test_a_user_named_one_that_may_not_be_read_stops_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commit beside it, and delete nothing: what it needs is unknown."""
    id, _ = saved(tmp_path)
    shutil.copytree(tmp_path / id, tmp_path / "final")
    job = make_job(seed=5)
    fail(monkeypatch, "final", MANIFEST_NAME, errno.EACCES)
    with checkpointer(tmp_path, job, retention=Retention(1), policy=Full()) as saver:
        with pytest.raises(StorageFailed, match="final"):
            saver.restore()
        saver.restore(id)
        for _ in range(2):
            train(job, saver)
            saver.save()
    assert len(list(tmp_path.glob("seq-*"))) == 5


def test_images_are_looked_at_again_once_the_storage_answers(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    saver.save()
    train(job, saver)
    lives.die()
    job, saver = lives.begin()

    def names(_: Folder) -> list[str]:
        raise StorageUnreachable(errno.ETIMEDOUT, "no answer")

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "names", names)
        with pytest.raises(StorageUnreachable):
            saver.restore()
    assert by_images(saver.restore())
    assert saver.steps == 3
