"""A run goes on from compacted copies of its chain, and loses no row, whatever happens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.crash.save_sweep import alone
from tests.distributed import references
from tests.distributed.models import Job
from tests.distributed.states import gather, scramble
from tests.examples import examples
from tests.unit.run.jobs import checkpointer, make_job, restored, train
from torchrec_checknrun import (
    Checkpointer,
    CompactAfter,
    Consecutive,
    Full,
    Intermittent,
    OneShot,
    Retention,
    compact,
    verify,
)
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import parse_id
from torchrec_checknrun.marks.layers import Consumer
from torchrec_checknrun.root.chain import newest
from torchrec_checknrun.root.checkpoints import read_manifest
from torchrec_checknrun.run import going_on
from torchrec_checknrun.run.compaction import Copied
from torchrec_checknrun.save import background
from torchrec_checknrun.store.folder import Folder

pytestmark = pytest.mark.usefixtures("one_rank")


class InThisProcess:
    """A compaction that runs when the test says so, with the interface of the process."""

    made: ClassVar[list[InThisProcess]] = []
    fails: ClassVar[bool] = False

    def __init__(self, root: Folder, original: Manifest) -> None:
        self.root, self.original = root, original
        self.outcome: Copied | None = None
        InThisProcess.made.append(self)

    def finish(self) -> None:
        copy = None
        if not InThisProcess.fails:
            report = compact(self.root.url, self.original.id)
            assert report is not None
            copy = read_manifest(self.root, report.id)
        self.outcome = Copied(self.original.id, copy)

    def wait(self, seconds: float | None = None) -> Copied | None:
        return self.outcome

    def end(self) -> None:
        pass


class CompactedAtOnce(InThisProcess):
    """A compaction that has ended when it is begun."""

    def __init__(self, root: Folder, original: Manifest) -> None:
        super().__init__(root, original)
        self.finish()


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> list[InThisProcess]:
    monkeypatch.setattr(going_on, "CompactionProcess", InThisProcess)
    monkeypatch.setattr(InThisProcess, "made", [])
    monkeypatch.setattr(InThisProcess, "fails", False)
    return InThisProcess.made


def is_copy(name: str | None) -> bool:
    id = None if name is None else parse_id(name)
    return id is not None and id.is_copy


def saved(job: Job, saver: Checkpointer, steps: int = 1) -> Any:
    train(job, saver, steps)
    return saver.save()


def chain_of(root: Path) -> list[str]:
    chain, _ = newest(Folder(root))
    assert chain is not None
    return [manifest.id for manifest in chain.manifests]


@pytest.mark.parametrize("between", [0, 1, 3])
def test_the_next_checkpoint_builds_on_the_copy(
    tmp_path: Path, job: Job, by_hand: list[InThisProcess], between: int
) -> None:
    """Read the copy and later differentials only, however many came while it was made."""
    with checkpointer(tmp_path, job, compact_after=2) as saver:
        reports = [saved(job, saver) for _ in range(3)]
        assert [each.original.id for each in by_hand] == [reports[-1].id]
        late = [saved(job, saver) for _ in range(between)]
        assert all(not is_copy(report.parent) for report in late)
        by_hand[0].finish()
        report = saved(job, saver)
        assert is_copy(report.parent)
        assert report.chain_length == 2
        upon = saved(job, saver)
        assert upon.parent == report.id
        wanted = gather(job)
    assert len(chain_of(tmp_path)) == 3
    assert restored(tmp_path, wanted) == []


@pytest.mark.parametrize(
    ("policy", "after"),
    [
        (OneShot(), CompactAfter(share=0.001)),
        (Intermittent(), CompactAfter(share=0.001)),
        (Consecutive(), CompactAfter(links=1)),
        (Consecutive(), CompactAfter(bytes=1)),
    ],
)
def test_the_copy_is_the_baseline_of_any_policy(
    tmp_path: Path, job: Job, by_hand: list[InThisProcess], policy: Any, after: CompactAfter
) -> None:
    """Rows modified since the original stay marked, and no others that a fresh start would not."""
    with checkpointer(tmp_path, job, policy=policy, compact_after=after) as saver:
        saved(job, saver)
        many = saved(job, saver, 6)
        before = rows_since_baseline(saver)
        job.train()
        saver.step()
        by_hand[0].finish()
        report = saver.save()
        assert report is not None
        assert is_copy(report.parent)
        assert report.modified_rows < many.modified_rows
        assert 0 < rows_since_baseline(saver) < before
        wanted = gather(job)
        names = {report.id: wanted}
        by_hand[-1].finish()
        last = saved(job, saver)
        names[last.id] = gather(job)
        for name, state in names.items():
            scramble(job)
            saver.restore(name)
            assert references.differences(gather(job), state, None) == []


def rows_since_baseline(saver: Checkpointer) -> int:
    shards = saver._target.tracked.shards
    return sum(int(shard.marks.modified(Consumer.BASELINE).sum()) for shard in shards)


def test_a_failed_save_after_the_copy_loses_no_row(
    tmp_path: Path, job: Job, by_hand: list[InThisProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    with checkpointer(tmp_path, job, compact_after=1) as saver:
        saved(job, saver)
        saved(job, saver)
        saved(job, saver)  # while it is being compacted
        by_hand[0].finish()
        train(job, saver)
        with monkeypatch.context() as patch:
            patch.setattr(background, "write_rank_file", no_space)
            with pytest.raises(SaveFailed):
                saver.save()
        report = saved(job, saver)
        assert is_copy(report.parent)
        wanted = gather(job)
    assert restored(tmp_path, wanted) == []


def no_space(*_: object) -> None:
    raise SaveFailed("no space left, says the test")


def test_a_failed_compaction_changes_nothing_and_is_tried_again(
    tmp_path: Path, job: Job, by_hand: list[InThisProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    with checkpointer(tmp_path, job, compact_after=1) as saver:
        saved(job, saver)
        before = saved(job, saver)
        monkeypatch.setattr(InThisProcess, "fails", True)
        by_hand[0].finish()
        report = saved(job, saver)
        assert report.parent == before.id
        assert len(by_hand) == 1  # after a pause that grows
        saved(job, saver)
        assert len(by_hand) == 2
        by_hand[1].finish()
        for _ in range(3):
            saved(job, saver)
        assert len(by_hand) == 3
        monkeypatch.setattr(InThisProcess, "fails", False)
        by_hand[2].finish()
        assert is_copy(saved(job, saver).parent)
        wanted = gather(job)
    assert restored(tmp_path, wanted) == []


def test_a_restore_gives_a_running_compaction_up(
    tmp_path: Path, job: Job, by_hand: list[InThisProcess]
) -> None:
    """A fork goes on with its own chain, though the copy was made."""
    with checkpointer(tmp_path, job, compact_after=2) as saver:
        reports = [saved(job, saver) for _ in range(3)]
        saver.restore(reports[1].id)
        by_hand[0].finish()
        report = saved(job, saver)
        assert report.parent == reports[1].id
        wanted = gather(job)
    assert restored(tmp_path, wanted) == []


def test_a_full_checkpoint_comes_first(
    tmp_path: Path, job: Job, by_hand: list[InThisProcess]
) -> None:
    with checkpointer(tmp_path, job, compact_after=1) as saver:
        saved(job, saver)
        saved(job, saver)
        saver._saver.lineage.force_full()
        full = saved(job, saver)
        assert full.kind == "full"
        by_hand[0].finish()
        assert saved(job, saver).parent == full.id
        wanted = gather(job)
    assert restored(tmp_path, wanted) == []


def test_what_is_replaced_is_pruned(tmp_path: Path, job: Job, by_hand: list[InThisProcess]) -> None:
    with checkpointer(tmp_path, job, compact_after=3, retention=Retention(1)) as saver:
        for _ in range(14):
            saved(job, saver)
            for each in by_hand:
                if each.outcome is None:
                    each.finish()
            pruner = saver._saver.writer._pruner
            assert pruner is not None
            pruner.wait(60)
            assert len(list(tmp_path.glob("seq-*"))) <= 6
        wanted = gather(job)
    assert restored(tmp_path, wanted) == []
    assert not any(checkpoint.problems for checkpoint in verify(tmp_path))


def test_nothing_has_changed_since_the_copy(
    tmp_path: Path, job: Job, by_hand: list[InThisProcess]
) -> None:
    """A save of the same step names the copy, once that stands in the original's place."""
    with checkpointer(tmp_path, job, compact_after=1, retention=Retention(1)) as saver:
        saved(job, saver)
        saved(job, saver)
        by_hand[0].finish()
        report = saver.save()
        assert report is not None
        assert report.unchanged
        assert is_copy(report.id)
        assert (report.kind, report.chain_length) == ("full", 1)


def test_a_process_of_its_own_compacts(tmp_path: Path, job: Job) -> None:
    with checkpointer(tmp_path, job, compact_after=2) as saver:
        for _ in range(3):
            saved(job, saver)
        assert saver._saver.going_on.wait(120)
        assert is_copy(saved(job, saver).parent)
        wanted = gather(job)
    assert restored(tmp_path, wanted) == []


def test_a_process_that_is_killed_is_a_failure(
    tmp_path: Path, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    with checkpointer(tmp_path, job, compact_after=1) as saver:
        saved(job, saver)
        before = saved(job, saver)
        process = saver._saver.going_on._process
        assert process is not None
        process._process.kill()
        assert saver._saver.going_on.wait(120)
        assert saved(job, saver).parent == before.id
        assert "ended with status -9" in caplog.text
        wanted = gather(job)
    assert restored(tmp_path, wanted) == []


def test_closing_ends_the_process(
    tmp_path: Path, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    with checkpointer(tmp_path, job, compact_after=1) as saver:
        saved(job, saver)
        saved(job, saver)
        process = saver._saver.going_on._process
        assert process is not None
    assert process._process.poll() is not None
    assert "behind training failed" not in caplog.text  # it was ended, and did not fail


def test_a_process_that_cannot_be_started(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with checkpointer(tmp_path, job, compact_after=1) as saver:
        saved(job, saver)
        before = saved(job, saver)
        assert saved(job, saver).parent == before.id
        wanted = gather(job)
    assert restored(tmp_path, wanted) == []


@pytest.mark.parametrize("value", [0, -1, True, "8", 0.0, float("inf"), {"links": 0}, {}, [8]])
def test_a_rule_out_of_range(tmp_path: Path, job: Job, value: Any) -> None:
    with pytest.raises(ValueError, match="compact_after"):
        checkpointer(tmp_path, job, compact_after=value)


def test_a_root_in_this_processs_memory_is_refused(job: Job) -> None:
    with pytest.raises(ValueError, match="root that other processes see"):
        checkpointer("memory://tests/compact", job, compact_after=8)


class History:
    """A run that saves, fails, compacts, prunes, falls back; every checkpoint's state is known."""

    def __init__(self, root: Path, policy: Any, keep: int | None) -> None:
        self.root, self.job = root, make_job()
        self.known: dict[str, Any] = {}
        retention = None if keep is None else Retention(keep)
        self.saver = checkpointer(
            root, self.job, policy=policy, compact_after=2, retention=retention, max_failures=99
        )

    def save(self) -> None:
        report = saved(self.job, self.saver)
        self.known[report.id] = gather(self.job)

    def fail(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(background, "write_rank_file", no_space)
            train(self.job, self.saver)
            with pytest.raises(SaveFailed):
                self.saver.save()

    def compact(self) -> None:
        for each in InThisProcess.made:
            if each.outcome is None:
                try:
                    each.finish()
                except Exception:  # pruned meanwhile
                    each.outcome = Copied(each.original.id, None)

    def break_compaction(self) -> None:
        for each in InThisProcess.made:
            each.outcome = each.outcome or Copied(each.original.id, None)

    def prune(self) -> None:
        pruner = self.saver._saver.writer._pruner
        if pruner is not None:
            pruner.wait(60)

    def fall_back(self) -> None:
        self.prune()
        there = [name for name in self.known if (self.root / name / "manifest.json").exists()]
        if there:
            name = there[len(there) // 2]
            self.saver.restore(name)
            assert references.differences(gather(self.job), self.known[name], None) == []

    def check(self) -> None:
        self.prune()
        copies = {
            copy.id: self.known[copy.previous.id]
            for path in self.root.glob("seq-*/manifest.json")
            if is_copy(path.parent.name)
            and (copy := read_manifest(Folder(self.root), path.parent.name)).previous
        }
        for name, wanted in {**self.known, **copies}.items():
            if (self.root / name / "manifest.json").exists():
                scramble(self.job)
                self.saver.restore(name)
                assert references.differences(gather(self.job), wanted, None) == [], name


ACTIONS = ("save", "save", "fail", "compact", "break_compaction", "prune", "fall_back")


@settings(max_examples=examples(12), deadline=None)
@given(
    actions=st.lists(st.sampled_from(ACTIONS), min_size=6, max_size=16),
    policy=st.sampled_from([Consecutive(), OneShot(), Intermittent(), Full()]),
    keep=st.sampled_from([None, 1, 2]),
)
def test_any_history(
    tmp_path_factory: pytest.TempPathFactory, actions: list[str], policy: Any, keep: int | None
) -> None:
    """Every checkpoint restores what was saved there."""
    with alone(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(going_on, "CompactionProcess", InThisProcess)
        patch.setattr(InThisProcess, "made", [])
        history = History(tmp_path_factory.mktemp("root"), policy, keep)
        try:
            history.save()
            for action in (*actions, "save"):
                getattr(history, action)()
            history.check()
        finally:
            history.saver._release(failed=True)


@pytest.mark.parametrize("policy", [OneShot(), Consecutive()])
def test_what_is_being_compacted_is_not_pruned(
    tmp_path: Path, job: Job, by_hand: list[InThisProcess], policy: Any
) -> None:
    """Keep the original while it is read, and the copy until the next checkpoint builds on it."""
    rule = CompactAfter(share=0.001)
    with checkpointer(
        tmp_path, job, policy=policy, compact_after=rule, retention=Retention(1)
    ) as saver:
        pruner = saver._saver.writer._pruner
        assert pruner is not None
        for number in range(6):
            saved(job, saver)
            pruner.wait(60)
            if number == 3:
                by_hand[0].finish()
                job.train()  # a pruning sees the copy before the run goes on from it
                saver._saver.writer.prune(saver._saver.lineage.history[-1])
                pruner.wait(60)
        assert is_copy(chain_of(tmp_path)[0])
        assert saver._saver.lineage.history[0].id == chain_of(tmp_path)[0]
        wanted = gather(job)
    assert restored(tmp_path, wanted) == []
