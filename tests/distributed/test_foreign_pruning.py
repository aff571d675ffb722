"""A run loses nothing when another process compacts and prunes its root."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed import references
from tests.distributed.models import Plan
from tests.distributed.small_job import build, checkpointer, save, where
from tests.distributed.states import gather, scramble
from tests.distributed.worker_pool import WorkerPool
from tests.examples import some_of
from torchrec_checknrun import Consecutive, Full, Intermittent, OneShot, compact
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.policy import Policy
from torchrec_checknrun.root.catalog import inventory
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers.lease import latest_claim

Workers = Callable[[int], WorkerPool]
POLICIES: dict[str, Policy] = {
    "consecutive": Consecutive(),
    "one_shot": OneShot(),
    "intermittent": Intermittent(),
}


def on_rank_0(act: Callable[[], Any]) -> None:
    """Act between barriers, as another process would at any time."""
    dist.barrier()
    if dist.get_rank() == 0:
        act()
    dist.barrier()


def tidy(root: str, keep: int) -> None:
    compact(root)
    prune(Folder(root), Retention(keep))


def goes_on(root: str, spec: dict[str, Any], plan: Plan, policy: str, keep: int) -> list[str]:
    job = build(spec, plan)
    with checkpointer(root, job, policy=POLICIES[policy]) as saver:
        for number in range(6):
            if number in (3, 5):
                on_rank_0(lambda: tidy(root, keep))
            job.train()
            saver.steps = job.steps
            save(saver)
        wanted = gather(job)
        scramble(job)
        report = saver.restore()
        assert report is not None
        assert (report.step, report.passed_over) == (6, ())
    return references.differences(gather(job), wanted, None)


@pytest.mark.parametrize(("policy", "keep"), some_of(itertools.product(POLICIES, [1, 2]), 0, 3))
def test_what_a_run_builds_on_stays(
    workers: Workers, tmp_path: Path, policy: str, keep: int
) -> None:
    place = where(tmp_path)
    for problems in workers(2).run(goes_on, **place, policy=policy, keep=keep):
        assert problems == []
    assert {found.status for found in inventory(Folder(place["root"])).checkpoints} == {
        "restorable"
    }


def resumes(root: str, spec: dict[str, Any], plan: Plan, claimed: bool) -> list[Any]:
    """Resume from an older checkpoint, which is pruned before the run has saved anything."""
    job = build(spec, plan)
    with checkpointer(root, job, policy=Full()) as saver:
        names = []
        for _ in range(3):
            job.train()
            names.append(save(saver))
    found: list[Any] = []
    with checkpointer(root, job, policy=Consecutive()) as saver:
        if claimed:
            job.train()
            saver.mark_all()
            saver.step()
        saver.restore(names[0])
        on_rank_0(lambda: prune(Folder(root), Retention(2)))
        found.append(names[0] in Folder(root).names())
        for _ in range(2):
            job.train()
            saver.steps += 1
            report = saver.save()
            assert report is not None
            found.append((report.kind, report.parent == names[0]))
        wanted = gather(job)
        scramble(job)
        assert saver.restore() is not None
    return [found, references.differences(gather(job), wanted, None)]


@pytest.mark.parametrize(
    ("claimed", "wanted"),
    [
        (True, [True, ["differential", True], ["differential", False]]),
        (False, [False, ["full", False], ["differential", False]]),
    ],
)
def test_what_was_resumed_from(
    workers: Workers, tmp_path: Path, claimed: bool, wanted: list[Any]
) -> None:
    for found, problems in workers(2).run(resumes, **where(tmp_path), claimed=claimed):
        assert found == wanted
        assert problems == []


def loses_its_parent(root: str, spec: dict[str, Any], plan: Plan) -> list[Any]:
    job = build(spec, plan)
    with checkpointer(root, job, policy=Consecutive()) as saver:
        job.train()
        first = save(saver)
        on_rank_0(lambda: (Folder(root) / first).delete("manifest.json"))
        job.train()
        saver.steps += 1
        with pytest.raises(SaveFailed, match=f"{first}, which this checkpoint builds on, was del"):
            saver.save()
        report = saver.save()
        assert report is not None
        wanted = gather(job)
        scramble(job)
        assert saver.restore() is not None
    return [report.kind, references.differences(gather(job), wanted, None)]


def test_a_parent_that_is_gone_is_built_upon_by_none(workers: Workers, tmp_path: Path) -> None:
    place = where(tmp_path)
    for kind, problems in workers(2).run(loses_its_parent, **place):
        assert kind == "full"
        assert problems == []
    claim = latest_claim(Folder(place["root"]))
    assert claim is not None
    assert claim.released


def outlives_its_root(root: str, spec: dict[str, Any], plan: Plan) -> list[Any]:
    """Save on when the root was moved away under a run."""
    job = build(spec, plan)
    with checkpointer(root, job, policy=Consecutive()) as saver:
        job.train()
        first = save(saver)
        on_rank_0(lambda: Path(root).rename(f"{root} of old"))
        job.train()
        saver.steps += 1
        with pytest.raises(SaveFailed, match=f"{first}, which this checkpoint builds on, was del"):
            saver.save()
        report = saver.save()
        assert report is not None
        wanted = gather(job)
        scramble(job)
        assert saver.restore() is not None
    return [report.kind, references.differences(gather(job), wanted, None)]


def test_a_run_whose_root_is_moved_away_saves_all_rows_anew(
    workers: Workers, tmp_path: Path
) -> None:
    for kind, problems in workers(2).run(outlives_its_root, **where(tmp_path)):
        assert (kind, problems) == ("full", [])
