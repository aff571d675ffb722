"""Explicit saves in which only dense state changed, or nothing at all."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.normalized import NormalizedJob
from tests.distributed.small_job import Note, Workers, build, checkpointer, where
from torchrec_checknrun import AtEnd, CheckpointReport, PerRank
from torchrec_checknrun.errors import (
    SaveDeferred,
    SaveFailed,
)


class Everything:
    """A job with all kinds of state, and changes to it that mark no row."""

    def __init__(self, seed: int = 0) -> None:
        self.job = NormalizedJob(seed)
        self.note, self.own = Note(0), Note(dist.get_rank())
        self.state = {"note": self.note, "own": PerRank(self.own)}

    @torch.no_grad()
    def change(self, what: str) -> None:
        job, last = self.job, dist.get_rank() == dist.get_world_size() - 1
        if what == "parameter":
            job.model.state_dict()["out.bias"].add_(1)
        elif what == "buffer":
            job.model.train()
            job.model(job.features())  # no backward: BatchNorm's statistics move
        elif what == "group":
            job.optimizer.param_groups[0]["lr"] *= 0.5
        elif what == "object":
            self.note.value += 1
        elif what == "per rank":
            self.own.value += 10 * last  # on one rank only
        elif what == "fused rate":
            for group in job.model.fused_optimizer.param_groups:
                group["lr"] *= 0.5
            job.model.fused_optimizer.step()


WHAT = ["parameter", "buffer", "group", "object", "per rank", "fused rate"]


def dense_of(job: NormalizedJob) -> dict[str, list[float]]:
    content = job.model.state_dict().items()
    return {name: v.tolist() for name, v in content if name.startswith(("norm", "out"))}


def only_dense(root: str) -> list[Any]:
    """Save after each change alone; a save without changes writes nothing, and says so."""
    every = Everything()
    with every.job.checkpointer(root, state=every.state, retention=None) as saver:
        every.job.train()
        saver.step()
        ids = [saver.save().id]
        for what in WHAT:
            every.change(what)
            report = saver.save()
            assert not report.unchanged, what
            assert (report.modified_rows, report.kind) == (0, "differential"), what
            ids.append(report.id)
            again = saver.save()
            assert again.unchanged
            assert again.id == report.id
            assert saver.save(wait=False) is None
            assert saver.wait() is None
            fresh = Everything(seed=5)
            with fresh.job.checkpointer(root, state=fresh.state, retention=None) as reading:
                reading.restore()
                if dist.get_rank() == 0:  # whose buffers count
                    assert dense_of(fresh.job) == dense_of(every.job), what
                assert (fresh.note.value, fresh.own.value) == (every.note.value, every.own.value)
                lr = every.job.optimizer.param_groups[0]["lr"]
                assert fresh.job.optimizer.param_groups[0]["lr"] == lr
    return ids


def test_a_save_of_dense_changes(workers: Workers, tmp_path: Path) -> None:
    zero, one = workers(2).run(only_dense, root=str(tmp_path / "root"))
    assert zero == one
    assert len(set(zero)) == 1 + len(WHAT)


def at_end(root: str) -> list[Any]:
    """Make a last checkpoint if anything has changed, and only then."""
    every = Everything()
    reports: list[CheckpointReport] = []
    options: dict[str, Any] = {
        "state": every.state,
        "triggers": [AtEnd()],
        "callbacks": [reports.append],
    }
    with every.job.checkpointer(root, **options) as saver:
        every.job.train()
        saver.step()
        saver.save()
    first = len(reports)
    for change in ("nothing", "per rank", "nothing"):
        with every.job.checkpointer(root, **options) as saver:
            saver.restore()
            every.change(change)
    return [first, len(reports), reports[-1].step]


def test_a_last_save_of_dense_changes(workers: Workers, tmp_path: Path) -> None:
    assert workers(2).run(at_end, root=str(tmp_path / "root")) == [[1, 2, 1]] * 2


def outcomes(root: str) -> list[str]:
    """Save in all circumstances: each save returns a report or raises."""
    every, told = Everything(), []
    job = every.job
    with job.checkpointer(root, state=every.state, max_failures=5) as saver:
        job.train()
        saver.step()
        job.model(job.features()).sum().backward()
        with pytest.raises(SaveDeferred, match=r"zero_grad\(\)"):
            saver.save()
        assert saver.save(wait=False) is None
        job.optimizer.step()
        assert saver.step() is None  # starts the deferred save
        report = saver.wait()
        assert isinstance(report, CheckpointReport)
        every.note.value = random.Random()  # cannot be stored
        with pytest.raises(Exception, match=r"note\.value") as refused:
            saver.save()
        told.append(type(refused.value).__name__)
        every.note.value = 3
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == dist.get_world_size() - 1:
                patch.setattr(every.note, "state_dict", lambda: 1 / 0)
            with pytest.raises(SaveFailed, match="note"):
                saver.save()
        assert not saver.save().unchanged
    return told


def test_a_save_returns_a_report_or_raises(workers: Workers, tmp_path: Path) -> None:
    assert workers(2).run(outcomes, root=str(tmp_path / "root")) == [["UnsupportedState"]] * 2


def after_a_part(root: str, spec: dict[str, Any], plan: Any) -> list[str]:
    """Save after a partial restore: the checkpoint lacks the rest, so it is written again."""
    job = build(spec, plan)
    with checkpointer(root, job) as saver:
        job.train()
        saver.step()
        saver.save()
    with checkpointer(root, job, state={"note": Note(5)}) as saver:
        report = saver.restore(strict=False)
        assert report is not None
        assert not saver.save().unchanged
    note = Note(0)
    with checkpointer(root, job, state={"note": note}) as saver:
        saver.restore()
        assert saver.save().unchanged
    assert note.value == 5
    return list(report.skipped)


def test_a_save_after_a_restore_in_part(workers: Workers, tmp_path: Path) -> None:
    (skipped,) = workers(1).run(after_a_part, **where(tmp_path, ranks=1))
    assert skipped == ["state 'note': not in the checkpoint"]
