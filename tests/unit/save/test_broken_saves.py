"""Break saves at unexpected places: between two statements, or for want of a thread.

No save may hang or lose a row.
"""

from __future__ import annotations

import gc
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.models import Job
from tests.distributed.states import gather
from tests.unit.run.jobs import checkpointer, restored, train
from torchrec_checknrun import AtEnd, Checkpointer
from torchrec_checknrun.errors import ModelPartlyRestored, SaveFailed
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.root.lineage import Lineage
from torchrec_checknrun.run.saver import Saver
from torchrec_checknrun.save import background
from torchrec_checknrun.save.commit import CheckpointWriter
from torchrec_checknrun.snapshot import staging
from torchrec_checknrun.snapshot.staged import StagedRows
from torchrec_checknrun.store.folder import Folder

pytestmark = pytest.mark.usefixtures("one_rank")


_PATIENCE_SECONDS = 20.0


def once(act: Callable[..., Any], error: BaseException, *, after: bool = False) -> Any:
    """Return a function whose first call raises an error."""
    calls: list[None] = []

    def broken(*args: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) > 1:
            return act(*args, **options)
        if after:
            act(*args, **options)
        raise error

    return broken


def refuse_threads(patch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """Refuse the n-th thread of a name, counted from 0, and later ones requested at once."""
    start, asked = threading.Thread.start, []

    def refuse(self: threading.Thread) -> None:
        if self.name == name:
            asked.append(name)
            if len(asked) > number:
                raise RuntimeError("can't start new thread")
        start(self)

    patch.setattr(threading.Thread, "start", refuse)


def save_in_time(saver: Checkpointer) -> None:
    """Save, but don't wait forever: a missing thread would never end."""
    saver.save(wait=False)
    running = saver._saver.running
    assert running is not None
    assert running.known.wait(_PATIENCE_SECONDS)


def save_and_wait(saver: Checkpointer) -> None:
    save_in_time(saver)
    saver.wait()


def test_a_writer_that_can_t_be_made_fails_the_save(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    with checkpointer(tmp_path, job) as saver:
        train(job, saver)
        saver.save()
        train(job, saver)
        with monkeypatch.context() as patch:
            error = OSError(5, "says the test")
            patch.setattr(background, "CheckpointWriter", once(background.CheckpointWriter, error))
            save_in_time(saver)
            with pytest.raises(SaveFailed, match="says the test"):
                saver.wait()
        saver.save()
        wanted = gather(job)
    assert restored(tmp_path, wanted) == []


@pytest.mark.parametrize("budget", [4096, 64 << 20], ids=["in parts", "at once"])
@pytest.mark.parametrize("helpers", [1, 2])
def test_no_thread_to_help(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch, budget: int, helpers: int
) -> None:
    """Copy with fewer threads, and continue training only when all of them have finished."""
    copy = StagedRows.copy

    def slowly(*args: Any) -> None:
        if threading.current_thread().name == "checknrun-stage":
            time.sleep(0.05)
        copy(*args)

    with checkpointer(tmp_path, job, memory_budget=budget) as saver:
        train(job, saver)
        with monkeypatch.context() as patch:
            patch.setattr(staging, "idle_threads", lambda: helpers)
            patch.setattr(StagedRows, "copy", slowly)
            refuse_threads(patch, "checknrun-stage", helpers - 1)
            save_in_time(saver)
            wanted = gather(job)
            train(job, saver)  # changes the rows to copy
            saver.wait()
    assert restored(tmp_path, wanted) == []


@pytest.mark.parametrize("budget", [4096, 64 << 20], ids=["in parts", "at once"])
@pytest.mark.parametrize("error", [MemoryError("says the test"), KeyboardInterrupt()])
def test_staging_that_breaks(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch, budget: int, error: BaseException
) -> None:
    with checkpointer(tmp_path, job, memory_budget=budget) as saver:
        train(job, saver)
        saver.save()
        train(job, saver)
        with monkeypatch.context() as patch:
            patch.setattr(staging.Staging, "_queued", once(staging.Staging._queued, error))
            with pytest.raises(SaveFailed if isinstance(error, Exception) else KeyboardInterrupt):
                save_and_wait(saver)
        saver.save()
        wanted = gather(job)
    assert restored(tmp_path, wanted) == []


def test_no_thread_to_write(tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the thread that is there already; without one report the error to all ranks at once, and
    write the rows by the next save.
    """
    with checkpointer(tmp_path, job) as saver:
        train(job, saver)
        saver.save()
        train(job, saver)
        with monkeypatch.context() as patch:
            refuse_threads(patch, "checknrun-save", 0)
            saver.save()
            train(job, saver)
            save_in_time(saver)
            assert gc.isenabled()
            with pytest.raises(SaveFailed, match="can't start new thread"):
                saver.wait()
        saver.save()
        wanted = gather(job)
    assert restored(tmp_path, wanted) == []


def test_no_collection_before_the_thread_runs(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collect what a cut has left in the background, and not while training waits."""
    start, go = background.Background._start, threading.Event()

    def late(self: background.Background, run: Callable[[], None]) -> Any:
        def wait() -> None:
            go.wait(_PATIENCE_SECONDS)
            run()

        return start(self, wait)

    monkeypatch.setattr(background.Background, "_start", late)
    with checkpointer(tmp_path, job) as saver:
        train(job, saver)
        assert gc.isenabled()
        saver.save(wait=False)
        assert not gc.isenabled()
        go.set()
        saver.wait()
        assert gc.isenabled()


BETWEEN: list[tuple[type, str, bool]] = [
    (Lineage, "committed", False),
    (Lineage, "committed", True),
    (TrackedModel, "forget", False),
    (TrackedModel, "forget", True),
    (Saver, "_forget_running", False),
    (Saver, "_forget_running", True),
]


@pytest.mark.parametrize(("owner", "name", "after"), BETWEEN)
def test_a_commit_whose_noting_is_interrupted_loses_no_row(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: bool
) -> None:
    """Continue training after Ctrl-C in a notebook."""
    with checkpointer(tmp_path, job) as saver:
        train(job, saver)
        saver.save()
        train(job, saver)
        saver.save(wait=False)
        with monkeypatch.context() as patch:
            broken = once(getattr(owner, name), KeyboardInterrupt(), after=after)
            patch.setattr(owner, name, broken)
            with pytest.raises(KeyboardInterrupt):
                saver.wait()
        train(job, saver)
        report = saver.save()
        assert report is not None
        assert report.chain_length == 3
        wanted = gather(job)
    assert restored(tmp_path, wanted) == []


@pytest.mark.parametrize("after", [False, True])
def test_a_restore_whose_noting_is_interrupted_is_a_half_one(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """Refuse to continue with a model older than the parent of the next checkpoint."""
    with checkpointer(tmp_path, job) as saver:
        for _ in range(3):
            train(job, saver)
            saver.save()
        first = saver._saver.lineage.history[0].id
        with monkeypatch.context() as patch:
            broken = once(Saver.restored, KeyboardInterrupt(), after=after)
            patch.setattr(Saver, "restored", broken)
            with pytest.raises(KeyboardInterrupt):
                saver.restore(first)
        with pytest.raises(ModelPartlyRestored, match="half-way"):
            saver.save()
        saver.restore(first)
        train(job, saver)
        saver.save()
        wanted = gather(job)
    assert restored(tmp_path, wanted) == []


def test_the_end_is_not_saved_in_silence_while_gradients_wait(tmp_path: Path, job: Job) -> None:
    """Warn when the last batches don't fill an accumulation."""
    saver = checkpointer(tmp_path, job, triggers=[AtEnd()])
    train(job, saver)
    job.loss(*job.batch(job.steps)).backward()
    saver.step()
    with pytest.raises(SaveFailed, match=r"step 2, .*gradients wait.*zero_grad"):
        saver.close()


def test_gradients_that_always_wait_are_told_ever_less_often(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Name the parameters of optimizers that step in turns, and what to change."""
    low, top = nn.Linear(2, 2), nn.Linear(2, 1)
    net = nn.ModuleDict({"low": low, "top": top})
    turns = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (low, top)]
    state = {"low": turns[0], "top": turns[1]}
    with Checkpointer(tmp_path, model=net, state=state, every_steps=1) as saver:
        for step in range(40):
            top(low(torch.ones(1, 2))).sum().backward()
            turns[step % 2].step()
            turns[step % 2].zero_grad()
            saver.step()
        lines = [line for line in caplog.messages if "is put off" in line]
        turns[0].zero_grad()
        turns[1].zero_grad()
        assert saver.save() is not None
    for line, step in zip(lines, (1, 2, 4, 8, 16, 32), strict=True):
        assert f"step {step} is put off" in line
    assert "gradients of low.bias, low.weight wait" in lines[1]
    assert ["in turns meet at one step" in line for line in lines] == [False] * 3 + [True] * 3


def test_nothing_is_committed_upon_a_chain_that_is_gone(tmp_path: Path, job: Job) -> None:
    """Refuse a broken chain even if its last checkpoint is still there."""
    with checkpointer(tmp_path, job) as saver:
        ids = []
        for _ in range(3):
            train(job, saver)
            report = saver.save()
            assert report is not None
            ids.append(report.id)
        shutil.rmtree(tmp_path / ids[0])
        train(job, saver)
        with pytest.raises(SaveFailed, match=f"{ids[0]}, which this checkpoint builds on"):
            saver.save()
        report = saver.save()
        assert report is not None
        assert report.kind == "full"
        wanted = gather(job)
    assert restored(tmp_path, wanted) == []


def test_a_state_that_can_t_be_asked_is_named(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    with checkpointer(tmp_path, job) as saver:
        train(job, saver)
        with monkeypatch.context() as patch:
            patch.setattr(job, "state_dict", once(job.state_dict, KeyError("cursor")))
            with pytest.raises(SaveFailed, match=r"'job' .*rank 0 KeyError: 'cursor'\. .*fix"):
                saver.save()
        saver.save()
        wanted = gather(job)
    assert restored(tmp_path, wanted) == []


def test_a_directory_that_goes_away_is_named(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = CheckpointWriter.write

    def write_nowhere(self: CheckpointWriter, *args: Any) -> Any:
        monkeypatch.setattr(Folder, "create", lambda *_: None)
        shutil.rmtree(tmp_path / self.folder.name)
        return write(self, *args)

    with checkpointer(tmp_path, job) as saver:
        saver.restore()
        train(job, saver)
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointWriter, "write", write_nowhere)
            with pytest.raises(SaveFailed, match=r"No such file or directory: '.*seq-000001"):
                saver.save()
        monkeypatch.undo()
        saver.save()
        wanted = gather(job)
    assert restored(tmp_path, wanted) == []
