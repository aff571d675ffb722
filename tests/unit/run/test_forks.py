"""Leave a run alone in forks of its process: children that a training program makes for itself."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.models import Job
from tests.distributed.states import gather
from tests.unit.run.jobs import checkpointer, restored, train
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.errors import CheckNRunError
from torchrec_checknrun.memory.images import Images
from torchrec_checknrun.run.waiting import finish_at_exit
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.store.new_file import DescriptorSink
from torchrec_checknrun.writers.claims import latest_claim

pytestmark = pytest.mark.usefixtures("one_rank")

_REFUSED, _OTHERWISE, _HANGS = 3, 4, 60


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold this process's writes until the event is set."""
    goes_on, own, write = threading.Event(), os.getpid(), DescriptorSink.write

    def write_later(sink: DescriptorSink, data: memoryview) -> int:
        if os.getpid() == own:
            goes_on.wait(_HANGS)
        return write(sink, data)

    goes_on.set()
    monkeypatch.setattr(DescriptorSink, "write", write_later)
    yield goes_on
    goes_on.set()


def exit_code(act: Callable[[], Any]) -> int:
    """Run in a fork; return its exit code."""
    child = os.fork()
    if not child:
        code = _OTHERWISE
        try:
            act()
            code = 0
        except CheckNRunError as error:
            code = _REFUSED if "a fork of the process" in str(error) else _OTHERWISE
        finally:
            os._exit(code)
    for _ in range(_HANGS * 10):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the fork hangs")


def leave(saver: Checkpointer, error: BaseException | None) -> None:
    """Leave the block of a Checkpointer that was entered before the fork."""
    try:
        with ExitStack() as stack:
            stack.push(saver.__exit__)
            if error is not None:
                raise error
    except SystemExit:
        pass


@pytest.mark.parametrize("background", ["thread", "process"])
@pytest.mark.parametrize("error", [None, SystemExit(0)])
def test_a_fork_leaves_the_block(
    tmp_path: Path, job: Job, held: threading.Event, background: Any, error: Any
) -> None:
    """Keep claim, images and write process: they are the parent's."""
    root = tmp_path / "run"
    options = {"background": background, "survive": Images(folder=str(tmp_path))}
    with checkpointer(root, job, **options) as saver:
        saver.restore()
        train(job, saver)
        saver.save()
        train(job, saver)
        held.clear()
        saver.save(wait=False)
        files = sorted(tmp_path.iterdir())
        assert exit_code(lambda: leave(saver, error)) == 0
        assert exit_code(saver.close) == 0
        assert sorted(tmp_path.iterdir()) == files
        claim = latest_claim(Folder(root))
        assert claim is not None
        assert not claim.released
        held.set()
        assert saver.wait() is not None
        wanted = gather(job)
    assert restored(root, wanted) == []


@pytest.mark.parametrize("call", ["restore", "step", "save", "wait"])
def test_calls_in_a_fork(tmp_path: Path, job: Job, held: threading.Event, call: str) -> None:
    """Refuse what only the parent's threads can do, at once."""
    with checkpointer(tmp_path, job) as saver:
        saver.restore()
        train(job, saver)
        held.clear()
        saver.save(wait=False)
        assert exit_code(getattr(saver, call)) == _REFUSED
        held.set()
        wanted = gather(job)
    assert restored(tmp_path, wanted) == []


def test_a_fork_ends(tmp_path: Path, job: Job, held: threading.Event) -> None:
    """Don't wait in a fork, as it ends, for a save that only the parent's threads can finish."""
    with checkpointer(tmp_path, job) as saver:
        saver.restore()
        train(job, saver)
        held.clear()
        saver.save(wait=False)
        save = saver._saver._running
        assert save is not None
        assert not hasattr(sys, "last_value")
        assert exit_code(lambda: finish_at_exit(save)) == 0
        held.set()
