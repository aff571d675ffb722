"""Ranks that differ while rows are copied on write: one waits, is slow or fails, none hangs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.models import Plan
from tests.distributed.on_write import (
    build,
    checkpointer,
    differences,
    held_copiers,
    little_memory,
    soon,
    was_on_write,
    where,
)
from tests.distributed.small_job import Workers
from tests.distributed.states import gather
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.save.local_part import LocalPart

TIMEOUT = 4.0
SLACK = 12.0
"""Seconds that a busy machine may take."""


def is_behind(root: str, plan: Plan, what: str) -> list[Any]:
    """Fill overflow memory on rank 0, while rank 1 is late in its background or in training."""
    job, rank = build(plan), dist.get_rank()
    with little_memory(), held_copiers() as held, pytest.MonkeyPatch.context() as patch:
        saver = checkpointer(root, job, timeout_seconds=60.0)
        job.train()
        was_on_write(saver.save(), protected=False)
        job.train(2)
        wanted = gather(job)
        prepare = LocalPart.prepare

        def prepare_later(plan: LocalPart) -> Any:
            time.sleep(1.0)
            return prepare(plan)

        if what == "background" and rank == 1:
            patch.setattr(LocalPart, "prepare", prepare_later)
        if rank == 0:
            held.hold()
        with soon(held.let_go, 1.5):
            saver.save(wait=False)
            if what == "training" and rank == 1:
                time.sleep(1.0)
            job.train(6)
        report = was_on_write(saver.wait(), protected=rank == 0)
        saver.close()
    return [report.memory_wait_seconds, differences(root, wanted, plan)]


@pytest.mark.parametrize("what", ["background", "training", "nothing"])
def test_one_rank_waits_while_the_other_is_behind(
    workers: Workers, tmp_path: Path, what: str
) -> None:
    found = workers(2).run(is_behind, **where(tmp_path), what=what)
    assert [problems for _, problems in found] == [[], []]
    assert found[0][0] > 0.1


def gives_up(root: str, plan: Plan, who: int) -> list[Any]:
    """Let one rank's hook wait for too long; then save again."""
    job, rank = build(plan), dist.get_rank()
    with little_memory(), held_copiers() as held:
        saver = checkpointer(root, job, timeout_seconds=TIMEOUT)
        job.train()
        was_on_write(saver.save(), protected=False)
        job.train(2)
        if rank == who:
            held.hold()
        started = time.monotonic()
        saver.save(wait=False)
        job.train(4)
        trained = time.monotonic() - started
        held.let_go()
        with pytest.raises(SaveFailed) as failed:
            saver.wait()
        seconds = time.monotonic() - started
        wanted = gather(job)
        saver.save(wait=False)
        job.train(2)
        was_on_write(saver.wait(), protected=False)
        saver.close()
    return [str(failed.value), trained, seconds, differences(root, wanted, plan)]


@pytest.mark.parametrize("who", [0, 1])
def test_all_ranks_hear_of_one_that_gave_up(workers: Workers, tmp_path: Path, who: int) -> None:
    found = workers(2).run(gives_up, **where(tmp_path), who=who)
    for told, trained, seconds, problems in found:
        assert "training waited 4 s for memory" in told
        assert trained < TIMEOUT + SLACK
        assert seconds < 2 * TIMEOUT + SLACK
        assert problems == []
