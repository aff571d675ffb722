"""Tell what can't be read from what is damaged: it may be sound."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.console import Console
from tests.unit.rights import bound, folder_of_bound, forbid
from tests.unit.run.jobs import checkpointer, make_job, train
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.tools.verify import Verified, verify

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def root() -> Iterator[Path]:
    """Make a full checkpoint, and two that build on it, with differences of dense values."""
    with folder_of_bound() as folder, bound():
        job = make_job()
        with checkpointer(folder / "run", job) as saver:
            for _ in range(3):
                train(job, saver)
                saver.save()
        yield folder / "run"


def found(root: Path) -> tuple[list[Path], list[Verified]]:
    """Return the checkpoints' directories, and what a verification finds, oldest first."""
    return sorted(root.glob("seq-*")), verify(root)[::-1]


@pytest.mark.parametrize("file", ["rank-00000.bin", MANIFEST_NAME, ""])
def test_what_builds_on_an_unread_one_is_not_called_damaged(
    root: Path, console: Console, file: str
) -> None:
    """Blame only what can't be read."""
    first = min(root.glob("seq-*"))
    forbid(first / file)
    folders, verified = found(root)
    assert sorted(one.id for one in verified) == [folder.name for folder in folders]
    for one in verified:
        assert one.unread
        for problem in one.problems:
            assert "permission was refused" in problem
            assert first.name in problem
    shown = console.run("verify", root)
    assert shown.code == 1
    assert "can't be read" in shown.out
    assert "damaged" not in shown.out
    (first / file).chmod(0o700)
    assert [(one.problems, one.unread) for one in verify(root)] == [((), False)] * 3


def test_a_damaged_parent_is_blamed_too_and_what_it_keeps_sound_is_read(root: Path) -> None:
    first = min(root.glob("seq-*"))
    data = bytearray((first / "rank-00000.bin").read_bytes())
    data[-1] ^= 1
    (first / "rank-00000.bin").write_bytes(data)
    _, (parent, *children) = found(root)
    assert parent.id == first.name
    (cause,) = parent.problems
    for one in children:
        assert not one.unread
        assert one.chunks > 0
        (problem,) = one.problems
        assert f"needs {first.name}" in problem or cause in problem
        assert "its parent lacks" not in problem


def test_an_unread_one_with_damage_is_damaged(root: Path) -> None:
    _, second, third = sorted(root.glob("seq-*"))
    data = bytearray((third / "rank-00000.bin").read_bytes())
    data[-1] ^= 1
    (third / "rank-00000.bin").write_bytes(data)
    forbid(second / MANIFEST_NAME)
    _, verified = found(root)
    unread = {one.id: one.unread for one in verified}
    assert unread[second.name]
    assert not unread[third.name]
