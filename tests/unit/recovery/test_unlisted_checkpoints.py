"""Go on from the newest checkpoint though the storage's listings don't show it yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.distributed.states import gather
from tests.unit.run.jobs import train
from tests.unit.run.lives import Lives, by_images, differences, undisturbed
from torchrec_checknrun import Checkpointer, HostCopies, RestoreReport
from torchrec_checknrun.root import checkpoints
from torchrec_checknrun.store.local import LocalStore

pytestmark = pytest.mark.usefixtures("one_rank")


@contextmanager
def unlisted(*hidden: str) -> Iterator[None]:
    """Leave names out of listings, as of an earlier moment."""
    names = LocalStore.list

    def earlier(self: LocalStore) -> list[str]:
        return [name for name in names(self) if name not in hidden]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "list", earlier)
        yield


def another_process() -> None:
    """Forget what this process has committed."""
    checkpoints._expected.clear()


def restored(saver: Checkpointer) -> RestoreReport:
    report = saver.restore()
    assert report is not None
    return report


def test_of_this_process(lives: Lives) -> None:
    """Restore what was saved last, not what was saved before."""
    job, saver = lives.begin(survive=None)
    saver.restore()
    ids = []
    for _ in range(2):
        train(job, saver)
        ids.append(saver.save().id)
    wanted = gather(job)
    train(job, saver)
    with unlisted(ids[-1]):
        assert restored(saver).id == ids[-1]
        assert differences(job, wanted) == []
    (lives.root / ids[-1] / "manifest.json").unlink()
    with unlisted(ids[-1]):  # and no more than is there
        assert restored(saver).id == ids[0]


@pytest.mark.parametrize("way", ["images", "host_copies"])
def test_of_an_earlier_checkpointer_of_this_process(lives: Lives, way: str) -> None:
    """Restore what the process has saved, of which the new one's images or copies know nothing."""
    job, saver = lives.begin(survive=None)
    saver.restore()
    train(job, saver)
    last = saver.save().id
    saver.close()
    with unlisted(last):
        copies = HostCopies(folder=str(lives.memory))
        job, saver = lives.begin(**({} if way == "images" else {"survive": copies}))
        assert restored(saver).id == last


@pytest.mark.parametrize("saves", [1, 2])
def test_of_images(lives: Lives, saves: int) -> None:
    """Lose no step of a run whose image descends from that checkpoint."""
    job, saver = lives.begin()
    saver.restore()
    for _ in range(saves):
        train(job, saver)
        last = saver.save().id
    train(job, saver)
    lives.die()
    another_process()
    with unlisted(last):
        job, saver = lives.begin()
        report = restored(saver)
        assert by_images(report)
        assert (report.step, report.id) == (saves + 1, last)
        assert differences(job, undisturbed(saves + 1)) == []


def test_of_host_copies(lives: Lives) -> None:
    """Restore the checkpoint whose copies are in memory."""
    copies = {"survive": HostCopies(folder=str(lives.memory))}
    job, saver = lives.begin(**copies)
    saver.restore()
    for _ in range(2):
        train(job, saver)
        last = saver.save().id
    lives.die()
    another_process()
    with unlisted(last):
        job, saver = lives.begin(**copies)
        assert restored(saver).id == last
        assert differences(job, undisturbed(2)) == []
