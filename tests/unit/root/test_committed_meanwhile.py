"""Checkpoints that others commit between a run's restore and its claim are not abandoned."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.models import Job
from tests.unit.console import Console
from tests.unit.root.writers import ELSEWHERE, become
from tests.unit.run import jobs
from tests.unit.run.deltas import live, make_job, same, saving, train
from tests.unit.run.lives import Lives, by_images
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.errors import RootInUse
from torchrec_checknrun.root.checkpoints import read_manifest
from torchrec_checknrun.root.counting import counting_ids
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers.lease import Lease

pytestmark = pytest.mark.usefixtures("group")


def commit(root: Path) -> str:
    """Go on from the newest checkpoint in another Checkpointer, as ranks without their agent do."""
    job = make_job()
    with saving(root, job) as other:
        other.restore()
        train(job, other)
        report = other.save()
        assert report is not None
        return report.id


def begun(root: Path, checkpoint: str | None = None) -> tuple[Job, Checkpointer]:
    job = make_job(seed=3)
    saver = saving(root, job)
    saver.restore(checkpoint)
    return job, saver


def go_on_from(newest: str, job: Job, saver: Checkpointer) -> None:
    """Be told of a newer checkpoint, restore it, and save upon it."""
    with pytest.raises(RootInUse, match=f"{newest} was committed .* restore"):
        saver.save()
    report = saver.restore()
    assert report is not None
    assert report.id == newest
    train(job, saver)
    after = saver.save()
    assert after is not None
    assert after.parent == newest
    saver.close()


def test_the_run_is_told_and_goes_on_from_them(tmp_path: Path) -> None:
    commit(tmp_path)
    job, saver = begun(tmp_path)
    newest = commit(tmp_path)
    job.train()
    with pytest.raises(RootInUse, match=newest):
        saver.save()
    go_on_from(newest, job, saver)


def test_a_fresh_start_is_told(tmp_path: Path) -> None:
    job, saver = begun(tmp_path)
    newest = commit(tmp_path)
    job.train()
    with pytest.raises(RootInUse, match=newest):
        saver.step()
    saver.close()


def test_an_older_one_that_was_asked_for_may_be_gone_on_from(tmp_path: Path) -> None:
    first = commit(tmp_path)
    commit(tmp_path)
    job, saver = begun(tmp_path, first)
    commit(tmp_path)
    train(job, saver)
    after = saver.save()
    assert after is not None
    rows = live(saver)
    saver.close()
    _, reader = begun(tmp_path)
    with reader:
        assert set(same(live(reader), rows)) <= {n for n in rows if "/" not in n}  # rounded rows


def test_a_run_that_passed_over_a_damaged_one_is_told(tmp_path: Path) -> None:
    """Abandon what could not be used, and nothing that came after."""
    commit(tmp_path)
    damaged = commit(tmp_path)
    (tmp_path / damaged / "rank-00000.bin").unlink()
    job, saver = begun(tmp_path)
    newest = commit(tmp_path)
    job.train()
    go_on_from(newest, job, saver)


def test_a_damaged_one_and_what_it_needs_are_abandoned(tmp_path: Path) -> None:
    """Also where the damage is found as the rows are read."""
    first, job = commit(tmp_path), make_job()
    with saving(tmp_path, job) as other:
        for _ in range(3):
            train(job, other)
            other.save()
    damaged = sorted(path.name for path in tmp_path.glob("seq-*"))[1]
    file = tmp_path / damaged / "rank-00000.bin"
    data = file.read_bytes()
    file.write_bytes(bytes(b ^ 1 for b in data[:1000]) + data[1000:])
    job, saver = begun(tmp_path)
    train(job, saver)
    after = saver.save()
    assert after is not None
    previous = read_manifest(Folder(tmp_path), after.id).previous
    assert previous is not None
    assert previous.id == first
    saver.close()


def test_one_that_somebody_adopts_is_not_abandoned(tmp_path: Path, console: Console) -> None:
    commit(tmp_path)
    root = Folder(tmp_path)
    ignored = commit(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        become(patch, **ELSEWHERE)
        lease = Lease(root)  # lists all but that one
        lease.acquire(lambda _: [id for id in counting_ids(root, None) if id != ignored])
        lease.release()
    job, saver = begun(tmp_path)
    assert console.run("adopt", tmp_path, ignored, "--yes").code == 0
    job.train()
    with pytest.raises(RootInUse, match=f"{ignored} was committed .* adopted"):
        saver.save()
    saver.close()


@pytest.mark.parametrize("saves", [True, False])
def test_a_run_that_went_on_from_images_is_told(lives: Lives, saves: bool) -> None:
    job, saver = lives.begin()
    saver.restore()
    jobs.train(job, saver, 2)
    if saves:
        saver.save()
        jobs.train(job, saver)
    lives.die()
    job, saver = lives.begin()
    assert by_images(saver.restore())
    other = jobs.make_job(seed=5)
    with jobs.checkpointer(lives.root, other) as another:
        another.restore()
        jobs.train(other, another)
        newest = another.save()
    assert newest is not None
    job.train()
    with pytest.raises(RootInUse, match=f"{newest.id} was committed .* restore"):
        saver.step()
    lives.die()
