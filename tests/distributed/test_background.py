"""Training goes on while a checkpoint is written, and neither disturbs the other."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.distributed import references
from tests.distributed.models import (
    CollectionSpec,
    Job,
    ModelSpec,
    Plan,
    TableSpec,
    gather,
    scramble,
    uniform_plan,
)
from tests.distributed.worker_pool import REPOSITORY, WorkerPool
from torchrec_checknrun import Checkpointer, CheckpointReport, Consecutive, Quantization
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.format.manifest import MANIFEST_NAME
from torchrec_checknrun.store.folder import Folder

Workers = Callable[[int], WorkerPool]

TABLES = (TableSpec("t0", 400, 8, ("f0", "f1")), TableSpec("t1", 300, 12, ("f1",)))
SPEC = ModelSpec((CollectionSpec("a", TABLES), CollectionSpec("b", TABLES[:1])))


def where(tmp_path: Path, ranks: int = 2) -> dict[str, Any]:
    plan = uniform_plan(SPEC, "row_wise", ranks)
    return {"root": str(tmp_path / "root"), "plan": plan}


def build(plan: Plan) -> Job:
    return Job.build(SPEC, plan, seed=0)


def checkpointer(root: str, job: Job, **options: Any) -> Checkpointer:
    state = {"optimizer": job.optimizer, "job": job}
    options.setdefault("chunk_bytes", 3000)
    options.setdefault("policy", Consecutive())
    options.setdefault("retention", None)
    return Checkpointer(root, model=job.model, state=state, **options)


@contextmanager
def storage_waits() -> Iterator[Event]:
    """No manifest is written before the event is set."""
    go, put = Event(), Folder.put

    def wait_and_put(folder: Folder, name: str, data: bytes, new: bool = False) -> None:
        assert name != MANIFEST_NAME or go.wait(60)
        put(folder, name, data, new)

    with mock.patch.object(Folder, "put", wait_and_put):
        yield go


@contextmanager
def storage_fails(when: str) -> Iterator[list[str]]:
    """The manifest is not written, or it is and that isn't known; the list says which."""
    put: Any = Folder.put
    hit: list[str] = []

    def put_or_fail(folder: Folder, name: str, data: bytes, new: bool = False) -> None:
        if name != MANIFEST_NAME:
            put(folder, name, data, new)
            return
        hit.append(folder.name)
        if when == "after":
            put(folder, name, data, new)
        raise OSError(28, "no space left, says the test")

    with mock.patch.object(Folder, "put", put_or_fail):
        yield hit


def ids(root: str) -> list[str]:
    return sorted(path.parent.name for path in Path(root).glob(f"*/{MANIFEST_NAME}"))


def parent_of(root: str, name: str) -> str | None:
    manifest = json.loads(Path(root, name, MANIFEST_NAME).read_bytes())["manifest"]
    return manifest["parent"] and str(manifest["parent"]["id"])


def differences(saver: Checkpointer, job: Job, wanted: dict[str, Any], **options: Any) -> list[str]:
    """Restores what is newest over noise; how it differs."""
    scramble(job)
    assert saver.restore(**options) is not None
    return references.differences(gather(job), wanted, None)


# Isolation


def train_while_written(root: str, plan: Plan, background: str) -> list[str]:
    job = build(plan)
    problems = []
    with checkpointer(root, job, background=background) as saver, storage_waits() as go:
        for _ in range(2):  # a full one, a differential one
            job.train(3)
            wanted = gather(job)
            go.clear()
            assert saver.save(wait=False) is None
            begun = len(ids(root))
            for _ in range(5):
                job.train()  # with collectives of its own, while the others' wait
                assert saver.step() is None
            assert len(ids(root)) == begun
            now = gather(job)
            assert references.differences(now, wanted, None)
            go.set()
            report = saver.wait()
            assert report is not None
            job_steps, saver_steps = job.steps, saver.steps
            problems += differences(saver, job, wanted, checkpoint=report.id)
            assert job.steps == job_steps - 5
            assert saver.steps == saver_steps - 5
    return problems


@pytest.mark.parametrize("background", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_training_never_changes_what_is_written(
    workers: Workers, tmp_path: Path, background: str
) -> None:
    found = workers(2).run(train_while_written, **where(tmp_path), background=background)
    assert found == [[], []]


def save_three(root: str, plan: Plan, bits: int | None, **options: Any) -> None:
    job = build(plan)
    quantization = Quantization(bits, exact_below_rows=0)
    with checkpointer(root, job, quantization=quantization, **options) as saver:
        for _ in range(3):
            job.train(2)
            saver.save(wait=False)
            saver.wait()


def test_who_writes_and_when_changes_no_byte(workers: Workers, tmp_path: Path) -> None:
    variants: list[dict[str, Any]] = [
        {"background": "thread", "staging": "copy"},
        {"background": "process", "staging": "copy"},
        {"background": "process", "staging": "encode"},
        {"background": "thread", "staging": "encode", "memory_budget": 24_000},
        {"background": "process", "staging": "copy", "memory_budget": 24_000},
    ]
    written = []
    for number, options in enumerate(variants):
        root = tmp_path / str(number)
        arguments = where(root)
        workers(2).run(save_three, **arguments, bits=4, **options)
        folders = [root / "root" / name for name in ids(arguments["root"])]
        assert len(folders) == 3
        written.append([(f / f"rank-0000{r}.bin").read_bytes() for f in folders for r in (0, 1)])
    for options, files in zip(variants, written, strict=True):
        assert files == written[0], options


# Memory


def save_with_little_memory(root: str, plan: Plan, background: str) -> list[Any]:
    job = build(plan)
    budget = 15_000
    with checkpointer(root, job, background=background, memory_budget=budget) as saver:
        sizes = [saver._saver._background._memory.size, saver._saver._background.chunk_bytes]
        job.train(3)
        wanted = gather(job)
        report = saver.save()
        assert report is not None
        rows = report.modified_bytes // dist.get_world_size()
        assert rows > budget
        problems = differences(saver, job, wanted)
        sizes += [saver._saver._background._memory.size]
    return [sizes, report.in_parts, problems]


@pytest.mark.parametrize("background", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_the_memory_budget_is_kept(workers: Workers, tmp_path: Path, background: str) -> None:
    found = workers(2).run(save_with_little_memory, **where(tmp_path), background=background)
    for sizes, in_parts, problems in found:
        before, chunk, after = sizes
        assert before == after  # the largest item has room
        assert after + 2 * chunk <= 15_000
        assert in_parts
        assert not problems


# Busy, failures


def skip_while_busy(root: str, plan: Plan) -> list[Any]:
    job = build(plan)
    with checkpointer(root, job, every_steps=2) as saver, storage_waits() as go:
        for _ in range(6):  # at step 2 one is begun; those of 4 and 6 are skipped
            job.train()
            saver.step()
        go.set()
        first = saver.wait()
        assert first is not None
        for _ in range(2):
            job.train()
            saver.step()
        second = saver.wait()
        assert second is not None
        problems = differences(saver, job, gather(job))
    return [first.step, second.step, ids(root), problems]


def test_a_due_checkpoint_is_skipped_while_one_is_written(workers: Workers, tmp_path: Path) -> None:
    found = workers(2).run(skip_while_busy, **where(tmp_path))
    for first, second, stored, problems in found:
        assert (first, second) == (2, 8)
        assert len(stored) == 2
        assert not problems


def wait_while_busy(root: str, plan: Plan) -> list[Any]:
    job = build(plan)
    reports: list[CheckpointReport] = []
    with checkpointer(
        root, job, every_steps=1, when_busy="wait", callbacks=[reports.append]
    ) as saver:
        for _ in range(4):
            job.train()
            saver.step()
        saver.wait()
    return [report.step for report in reports]


def test_or_waited_for(workers: Workers, tmp_path: Path) -> None:
    assert workers(2).run(wait_while_busy, **where(tmp_path)) == [[1, 2, 3, 4]] * 2


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
        deadline = time.monotonic() + 30
        running = saver._saver.running
        assert running is not None
        assert running.wait(deadline - time.monotonic())
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


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("ends", ["step", "wait", "close"])
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
        # It is started anew where that is seen in time, and else this one fails.
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


def empty_differential(root: str, plan: Plan) -> list[Any]:
    job = build(plan)
    with checkpointer(root, job) as saver:
        job.train(2)
        saver.steps += 2
        saver.save()
        assert saver.save().unchanged  # that step is saved
        saver.steps += 1
        report = saver.save()
        assert report is not None
        problems = differences(saver, job, gather(job))
    return [report.kind, report.modified_rows, report.bytes["weights"], problems]


def test_nothing_modified_is_a_tiny_checkpoint(workers: Workers, tmp_path: Path) -> None:
    for found in workers(2).run(empty_differential, **where(tmp_path)):
        assert found == ["differential", 0, 0, []]


def report_times(root: str, plan: Plan) -> dict[str, Any]:
    job = build(plan)
    with checkpointer(root, job, quantization=Quantization(4, exact_below_rows=0)) as saver:
        job.train(2)
        report = saver.save()
        assert report is not None
    return report.to_json()


def test_a_report_tells_times_and_bytes(workers: Workers, tmp_path: Path) -> None:
    for report in workers(2).run(report_times, **where(tmp_path)):
        times = ("stall_seconds", "encoded_seconds", "written_seconds", "committed_seconds")
        assert sorted(report[time] for time in times) == [report[time] for time in times]
        assert report["stall_seconds"] > 0
        assert report["full_fp32_bytes"] == report["modified_bytes"]
        assert report["encoded_bytes"] < report["modified_bytes"]
        assert set(report["table_fractions"].values()) == {1.0}
        assert not report["in_parts"]


def the_snapshot_is_a_copy(root: str, plan: Plan) -> bool:
    """Every staged tensor is memory of its own."""
    job = build(plan)
    with checkpointer(root, job, staging="copy") as saver, storage_waits() as go:
        job.train()
        saver.save(wait=False)
        memory = saver._saver._background._memory.bytes
        own = range(memory.data_ptr(), memory.data_ptr() + len(memory))
        tables = [shard.local for shard in saver._target.tracked.shards]
        apart = all(t.data_ptr() not in own for table in tables for t in table.tensors)
        with torch.no_grad():
            for table in tables:
                for tensor in table.tensors:
                    tensor.fill_(float("nan"))
        go.set()
        report = saver.wait()
        assert report is not None
        saver.restore(report.id)
        whole = all(not t.isnan().any() for table in tables for t in table.tensors)
    return apart and whole


def test_tables_can_be_overwritten_at_once(workers: Workers, tmp_path: Path) -> None:
    assert workers(1).run(the_snapshot_is_a_copy, **where(tmp_path, 1)) == [True]


SCRIPT = """
import logging, os, sys, threading, time
import torch.distributed as dist
from tests.distributed.test_background import build, checkpointer, uniform_plan, SPEC
from torchrec_checknrun.store.folder import Folder

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
put, create = Folder.put, Folder.create

def create_later(folder):
    if threading.current_thread() is not threading.main_thread():
        threading.main_thread().join()  # the script is over before a rank's file is begun
    create(folder)

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


@pytest.mark.parametrize("background", ["thread", "process"])
@pytest.mark.parametrize("ends", ["well", pytest.param("error", marks=pytest.mark.slow)])
def test_a_script_that_never_closes(tmp_path: Path, ends: str, background: str) -> None:
    """What it has begun becomes durable before it ends, or is told; after an error it isn't
    waited for. No process is left over.
    """
    started = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), ends, background],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
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
