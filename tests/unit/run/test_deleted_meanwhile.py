"""Checkpoints go as a restore reads them: the newest is restored, and what was lost is told."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.states import gather
from tests.unit.run.jobs import checkpointer, make_job, train
from torchrec_checknrun import RestoreReport
from torchrec_checknrun.compaction.compact import compact
from torchrec_checknrun.format import reader
from torchrec_checknrun.restore import restore
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.store.folder import Folder

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a root with a chain of three, whose missing files are not waited for."""
    real = reader._fill

    def fill(folder: Folder, memory: memoryview, name: str, offset: int, _: float) -> int:
        return real(folder, memory, name, offset, 0.0)

    monkeypatch.setattr(reader, "_fill", fill)
    job = make_job()
    with checkpointer(tmp_path / "run", job) as saver:
        saver.restore()
        for _ in range(3):
            train(job, saver)
            saver.save()
    return tmp_path / "run"


@contextmanager
def once_chosen(act: Callable[[], object]) -> Iterator[None]:
    """Act once a restore has chosen a chain, before it reads that."""
    real, to_do = restore.read_content, [act]

    def read(*args: Any, **options: Any) -> object:
        if to_do:
            to_do.pop()()
        return real(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restore, "read_content", read)
        yield


def compact_and_prune(root: Path) -> None:
    compact(root)
    prune(Folder(root), Retention(1))


def go_on(root: Path) -> RestoreReport:
    """Restore, train a step and save; return the restore's report."""
    job = make_job(seed=3)
    with checkpointer(root, job) as saver:
        report = saver.restore()
        assert report is not None
        train(job, saver)
        saver.save()
    return report


def lineages(root: Path) -> list[str]:
    folder = Folder(root)
    ids = sorted(path.name for path in root.glob("seq-*"))
    return [restore.resolve(folder, id).head.lineage for id in ids]


def test_nothing_is_passed_over_where_a_compacted_copy_has_taken_its_place(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And no fork begins."""
    with once_chosen(lambda: compact_and_prune(root)):
        report = go_on(root)
    assert report.passed_over == ()
    assert "passed over" not in caplog.text
    assert len(set(lineages(root))) == 1
    assert len(lineages(root)) == 2


def test_an_older_one_is_never_gone_on_from_in_silence(root: Path) -> None:
    last = max(root.glob("seq-*"))
    with once_chosen(lambda: shutil.rmtree(last)):
        report = go_on(root)
    assert report.step == 2
    assert [line.partition(": ")[0] for line in report.passed_over] == [last.name]
    assert len(set(lineages(root))) == 2


def test_a_root_that_is_emptied_is_no_fresh_start(root: Path) -> None:
    """All that there was goes as it is read."""

    def empty() -> None:
        for path in root.glob("seq-*"):
            shutil.rmtree(path)

    job = make_job(seed=3)
    before = gather(job)
    with checkpointer(root, job) as saver:
        with once_chosen(empty), pytest.raises(restore.ChainBroken, match="was deleted while"):
            saver.restore()
        after = gather(job)
    assert all((after[name] == value).all() for name, value in before.items())
