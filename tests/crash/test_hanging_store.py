"""On a store that stops answering, saves, ``close`` and the interpreter's exit end, and say why."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.crash.hanging import CALLS, HangingStore
from tests.crash.save_sweep import alone
from tests.distributed.models import Plan
from tests.distributed.small_job import Workers, build, checkpointer, where
from tests.distributed.states import gather
from tests.unit.run import jobs
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.run import waiting
from torchrec_checknrun.save import background
from torchrec_checknrun.store import new_file

TIMEOUT = 3.0
SLACK = 25.0
"""Seconds that a busy machine may take on top."""
_numbers = count()


@pytest.fixture
def store() -> Iterator[type[HangingStore]]:
    HangingStore.released.clear()
    with alone():
        yield HangingStore
    HangingStore.released.set()
    HangingStore.hangs.clear()
    HangingStore.store.clear()


def made(**options: Any) -> tuple[Any, Checkpointer]:
    """Make a job and its saver in a new root: a call that hung before may still come back."""
    job = jobs.make_job()
    root = f"hanging://run-{next(_numbers)}"
    saver = jobs.checkpointer(root, job, **{"timeout_seconds": TIMEOUT, **options})
    jobs.train(job, saver)
    saver.save()
    jobs.train(job, saver)
    return job, saver


def manifests(saver: Checkpointer) -> list[str]:
    place = saver.root.url.removeprefix("hanging:/")
    return [
        path
        for path in HangingStore.store
        if path.startswith(f"{place}/") and path.endswith("manifest.json")
    ]


@pytest.mark.parametrize(
    ("hangs", "told"),
    [
        ("open", r"rank-00000\.bin: nothing was heard"),
        ("write", r"rank-00000\.bin: nothing was heard"),
        ("close", r"rank-00000\.bin: nothing was heard"),
        ("manifest", r"manifest\.json: nothing was heard"),
        ("ls", r"listing hanging://run"),
        ("all", r"hanging://run.*nothing was heard"),
    ],
)
def test_a_save_and_close_end(store: type[HangingStore], hangs: str, told: str) -> None:
    _, saver = made()
    store.hangs.update([*CALLS, "write", "close"] if hangs == "all" else [hangs])
    started = time.monotonic()
    with pytest.raises(SaveFailed, match=told):
        saver.save()
    assert time.monotonic() - started < TIMEOUT + SLACK
    started = time.monotonic()
    saver.close()
    assert time.monotonic() - started < TIMEOUT + SLACK


def test_rows_of_a_save_that_hung_are_part_of_the_next(store: type[HangingStore]) -> None:
    """Never commit the hung save, though it comes back in between."""
    job, saver = made()
    store.hangs.add("manifest")
    with pytest.raises(SaveFailed):
        saver.save()
    store.hangs.clear()
    store.released.set()
    jobs.train(job, saver)
    wanted = gather(job)
    report = saver.save()
    assert report is not None
    saver.close()
    assert len(manifests(saver)) == 2
    assert jobs.restored(saver.root.url, wanted) == []


def test_a_save_that_does_not_move_is_given_up(
    store: type[HangingStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Give up a save that hangs outside the storage; it commits nothing when it goes on."""
    _, saver = made(timeout_seconds=1.0)
    go, write = threading.Event(), background.write_rank_file

    def hang(*args: Any) -> Any:
        go.wait(60)
        return write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(background, "write_rank_file", hang)
        with pytest.raises(SaveFailed, match="given up: nothing was heard of it for"):
            saver.save()
    monkeypatch.setattr(background, "_END_SECONDS", 0.1)
    with pytest.raises(SaveFailed, match=r"on ranks \[0\] has not come back yet"):
        saver.save()
    go.set()
    monkeypatch.setattr(background, "_END_SECONDS", 60.0)
    report = saver.save()
    assert report is not None
    saver.close()
    assert len(manifests(saver)) == 2


def test_a_slow_store_is_no_dead_one(
    store: type[HangingStore], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Let the exit wait for a save that moves, although it takes longer than a call may."""
    monkeypatch.setattr(waiting, "EXIT_SECONDS", 2.0)
    job = jobs.make_job()
    saver = jobs.checkpointer(tmp_path, job)
    jobs.train(job, saver)
    write = new_file.os.write

    def slowly(descriptor: int, data: memoryview) -> int:
        time.sleep(0.05)
        return write(descriptor, data[:250])

    monkeypatch.setattr(new_file.os, "write", slowly)
    saver.save(wait=False)
    save = saver._saver.running
    assert save is not None
    started = time.monotonic()
    waiting.await_at_exit(save)
    assert save.result().step == 1
    assert time.monotonic() - started > 2.0
    saver.close()


def test_the_exit_takes_seconds(tmp_path: Path) -> None:
    """Exit with the script's status, even with half an hour's patience."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.hanging", "exit", "write", "1800"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    took = time.monotonic() - started
    assert done.returncode == 0, done.stderr
    assert re.search(r"the checkpoint at step 2 was given up.*rank-00000\.bin", done.stderr)
    assert took < 120  # mostly imports


def one_rank_hangs(root: str, spec: dict[str, Any], plan: Plan) -> list[float]:
    """Hang the disk of rank 1 once; return the seconds until all know, and save again."""
    job = build(spec, plan)
    saver = checkpointer(root, job, timeout_seconds=5.0)
    job.train()
    saver.step()
    saver.save()
    job.train()
    saver.step()
    go = threading.Event()
    started = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            fsync = new_file.os.fsync
            patch.setattr(new_file.os, "fsync", lambda fd: (go.wait(60), fsync(fd)))
        with pytest.raises(SaveFailed, match=r"rank-00001\.bin: nothing was heard"):
            saver.save()
    took = time.monotonic() - started
    go.set()
    assert saver.save() is not None  # both, over the same connections
    saver.close()
    return [took]


def test_the_other_rank_hears_of_it(workers: Workers, tmp_path: Path) -> None:
    for (took,) in workers(2).run(one_rank_hangs, **where(tmp_path)):
        assert took < 5 + SLACK
