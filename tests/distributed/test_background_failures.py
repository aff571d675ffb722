"""A save that fails in the background is reported, loses no row, and ends with its script."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.background_jobs import (
    build,
    checkpointer,
    differences,
    ids,
    parent_of,
    storage_fails,
    where,
)
from tests.distributed.fork_server import REPOSITORY
from tests.distributed.models import (
    Plan,
)
from tests.distributed.small_job import Workers
from tests.distributed.states import gather
from tests.examples import some_of
from torchrec_checknrun.errors import SaveFailed


def fail_and_go_on(root: str, plan: Plan, when: str, ends: str) -> list[Any]:
    job = build(plan)
    saver = checkpointer(root, job)
    job.train(2)
    saver.save()
    first = gather(job)
    job.train(2)
    failed = gather(job)
    with storage_fails(when):
        saver.save(wait=False)
        deadline = time.monotonic() + 90
        running = saver._saver.running
        assert running is not None
        assert running.known.wait(deadline - time.monotonic())
        running.common_step.settled()
    job.train()
    try:
        getattr(saver, ends)()
    except SaveFailed as error:
        told = str(error)
    else:
        told = ""
    problems = []
    if ends == "close":
        saver = checkpointer(root, job)  # a new one knows nothing of the old one's marks
        problems = differences(saver, job, failed if when == "after" else first)
        job.train(2)
    wanted = gather(job)
    report = saver.save()
    assert report is not None
    parent = parent_of(root, report.id)
    problems += differences(saver, job, wanted)
    saver.close()
    stored = ids(root)
    return [told, len(stored), report.kind, parent and stored.index(parent), problems]


@pytest.mark.parametrize(
    ("ends", "when"),
    some_of(itertools.product(["step", "wait", "close"], ["before", "after"]), 0, 3, 4, 5),
)
def test_a_background_failure_is_told_and_loses_no_row(
    workers: Workers, tmp_path: Path, when: str, ends: str
) -> None:
    found = workers(2).run(fail_and_go_on, **where(tmp_path), when=when, ends=ends)
    restored_it = (when, ends) == ("after", "close")
    for told, stored, kind, parent, problems in found:
        assert "no space left" in told
        assert stored == (3 if when == "after" else 2)
        assert not problems
        assert (kind, parent) == ("differential", 1 if restored_it else 0)


def allow_failures(root: str, plan: Plan) -> list[Any]:
    job = build(plan)
    told = 0
    with checkpointer(root, job, every_steps=1, when_busy="wait", max_failures=2) as saver:
        job.train()
        saver.step()
        saver.wait()
        with storage_fails("before") as hit:
            for _ in range(2):
                job.train()
                saver.step()
            assert saver.wait() is None
        job.train()
        saver.step()  # its success begins the count anew
        assert saver.wait() is not None
        problems = differences(saver, job, gather(job))
        with storage_fails("before"):
            for _ in range(4):
                job.train()
                try:
                    saver.step()
                except SaveFailed:
                    told += 1
                    break
            try:
                saver.wait()
            except SaveFailed:
                told += 1
    return [len(hit), told, problems]


def test_some_failures_can_be_allowed(workers: Workers, tmp_path: Path) -> None:
    found = workers(2).run(allow_failures, **where(tmp_path))
    assert found == [[2, 1, []], [0, 1, []]]


def lose_the_process(root: str, plan: Plan) -> list[Any]:
    job = build(plan)
    with checkpointer(root, job, background="process") as saver:
        job.train(2)
        saver.save()
        process = saver._saver._background._process
        assert process is not None
        told = ""
        if dist.get_rank() == 1:
            process._process.kill()
            process._process.wait()
        dist.barrier()
        job.train(2)
        # The background is started anew where its end is seen in time, and else this save fails.
        try:
            saver.save()
        except SaveFailed as error:
            told = str(error)
            saver.save()
        problems = differences(saver, job, gather(job))
    return [told, problems]


def test_a_lost_background_process_is_started_anew(workers: Workers, tmp_path: Path) -> None:
    for told, problems in workers(2).run(lose_the_process, **where(tmp_path)):
        assert told == ""
        assert not problems


SCRIPT = """
import logging, os, sys, threading, time
import torch.distributed as dist
from tests.distributed.background_jobs import SPEC, build, checkpointer
from tests.distributed.models import uniform_plan
from torchrec_checknrun.store.folder import Folder

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
put, create = Folder.put, Folder.create

def create_later(folder, **options):
    if threading.current_thread() is not threading.main_thread():
        threading.main_thread().join()  # the script is over before a rank's file is begun
    create(folder, **options)

def put_later(folder, name, data, new=False):
    if name == "manifest.json":
        time.sleep(1)
        if "broken" in str(folder):
            raise OSError("no space left, says the test")
    put(folder, name, data, new)

Folder.put, Folder.create = put_later, create_later
def main():
    job = build(uniform_plan(SPEC, "row_wise", 1))
    for name in ("whole", "broken"):
        root = os.path.join(sys.argv[1], name)
        checkpointer(root, job, background=sys.argv[3]).save(wait=False)
    print("the end", flush=True)
    if sys.argv[2] == "error":
        raise RuntimeError("training failed")
main()
"""


@pytest.mark.parametrize("background", some_of(["thread", "process"], 0))
@pytest.mark.parametrize("ends", some_of(["well", "error"], 0))
def test_a_script_that_never_closes(tmp_path: Path, ends: str, background: str) -> None:
    """Commit, or report, the last checkpoint before a script ends; not after an error.

    No process is left over.
    """
    started = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), ends, background],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "the end" in started.stdout, started.stderr
    assert (started.returncode == 0) == (ends == "well")
    if ends == "well":
        assert len(ids(str(tmp_path / "whole"))) == 1
        assert "the last checkpoint was not committed" in started.stderr
        assert "no space left, says the test" in started.stderr
    else:
        assert ids(str(tmp_path / "whole")) == []
    assert ids(str(tmp_path / "broken")) == []
