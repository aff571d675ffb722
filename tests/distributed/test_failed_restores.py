"""Damage, and errors midway, are reported on all ranks with this package's errors."""

from __future__ import annotations

import errno
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.distributed.damage import chunks_of, damage, flip
from tests.distributed.models import Plan
from tests.distributed.small_job import (
    Made,
    Note,
    Workers,
    build,
    checkpointer,
    is_at,
    keep,
    restore_is_refused,
    save,
    three_checkpoints,
    where,
)
from tests.distributed.states import local_bytes, scramble
from tests.examples import some_of
from torchrec_checknrun import errors
from torchrec_checknrun.dcp import LoadPlanner, StorageReader
from torchrec_checknrun.format.reader import StoredChunk
from torchrec_checknrun.restore import chunks
from torchrec_checknrun.restore import restore as restoring_rows
from torchrec_checknrun.run import restoring
from torchrec_checknrun.store import folder as filesystem

FOUND_BEFORE = [
    *("manifest", "manifest_cut", "manifest_empty", "format"),
    *("index", "truncated", "longer", "missing"),
]
FOUND_WHEN_READ = ["first_rows", "last_rows", "state"]


@pytest.mark.parametrize("how", some_of(FOUND_BEFORE, 0, 3, 5))
def test_damaged_checkpoint_named(workers: Workers, made: Made, tmp_path: Path, how: str) -> None:
    names = made(tmp_path)
    damage(tmp_path / "root" / names[1], how)
    damaged = "UnsupportedFormat" if how == "format" else "CorruptCheckpoint"
    for name, error in ((names[1], damaged), (names[2], "ChainBroken")):
        if how == "index" and name == names[2]:
            error = "CorruptCheckpoint"
        workers(2).run(
            restore_is_refused, **where(tmp_path), error=error, match=names[1], name=name
        )


@pytest.mark.parametrize("how", some_of(["gone", "uncommitted"], 1))
def test_parent_is_missing(workers: Workers, made: Made, tmp_path: Path, how: str) -> None:
    names = made(tmp_path)
    damage(tmp_path / "root" / names[0], how)
    for name in (names[1], None):
        workers(2).run(
            restore_is_refused, **where(tmp_path), error="ChainBroken", match=names[0], name=name
        )
    workers(2).run(
        restore_is_refused,
        **where(tmp_path),
        error="CheckpointNotFound",
        match=names[0],
        name=names[0],
    )


def test_parent_was_replaced(workers: Workers, made: Made, tmp_path: Path) -> None:
    names = made(tmp_path)
    other = tmp_path / "other"
    others = workers(2).run(three_checkpoints, **{**where(tmp_path), "root": str(other)})[0]
    shutil.rmtree(tmp_path / "root" / names[0])
    shutil.copytree(other / others[0], tmp_path / "root" / names[0])
    for name in (names[1], None):
        workers(2).run(
            restore_is_refused, **where(tmp_path), error="ChainBroken", match=names[0], name=name
        )


def starts_fresh(root: str, spec: dict[str, Any], plan: Plan) -> int:
    job = build(spec, plan)
    with checkpointer(root, job) as saver:
        before = local_bytes(job)
        assert saver.restore() is None
        assert local_bytes(job) == before
        job.train()
        report = saver.save()
        assert report is not None
        assert report.kind == "full"
        return report.sequence


def test_nothing_committed_is_a_fresh_start(workers: Workers, tmp_path: Path) -> None:
    assert workers(2).run(starts_fresh, **where(tmp_path))[0] == 1
    for manifest in (tmp_path / "root").glob("*/manifest.json"):
        damage(manifest.parent, "uncommitted")
    assert workers(2).run(starts_fresh, **where(tmp_path))[0] == 2
    workers(2).run(
        restore_is_refused,
        **where(tmp_path),
        error="CheckpointNotFound",
        match="seq-000009",
        name="seq-000009_step-00000001_00000000",
    )


def falls_back(
    root: str, spec: dict[str, Any], plan: Plan, to: str, passed_over: list[str]
) -> list[str]:
    """Restore the newest whole chain, train, and save upon it."""
    job = build(spec, plan, seed=5)
    with checkpointer(root, job) as saver:
        report = saver.restore()
        assert report is not None
        assert report.id == to
        assert len(report.passed_over) == len(passed_over)
        for name, problem in zip(passed_over, report.passed_over, strict=True):
            assert problem.startswith(name)
        assert is_at(job, root, to)
        assert saver.steps == job.steps == report.step
        job.train()
        new = save(saver)
        keep(job, root, new)
        scramble(job)
        found = saver.restore(new)
        assert found is not None
        assert is_at(job, root, new)
        return list(found.chain)


@pytest.mark.parametrize(
    ("ranks", "how"),
    some_of(
        [(2, how) for how in (*FOUND_BEFORE, *FOUND_WHEN_READ) if how != "format"]
        + [(1, how) for how in FOUND_WHEN_READ],
        *(0, 3, 8, 10),
    ),
)
def test_falls_back_to_the_newest_whole_chain(
    workers: Workers, made: Made, tmp_path: Path, how: str, ranks: int
) -> None:
    names = made(tmp_path)
    damage(tmp_path / "root" / names[2], how)
    chain = workers(ranks).run(
        falls_back, **where(tmp_path, ranks=ranks), to=names[1], passed_over=[names[2]]
    )[0]
    # OneShot goes on from the baseline of what was restored; the damaged one is of no lineage.
    assert chain[0] == names[0]
    assert names[2] not in chain


def test_a_newer_format_is_not_passed_over(workers: Workers, made: Made, tmp_path: Path) -> None:
    names = made(tmp_path)
    damage(tmp_path / "root" / names[2], "format")
    workers(2).run(
        restore_is_refused, **where(tmp_path), error="UnsupportedFormat", match=names[2], name=None
    )


@pytest.mark.parametrize("how", some_of(["manifest", "index", *FOUND_WHEN_READ], 0, 3))
def test_falls_back_over_several(workers: Workers, made: Made, tmp_path: Path, how: str) -> None:
    names = made(tmp_path, True)
    for name in names[1:]:
        damage(tmp_path / "root" / name, how)
    workers(2).run(falls_back, **where(tmp_path), to=names[0], passed_over=[names[2], names[1]])


def only_one_is_damaged(root: str, spec: dict[str, Any], plan: Plan, name: str | None) -> None:
    job = build(spec, plan, seed=5)
    with checkpointer(root, job) as saver:
        with pytest.raises(errors.ModelPartlyRestored):
            saver.restore(name)
        for act in (saver.step, saver.save):
            with pytest.raises(errors.ModelPartlyRestored):
                act()


def fix(root: str, spec: dict[str, Any], plan: Plan, name: str, sound: str) -> None:
    """Restore a sound checkpoint after one that failed half-way: the model is whole again."""
    job = build(spec, plan, seed=5)
    with checkpointer(root, job) as saver:
        with pytest.raises(errors.ModelPartlyRestored):
            saver.restore(name)
        saver.restore(sound)
        assert is_at(job, root, sound)
        job.train()
        save(saver)


@pytest.mark.parametrize("how", some_of(FOUND_WHEN_READ, 1))
def test_damage_met_midway(workers: Workers, made: Made, tmp_path: Path, how: str) -> None:
    first, _, third = made(tmp_path, True)
    damage(tmp_path / "root" / third, how)
    workers(2).run(fix, **where(tmp_path), name=third, sound=first)
    shutil.rmtree(tmp_path / "root")
    names = made(tmp_path)
    damage(tmp_path / "root" / names[0], how)
    workers(2).run(only_one_is_damaged, **where(tmp_path), name=names[0])


def test_damage_met_midway_in_a_parent(workers: Workers, made: Made, tmp_path: Path) -> None:
    names = made(tmp_path)
    damage(tmp_path / "root" / names[0], "every_rows")
    for name in (names[1], None):
        workers(2).run(only_one_is_damaged, **where(tmp_path), name=name)


def superseded_is_damaged(root: str, spec: dict[str, Any], plan: Plan, names: list[str]) -> None:
    job = build(spec, plan, seed=5)
    with checkpointer(root, job) as saver:
        with pytest.raises(errors.CorruptCheckpoint, match=names[0]):
            saver.restore(names[2], verify="all")
        saver.restore(names[2])
        assert is_at(job, root, names[2])


def test_damage_in_rows_that_newer_ones_replace(
    workers: Workers, made: Made, tmp_path: Path
) -> None:
    """Don't read replaced rows, unless everything is to be verified."""
    names = made(tmp_path)
    newer = [c for name in names[1:] for _, c in chunks_of(tmp_path / "root" / name, "rows")]
    replaced = 0
    for file, chunk in chunks_of(tmp_path / "root" / names[0], "rows"):
        if any(covers(other, chunk) for other in newer):
            flip(file, chunk["offset"] + chunk["length"] // 2)
            replaced += 1
    assert replaced
    workers(2).run(superseded_is_damaged, **where(tmp_path), names=names)


def covers(newer: dict[str, Any], older: dict[str, Any]) -> bool:
    """Tell whether a chunk has all the rows of another chunk's range."""
    (first, last), (start, stop) = [[chunk["first"], chunk["last"]] for chunk in (newer, older)]
    same = newer["table"] == older["table"] and newer["columns"] == older["columns"]
    return same and newer["count"] == last - first + 1 and first <= start and stop <= last


@pytest.mark.parametrize("how", some_of(FOUND_WHEN_READ, 0))
def test_verify_all_finds_damage_before(
    workers: Workers, made: Made, tmp_path: Path, how: str
) -> None:
    names = made(tmp_path)
    for name in names:
        damage(tmp_path / "root" / name, how)
    refusals: list[tuple[str | None, str]] = [
        (names[0], "CorruptCheckpoint"),
        (None, "ChainBroken"),
    ]
    for damaged, error in refusals:
        workers(2).run(
            restore_is_refused,
            **where(tmp_path),
            error=error,
            match=names[0],
            name=damaged,
            verify="all",
        )


def load_is_refused(root: str, spec: dict[str, Any], plan: Plan, name: str, match: str) -> None:
    job = build(spec, plan, seed=5)
    before = local_bytes(job)
    state = {"model": job.model, "optimizer": job.optimizer}
    reader = StorageReader(Path(root) / name)
    with pytest.raises(CheckpointException, match=match):
        dcp.load(state, planner=LoadPlanner(), storage_reader=reader)
    assert local_bytes(job) == before


@pytest.mark.parametrize("how", some_of([*FOUND_BEFORE, "gone", "uncommitted"], 0, 3, 4, 7, 8, 9))
def test_damaged_checkpoint_through_dcp_load(
    workers: Workers, made: Made, tmp_path: Path, how: str
) -> None:
    names = made(tmp_path)
    damage(tmp_path / "root" / names[2], how)
    error = {
        "format": "UnsupportedFormat",
        "gone": "CheckpointNotFound",
        "uncommitted": "CheckpointNotFound",
    }.get(how, "CorruptCheckpoint")
    workers(2).run(load_is_refused, **where(tmp_path), name=names[2], match=error)


def read_fails_on_one_rank(root: str, spec: dict[str, Any], plan: Plan, names: list[str]) -> None:
    """Answer rank 1 with errors for the newest checkpoint's chunks."""
    read_chunk = chunks.read_chunk

    def failing(
        folder: filesystem.Folder, chunk: StoredChunk, *memory: Any, **options: Any
    ) -> memoryview:
        if dist.get_rank() == 1 and chunk.checkpoint == names[2]:
            raise OSError("connection reset")
        return read_chunk(folder, chunk, *memory, **options)

    job = build(spec, plan, seed=5)
    with checkpointer(root, job) as saver, pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "read_chunk", failing)
        report = saver.restore()
        assert report is not None
        assert report.id == names[1]
        assert is_at(job, root, names[1])
        with pytest.raises(errors.ModelPartlyRestored, match="connection reset"):
            saver.restore(names[2])


def test_reading_fails_on_one_rank(workers: Workers, made: Made, tmp_path: Path) -> None:
    names = made(tmp_path)
    workers(2).run(read_fails_on_one_rank, **where(tmp_path), names=names)


def storage_is_lost_midway(root: str, spec: dict[str, Any], plan: Plan, newest: str) -> None:
    """Answer with errors from the newest checkpoint's chunks on, also to who looks for another."""
    read_chunk, names, lost = chunks.read_chunk, filesystem.Folder.names, False

    def failing(
        folder: filesystem.Folder, chunk: StoredChunk, *memory: Any, **options: Any
    ) -> memoryview:
        nonlocal lost
        lost = lost or chunk.checkpoint == newest
        if lost and dist.get_rank() == 1:
            raise OSError("connection reset")
        return read_chunk(folder, chunk, *memory, **options)

    def unlisted(folder: filesystem.Folder) -> list[str]:
        if lost:
            raise errors.StorageFailed(errno.EIO, "nothing can be listed, says the test")
        return names(folder)

    job = build(spec, plan, seed=5)
    with checkpointer(root, job) as saver:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chunks, "read_chunk", failing)
            patch.setattr(filesystem.Folder, "names", unlisted)
            with pytest.raises(errors.ModelPartlyRestored, match="nothing can be listed"):
                saver.restore()
        for act in (saver.step, saver.save):
            with pytest.raises(errors.ModelPartlyRestored):
                act()


def test_no_other_chain_can_be_looked_for(workers: Workers, made: Made, tmp_path: Path) -> None:
    """Refuse to train on and save what is half of one checkpoint."""
    names = made(tmp_path)
    workers(2).run(storage_is_lost_midway, **where(tmp_path), newest=names[2])


class Stubborn(Note):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if dist.get_rank() == 1:
            raise ValueError("not mine")


def state_refuses(root: str, spec: dict[str, Any], plan: Plan) -> None:
    job = build(spec, plan)
    with checkpointer(root, job, state={"note": Stubborn(1)}) as saver:
        save(saver)
        with pytest.raises(errors.ModelPartlyRestored, match="not mine"):
            saver.restore()
        with pytest.raises(errors.ModelPartlyRestored):
            saver.step()


def test_state_object_refuses_its_content(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(state_refuses, **where(tmp_path))


def initialization_fails(root: str, spec: dict[str, Any], plan: Plan) -> None:
    """Fail to make up for the initial values that rank 1's model was built without."""

    def fail(model: object) -> list[str]:
        if dist.get_rank() == 1:
            raise MemoryError("no memory for initial values, says the test")
        return []

    job = build(spec, plan)
    with checkpointer(root, job, timeout_seconds=20.0) as saver:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(restoring, "initialize_skipped", fail)
            patch.setattr(saver._restoring, "_uninitialized", "its tables hold no values")
            with pytest.raises(MemoryError, match="says the test"):
                saver.restore()
            with pytest.raises(errors.ModelPartlyRestored, match="no values"):
                saver.step()
        save(saver)


def test_initial_values_fail_on_one_rank(workers: Workers, tmp_path: Path) -> None:
    """Tell the other ranks, which would wait."""
    workers(2).run(initialization_fails, **where(tmp_path))


def deleted_meanwhile(root: str, spec: dict[str, Any], plan: Plan, name: str) -> str:
    """Delete the newest checkpoint once rank 0 has found it, before the other ranks look."""
    real, job = restoring_rows.require_shared, build(spec, plan, seed=5)

    def late(*arguments: Any) -> bool:
        if dist.get_rank() == 0:
            shutil.rmtree(Path(root, name), ignore_errors=True)
        dist.barrier()
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch, checkpointer(root, job) as saver:
        patch.setattr(restoring_rows, "require_shared", late)
        report = saver.restore()
        assert report is not None
        assert report.passed_over == ()
        assert is_at(job, root, report.id)
    return report.id


def test_a_checkpoint_that_is_deleted_while_ranks_look_at_it(
    workers: Workers, made: Made, tmp_path: Path
) -> None:
    names = made(tmp_path, full=True)
    began = time.monotonic()
    told = workers(2).run(deleted_meanwhile, **where(tmp_path), name=names[2])
    assert told == [names[1], names[1]]
    assert time.monotonic() - began < 10
