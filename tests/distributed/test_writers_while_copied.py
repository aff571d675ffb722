"""Whoever writes to tables while a checkpoint's rows are copied: announced writers change nothing,
foreign ones fail the save, and its rows are part of the next one.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.distributed import references
from tests.distributed.background_jobs import storage_waits
from tests.distributed.slowed import Chunks, Instants, checkpointer, on_all_ranks, slowed
from tests.distributed.states import gather
from tests.distributed.test_hand_written_rows import PLAIN, PREFIX, Job
from tests.distributed.test_tracking_zoo import PLANS
from tests.distributed.worker_pool import WorkerPool
from tests.distributed.zoo import ROWS, build_zoo
from tests.examples import ALL, some_of
from torchrec_checknrun import Checkpointer, load_tables
from torchrec_checknrun.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from torchrec_checknrun.errors import CheckNRunError, SaveFailed
from torchrec_checknrun.model.hand_written import WriteWatch
from torchrec_checknrun.tracking import track

Workers = Callable[[int], WorkerPool]


class Writer(Job):
    """A job whose rows are written by all known means while they are copied."""

    def __init__(self, root: str, plan: dict[str, str], chunks: Chunks) -> None:
        super().__init__(f"{root}/unused", plan)
        self.saver.close()
        again = build_zoo("bags", plan)
        self.instants = Instants(f"{root}/root", self.zoo, again, chunks)
        self.replicas = sorted(t for t in plan if plan[t] == "data_parallel")
        self.saver = self.instants.saver
        self.folder = root
        for watch in WriteWatch._alive:
            watch.updates_to_look_at = 0  # else all that is written has rows copied at the cut

    def act(self, action: str) -> None:
        """Write by hand, or move all tables to shared memory."""
        if action == "share_memory":
            self.zoo.model.share_memory()
        else:
            super().act(action)

    def write_everywhere(self) -> None:
        """Write rows of every table with states, through this and another tracker."""
        other = track(self.zoo.model, [self.zoo.optimizer])
        for table in ROWS:
            rows = self.rows(table)
            for tracked in (self.saver._target.tracked, other):
                for shard in tracked.shards:
                    place = shard.rectangle
                    own = [row for row in rows if place.row_start <= row < place.row_stop]
                    if shard.table == PREFIX + table and own:
                        found = shard.read_rows(own)
                        states = {name: state + 1 for name, state in found.optimizer.items()}
                        shard.write_rows(own, found.weight + self.draw.random(), states)
        other.close()

    def write_in_blocks(self) -> None:
        """Write rows inside ``writing``, of this and of another tracker."""
        other = track(self.zoo.model)
        for table in ROWS:
            for writing in (self.saver.writing, other.writing):
                rows = self.rows(table)
                with writing(PREFIX + table, rows):
                    self.assign(table, rows)
        other.close()

    def whole(self, how: str) -> None:
        """Write all rows at once, by a restore of an older state made by ``prepare``."""
        contents = {"model": self.zoo.model, "optimizer": self.zoo.optimizer}
        if how == "restore":
            assert self.other.restore() is not None
        elif how == "restore_some":
            load_tables(Path(self.folder, "other"), self.zoo.model, ["t0"], optimizer=True)
        else:
            tracked = track(self.zoo.model) if how == "dcp_tracked" else None
            dcp.load(
                contents,
                planner=LoadPlanner(tracked),
                storage_reader=StorageReader(Path(self.folder, "dcp", "one")),
            )
            if tracked is not None:
                tracked.close()

    def prepare(self) -> None:
        """Save a state to be restored later, by another Checkpointer and by ``dcp.save``."""
        self.other: Checkpointer = checkpointer(f"{self.folder}/other", self.zoo)
        assert self.other.save() is not None
        contents = {"model": self.zoo.model, "optimizer": self.zoo.optimizer}
        writer = StorageWriter(Path(self.folder, "dcp", "one"))
        dcp.save(contents, planner=SavePlanner(), storage_writer=writer)


def announced(root: str, plan: dict[str, str], how: str) -> list[Any]:
    """Write rows that are named; no chunk of the save in progress is copied before that."""
    with slowed() as chunks:
        job = Writer(root, plan, chunks)
        job.zoo.train(2)
        write = {"write_rows": job.write_everywhere, "writing": job.write_in_blocks}[how]
        for _ in range(3):

            def rest() -> None:
                write()
                job.zoo.train(1)

            job.instants.save(write, rest)
        return [job.instants.close()]


@pytest.mark.parametrize(
    ("how", "plan"),
    some_of(itertools.product(["write_rows", "writing"], ["rows", "columns", "mixed"]), 2, 4),
)
def test_named_rows(workers: Workers, tmp_path: Path, plan: str, how: str) -> None:
    (protected,) = workers(2).run(announced, root=str(tmp_path), plan=PLANS[plan], how=how)[0]
    assert min(protected) > 0


def overwritten(root: str, plan: dict[str, str], how: str) -> bool:
    """Restore another state meanwhile, which waits until the rows are copied; return if it did."""
    with slowed(0.01) as chunks:
        job = Writer(root, plan, chunks)
        job.zoo.train(1)
        job.prepare()
        waited = []

        def restore() -> None:
            save = job.saver._saver.running
            assert save is not None
            assert save.rows is not None
            waited.append(not save.rows.copies.over)
            chunks.go.set()
            job.whole(how)

        for _ in range(2):
            job.zoo.train(2)
            job.instants.save(restore, lambda: None)
        job.zoo.train(2)
        job.instants.save(lambda: job.zoo.train(2), lambda: job.zoo.train(1))
        assert job.instants.protected[-1] > 0
        job.other.close()
        job.instants.close()
        return all(map(all, on_all_ranks(waited)))


@pytest.mark.parametrize("how", some_of(["restore", "restore_some", "dcp", "dcp_tracked"], 0, 3))
def test_all_rows_at_once(workers: Workers, tmp_path: Path, how: str) -> None:
    found = workers(2).run(overwritten, root=str(tmp_path), plan=PLANS["rows"], how=how)
    assert found == [True, True]


def spoiled(root: str, plan: dict[str, str], actions: list[str], after: int) -> list[str]:
    """Write by hand while rows are copied; return the errors.

    Args:
        after: chunks that are copied before the write.
    """
    errors = []
    with slowed(0, dense=False) as chunks:  # a write to the dense part has an error of its own
        job = Writer(root, plan, chunks)
        job.zoo.train(2)
        job.instants.save(lambda: job.zoo.train(2), lambda: None)
        for number, action in enumerate(actions):
            job.draw = random.Random(number)
            before = chunks.copied
            chunks.go.clear()
            chunks.stop_after = None
            job.saver.steps += 1
            assert job.saver.save(wait=False) is None
            if after:
                chunks.stop_after = before + after
                chunks.go.set()
                while chunks.copied < before + after:
                    torch.ones(1)
            if number % 2:
                job.zoo.train(1)
            job.act(action)
            if number % 3:
                job.zoo.train(1)
            chunks.stop_after = None
            chunks.go.set()
            with pytest.raises(SaveFailed) as failed:
                job.saver.wait()
            errors.append(str(failed.value))
            for watch in WriteWatch._alive:
                watch.spoils = False  # else the rows of the next save are copied at the cut
            job.instants.save(lambda: job.zoo.train(1), lambda: job.zoo.train(1))
        job.instants.close()
    return errors


@pytest.mark.parametrize("after", some_of([0, 2], 1))
def test_foreign_writes_fail_the_save(workers: Workers, tmp_path: Path, after: int) -> None:
    plan = PLANS["rows"]
    errors = workers(2).run(spoiled, root=str(tmp_path), plan=plan, actions=PLAIN, after=after)[0]
    assert len(errors) == len(PLAIN)
    for error in errors:
        assert "written outside of training" in error
        assert all(f"{PREFIX}{table}" in error for table in ROWS)


@pytest.mark.parametrize("after", [0, 2])
def test_tables_that_move_fail_the_save(workers: Workers, tmp_path: Path, after: int) -> None:
    """Move tables to other memory: rows that were not copied yet may be newer from then on."""
    plan, actions = PLANS["rows"], ["share_memory"]
    pool = workers(2)
    (error,) = pool.run(spoiled, root=str(tmp_path), plan=plan, actions=actions, after=after)[0]
    assert all(f"{PREFIX}{table}" in error for table in ROWS)


def harmless(root: str, plan: dict[str, str]) -> list[bool]:
    """Write by hand once all rows are copied, and to data-parallel tables after a step."""
    with slowed() as chunks:
        job = Writer(root, plan, chunks)
        job.zoo.train(2)
        for action in PLAIN if ALL else ("load", "state", "view"):
            with storage_waits() as go:

                def write(action: str = action) -> None:
                    save = job.saver._saver.running
                    assert save is not None
                    assert save.rows is not None
                    while not save.rows.copies.over:
                        torch.ones(1)
                    assert not save.done
                    job.act(action)
                    dist.barrier()
                    go.set()

                job.instants.save(lambda: job.zoo.train(2), write)

        def write_copied() -> None:
            for table in job.replicas:
                job.assign(table, job.rows(table))

        job.instants.save(lambda: job.zoo.train(1), write_copied)
        job.zoo.train(1)
        job.instants.save(lambda: job.zoo.train(1), lambda: job.zoo.train(1))
        return [count > 0 for count in job.instants.close()]


@pytest.mark.parametrize("plan", some_of(["rows", "mixed"], 1))
def test_foreign_writes_after_the_last_row(workers: Workers, tmp_path: Path, plan: str) -> None:
    protected = workers(2).run(harmless, root=str(tmp_path), plan=PLANS[plan])[0]
    assert all(protected)


def unwatched(root: str, plan: dict[str, str], leave: list[int]) -> list[str]:
    """Leave a ``with`` block by an error on some ranks, which takes the hooks off, and train on."""
    with slowed() as chunks:
        job = Writer(root, plan, chunks)
        job.zoo.train(2)
        job.instants.save(lambda: job.zoo.train(1), lambda: job.zoo.train(1))
        wanted = gather(job.zoo)
        chunks.go.clear()
        job.saver.steps += 1
        job.saver.save(wait=False)
        save = job.saver._saver.running
        assert save is not None
        if dist.get_rank() in leave:
            with pytest.raises(ValueError, match="of the user"), job.saver:
                raise ValueError("of the user")
        job.zoo.train(2)
        chunks.go.set()
        assert save.known.wait(60)
        failed: CheckNRunError | None = None
        try:
            name = save.result().id
        except CheckNRunError as error:
            failed = error
        if dist.get_rank() not in leave:
            job.saver._release(failed=True)
        if failed is not None:
            return [type(failed).__name__]
        assert job.instants.reader.restore(name) is not None
        return references.differences(gather(job.instants.again), wanted, None)


@pytest.mark.parametrize("leave", some_of([[0, 1], [1], [0]], 1))
def test_a_block_left_by_an_error(workers: Workers, tmp_path: Path, leave: list[int]) -> None:
    """A save whose rows nobody protects any more is not committed."""
    found = workers(2).run(unwatched, root=str(tmp_path), plan=PLANS["rows"], leave=leave)
    assert all(problems in (["SaveFailed"], ["RootInUse"]) for problems in found), found
