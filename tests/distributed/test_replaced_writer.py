"""A writer that is replaced between its last look and the commit fails its save."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.distributed.background_jobs import build, checkpointer, differences, ids, where
from tests.distributed.models import Plan
from tests.distributed.states import gather
from tests.distributed.worker_pool import WorkerPool
from torchrec_checknrun.errors import RootInUse, SaveFailed
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.marks.layers import Consumer
from torchrec_checknrun.root.catalog import inventory
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools import takeover

Workers = Callable[[int], WorkerPool]


def before_the_manifest(act: Callable[[Folder], None]) -> Any:
    """Act on rank 0 once, after the last look and before the put."""
    real: Any = Folder.put
    done: list[str] = []

    def put(folder: Folder, name: str, data: bytes, new: bool = False) -> None:
        if name == MANIFEST_NAME and not done:
            done.append(folder.name)
            act(folder)
        real(folder, name, data, new)

    return mock.patch.object(Folder, "put", put)


def is_stopped(folder: Folder) -> None:
    Path(folder.parent.url, "..", "pid").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def is_replaced(root: str, plan: Plan) -> list[Any]:
    """Return the save's error, whether rows stay marked, and what is restored afterwards."""
    job = build(plan)
    with checkpointer(root, job) as saver:
        job.train()
        saver.step()
        saver.save()
        (first,) = ids(root)
        wanted = gather(job)
        job.train()
        saver.steps += 1
        with before_the_manifest(is_stopped), pytest.raises(RootInUse) as failed:
            saver.save()
        marked = saver._target.tracked.is_modified(Consumer.LAST)
        with pytest.raises(RootInUse):
            saver.save()
    (late,) = set(ids(root)) - {first}
    with checkpointer(root, job) as saver:
        problems = differences(saver, job, wanted)
        job.train()
        saver.step()
        after = saver.save()
        assert after is not None
        problems += differences(saver, job, gather(job))
    dist.barrier()
    statuses = {one.id: one.status for one in inventory(Folder(root)).checkpoints}
    return [
        str(failed.value),
        marked,
        problems,
        [statuses[id] for id in (first, late, after.id)],
        after.parent == first,
    ]


def test_a_stopped_writer(workers: Workers, tmp_path: Path) -> None:
    """Stop a real process, replace it by ``checknrun unlock``, and wake it up."""
    place = where(tmp_path)

    def replace_it() -> None:
        deadline = time.monotonic() + 200
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
        pid = int((tmp_path / "pid").read_text())
        try:
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.02)
            takeover.unlock(Folder(place["root"]))
        finally:
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=replace_it)
    thread.start()
    try:
        zero, one = workers(2).run(is_replaced, **place)
    finally:
        thread.join()
    assert zero == one
    said, marked, problems, statuses, upon_first = zero
    assert "was taken over by process" in said
    assert (marked, problems) == (True, [])
    assert statuses == ["restorable", "ignored", "restorable"]
    assert upon_first


def cut_short(folder: Folder) -> None:
    with open(Path(folder.url, "rank-00001.bin"), "rb+") as file:
        file.truncate(10)


def loses_files(root: str, plan: Plan) -> list[Any]:
    job = build(plan)
    with checkpointer(root, job) as saver:
        job.train()
        saver.step()
        with before_the_manifest(cut_short), pytest.raises(SaveFailed) as failed:
            saver.save()
        report = saver.save()
        assert report is not None
        return [str(failed.value), differences(saver, job, gather(job))]


def test_files_that_are_cut_short_while_it_commits(workers: Workers, tmp_path: Path) -> None:
    zero, one = workers(2).run(loses_files, **where(tmp_path))
    assert zero == one
    assert "went away while it was committed" in zero[0]
    assert zero[1] == []
