"""Know a run's root again under another spelling: a link, a path through another folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.models import Job
from tests.unit.run.jobs import checkpointer, make_job, train
from tests.unit.run.lives import Lives, by_images, differences, undisturbed
from torchrec_checknrun import HostCopies, Images, skip_initialization
from torchrec_checknrun.errors import RootInUse

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(params=["link", "elsewhere/../root"])
def spelling(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    (tmp_path / "root").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("root")
    return f"{tmp_path}/{request.param}"


def test_images_are_found_again(lives: Lives, spelling: str) -> None:
    """Lose no step, and take no memory for a second image."""
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 3)
    lives.die()
    lives.root = Path(spelling)
    with skip_initialization(spelling, Images(folder=str(lives.memory))) as there:
        assert there
    job, saver = lives.begin()
    assert by_images(saver.restore())
    assert differences(job, undisturbed(3)) == []
    assert len(lives.files()) == 1


def test_host_copies_are_found_again(lives: Lives, spelling: str) -> None:
    copies = HostCopies(folder=str(lives.memory))
    job, saver = lives.begin(survive=copies)
    train(job, saver)
    saver.save()
    lives.die()
    lives.root = Path(spelling)
    job, saver = lives.begin(survive=copies)
    report = saver.restore()
    assert report is not None
    assert report.memory_bytes
    assert differences(job, undisturbed(1)) == []


def test_a_second_checkpointer_of_the_process_is_refused(
    tmp_path: Path, job: Job, spelling: str
) -> None:
    """Refuse two writers of one claim, each of which would end the other's saves."""
    with checkpointer(tmp_path / "root", job) as first:
        train(job, first)
        first.save()
        with (
            checkpointer(spelling, make_job(seed=3)) as second,
            pytest.raises(RootInUse, match=r"another Checkpointer .*close\(\) it"),
        ):
            second.save()
        train(job, first)
        first.save()
