"""Use a Checkpointer in the thread that trains, one call at a time; other calls are refused."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.models import Job
from tests.distributed.states import gather
from tests.unit.run.jobs import checkpointer, make_job, restored, train
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.errors import CheckNRunError

pytestmark = pytest.mark.usefixtures("one_rank")


def in_another_thread(act: Callable[[], Any]) -> Any:
    """Call in a new thread; return the result, or the error."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(act())
        except CheckNRunError as error:
            found.append(error)

    thread = threading.Thread(target=run, name="a timer")
    thread.start()
    thread.join(60)
    (result,) = found
    return result


@pytest.mark.parametrize("call", ["save", "publish"])
def test_a_timer_may_not_save(tmp_path: Path, job: Job, call: str) -> None:
    with checkpointer(tmp_path, job) as saver:
        saver.restore()
        train(job, saver)
        error = in_another_thread(getattr(saver, call))
        assert isinstance(error, CheckNRunError)
        words = (f"{call}() of a timer", "MainThread trains", "between two steps", "EverySeconds")
        assert all(word in str(error) for word in words), str(error)
        train(job, saver)
        wanted = gather(job)
        saver.save()
    assert restored(tmp_path, wanted) == []


def test_saves_of_a_timer_beside_steps_that_save(tmp_path: Path, job: Job) -> None:
    """Keep every checkpoint that of a step's end: a thread that saves meanwhile gets in nowhere."""
    wanted, refused = {}, []
    with checkpointer(tmp_path, job, every_steps=1, when_busy="wait") as saver:
        saver.restore()
        over = threading.Event()

        def save_again_and_again() -> None:
            while not over.wait(0.001):
                with pytest.raises(CheckNRunError):
                    saver.save()
                refused.append(1)

        thread = threading.Thread(target=save_again_and_again)
        thread.start()
        for _ in range(10):
            train(job, saver)
            wanted[saver.steps] = gather(job)
        over.set()
        thread.join(60)
    assert refused
    with checkpointer(tmp_path, again := make_job(seed=7)) as saver:
        for path in sorted(tmp_path.glob("seq-*")):
            report = saver.restore(path.name)
            assert report is not None
            assert_same(again, wanted[report.step])
    assert len(list(tmp_path.glob("seq-*"))) == 10


def assert_same(job: Job, wanted: dict[str, Any]) -> None:
    found = gather(job)
    assert found.keys() == wanted.keys()
    assert all((found[name] == wanted[name]).all() for name in wanted)


@pytest.mark.parametrize("within", ["save", "step"])
def test_a_signal_handler_may_not_save_within_a_call(
    tmp_path: Path, job: Job, within: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[str] = []

    def handler(*_: object) -> None:
        with pytest.raises(CheckNRunError) as caught:
            saver.save()
        errors.append(str(caught.value))

    with checkpointer(tmp_path, job, every_steps=2, when_busy="wait") as saver:
        saver.restore()
        train(job, saver)
        before = signal.signal(signal.SIGUSR1, handler)
        begin = saver._saver.begin

        def begin_late(*args: Any) -> Any:
            signal.raise_signal(signal.SIGUSR1)
            return begin(*args)

        monkeypatch.setattr(saver._saver, "begin", begin_late)
        try:
            job.train()
            saver.step() if within == "step" else saver.save()
        finally:
            signal.signal(signal.SIGUSR1, before)
        wanted = gather(job)
    assert len(errors) == 1
    assert f"save() of MainThread was called while {within}() of MainThread" in errors[0]
    assert "set a flag" in errors[0]
    assert restored(tmp_path, wanted) == []


@pytest.mark.parametrize("call", ["save", "step"])
def test_a_hook_of_the_backward_pass_may_not_save(tmp_path: Path, job: Job, call: str) -> None:
    """Some tables have been updated by then, and others not."""
    with checkpointer(tmp_path, job, every_steps=1) as saver:
        saver.restore()
        train(job, saver)
        out = torch.ones(1, requires_grad=True) * 2
        out.register_hook(lambda _: getattr(saver, call)())
        with pytest.raises(CheckNRunError, match=r"within a backward pass.*between two steps"):
            out.backward()
        train(job, saver)
        wanted = gather(job)
        saver.save()
    assert restored(tmp_path, wanted) == []


def test_an_error_ends_a_call(tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next call in, whatever ended the one before: as Ctrl-C does."""
    with checkpointer(tmp_path, job) as saver:
        saver.restore()

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(saver._saver, "begin", interrupt)
            with pytest.raises(KeyboardInterrupt):
                saver.save()
        train(job, saver)
        assert saver.save().step == 1


def test_training_may_move_to_another_thread(tmp_path: Path, job: Job) -> None:
    """Follow ``step()``: the thread that calls it trains, and saves."""
    with checkpointer(tmp_path, job) as saver:
        saver.restore()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(train, job, saver, 2).result()
            assert pool.submit(saver.save).result().step == 2
            with pytest.raises(CheckNRunError, match="ThreadPoolExecutor"):
                saver.save()
        train(job, saver)  # that thread has ended
        wanted = gather(job)
        assert saver.save().step == 3
    assert restored(tmp_path, wanted) == []


def test_another_thread_may_close_and_not_wait(tmp_path: Path, job: Job) -> None:
    """Refuse a wait, which would keep ``step()`` out."""
    saver: Checkpointer = checkpointer(tmp_path, job)
    saver.restore()
    train(job, saver)
    saver.save(wait=False)
    assert "wait() of a timer" in str(in_another_thread(saver.wait))
    report = saver.wait()
    assert report is not None
    assert report.step == 1
    assert in_another_thread(saver.close) is None
    with pytest.raises(CheckNRunError, match="is closed, its hooks are off"):
        saver.save()
    assert saver.wait() is None
