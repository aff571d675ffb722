"""Save whatever becomes of the working directory while a run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.models import Job
from tests.distributed.states import gather
from tests.unit.run.jobs import checkpointer, restored, train
from torchrec_checknrun.errors import StorageFailed

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delete the working directory."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()


@pytest.mark.usefixtures("gone")
@pytest.mark.parametrize("background", ["thread", "process"])
def test_it_is_gone(tmp_path: Path, job: Job, background: Any) -> None:
    root = tmp_path / "run"
    with checkpointer(root, job, background=background) as saver:
        saver.restore()
        train(job, saver)
        saver.save()
        wanted = gather(job)
    assert restored(root, wanted) == []


@pytest.mark.usefixtures("gone")
@pytest.mark.parametrize("root", ["run", "file:run", "../run"])
def test_a_root_in_a_directory_that_is_gone(job: Job, root: str) -> None:
    with pytest.raises(StorageFailed, match="working directory, which is gone: give the whole"):
        checkpointer(root, job)


def test_a_root_in_a_directory_that_is_left(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative root stays where it was when the Checkpointer was made."""
    monkeypatch.chdir(tmp_path)
    with checkpointer("run", job, background="process") as saver:
        monkeypatch.chdir("/")
        saver.restore()
        train(job, saver)
        saver.save()
        wanted = gather(job)
    assert restored(tmp_path / "run", wanted) == []
