"""Check that content beside table rows is stored as a difference to the parent, and restored bit
for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import references
from tests.distributed.models import Job
from tests.distributed.states import gather, scramble
from tests.examples import some_of
from tests.unit.run.jobs import checkpointer, make_job, restored, train
from tests.unit.run.test_going_on import CompactedAtOnce
from torchrec_checknrun import Checkpointer, Consecutive, Full, OneShot, Retention, compact, verify
from torchrec_checknrun.errors import CheckNRunError, SaveFailed
from torchrec_checknrun.format.entries import difference_of
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.format.reader import read_indexes
from torchrec_checknrun.root.checkpoints import read_manifest
from torchrec_checknrun.run import going_on
from torchrec_checknrun.save import background
from torchrec_checknrun.store.folder import Folder

pytestmark = pytest.mark.usefixtures("one_rank")


class Large:
    """A state that changes a little between checkpoints, as dense parameters do."""

    def __init__(self) -> None:
        self.values = torch.linspace(1, 2, 50_000)

    def drift(self) -> None:
        self.values *= 1 + 1e-5

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values.copy_(state["values"])


class Run:
    """A run with a large state; each checkpoint's values are known."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root, self.job, self.large = root, make_job(), Large()
        self.known: dict[str, tuple[Any, torch.Tensor]] = {}
        self.saver = self.checkpointer(**options)

    def checkpointer(self, **options: Any) -> Checkpointer:
        return Checkpointer(
            self.root,
            model=self.job.model,
            state={"optimizer": self.job.optimizer, "job": self.job, "large": self.large},
            **{"policy": Consecutive(), "retention": None, "chunk_bytes": 1000, **options},
        )

    def save(self) -> str:
        self.job.train()
        self.large.drift()
        self.saver.step()
        report = self.saver.save()
        self.known[report.id] = gather(self.job), self.large.values.clone()
        return report.id

    def check(self) -> None:
        self.saver._saver.writer.wait_for_pruning()  # what is there stays
        for name, (wanted, values) in self.known.items():
            if not (self.root / name / MANIFEST_NAME).exists():
                continue
            scramble(self.job)
            self.large.values.zero_()
            self.saver.restore(name)
            assert references.differences(gather(self.job), wanted, None) == [], name
            assert torch.equal(self.large.values, values), name
        assert not any(checkpoint.problems for checkpoint in verify(self.root))

    def manifest(self, name: str) -> Manifest:
        return read_manifest(Folder(self.root), name)

    def differences(self, name: str) -> int:
        chunks = read_indexes(Folder(self.root), self.manifest(name))
        return sum(difference_of(chunk.entry) is not None for chunk in chunks)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_chain_of_differences(run: Run) -> None:
    names = [run.save() for _ in range(5)]
    assert run.differences(names[0]) == 0
    assert all(run.differences(name) > 0 for name in names[1:])
    assert [run.manifest(name).format_version for name in names] == [1, 2, 2, 2, 2]
    full = run.manifest(names[0]).dense_bytes
    assert all(run.manifest(name).dense_bytes < 0.8 * full for name in names[1:])
    run.check()
    run.saver.close()


@pytest.mark.parametrize("background", some_of(["thread", "process"], 0))
def test_whoever_writes(tmp_path: Path, background: str) -> None:
    run = Run(tmp_path, background=background)
    names = [run.save() for _ in range(3)]
    assert all(run.differences(name) > 0 for name in names[1:])
    run.check()
    run.saver.close()


def test_to_the_baseline_of_one_shot(tmp_path: Path) -> None:
    run = Run(tmp_path, policy=OneShot())
    names = [run.save() for _ in range(4)]
    assert all(run.differences(name) > 0 for name in names[1:])
    run.check()
    run.saver.close()


def test_full_checkpoints_are_whole(tmp_path: Path) -> None:
    run = Run(tmp_path, policy=Full())
    assert [run.differences(run.save()) for _ in range(3)] == [0, 0, 0]
    run.saver.close()


def test_whole_on_request(tmp_path: Path) -> None:
    run = Run(tmp_path, dense="whole")
    names = [run.save() for _ in range(3)]
    assert [run.differences(name) for name in names] == [0, 0, 0]
    assert {run.manifest(name).format_version for name in names} == {1}
    run.saver.close()
    with pytest.raises(ValueError, match="dense must be one of"):
        Run(tmp_path / "other", dense="half")


def test_after_a_failure_and_after_a_restore(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with what is known to be committed, or with nothing."""
    names = [run.save() for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(background, "write_rank_file", refused)
        with pytest.raises(SaveFailed):
            run.save()
    names.append(run.save())
    assert run.differences(names[2]) > 0
    run.saver.restore(names[1])
    names.append(run.save())
    assert run.differences(names[3]) == 0
    names.append(run.save())
    assert run.differences(names[4]) > 0
    run.check()
    run.saver.close()


def refused(*_: object) -> None:
    raise SaveFailed("no space left, says the test")


def test_a_compacted_one_holds_it_whole(run: Run) -> None:
    names = [run.save() for _ in range(4)]
    report = compact(run.root, names[-1])
    assert report is not None
    assert run.differences(report.id) == 0
    assert run.manifest(report.id).format_version == 1
    run.known[report.id] = run.known[names[-1]]
    run.check()
    run.saver.close()


def test_retention_never_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(going_on, "CompactionProcess", CompactedAtOnce)
    run = Run(tmp_path, retention=Retention(1), compact_after=3)
    for number in range(9):
        run.save()
        if number == 5:
            assert run.saver._saver.going_on.wait(120)
    run.check()
    run.saver.close()


@pytest.mark.parametrize("damage", ["swapped", "missing", "flipped"])
def test_damage_is_found_before_anything_is_touched(run: Run, damage: str) -> None:
    """Restore nothing upon another parent than the one that was compared with."""
    names = [run.save() for _ in range(3)]
    victim = run.root / names[1]
    if damage == "swapped":
        for path in (run.root / names[2]).glob("rank-*"):
            (victim / path.name).write_bytes(path.read_bytes())
    elif damage == "missing":
        (victim / MANIFEST_NAME).unlink()
    else:
        manifest = run.manifest(names[1])
        (chunk,) = (
            c
            for c in read_indexes(Folder(run.root), manifest)
            if difference_of(c.entry) is not None and getattr(c.entry, "name", "") == "large"
        )
        data = bytearray((victim / chunk.file).read_bytes())
        data[chunk.entry.offset + 100] ^= 1
        (victim / chunk.file).write_bytes(bytes(data))
    scramble(run.job)
    before = gather(run.job)
    if damage == "flipped":  # known once it is read: all is read first
        with pytest.raises(CheckNRunError):
            run.saver.restore(names[2], verify="all")
    else:
        with pytest.raises(CheckNRunError):
            run.saver.restore(names[2])
    assert references.differences(gather(run.job), before, None) == []
    found = run.saver.restore()
    assert found is not None
    assert found.id == names[0]
    run.saver._release(failed=True)


def test_another_process_reads_it(tmp_path: Path, job: Job) -> None:
    with checkpointer(tmp_path, job) as saver:
        for _ in range(4):
            job.train()
            saver.step()
            saver.save()
        wanted = gather(job)
    assert restored(tmp_path, wanted) == []


def test_rows_encoded_at_the_cut_are_never_differences(tmp_path: Path) -> None:
    """Also where they would be smaller so, as are rows that have hardly changed."""
    job = make_job()
    with checkpointer(tmp_path, job, staging="encode") as saver:
        saver.save()
        for _ in range(3):
            for shard in saver._target.tracked.shards:
                shard.mark_all()
            train(job, saver)
            saver.save()
        wanted = gather(job)
    assert restored(tmp_path, wanted) == []
