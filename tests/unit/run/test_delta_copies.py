"""Compacted copies that stand in for lost links, in restores, lists, prunings, verifications."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.distributed.models import Job
from tests.examples import some_of
from tests.unit.run.deltas import chain, expected, make_job, restored, same, saving, train
from torchrec_checknrun import Retention
from torchrec_checknrun.compaction.compact import compact
from torchrec_checknrun.errors import CheckNRunError
from torchrec_checknrun.root.catalog import inventory
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.verify import verify

pytestmark = pytest.mark.usefixtures("one_rank", "state_scheme")


@pytest.fixture
def job(one_rank: None) -> Job:
    return make_job()


def test_a_copy_of_equal_digest_serves_in_a_lost_links_place(tmp_path: Path, job: Job) -> None:
    made = chain(tmp_path, job, 4)
    copy = compact(tmp_path, made[2][0])
    assert copy is not None
    for name, _ in made[:3]:
        (tmp_path / name).rename(tmp_path / f"lost-{name}")
    for name, wanted in made[3:]:
        assert same(restored(tmp_path, name), wanted) == []
    assert same(restored(tmp_path), made[-1][1]) == []
    other = make_job(seed=7)
    with saving(tmp_path, other) as saver:
        saver.restore()
        train(other, saver)
        saver.save()
        wanted = expected(saver)
    assert same(restored(tmp_path), wanted) == []


def test_a_copy_of_another_digest_does_not_serve(tmp_path: Path, job: Job) -> None:
    made = chain(tmp_path, job, 4)
    copies = [compact(tmp_path, name) for name, _ in made[1:3]]
    assert None not in copies
    for name, _ in made[:3]:
        (tmp_path / name).rename(tmp_path / f"lost-{name}")
    last = copies[1]
    assert last is not None
    (tmp_path / last.id).rename(tmp_path / "lost-copy")
    with pytest.raises(CheckNRunError):
        restored(tmp_path, made[3][0])


@pytest.mark.parametrize("how", some_of(["missing", "cut", "no manifest"], 1))
def test_everything_knows_the_copy(tmp_path: Path, job: Job, how: str) -> None:
    """List, verify and prune by the copy of a link that is lost, and go on from there."""
    made = chain(tmp_path, job, 4)
    copy = compact(tmp_path, made[2][0])
    assert copy is not None
    lost = tmp_path / made[2][0]
    if how == "missing":
        shutil.rmtree(lost)
    elif how == "cut":
        (lost / "rank-00000.bin").write_bytes(b"")
    else:
        (lost / "manifest.json").unlink()
    listed = {one.id: one for one in inventory(Folder(tmp_path)).checkpoints}
    head = made[4][0]
    assert listed[head].status == "restorable"
    assert listed[head].chain == (copy.id, made[3][0], head)
    problems = {found.id: found.problems for found in verify(tmp_path)}
    assert not any(problems[id] for id in listed[head].chain)
    prune(Folder(tmp_path), Retention(1))
    assert same(restored(tmp_path), made[4][1]) == []
    other = make_job(seed=7)
    with saving(tmp_path, other, retention=Retention(1)) as saver:
        saver.restore()
        for _ in range(3):
            train(other, saver)
            report = saver.save()
        wanted = expected(saver)
    assert same(restored(tmp_path), wanted) == []
    manifest = json.loads((tmp_path / report.id / "manifest.json").read_bytes())["manifest"]
    assert manifest["kind"] == "differential"
    assert (tmp_path / copy.id / "manifest.json").exists()
    assert [p for found in verify(tmp_path) for p in found.problems] == [] or how == "cut"
