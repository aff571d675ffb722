"""Failed saves and damaged links of tables stored as differences: no row is lost, none is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.models import Job
from tests.examples import some_of
from tests.unit.run.deltas import (
    Own,
    chain,
    expected,
    live,
    make_job,
    manifest,
    restored,
    same,
    saving,
    sound,
    train,
)
from torchrec_checknrun.errors import CheckNRunError, SaveFailed
from torchrec_checknrun.format.entries import RowsEntry
from torchrec_checknrun.format.reader import read_indexes
from torchrec_checknrun.root.checkpoints import read_manifest
from torchrec_checknrun.save import background
from torchrec_checknrun.store.folder import Folder

pytestmark = pytest.mark.usefixtures("one_rank", "state_scheme")


@pytest.fixture
def job(one_rank: None) -> Job:
    return make_job()


Fail = Callable[[pytest.MonkeyPatch], None]


def storage_fails(patch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "no space left, says the test")

    patch.setattr(background, "write_rank_file", fail)


def fails_when_written(patch: pytest.MonkeyPatch) -> None:
    """Fail after all rows were encoded."""
    write = background.write_rank_file

    def fail(*arguments: Any) -> None:
        write(*arguments)
        raise OSError(5, "says the test")

    patch.setattr(background, "write_rank_file", fail)


@pytest.mark.parametrize("fails", [storage_fails, fails_when_written])
def test_failed_saves_are_undone(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch, fails: Fail
) -> None:
    with saving(tmp_path, job) as saver:
        train(job, saver)
        saver.save()
        kinds = []
        for number in range(6):
            before = expected(saver) if number else None
            train(job, saver)
            with monkeypatch.context() as patch:
                fails(patch)
                with pytest.raises(SaveFailed):
                    saver.save()
            if before is not None:
                held = saver._saver._links
                assert held.belong_to(saver._target.tracked, saver._saver.proposer.quantization)
            train(job, saver)
            report = saver.save()
            kinds.append(report.kind)
            wanted = expected(saver)
            assert same(restored(tmp_path), wanted) == []
    assert "differential" in kinds
    assert sound(tmp_path) == []


def test_a_failed_base_is_followed_by_a_base(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    with saving(tmp_path, job, policy=Own()) as saver:
        train(job, saver)
        saver.save()
        train(job, saver)
        with monkeypatch.context() as patch:
            fails_when_written(patch)
            with pytest.raises(SaveFailed):
                saver.save()  # since the baseline: a base
        train(job, saver)
        assert saver.save().kind == "full"  # since the last: it would be a link
        wanted = expected(saver)
    assert same(restored(tmp_path), wanted) == []


def damage(root: Path, checkpoint: str) -> None:
    """Flip a bit of a chunk of rows."""
    folder = Folder(root)
    chunks = read_indexes(folder, read_manifest(folder, checkpoint))
    entry = next(chunk.entry for chunk in chunks if isinstance(chunk.entry, RowsEntry))
    file = root / checkpoint / "rank-00000.bin"
    data = bytearray(file.read_bytes())
    data[entry.offset + entry.length // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("how", some_of(["cut", "missing", "swapped", "flipped"], 1, 3))
def test_a_bad_link_leads_to_the_newest_whole_chain(tmp_path: Path, job: Job, how: str) -> None:
    made = chain(tmp_path, job, 4)
    assert all(manifest(tmp_path, name)["kind"] == "differential" for name, _ in made[1:])
    bad, good = made[2][0], made[1]
    if how == "cut":
        (tmp_path / bad / "rank-00000.bin").write_bytes(b"")
    elif how == "missing":
        (tmp_path / bad).rename(tmp_path / "elsewhere")
    elif how == "swapped":
        (tmp_path / bad / "manifest.json").write_bytes(
            (tmp_path / made[3][0] / "manifest.json").read_bytes()
        )
    else:
        damage(tmp_path, bad)
    other_job = make_job(seed=7)
    with saving(tmp_path, other_job) as saver:
        report = saver.restore()
        assert report is not None
        if how == "flipped":  # found by a checksum, once it is read
            assert report.id in [name for name, _ in made[:2]]
        else:
            assert report.id == good[0]
        wanted = dict(made)[report.id]
        assert same(live(saver), wanted) == []
    with pytest.raises(CheckNRunError):
        restored(tmp_path, made[4][0])


def test_nothing_is_touched_before_the_links_are_sound(tmp_path: Path, job: Job) -> None:
    made = chain(tmp_path, job, 3)
    damage(tmp_path, made[3][0])
    other = make_job(seed=7)
    with saving(tmp_path, other) as saver:
        before = live(saver)
        with pytest.raises(CheckNRunError):
            saver.restore(made[3][0])
        assert same(live(saver), before) == []
        train(other, saver)  # and the model is usable
