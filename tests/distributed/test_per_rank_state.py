"""State that differs between ranks is saved and restored rank by rank."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.models import Plan
from tests.distributed.small_job import Note, Workers, build, checkpointer, save, where
from tests.distributed.states import local_bytes
from torchrec_checknrun import PerRank, errors


def save_per_rank(root: str, spec: dict[str, Any], plan: Plan) -> None:
    job = build(spec, plan)
    note = PerRank(Note(torch.arange(3) + 10 * dist.get_rank()))
    with checkpointer(root, job, state={"note": note}) as saver:
        save(saver)


def restore_per_rank(root: str, spec: dict[str, Any], plan: Plan, merge: bool) -> list[int]:
    job = build(spec, plan, seed=5)
    note = Note(torch.full((3,), -1))
    function = add_up if merge else None
    with checkpointer(root, job, state={"note": PerRank(note, function)}) as saver:
        saver.restore()
    found: list[int] = note.value.tolist()
    return found


def add_up(states: list[dict[str, Any]]) -> dict[str, Any]:
    return {"value": torch.stack([state["value"] for state in states]).sum(dim=0)}


def refuse_per_rank(root: str, spec: dict[str, Any], plan: Plan) -> None:
    job = build(spec, plan, seed=5)
    note = Note(torch.zeros(3))
    with checkpointer(root, job, state={"note": PerRank(note)}) as saver:
        before = local_bytes(job)
        with pytest.raises(errors.IncompatibleCheckpoint, match=r"'note'.*PerRank\(.*merge"):
            saver.restore()
        assert local_bytes(job) == before
        assert note.value.tolist() == [0, 0, 0]


def test_per_rank_state(workers: Workers, tmp_path: Path) -> None:
    two, one = where(tmp_path), where(tmp_path, ranks=1)
    workers(2).run(save_per_rank, **two)
    own = [[0, 1, 2], [10, 11, 12]]
    assert workers(2).run(restore_per_rank, **two, merge=False) == own
    assert workers(2).run(restore_per_rank, **two, merge=True) == own
    assert workers(1).run(restore_per_rank, **one, merge=True) == [[10, 12, 14]]
    workers(1).run(refuse_per_rank, **one)
    shutil.rmtree(two["root"])
    workers(1).run(save_per_rank, **one)
    assert workers(2).run(restore_per_rank, **two, merge=True) == [[0, 1, 2]] * 2
    workers(2).run(refuse_per_rank, **two)
