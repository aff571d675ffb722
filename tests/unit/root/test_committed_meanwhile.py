"""Checkpoints that others commit between a run's restore and its claim are not abandoned."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.models import Job
from tests.unit.run.deltas import live, make_job, same, saving, train
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.errors import RootInUse

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


def test_the_run_is_told_and_goes_on_from_them(tmp_path: Path) -> None:
    commit(tmp_path)
    job, saver = begun(tmp_path)
    newest = commit(tmp_path)
    job.train()
    for _ in range(2):
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
