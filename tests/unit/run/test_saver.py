"""Lose no rows when saving is interrupted, fails or overlaps: one rank, in this process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.distributed.models import Job
from tests.distributed.states import gather
from tests.unit.run.jobs import checkpointer, restored, train
from torchrec_checknrun import AtEnd, EverySteps, Full, OneShot, Retention
from torchrec_checknrun.dcp import SavePlanner, StorageWriter
from torchrec_checknrun.dense.gradients import PendingGradients
from torchrec_checknrun.errors import CheckNRunError, SaveFailed
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.marks import layers
from torchrec_checknrun.root.report import CheckpointReport
from torchrec_checknrun.row_sets import RowSet
from torchrec_checknrun.save import background
from torchrec_checknrun.save.save import Save
from torchrec_checknrun.schedule.triggers import Trigger
from torchrec_checknrun.tracking import track
from torchrec_checknrun.writers.lease import Lease

pytestmark = pytest.mark.usefixtures("one_rank")


Write = Callable[..., Any]


def names(root: Path) -> list[str]:
    return sorted(path.parent.name for path in root.glob(f"seq-*/{MANIFEST_NAME}"))


def save_by_dcp(path: Path, job: Job) -> None:
    tracked = track(job.model)
    writer = StorageWriter(path)
    dcp.save({"model": job.model}, storage_writer=writer, planner=SavePlanner(tracked))
    tracked.close()


def fail(*_: object) -> None:
    raise OSError(28, "no space left, says the test")


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("kept", [False, True])
def test_a_cut_that_is_interrupted_loses_no_row(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch, error: type, kept: bool
) -> None:
    """Keep rows that were already taken from the marks and are not stored elsewhere yet."""
    with checkpointer(tmp_path, job) as saver:
        train(job, saver)
        saver.save()
        train(job, saver, 3)

        def interrupted(*args: Any, **options: Any) -> RowSet:
            if kept:
                RowSet(*args, **options)
            raise error("says the test")

        with monkeypatch.context() as patch:
            patch.setattr(layers, "RowSet", interrupted)
            with pytest.raises((SaveFailed, KeyboardInterrupt)):
                saver.save()
        wanted = gather(job)
        report = saver.save()
        assert report is not None
        assert report.modified_rows > 0
    assert restored(tmp_path, wanted) == []


def test_other_columns_are_not_forgotten_while_one_is_written(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[CheckpointReport] = []
    with checkpointer(tmp_path, job, every_steps=1, callbacks=[written.append]) as saver:
        train(job, saver)
        saver.wait()
        write: Write = background.write_rank_file
        go_on: list[bool] = []

        def slow(*args: Any) -> Any:
            while not go_on:
                time.sleep(0.01)
            return write(*args)

        with monkeypatch.context() as patch:
            patch.setattr(background, "write_rank_file", slow)
            train(job, saver)
            saver._target.tracked.converted = True  # as after a reshard
            train(job, saver)  # due, and skipped
            go_on.append(True)
            saver.wait()
        train(job, saver)
        saver.wait()
    assert [report.kind for report in written] == ["full", "differential", "full"]


def test_the_end_is_saved_though_the_one_before_failed(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    with checkpointer(tmp_path, job, triggers=[AtEnd()]) as saver:
        train(job, saver)
        saver.save()
        train(job, saver)
        with monkeypatch.context() as patch:
            patch.setattr(background, "write_rank_file", fail)
            saver.save(wait=False)
            assert saver._saver.running is not None
            saver._saver.running.known.wait()
        wanted = gather(job)
    assert restored(tmp_path, wanted) == []


@pytest.mark.parametrize("triggers", [[AtEnd()], [EverySteps(4)]])
def test_a_failure_that_no_checkpoint_makes_good_is_raised_at_the_end(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch, triggers: list[Trigger]
) -> None:
    """Raise an error that is only logged while training goes on: no later save has its rows."""
    saver = checkpointer(tmp_path, job, triggers=triggers, max_failures=2)
    train(job, saver, 3)
    saver.save()
    monkeypatch.setattr(background, "write_rank_file", fail)
    train(job, saver)
    assert saver.wait() is None
    with pytest.raises(SaveFailed, match="no space left"):
        saver.close()


def test_a_failure_that_a_checkpoint_has_made_good_is_not_raised_at_the_end(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    with checkpointer(tmp_path, job, triggers=[EverySteps(2)], max_failures=2) as saver:
        with monkeypatch.context() as patch:
            patch.setattr(background, "write_rank_file", fail)
            train(job, saver, 2)
            assert saver.wait() is None
        train(job, saver, 2)
        wanted = gather(job)
    assert restored(tmp_path, wanted) == []


def test_a_callback_that_fails_fails_nothing_else(
    tmp_path: Path, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[CheckpointReport] = []
    with checkpointer(
        tmp_path, job, callbacks=[fail, told.append], triggers=[EverySteps(1), AtEnd()]
    ) as saver:
        train(job, saver, 3)
        wanted = gather(job)
    assert restored(tmp_path, wanted) == []
    assert len(told) == len(names(tmp_path))
    assert "says the test" in caplog.text


@pytest.mark.parametrize(("policy", "keep", "left"), [(OneShot(), 1, 2), (OneShot(), 2, 3)])
def test_what_retention_keeps_of_a_policy(
    tmp_path: Path, job: Job, policy: OneShot, keep: int, left: int
) -> None:
    """Keep the newest and the baseline: no checkpoint needs those in between."""
    with checkpointer(tmp_path, job, policy=policy, retention=Retention(keep)) as saver:
        for _ in range(6):
            train(job, saver)
            saver.save()
            assert saver._saver.writer._pruner is not None
            saver._saver.writer._pruner.wait(60)
        wanted = gather(job)
    assert len(names(tmp_path)) == left
    assert restored(tmp_path, wanted) == []


def test_waiting_for_the_one_before_is_a_stall(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    write: Write = background.write_rank_file

    def slow(*args: Any) -> Any:
        time.sleep(1.0)
        return write(*args)

    monkeypatch.setattr(background, "write_rank_file", slow)
    stalls: list[float] = []
    with checkpointer(
        tmp_path,
        job,
        every_steps=1,
        when_busy="wait",
        callbacks=[lambda report: stalls.append(report.stall_seconds)],
    ) as saver:
        train(job, saver, 3)
    assert stalls[0] < 0.9
    assert min(stalls[1:]) > 0.9


def test_a_report_is_given_once_and_to_somebody(tmp_path: Path, job: Job) -> None:
    with checkpointer(tmp_path, job) as saver:
        train(job, saver)
        saver.save(wait=False)
        job.train()
        saver.steps += 1
        saver.save(wait=False)  # waits for the previous save
        assert saver._saver.running is not None
        report = saver.step()
        assert report is not None


def test_a_closed_one_says_so(tmp_path: Path, job: Job) -> None:
    saver = checkpointer(tmp_path, job)
    train(job, saver)
    saver.save()
    saver.close()
    saver.close()
    for act in (saver.step, saver.save, saver.restore):
        with pytest.raises(CheckNRunError, match=r"closed.*make a new one"):
            act()


class Nonsense:
    def decide(self, history: object) -> str:
        return "full"


def test_a_policy_s_mistake_is_named(tmp_path: Path, job: Job) -> None:
    with checkpointer(tmp_path, job, policy=Nonsense()) as saver:
        train(job, saver)
        saver.save()
        train(job, saver)
        with pytest.raises(TypeError, match=r"Nonsense.* decided 'full': .* a Decision"):
            saver.save()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": Full}, "policy must be an object such as Full()"),
        ({"policy": "fully"}, "policy must be an object"),
        ({"triggers": [AtEnd]}, "triggers must be objects such as AtEnd()"),
        ({"triggers": AtEnd()}, "triggers must be a list"),
        ({"retention": 2}, "retention must be Retention"),
        ({"callbacks": print}, "callbacks must be a list"),
        ({"callbacks": [1]}, "callbacks must be functions"),
        ({"every_steps": 0}, "at least 1 step"),
        ({"chunk_bytes": 32e6}, "chunk_bytes must be a whole number of bytes"),
        ({"chunk_bytes": 0}, "chunk_bytes must be"),
        ({"chunk_bytes": "32MB"}, "not '32MB'"),
        ({"max_failures": -1}, "max_failures must be"),
        ({"max_failures": 0.5}, "max_failures must be"),
        ({"timeout_seconds": 0}, "timeout_seconds must be positive"),
        ({"timeout_seconds": float("inf")}, "not inf"),
        ({"timeout_seconds": float("nan")}, "not nan"),
    ],
)
def test_mistakes_are_told_before_anything_is_made(
    tmp_path: Path,
    job: Job,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr(background.Background, "__init__", fail)
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        checkpointer(tmp_path, job, **options)


@pytest.mark.parametrize("name", ["weekly", "aweekly"])
def test_a_dcp_save_beside_a_run_hides_nothing(tmp_path: Path, job: Job, name: str) -> None:
    """Take the next number in every save, whoever took the previous one."""
    with checkpointer(tmp_path, job) as saver:
        train(job, saver)
        saver.save()
        for number in range(2):
            save_by_dcp(tmp_path / f"{name}{number}", job)
        train(job, saver)
        report = saver.save()
        wanted = gather(job)
    assert report is not None
    assert report.sequence == 4
    assert restored(tmp_path, wanted) == []


def test_another_process_s_number_is_seen_before_the_commit(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    with checkpointer(tmp_path, job) as saver:
        train(job, saver)
        saver.save()
        save_by_dcp(tmp_path / "weekly", job)
        monkeypatch.setattr("torchrec_checknrun.root.lineage._numbers", {})
        train(job, saver)
        with pytest.raises(SaveFailed, match=r"weekly was committed .* the next one gets a higher"):
            saver.save()
        saver.save()
        wanted = gather(job)
    assert restored(tmp_path, wanted) == []


def test_what_was_restored_has_a_lower_number_than_what_comes(tmp_path: Path, job: Job) -> None:
    with checkpointer(tmp_path, job) as saver:
        train(job, saver)
        saver.save()
        save_by_dcp(tmp_path / "best", job)
        saver.restore("best", strict=False)
        train(job, saver)
        saver.save()
        wanted = gather(job)
    assert restored(tmp_path, wanted) == []


@pytest.mark.parametrize("of", ["own", "parent"])
def test_nothing_is_committed_without_its_files(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """Refuse to commit on an object store, where files can go without their directory."""
    with checkpointer(tmp_path, job) as saver:
        train(job, saver)
        first = saver.save()
        assert first is not None
        train(job, saver)
        check = type(saver._saver.writer).before_commit

        def pruned(self: Any, *args: Any) -> None:
            check(self, *args)
            newest = max(path for path in tmp_path.glob("seq-*"))
            os.unlink(newest / "rank-00000.bin")

        with monkeypatch.context() as patch:
            if of == "own":
                patch.setattr(type(saver._saver.writer), "before_commit", pruned)
            else:
                os.unlink(tmp_path / first.id / "rank-00000.bin")
            with pytest.raises(SaveFailed, match=r"went away|was deleted"):
                saver.save()
        saver.save()
        wanted = gather(job)
    assert restored(tmp_path, wanted) == []


def test_gradients_that_were_dropped_wait_for_nobody() -> None:
    """Ignore gradients that another loss has left on parameters of no optimizer."""
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters())
    pending = PendingGradients([optimizer])
    waiting = []
    for act in (lambda: None, optimizer.zero_grad, lambda: None, optimizer.step):
        layer(torch.ones(2)).sum().backward()
        act()
        waiting.append(pending.waiting)
    pending.close()
    assert waiting == [True, False, True, False]


def test_a_run_fails_while_the_background_lets_go_of_its_rows(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = checkpointer(tmp_path, job, staging="copy")
    saver.save(wait=False)
    running = saver._saver.running
    assert running is not None
    assert running.known.wait(60)
    running.leave()
    rows = mock.Mock()
    looks = [rows]  # it sets them to None between two looks
    seen = property(lambda save: looks.pop() if looks else None)
    monkeypatch.setattr(Save, "rows", seen, raising=False)
    saver.__exit__(ValueError, ValueError("says the test"), None)
    rows.close.assert_called_once()
    assert not any(lease._root.url == saver.root.url for lease in Lease._held)


def test_the_end_of_the_data_outside_of_the_block_is_told(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "write_rank_file", lambda *_: time.sleep(0.5))
    with suppress(StopIteration), checkpointer(tmp_path, job, every_steps=2) as saver:
        train(job, saver, 2)
        raise StopIteration
    (line,) = (line for line in caplog.messages if "StopIteration" in line)
    assert "the checkpoint of step 2 is given up" in line
