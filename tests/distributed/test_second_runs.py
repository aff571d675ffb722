"""A second run in a live run's root, started by mistake, leaves all of that run's alone."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch.distributed as dist

from tests.distributed.models import ModelSpec
from tests.distributed.partial_lives import Lives
from tests.distributed.small_job import build, checkpointer, is_at, keep, plan_of, save
from tests.distributed.small_job import where as of_small_job
from tests.distributed.test_priority_saves import restored, saves, settled, train
from tests.distributed.worker_pool import WorkerPool
from torchrec_checknrun import Checkpointer, Images, PartialRecovery, PrioritySaves
from torchrec_checknrun.errors import RootInUse
from torchrec_checknrun.memory.partial import PeerCopies
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.shared_memory import file as files
from torchrec_checknrun.writers.lease import Holder

pytestmark = pytest.mark.skipif(not has_extension(), reason="the extension was not built")

Workers = Callable[[int], WorkerPool]


@pytest.fixture
def where(tmp_path: Path) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="checknrun-test-", dir="/dev/shm") as memory:
        yield {"folder": str(tmp_path), "memory": memory}


def elsewhere() -> Any:
    """Make this process look like one of another machine."""
    other = msgspec.structs.replace(
        Holder.this_process(), machine="another", host="far", pid=7, run="another"
    )
    return mock.patch.object(Holder, "this_process", classmethod(lambda cls: other))


def second_run(folder: str, memory: str) -> list[Any]:
    """Return what is there of the live run's priority saves as another one comes and goes."""
    wanted = PrioritySaves(1, 1.0)
    live = Lives(folder, memory, priority=wanted)
    live.begin()
    live.saver.restore()
    train(live, 6)
    found = [saves(live)]
    second = Lives(folder, f"{memory}/another", priority=wanted)
    if dist.get_rank() == 0:
        Path(second.memory).mkdir()
    dist.barrier()
    for steps in (True, False):
        with elsewhere():
            second.begin()
            assert restored(second).step == 4
            settled(second)
            found.append(saves(live))
            if steps:
                second.job.train()
                with pytest.raises(RootInUse):
                    second.saver.step()
                second.job.train()
                second.saver.step()  # and goes on after the refusal
                settled(second)
                second.die([0, 1])
            else:  # an evaluation
                second.saver.close()
        dist.barrier()
        found.append(saves(live))
    train(live, 1)
    live.die([1])
    live.begin()
    assert [rank.step for rank in restored(live).ranks] == [7, 4]
    live.end()
    return found


def test_priority_saves_of_a_live_run_stay(where: dict[str, Any], workers: Workers) -> None:
    for found in workers(2).run(second_run, **where):
        assert [name.rpartition(".")[2] for name in found[0]] == ["step-00000005", "step-00000006"]
        assert all(names == found[0] for names in found), found


def with_images(root: str, memory: str, job: Any) -> Checkpointer:
    files._mapped.clear()
    partial = PartialRecovery(1.0, 100, PeerCopies())
    return checkpointer(root, job, survive=Images(folder=memory), partial=partial)


def killed(root: str, memory: str, spec: Any, plan: Any) -> None:
    """Save at step 1, and die at the end of step 2."""
    job = build(spec, plan)
    saver = with_images(root, memory, job)
    assert saver.restore() is None
    job.train()
    saver.step()
    save(saver)
    job.train()
    saver.step()
    keep(job, root, "killed")
    saver._release(failed=True)


def evaluated(root: str, memory: str, spec: Any, plan: Any) -> None:
    """Restore on another number of ranks, as an evaluation does with the run's options."""
    with with_images(root, memory, build(spec, plan, seed=5)) as saver:
        report = saver.restore()
        assert report is not None
        assert (report.source, report.step) == ("checkpoint", 1)


def goes_on(root: str, memory: str, spec: Any, plan: Any) -> int:
    job = build(spec, plan, seed=7)
    with with_images(root, memory, job) as saver:
        report = saver.restore()
        assert report is not None
        assert is_at(job, root, "killed")
        job.train()
        saver.step()
    return report.step


def left(memory: str) -> list[str]:
    return sorted(path.name.rpartition("-")[2] for path in Path(memory).iterdir())


def test_an_evaluation_leaves_the_images_of_a_killed_run(workers: Workers, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="checknrun-test-", dir="/dev/shm") as memory:
        place = {**of_small_job(tmp_path), "memory": memory}
        alone = {**place, "plan": plan_of(ModelSpec.from_json(place["spec"]), 1)}
        workers(2).run(killed, **place)
        before = left(memory)
        assert before == ["0of2.copies", "0of2.image", "1of2.copies", "1of2.image"]
        workers(1).run(evaluated, **alone)
        assert left(memory) == before
        assert workers(2).run(goes_on, **place) == [2, 2]
        assert left(memory) == []
