"""A run whose tables are stored as differences goes on from compacted copies of equal digest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.models import Job
from tests.unit.run.deltas import (
    delta,
    expected,
    lc,
    live,
    make_job,
    restored,
    same,
    saving,
    train,
)
from tests.unit.run.test_going_on import InThisProcess, is_copy, no_space
from torchrec_checknrun import Quantization, verify
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.format.manifest import Manifest, TableDigests
from torchrec_checknrun.root.checkpoints import read_manifest
from torchrec_checknrun.root.lineage import restores_alike
from torchrec_checknrun.run import going_on
from torchrec_checknrun.save import background
from torchrec_checknrun.store.folder import Folder

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def job(one_rank: None) -> Job:
    return make_job()


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> list[InThisProcess]:
    monkeypatch.setattr(going_on, "CompactionProcess", InThisProcess)
    monkeypatch.setattr(InThisProcess, "made", [])
    return InThisProcess.made


def saved(job: Job, saver: Any, known: dict[str, Any]) -> Any:
    train(job, saver)
    report = saver.save()
    known[report.id] = expected(saver)
    return report


def all_restore(root: Path, known: dict[str, Any]) -> None:
    assert [problem for found in verify(root) for problem in found.problems] == []
    for name, wanted in known.items():
        assert same(restored(root, name), wanted) == [], name


@pytest.mark.parametrize(
    "quantization", [delta(), delta(optimizer="logdelta"), lc()], ids=["delta", "logdelta", "lc"]
)
def test_the_next_link_builds_on_the_copy(
    tmp_path: Path, job: Job, by_hand: list[InThisProcess], quantization: Quantization
) -> None:
    known: dict[str, Any] = {}
    with saving(tmp_path, job, compact_after=1, quantization=quantization) as saver:
        saved(job, saver, known)
        original = saved(job, saver, known)
        by_hand[0].finish()
        link = saved(job, saver, known)
        assert is_copy(link.parent)
        assert link.chain_length == 2
        root = Folder(tmp_path)
        assert link.parent is not None
        before = read_manifest(root, original.id).deltas
        copy = read_manifest(root, link.parent).deltas
        after = read_manifest(root, link.id).deltas
        assert all(copy[name] == TableDigests(None, said.after) for name, said in before.items())
        assert {said.before for said in after.values()} == {said.after for said in before.values()}
        known[link.parent] = known[original.id]
    all_restore(tmp_path, known)


def test_a_copy_of_an_earlier_link_is_not_built_upon(
    tmp_path: Path, job: Job, by_hand: list[InThisProcess], caplog: pytest.LogCaptureFixture
) -> None:
    """References are the last link's by then: the run goes on with its own chain."""
    known: dict[str, Any] = {}
    with saving(tmp_path, job, compact_after=1) as saver:
        saved(job, saver, known)
        saved(job, saver, known)
        later = saved(job, saver, known)
        by_hand[0].finish()
        link = saved(job, saver, known)
        assert link.parent in (None, later.id)
        assert "goes on with its own chain" in caplog.text
        assert len(by_hand) == 1  # after a pause, as after a failure
        for _ in range(4):
            saved(job, saver, known)
        assert len(by_hand) == 2
    all_restore(tmp_path, known)


def test_a_failed_link_upon_the_copy_is_written_again(
    tmp_path: Path, job: Job, by_hand: list[InThisProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    known: dict[str, Any] = {}
    with saving(tmp_path, job, compact_after=1) as saver:
        saved(job, saver, known)
        saved(job, saver, known)
        by_hand[0].finish()
        train(job, saver)
        with monkeypatch.context() as patch:
            patch.setattr(background, "write_rank_file", no_space)
            with pytest.raises(SaveFailed):
                saver.save()
        assert is_copy(saved(job, saver, known).parent)
    all_restore(tmp_path, known)


def test_a_restart_goes_on_from_the_copy(
    tmp_path: Path, job: Job, by_hand: list[InThisProcess]
) -> None:
    known: dict[str, Any] = {}
    with saving(tmp_path, job, compact_after=1) as saver:
        saved(job, saver, known)
        saved(job, saver, known)
        by_hand[0].finish()
        saved(job, saver, known)
    other = make_job(seed=7)
    with saving(tmp_path, other) as saver:
        report = saver.restore()
        assert report is not None
        assert is_copy(report.chain[0])
        assert same(live(saver), known[report.id]) == []
        assert saved(other, saver, known).parent in (None, report.id)
    all_restore(tmp_path, known)


def test_a_copy_of_other_digests_is_not_built_upon(
    tmp_path: Path, job: Job, by_hand: list[InThisProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    known: dict[str, Any] = {}

    def other(one: Manifest, copy: Manifest) -> bool:
        assert restores_alike(one, copy)
        return False

    monkeypatch.setattr("torchrec_checknrun.root.lineage.restores_alike", other)
    with saving(tmp_path, job, compact_after=1) as saver:
        saved(job, saver, known)
        last = saved(job, saver, known)
        by_hand[0].finish()
        assert saved(job, saver, known).parent in (None, last.id)
    all_restore(tmp_path, known)
