"""Full, read-only and foreign file systems: real ones, where they can be had."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.background_jobs import build, checkpointer, differences, ids, where
from tests.distributed.models import Plan
from tests.distributed.states import gather
from tests.distributed.worker_pool import WorkerPool
from torchrec_checknrun.errors import SaveFailed

Workers = Callable[[int], WorkerPool]
SIZE = 2 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of two megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "checknrun-tests", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("may not mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def full(root: Path) -> Iterator[None]:
    """Fill the file system."""
    ballast = root.parent / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    yield
    ballast.unlink()


@contextmanager
def read_only(root: Path) -> Iterator[None]:
    """Mount the file system read-only."""
    for mode in ("ro", "rw"):
        subprocess.run(["mount", "-o", f"remount,{mode}", str(root.parent)], check=True)
        if mode == "ro":
            yield


@contextmanager
def another_users(root: Path) -> Iterator[None]:
    """Give the root to another user."""
    for folder in (root, *root.iterdir()):
        folder.chmod(0o755)
    own = os.geteuid()
    os.seteuid(65534)
    yield
    os.seteuid(own)


HOW = {"full": full, "read-only": read_only, "another user's": another_users}


def fails_and_goes_on(root: str, plan: Plan, how: str) -> list[Any]:
    """Return the error, whether older checkpoints are intact, and what the next one lacks."""
    job = build(plan)
    with checkpointer(root, job) as saver:
        job.train()
        saver.step()
        saver.save()
        before = ids(root)
        wanted = gather(job)
        job.train()
        saver.step()
        trained = gather(job)
        with HOW[how](Path(root)), pytest.raises(SaveFailed) as refused:
            saver.save()
        assert ids(root) == before
        left = [path.name for path in Path(root).rglob("rank-*") if path.parent.name not in before]
        report = saver.save()  # the same step again, with the rows of the one that failed
        assert report is not None
        new = differences(saver, job, trained)
        old = differences(saver, job, wanted, checkpoint=before[0])
        return [str(refused.value), left, old, new]


@pytest.mark.parametrize(
    ("how", "remedy"),
    [
        ("full", "no space is left: free some"),
        ("read-only", "mounted read-only"),
        ("another user's", "permission was refused"),
    ],
)
def test_storage_that_refuses(workers: Workers, disk: Path, how: str, remedy: str) -> None:
    if how == "another user's" and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    case = {**where(disk, ranks=1), "how": how}
    ((told, left, old, new),) = workers(1).run(fails_and_goes_on, **case)
    assert remedy in told
    assert "was not committed" in told
    assert (left, old, new) == ([], [], [])
