"""Random histories of a run that saves links: every one restores what a plain model says.

Saves fail, are given up, or end unknown; rows are evicted or not finite; chains are compacted, gone
on with from the copy, pruned, cut, forked; tables grow.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.crash.save_sweep import alone
from tests.distributed.models import CollectionSpec, Job, ModelSpec, TableSpec, uniform_plan
from tests.distributed.states import gather, scramble
from tests.examples import OF_HISTORIES, examples, some_of
from tests.unit.run.deltas import TABLES, delta, lc, saving, sound
from tests.unit.run.plain_links import Known, follow
from tests.unit.run.test_delta_failures import fails_when_written, storage_fails
from tests.unit.run.test_going_on import InThisProcess, is_copy
from torchrec_checknrun import Checkpointer, Quantization, Retention, compact
from torchrec_checknrun.delta.log_references import LogReferences
from torchrec_checknrun.delta.transaction import Transaction
from torchrec_checknrun.errors import CheckNRunError, SaveFailed
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.root.checkpoints import read_manifest
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.run import going_on
from torchrec_checknrun.run.compaction import Copied
from torchrec_checknrun.save import background
from torchrec_checknrun.store.folder import Folder

METHODS = {
    "delta": delta(),
    "logdelta": delta(optimizer="logdelta"),
    **{f"lc, x = {bits}": lc(bits) for bits in (2, 3, 4)},
}
ODD = (float("nan"), float("-inf"), 1e-40, 3e38, -0.0, 0.0)
UNTRAINED = 5
"""Last rows of the first table, which no batch has: numbers that aren't finite stay there."""


class History:
    """A run, its root, and what each checkpoint must restore to."""

    def __init__(self, root: Path, method: Quantization, compact_after: int | None) -> None:
        self.root = root
        self._method, self._compact_after = method, compact_after
        self._grown = 0
        self.known: dict[str, Known] = {}
        self.kinds: list[str] = []
        self._start(0)

    def save(self, choice: int = 0) -> None:
        self._train(1 + choice % 2)
        with self._noted():
            self.saver.save()

    def fail(self, choice: int) -> None:
        """Fail before rows are encoded, or after."""
        self._train(1)
        with pytest.MonkeyPatch.context() as patch, self._noted():
            (storage_fails, fails_when_written)[choice % 2](patch)
            with pytest.raises(SaveFailed):
                self.saver.save()

    def stay_unknown(self, choice: int) -> None:
        """Commit, and lose the storage's answer."""
        put = Folder.put

        def put_and_fail(folder: Folder, name: str, *arguments: Any, **options: Any) -> Any:
            put(folder, name, *arguments, **options)
            if name == MANIFEST_NAME:
                raise OSError(28, "no space left, says the test")

        self._train(1)
        with pytest.MonkeyPatch.context() as patch, self._noted():
            patch.setattr(Folder, "put", put_and_fail)
            with suppress(SaveFailed):
                self.saver.save()

    def give_up(self, choice: int) -> None:
        """Give a save up while its thread hangs, before it has encoded rows or after."""
        write, reached, go_on = background.write_rank_file, threading.Event(), threading.Event()

        def hanging(*arguments: Any) -> Any:
            summary = write(*arguments) if choice % 2 else None
            reached.set()
            assert go_on.wait(60)
            return summary if summary is not None else write(*arguments)

        self._train(1)
        with pytest.MonkeyPatch.context() as patch, self._noted():
            patch.setattr(background, "write_rank_file", hanging)
            self.saver.save(wait=False)
            assert reached.wait(60)
            running = self.saver._saver.running
            assert running is not None
            assert running.give_up(SaveFailed("says the test"))
            with pytest.raises(SaveFailed):
                self.saver.wait()
            go_on.set()
            assert running.thread is not None
            running.thread.join(60)

    def evict(self, choice: int) -> None:
        """Begin some rows anew, without optimizer state."""
        rows = torch.randperm(25, generator=torch.Generator().manual_seed(choice))[:6]
        for shard in self.saver._target.tracked.shards:
            columns = shard.rectangle.cols
            values = torch.randn((6, columns), generator=torch.Generator().manual_seed(choice))
            shard.write_rows(rows, values / 10, {"momentum1": torch.zeros(6)})

    def write_odd(self, choice: int) -> None:
        """Write rows that are not finite, or denormal, or huge, where no batch looks."""
        (shard,) = (s for s in self.saver._target.tracked.shards if s.table.endswith("t0"))
        ids = torch.arange(TABLES[0].rows - UNTRAINED, TABLES[0].rows)[choice % 2 :]
        weight = torch.full((len(ids), 8), ODD[choice % len(ODD)])
        weight[0, 3] = 0.25
        sums = (0.0, 1e-3, 4.0, float("inf"), float("nan"))[choice % 5]
        shard.write_rows(ids, weight, {"momentum1": torch.full((len(ids),), sums)})

    def fall_back(self, choice: int) -> None:
        """Restore an older checkpoint: the next one begins a fork."""
        there = self._there()
        if there:
            self._restore(there[choice % len(there)])

    def restart(self, choice: int) -> None:
        self.saver.close()
        self._start(choice)
        self._restore(None)

    def grow(self, choice: int) -> None:
        """Restart with larger tables."""
        self._grown = min(self._grown + 3, 6)
        self.restart(choice)

    def compact(self, choice: int) -> None:
        """Compact any chain, as another process may; end what this one compacts."""
        originals = [id for id in self._there() if not is_copy(id)]
        if originals:
            compact(self.root, originals[choice % len(originals)])
        for each in InThisProcess.made:
            if each.outcome is None:
                try:
                    each.finish()
                except Exception:  # it is full, pruned or lost
                    each.outcome = Copied(each.original.id, None)

    def lose(self, choice: int) -> None:
        """Lose a link that has a copy, between two lives."""
        for id in self._there():
            original = self._copied(id)
            if original != id and (self.root / original / MANIFEST_NAME).exists():
                (self.root / original).rename(self.root.with_name(f"lost-{original}"))
                self.restart(choice)
                return

    def prune(self, choice: int) -> None:
        prune(Folder(self.root), Retention(1 + choice % 3))

    def go_through(self, actions: Iterable[tuple[str, int]]) -> None:
        for action, choice in actions:
            getattr(self, action)(choice)
        self.check()

    def check(self) -> None:
        """Restore every checkpoint that there is."""
        self.saver.close()
        assert sound(self.root) == []
        self._start(1)
        for id in [None, *self._there()]:
            self._restore(id)

    def _start(self, seed: int) -> None:
        tables = [TableSpec(t.name, t.rows + self._grown, t.dim, t.features) for t in TABLES]
        spec = ModelSpec((CollectionSpec("c", tuple(tables)),))
        sharding = ("table_wise", "row_wise")[seed % 2]
        self._job = Job.build(spec, uniform_plan(spec, sharding, 1), seed=seed)
        self.saver: Checkpointer = saving(
            self.root,
            self._job,
            quantization=self._method,
            compact_after=self._compact_after,
        )

    def _train(self, steps: int) -> None:
        """Train on rows that every size of the tables has."""
        rows = {table.features[0]: 25 for table in TABLES}
        for _ in range(steps):
            self._job.optimizer.zero_grad()
            self._job.loss(*self._job.batch(self._job.steps, rows)).backward()
            self._job.optimizer.step()
            self._job.steps += 1
            self.saver.step()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Note what the checkpoint that is made meanwhile must restore to, if one is."""
        live, before = gather(self._job), {path.parent for path in self._manifests()}
        yield
        for path in self._manifests():
            if path.parent not in before and not is_copy(path.parent.name):
                manifest = read_manifest(Folder(self.root), path.parent.name)
                parent = None
                if manifest.parent is not None:
                    parent = self.known[self._copied(manifest.parent.id)]
                self.kinds.append(manifest.kind)
                known = follow(self.root, manifest, live, parent, self._method)
                self.known[manifest.id] = known

    def _manifests(self) -> list[Path]:
        return sorted(self.root.glob(f"seq-*/{MANIFEST_NAME}"))

    def _there(self) -> list[str]:
        return [path.parent.name for path in self._manifests()]

    def _copied(self, id: str) -> str:
        """Return the id of what a copy is of; the id itself of others."""
        if not is_copy(id):
            return id
        previous = read_manifest(Folder(self.root), id).previous
        assert previous is not None
        return previous.id

    def _restore(self, id: str | None) -> None:
        scramble(self._job)
        report = self.saver.restore(id)
        if report is None:
            assert not self._there()
            return
        assert id in (None, report.id)
        self._job.steps = report.step
        found = gather(self._job)
        for name, wanted in self.known[self._copied(report.id)].state.items():
            rows = found[name][: len(wanted)]
            wrong = rows.view(np.int32) != wanted.view(np.int32)
            assert not wrong.any(), (report.id, name, np.argwhere(wrong))


ACTIONS = ["save", "save", "save", "save", "fail", "stay_unknown", "give_up", "evict", "write_odd",
           "fall_back", "restart", "grow", "compact", "compact", "lose", "prune"]  # fmt: skip


@contextmanager
def run(folder: Path, method: str, compact_after: int | None = None) -> Iterator[History]:
    """Begin a history that compacts in this process."""
    with alone(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(going_on, "CompactionProcess", InThisProcess)
        patch.setattr(InThisProcess, "made", [])
        history = History(folder, METHODS[method], compact_after)
        try:
            history.save()
            yield history
        finally:
            history.saver._release(failed=True)


EACH = [("evict", 1), ("fail", 0), ("fail", 1), ("stay_unknown", 0), ("save", 0), ("give_up", 0),
        ("give_up", 1), ("write_odd", 0), ("write_odd", 3), ("compact", 5), ("lose", 0),
        ("prune", 2), ("fall_back", 1), ("restart", 1), ("grow", 0), ("save", 0)]  # fmt: skip


@pytest.mark.parametrize("method", some_of(METHODS, 1, 3))
def test_one_of_each(tmp_path: Path, method: str) -> None:
    with run(tmp_path / "root", method) as history:
        history.save()
        history.go_through([each for action in EACH for each in (action, ("save", 0))])
    assert history.kinds.count("differential") >= 12
    assert len([*tmp_path.glob("lost-*")]) == 1


def no_merge(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TrackedModel, "merge", lambda *_: None)


def no_undo(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Transaction, "undo", lambda *_: None)


def no_undo_of_states(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LogReferences, "put_back", lambda *_: None)


LOSSES = [no_merge, no_undo, no_undo_of_states]


@pytest.mark.parametrize(
    ("method", "sabotage"),
    [*product(["delta", "lc, x = 3"], LOSSES[:2]), *product(["logdelta"], LOSSES)],
)
def test_what_is_lost_is_found(
    tmp_path: Path, method: str, sabotage: Callable[[pytest.MonkeyPatch], None]
) -> None:
    with run(tmp_path / "root", method) as history, pytest.MonkeyPatch.context() as patch:
        sabotage(patch)
        history.save()
        with pytest.raises((AssertionError, CheckNRunError)):
            history.go_through([("fail", 1), ("save", 0)])


@pytest.mark.timeout(1800)
@settings(OF_HISTORIES, max_examples=examples(250, quick=4))
@given(
    method=st.sampled_from(list(METHODS)),
    actions=st.lists(
        st.tuples(st.sampled_from(ACTIONS), st.integers(0, 9)), min_size=8, max_size=20
    ),
    compact_after=st.sampled_from([None, 2]),
)
def test_any_history_of_links(
    tmp_path_factory: pytest.TempPathFactory,
    method: str,
    actions: list[tuple[str, int]],
    compact_after: int | None,
) -> None:
    with run(tmp_path_factory.mktemp("root"), method, compact_after) as history:
        history.go_through([*actions, ("save", 0)])
