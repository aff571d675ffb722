"""Processes that are killed go back to the newest checkpoint by copies in this machine's memory."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.models import ModelSpec
from tests.distributed.small_job import build, checkpointer, is_at, keep, plan_of, save, where
from tests.distributed.worker_pool import CaseFailed, WorkerPool
from torchrec_checknrun import Checkpointer, Consecutive, HostCopies, errors
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.save.parent_content import ParentContent

Workers = Callable[[int], WorkerPool]
Place = dict[str, Any]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="checknrun-test-", dir="/dev/shm") as memory:
        yield {**where(tmp_path), "memory": memory}


def of_one_rank(place: Place) -> Place:
    return {**place, "plan": plan_of(ModelSpec.from_json(place["spec"]), 1)}


def files_in(memory: str) -> list[Path]:
    return sorted(Path(memory).glob("*.copies/kept/*/*"))


def made(root: str, memory: str, job: Any, **options: Any) -> Checkpointer:
    most = options.pop("most_bytes", None)
    survive = HostCopies(folder=memory, most_bytes=most)
    return checkpointer(root, job, **{"policy": Consecutive(), **options}, survive=survive)


def live(root: str, memory: str, spec: Any, plan: Any, killed: bool = True, **options: Any) -> None:
    """Save a chain of three, train on, and die.

    Args:
        killed: by a real SIGKILL; else nothing is closed or saved, and the worker lives on.
    """
    job = build(spec, plan)
    saver = made(root, memory, job, **options)
    for _ in range(3):
        job.train()
        saver.step()
        keep(job, root, save(saver))
    job.train()
    saver.step()
    dist.barrier()
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)
    saver._release(failed=True)


def hide_storage(root: str) -> None:
    """Put zeros into all rank files of the storage, on rank 0."""
    if dist.get_rank() == 0:
        for path in Path(root).glob("*/rank-*.bin"):
            shutil.copy(path, path.with_suffix(".hidden"))
            path.write_bytes(bytes(path.stat().st_size))
    dist.barrier()


def show_storage(root: str) -> None:
    """Undo ``hide_storage``."""
    if dist.get_rank() == 0:
        for path in Path(root).glob("*/rank-*.hidden"):
            path.rename(path.with_suffix(".bin"))
    dist.barrier()


def go_on(
    root: str, memory: str, spec: Any, plan: Any, hidden: bool = True, **options: Any
) -> dict[str, Any]:
    """Restore, with nothing but zeros in the storage's rank files if ``hidden``, and go on."""
    if hidden:
        hide_storage(root)
    job = build(spec, plan, seed=7)
    with made(root, memory, job, **options) as saver:
        report = saver.restore()
        assert report is not None
        restored = is_at(job, root, report.id)
        if hidden:
            show_storage(root)
        job.train()
        saver.step()
        kind = saver.save().kind
        dist.barrier()
        held = len(files_in(memory))
        dist.barrier()
    return {
        "restored": restored,
        "chain": len(report.chain),
        "passed_over": report.passed_over,
        "memory": report.memory_bytes,
        "kind": kind,
        "held": held,
    }


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"background": "process"}, marks=pytest.mark.slow)]
)
def test_nothing_is_read_from_the_storage(
    options: dict[str, Any], place: Place, workers: Workers
) -> None:
    with pytest.raises(CaseFailed):
        workers(2).run(live, **place, **options)
    found = workers(2).run(go_on, **place, **options)
    for of_rank in found:
        assert of_rank["restored"]
        assert of_rank["memory"] > 0
        assert (of_rank["chain"], of_rank["kind"]) == (3, "differential")
        assert of_rank["held"] == 2 * 4  # of both ranks, the chain with the one saved since
    assert list(Path(place["memory"]).iterdir()) == []  # the run has come to its end


def change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def link(path: Path) -> None:
    path.rename(path.with_suffix(".other"))
    path.symlink_to(path.with_suffix(".other"))


@pytest.mark.parametrize("damage", [change_a_byte, cut_off, link, Path.unlink])
def test_a_damaged_copy_is_read_from_the_storage(
    damage: Callable[[Path], None], place: Place, workers: Workers
) -> None:
    workers(2).run(live, killed=False, **place)
    damage(next(path for path in files_in(place["memory"]) if path.name.startswith("rank-00000")))
    for found in workers(2).run(go_on, hidden=False, **place):
        assert found["restored"]
        assert found["passed_over"] == []
        assert found["chain"] == 3


def test_where_both_are_damaged_an_older_chain_is_restored(place: Place, workers: Workers) -> None:
    workers(2).run(live, killed=False, **place)
    *_, newest = sorted(path.parent.name for path in files_in(place["memory"]))
    for path in (*files_in(place["memory"]), *Path(place["root"]).glob("*/rank-00000.bin")):
        if path.parent.name == newest:
            change_a_byte(path)
    for found in workers(2).run(go_on, hidden=False, **place):
        assert len(found["passed_over"]) == 1
        assert found["chain"] == 2


def test_other_ranks_read_the_copies_of_those_before(
    tmp_path: Path, place: Place, workers: Workers
) -> None:
    workers(2).run(live, killed=False, **place)
    (found,) = workers(1).run(go_on, **of_one_rank(place))
    assert found["restored"]
    assert found["memory"] > 0
    assert found["held"] == 1  # copies of two ranks are over


def test_more_than_fits_is_not_copied(place: Place, workers: Workers) -> None:
    workers(2).run(live, killed=False, most_bytes=3000, **place)
    assert files_in(place["memory"]) == []
    for found in workers(2).run(go_on, hidden=False, most_bytes=3000, **place):
        assert found["restored"]
        assert found["memory"] == 0


def test_a_folder_of_others_is_not_read(place: Place, workers: Workers) -> None:
    workers(2).run(live, killed=False, **place)
    for path in Path(place["memory"]).iterdir():
        path.chmod(0o755)
    for found in workers(2).run(go_on, hidden=False, **place):
        assert found["restored"]
        assert found["memory"] == 0


def refused(root: str, memory: str, spec: Any, plan: Any) -> None:
    with pytest.raises(errors.ImagesRefused, match="name a folder in shared memory"):
        made(root, memory + "/missing", build(spec, plan))


def test_a_missing_folder_is_refused(place: Place, workers: Workers) -> None:
    workers(1).run(refused, **of_one_rank(place))


def test_memory_is_given_back(place: Place, workers: Workers) -> None:
    """Copies of runs that are over are swept by the next run, those of living ones are kept."""
    workers(2).run(live, killed=False, **place)
    left = {path.parents[2] for path in files_in(place["memory"])}
    other = {**place, "root": f"{place['root']}-of-another-run"}
    workers(2).run(go_on_alone, **other)
    assert {path.parents[2] for path in files_in(place["memory"])} == left
    for folder in left:
        os.utime(folder, (0, 0))
    workers(2).run(go_on_alone, **other)
    assert list(Path(place["memory"]).iterdir()) == []


def looked_at(root: str, memory: str, spec: Any, plan: Any) -> list[int]:
    """Restore what a live run has saved, as an evaluation does, and count its copies."""
    counts, job = [], build(spec, plan)
    with made(root, memory, job) as saver:
        job.train()
        saver.step()
        saver.save()
        dist.barrier()
        counts.append(len(files_in(memory)))
        dist.barrier()
        with made(root, memory, build(spec, plan, seed=5)) as other:
            assert other.restore() is not None
        dist.barrier()
        counts.append(len(files_in(memory)))
        dist.barrier()
    dist.barrier()
    return [*counts, len(files_in(memory))]


def test_who_only_restores_leaves_the_copies_of_the_run(place: Place, workers: Workers) -> None:
    assert workers(2).run(looked_at, **place) == [[2, 2, 0], [2, 2, 0]]


def go_on_alone(root: str, memory: str, spec: Any, plan: Any) -> None:
    if dist.get_rank() == 0:
        shutil.rmtree(root, ignore_errors=True)
    dist.barrier()
    job = build(spec, plan)
    with made(root, memory, job) as saver:
        job.train()
        saver.step()
        saver.save()


def given_up_on_one_rank(root: str, memory: str, spec: Any, plan: Any) -> None:
    """Give up on rank 1 what rank 0 commits, as where one rank hears of it too late."""
    job, heard, go_on = build(spec, plan), threading.Event(), threading.Event()
    committed = ParentContent.committed

    def late(content: ParentContent, manifest: Manifest) -> None:
        heard.set()
        assert go_on.wait(60)
        committed(content, manifest)

    with made(root, memory, job) as saver:
        job.train()
        saver.step()
        save(saver)
        job.train()
        saver.step()
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(ParentContent, "committed", late)
            saver.save(wait=False)
            running = saver._saver.running
            assert running is not None
            if dist.get_rank() == 1:
                assert heard.wait(60)
                running.give_up(errors.SaveFailed("given up, says the test"), force=True)
                with pytest.raises(errors.SaveFailed, match="says the test"):
                    saver.wait()
            else:
                assert saver.wait() is not None
            dist.barrier()
            go_on.set()
        job.train()
        saver.step()
        keep(job, root, save(saver))


def test_one_rank_has_given_the_parent_up(workers: Workers, place: Place) -> None:
    workers(2).run(given_up_on_one_rank, **place)
    found = workers(2).run(go_on, **place, hidden=False)
    assert [(each["restored"], each["chain"]) for each in found] == [(True, 3)] * 2
