"""Wherever a save or a restore fails on one rank, every rank is told, and no row is lost.

Nobody waits for the collectives' timeout, whatever is raised, ``KeyboardInterrupt`` included.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.models import Plan
from tests.distributed.small_job import Workers, build, checkpointer, is_at, keep, save, where
from tests.distributed.states import local_bytes, scramble
from tests.examples import ALL
from torchrec_checknrun import Consecutive
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.marks.row_copies import ShardCopies
from torchrec_checknrun.restore import chunks
from torchrec_checknrun.restore import restore as restoring
from torchrec_checknrun.restore.plan import ChainRestore
from torchrec_checknrun.restore.rows import RowRestore
from torchrec_checknrun.root.writer import RootWriter
from torchrec_checknrun.save import commit
from torchrec_checknrun.save.commit import CheckpointWriter
from torchrec_checknrun.save.local_part import LocalPart
from torchrec_checknrun.save.plan import Prepared
from torchrec_checknrun.snapshot.cut_rows import CutRows
from torchrec_checknrun.snapshot.items import Items
from torchrec_checknrun.snapshot.staged import StagedRows
from torchrec_checknrun.snapshot.staging import Staging

TIMEOUT = 120.0
LATE = 60.0
"""Seconds that no failed save or restore may take; else a rank has waited for the timeout."""

ON_WRITE: dict[str, tuple[Any, str]] = {
    "find rows": (Items, "find_rows"),
    "start the copier": (Staging, "start_behind"),
    "copy rows": (ShardCopies, "stage"),
    "check copies": (CutRows, "finish"),
}
ON_EVERY_RANK: dict[str, tuple[Any, str]] = {
    "prepare": (LocalPart, "prepare"),
    "check": (CheckpointWriter, "check"),
    "jobs": (Prepared, "jobs"),
    "encode": (StagedRows, "encode"),
    **ON_WRITE,
    "write": (CheckpointWriter, "write"),
}
ON_RANK_0: dict[str, tuple[Any, str]] = {
    "decide": (commit, "make_global_plan"),
    "create": (CheckpointWriter, "create"),
    "manifest": (CheckpointWriter, "_manifest"),
    "before commit": (RootWriter, "before_commit"),
    "after commit": (RootWriter, "after_commit"),
}
PLANNING: dict[str, tuple[Any, str]] = {
    "indexes": (chunks, "read_index_bytes"),
    "content": (restoring, "read_content"),
    "plan": (ChainRestore, "_plan_blocks"),
}
LOADING: dict[str, tuple[Any, str]] = {
    "mark": (ChainRestore, "_mark"),
    "rows": (RowRestore, "load"),
    "finish": (ChainRestore, "_finish"),
}


def errors() -> list[BaseException]:
    class Unsendable(Exception):
        """An error of a class that no other process knows."""

    return [
        ValueError("says the test"),
        KeyboardInterrupt("says the test"),
        Unsendable("says the test"),
    ]


@contextmanager
def failing(
    point: tuple[Any, str], error: BaseException, here: bool, after: bool
) -> Iterator[None]:
    """Fail a function on some ranks; if ``after``, once it is done."""
    owner, name = point
    whole: Callable[..., Any] = getattr(owner, name)

    def fail(*args: Any, **options: Any) -> None:
        if after:
            whole(*args, **options)
        raise error

    with pytest.MonkeyPatch.context() as patch:
        if here:
            patch.setattr(owner, name, fail)
        yield


def cases(on_every_rank: dict[str, Any], on_rank_0: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield failures: at every point, of the first rank, the last one and all; each with an error
    of its own, or with every error in a full run.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    turn = itertools.cycle((0, 1, 2, 1, 2, 0, 2, 0, 1))
    for name, point in {**on_every_rank, **on_rank_0}.items():
        who = {"the first": rank == 0, "the last": rank == world - 1, "all": True}
        for whom, here in who.items():
            if name in on_rank_0 and whom != "the first":
                continue
            found = list(enumerate(errors()))
            for number, error in found if ALL else [found[next(turn)]]:
                yield f"{name} of {whom}: {error!r}", point, error, here, number % 2 == 1


def saves_fail(
    root: str, spec: dict[str, Any], plan: Plan, on_write: bool = True, **options: Any
) -> None:
    job = build(spec, plan)
    saver = checkpointer(root, job, timeout_seconds=TIMEOUT, policy=Consecutive(), **options)
    first = saver.save()
    assert first is not None
    assert (first.copied_at_cut == {}) == on_write
    points = {k: v for k, v in ON_EVERY_RANK.items() if on_write or k not in ON_WRITE}
    for what, point, error, here, after in cases(points, ON_RANK_0):
        job.train(1)
        saver.step()
        started = time.monotonic()
        with failing(point, error, here, after), pytest.raises(SaveFailed, match="says the test"):
            saver.save()
        assert time.monotonic() - started < LATE, what
    job.train(1)
    name = save(saver)
    keep(job, root, name)
    scramble(job)
    report = saver.restore()
    assert report is not None
    assert len(report.chain) > 1
    assert report.chain[-1] == name
    assert is_at(job, root, name)
    saver.close()


def restores_fail(root: str, spec: dict[str, Any], plan: Plan) -> None:
    job = build(spec, plan)
    with checkpointer(root, job, timeout_seconds=TIMEOUT, policy=Consecutive()) as saver:
        save(saver)
        job.train()
        saver.step()
        name = save(saver)
        keep(job, root, name)
        points = {**PLANNING, **LOADING}
        if dist.get_world_size() == 1:
            del points["indexes"]  # nobody to share them with
        for what, point, error, here, after in cases(points, {}):
            scramble(job)
            before = local_bytes(job)
            started = time.monotonic()
            with (
                failing(point, error, here, after),
                pytest.raises(Exception, match="says the test"),
            ):
                saver.restore()
            assert time.monotonic() - started < LATE, what
            if point in PLANNING.values():
                assert local_bytes(job) == before, what
            else:
                with pytest.raises(Exception, match="restore"):
                    saver.save()
        saver.restore()
        assert is_at(job, root, name)
        job.train()
        saver.step()
        name = save(saver)
        keep(job, root, name)
        scramble(job)
        saver.restore()
        assert is_at(job, root, name)


@pytest.mark.parametrize(
    "ranks",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)],
)
def test_a_save_that_fails_anywhere(workers: Workers, tmp_path: Path, ranks: int) -> None:
    workers(ranks).run(saves_fail, **where(tmp_path, ranks=ranks))


def test_a_save_in_parts_that_fails_anywhere(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(saves_fail, **where(tmp_path), memory_budget=8192, on_write=False)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_restore_that_fails_anywhere(workers: Workers, tmp_path: Path, ranks: int) -> None:
    workers(ranks).run(restores_fail, **where(tmp_path, ranks=ranks))
