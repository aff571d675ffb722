"""Training goes on while a checkpoint is written, and neither disturbs the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import references
from tests.distributed.background_jobs import (
    build,
    checkpointer,
    differences,
    ids,
    storage_waits,
    where,
)
from tests.distributed.models import (
    Plan,
)
from tests.distributed.slowed import slowed
from tests.distributed.small_job import Workers
from tests.distributed.states import gather
from tests.examples import ALL
from torchrec_checknrun import CheckpointReport, Quantization


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


def save_three(root: str, plan: Plan, how: dict[str, Any], train: int, **options: Any) -> int:
    """Save while training goes on; return how many rows that had to save before."""
    job = build(plan)
    quantization = Quantization(**how, exact_below_rows=0)
    protected = 0
    with slowed() as chunks, checkpointer(root, job, quantization=quantization, **options) as saver:
        for _ in range(3):
            job.train(2)
            chunks.go.clear()
            saver.save(wait=False)
            job.train(train)  # the cut's bytes are written nevertheless
            chunks.go.set()
            report = saver.wait()
            assert report is not None
            assert not report.copied_at_cut
            protected += report.protected_rows
    return protected


@pytest.mark.parametrize(
    "how",
    [
        {"bits": 4},
        {"method": "importance", "mean_bits": 3},
        pytest.param({"bits": None}, marks=pytest.mark.slow),
        pytest.param({"bits": 8}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_who_writes_and_when_changes_no_byte(
    workers: Workers, tmp_path: Path, how: dict[str, Any]
) -> None:
    on_write: dict[str, Any] = {"staging": "copy_on_write", "memory_budget": 8 << 20}
    variants: list[dict[str, Any]] = [
        {"background": "thread", "staging": "copy"},
        {"background": "process", "staging": "copy"},
        {"background": "process", "staging": "encode"},
        {"background": "thread", "staging": "encode", "memory_budget": 24_000},
        {"background": "process", "staging": "copy", "memory_budget": 24_000},
        {"background": "thread", **on_write},
        {"background": "process", **on_write},
    ]
    if not ALL:  # a process takes seconds to start
        last = variants[-1:] if how == {"bits": 4} else []
        variants = [each for each in variants if each["background"] == "thread"] + last
    if "bits" not in how:  # rows whose widths need a plan first are never encoded at the cut
        variants = [options for options in variants if options["staging"] != "encode"]
    written = []
    for number, options in enumerate(variants):
        root = tmp_path / str(number)
        arguments = where(root)
        protected = workers(2).run(save_three, **arguments, how=how, train=2, **options)
        assert all((rows > 0) == (options["staging"] == "copy_on_write") for rows in protected)
        folders = [root / "root" / name for name in ids(arguments["root"])]
        assert len(folders) == 3
        written.append([(f / f"rank-0000{r}.bin").read_bytes() for f in folders for r in (0, 1)])
    for options, files in zip(variants, written, strict=True):
        assert files == written[0], options


def save_with_little_memory(root: str, plan: Plan, background: str) -> list[Any]:
    job = build(plan)
    budget = 15_000
    with checkpointer(root, job, background=background, memory_budget=budget) as saver:
        sizes = [
            saver._saver._background.memory.staging.size,
            saver._saver._background.memory.chunk_bytes,
        ]
        job.train(3)
        wanted = gather(job)
        report = saver.save()
        assert report is not None
        rows = report.modified_bytes // dist.get_world_size()
        assert rows > budget
        problems = differences(saver, job, wanted)
        sizes += [saver._saver._background.memory.staging.size]
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
    """Tell whether every staged tensor is memory of its own."""
    job = build(plan)
    with checkpointer(root, job, staging="copy") as saver, storage_waits() as go:
        job.train()
        saver.save(wait=False)
        memory = saver._saver._background.memory.staging.bytes
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
