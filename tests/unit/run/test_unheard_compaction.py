"""A compaction behind training that nobody can listen to leaves nothing behind."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.models import Job
from tests.unit.run.jobs import checkpointer
from tests.unit.run.test_going_on import saved
from torchrec_checknrun.run import compaction


def test_a_system_without_a_thread_for_the_process(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leave no process behind that nobody listens to, and go on without a copy."""
    begun, begin, start = [], compaction.start, threading.Thread.start

    def begin_and_note(*arguments: Any, **options: Any) -> Any:
        begun.append(begin(*arguments, **options))
        return begun[-1]

    def none_to_listen(thread: threading.Thread) -> None:
        if thread.name == "checknrun-compact":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(compaction, "start", begin_and_note)
    monkeypatch.setattr(threading.Thread, "start", none_to_listen)
    with checkpointer(tmp_path, job, compact_after=1) as saver:
        saved(job, saver)
        before = pipes()
        saved(job, saver)
        assert [process.poll() for process in begun] == [-9]
        assert pipes() == before
        saved(job, saver)


def pipes() -> int:
    """Count this process's ends of pipes."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            found += os.readlink(f"/proc/self/fd/{number}").startswith("pipe:")
    return found
