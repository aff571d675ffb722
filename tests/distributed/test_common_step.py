"""All ranks hear of a checkpoint's end after the same step, in ``step()`` as in callbacks."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.distributed.models import Plan
from tests.distributed.small_job import Workers, build, checkpointer, where
from tests.distributed.test_failed_saves import Unstorable
from torchrec_checknrun import CheckpointReport, Consecutive
from torchrec_checknrun.errors import SaveFailed

STEPS = 60


def hear_of_all(root: str, spec: dict[str, Any], plan: Plan) -> int:
    """Record after which steps a rank, slower at times, hears of checkpoints and of failures."""
    draws = random.Random(dist.get_rank())
    note = Unstorable("raises")
    note.how = None
    job = build(spec, plan)
    heard: list[tuple[int, str]] = []

    def hear(report: CheckpointReport) -> None:
        heard.append((saver.steps, report.id))

    saver = checkpointer(
        root, job, state={"note": note}, policy=Consecutive(), every_steps=3, callbacks=[hear]
    )
    with saver:
        for step in range(STEPS):
            job.train(1)
            time.sleep(draws.choice([0.0, 0.0, 0.002, 0.008]))
            note.how = "raises" if step % 4 == 0 and step < STEPS // 2 else None
            try:
                report = saver.step()
            except SaveFailed:
                heard.append((saver.steps, "failed"))
            else:
                assert report is None or (saver.steps, report.id) == heard[-1]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, heard)
    assert of_ranks[0] == of_ranks[1]
    assert {"failed"} < {what for _, what in heard}
    return len(heard)


def test_ranks_hear_after_the_same_step(workers: Workers, tmp_path: Path) -> None:
    assert min(workers(2).run(hear_of_all, **where(tmp_path))) > STEPS // 10


def go_on_together(root: str, spec: dict[str, Any], plan: Plan) -> None:
    """Meet the other rank in a callback, and save again where ``step`` has raised."""
    note = Unstorable("raises")
    note.how = None
    job = build(spec, plan)
    met: list[int] = []

    def meet(_: object) -> None:
        steps: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(steps, saver.steps)
        assert steps == [saver.steps] * 2
        met.append(saver.steps)

    saved_again = 0
    saver = checkpointer(
        root, job, state={"note": note}, policy=Consecutive(), every_steps=2, callbacks=[meet]
    )
    with saver:
        for step in range(STEPS // 3):
            job.train(1)
            time.sleep(0.004 * (step % 2 == dist.get_rank()))
            note.how = "raises" if step % 8 == 1 and step < STEPS // 4 else None
            try:
                saver.step()
            except SaveFailed:
                note.how = None
                saved_again += not saver.save().unchanged
    assert met
    assert saved_again


def test_what_follows_may_be_a_collective(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(go_on_together, **where(tmp_path))


def count_anew(root: str, spec: dict[str, Any], plan: Plan) -> None:
    """Set ``steps`` back, as for a new epoch, while a checkpoint's end waits to be heard of."""
    job = build(spec, plan)
    reports = []
    with checkpointer(root, job) as saver:
        saver.steps = 1000
        job.train(1)
        saver.step()
        saver.save(wait=False)
        running = saver._saver.running
        assert running is not None
        assert running.known.wait(60.0)
        running.common_step.settled()
        saver.steps = 0
        for _ in range(4):
            job.train(1)
            reports.append(saver.step())
    assert [report.step for report in reports if report is not None] == [1001]


def test_steps_may_be_counted_anew(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(count_anew, **where(tmp_path))
