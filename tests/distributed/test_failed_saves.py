"""A save that fails is an error on all ranks, and loses no row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.models import Plan, uniform_plan
from tests.distributed.reader30 import read_rows
from tests.distributed.small_job import (
    SPEC,
    Note,
    Workers,
    build,
    checkpointer,
    is_at,
    keep,
    save,
    where,
)
from tests.distributed.states import gather, row_bytes, scramble
from tests.examples import some_of
from torchrec_checknrun import AtEnd, Consecutive, errors
from torchrec_checknrun.format import rank_file
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.root.policy import Decision
from torchrec_checknrun.snapshot.cut_rows import CutRows
from torchrec_checknrun.snapshot.snapshot import ShardSnapshot
from torchrec_checknrun.store import folder


class Unstorable(Note):
    """A state object that can't be stored on one rank, while it is switched on."""

    def __init__(self, how: str) -> None:
        super().__init__(0)
        self.how: str | None = how

    def state_dict(self) -> dict[str, Any]:
        if self.how is None or dist.get_rank() != 1:
            return super().state_dict()
        if self.how == "raises":
            raise RuntimeError("no state today")
        if self.how == "raises what nobody else knows":

            class OwnError(Exception):
                """An error that can't be pickled, and so not be sent to other ranks."""

            raise OwnError("no state here")
        return {"value": {"deep": [1, object()]}}


def save_fails_once(root: str, spec: dict[str, Any], plan: Plan, how: str, error: str) -> None:
    """Fail a save on one rank: all ranks raise, and the next save holds its rows."""
    note = Unstorable(how)
    job = build(spec, plan)
    saver = checkpointer(root, job, state={"note": note}, policy=Consecutive())
    note.how = None
    job.train()
    baseline = save(saver)
    before = row_bytes(job.spec, gather(job))
    job.train()
    note.how = how if how == "unstorable" or how.startswith("raises") else None
    with pytest.MonkeyPatch.context() as patch:
        if how == "write" and dist.get_rank() == 1:
            patch.setattr(rank_file, "_write_index", raise_os_error)
        if how == "manifest":
            patch.setattr(folder.Folder, "put", raise_os_error)
        if how == "steps":
            saver.steps += dist.get_rank()
        with pytest.raises(getattr(errors, error), match=MESSAGES[how]):
            saver.save()
        if how == "steps":
            saver.steps -= dist.get_rank()
    note.how = None
    dist.barrier()
    assert [path.parent.name for path in Path(root).glob("*/manifest.json")] == [baseline]
    job.train()
    after = row_bytes(job.spec, gather(job))
    name = save(saver)
    keep(job, root, name)
    assert read_rows(Path(root) / name).keys() == {k for k in after if after[k] != before[k]}
    scramble(job)
    report = saver.restore()
    assert report is not None
    assert report.chain == (baseline, name)
    assert is_at(job, root, name)
    saver.close()


def raise_os_error(*_: object, **__: object) -> None:
    raise OSError("no space left on device")


MESSAGES = {
    "unstorable": r"note\.value\.deep\[1\] is a builtins\.object",
    "raises": "no state today",
    "raises what nobody else knows": "OwnError: no state here",
    "write": "no space left",
    "manifest": "no space left",
    "steps": r"different steps \[0, 1\]",
}


@pytest.mark.parametrize("how", some_of(sorted(MESSAGES), 0, 2, 3, 4))
def test_save_that_fails_loses_no_row(workers: Workers, tmp_path: Path, how: str) -> None:
    error = "UnsupportedState" if how == "unstorable" else "SaveFailed"
    workers(2).run(save_fails_once, **where(tmp_path), how=how, error=error)


class Undecided:
    """A policy that raises an error that can't be pickled."""

    def decide(self, history: object) -> Decision:
        class OwnError(Exception):
            pass

        raise OwnError("can't say")


def policy_fails(root: str, spec: dict[str, Any], plan: Plan) -> None:
    job = build(spec, plan)
    with checkpointer(root, job, policy=Undecided()) as saver:
        save(saver)  # the first is full, whatever the policy
        job.train()
        with pytest.raises(RuntimeError, match="OwnError: can't say"):
            saver.save()


def test_policy_that_fails_is_heard_on_all_ranks(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(policy_fails, **where(tmp_path))


def root_is_a_file(root: str, spec: dict[str, Any], plan: Plan) -> None:
    job = build(spec, plan)
    with checkpointer(root, job) as saver, pytest.raises(errors.SaveFailed):
        saver.save()


def test_root_is_a_file(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "root").write_text("not a folder")
    workers(2).run(root_is_a_file, **where(tmp_path))


def background_fails(root: str, spec: dict[str, Any], plan: Plan, within: str) -> None:
    """Fail on rank 1 before the ranks first meet in the background."""
    job = build(spec, plan)
    with checkpointer(root, job, policy=Consecutive(), timeout_seconds=60.0) as saver:
        job.train()
        baseline = save(saver)
        job.train()
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(*BEFORE_THEY_MEET[within][:2], no_memory)
            with pytest.raises(errors.SaveFailed, match="no memory for rows, says the test"):
                saver.save()
        name = save(saver)
        keep(job, root, name)
        scramble(job)
        report = saver.restore()
        assert report is not None
        assert report.chain == (baseline, name)
        assert is_at(job, root, name)


def no_memory(*_: object) -> None:
    raise MemoryError("no memory for rows, says the test")


BEFORE_THEY_MEET: dict[str, tuple[type, str, str]] = {
    "rows that ranks unite": (ShardSnapshot, "own_rows", "data_parallel"),
    "rows that are copied on write": (CutRows, "make_ready", "row_wise"),
}


@pytest.mark.parametrize("within", BEFORE_THEY_MEET)
def test_the_background_fails_on_one_rank(workers: Workers, tmp_path: Path, within: str) -> None:
    """Tell the other ranks, which would wait."""
    if not has_extension():
        pytest.skip("the compiled extension was not built: rows are copied at the cut")
    plan = uniform_plan(SPEC, BEFORE_THEY_MEET[within][2], 2)
    workers(2).run(background_fails, **{**where(tmp_path), "plan": plan}, within=within)


def looking_fails_at_the_end(root: str, spec: dict[str, Any], plan: Plan) -> None:
    job = build(spec, plan)
    saver = checkpointer(root, job, triggers=[AtEnd()], timeout_seconds=60.0)
    job.train()
    saver.step()
    save(saver)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(TrackedModel, "is_modified", no_memory)
        with pytest.raises(MemoryError, match="no memory for rows, says the test"):
            saver.close()


def test_the_look_for_a_last_checkpoint_fails_on_one_rank(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(looking_fails_at_the_end, **where(tmp_path))
