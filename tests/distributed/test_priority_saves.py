"""Rows saved between checkpoints make a lost rank's rows less stale; nothing else reads them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.partial_lives import Lives, differing, from_storage
from tests.distributed.worker_pool import WorkerPool
from tests.examples import some_of
from torchrec_checknrun import PrioritySaves, RestoreReport
from torchrec_checknrun.format.names import PRIORITY_SAVES
from torchrec_checknrun.memory.partial import PRIORITIES
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.root.chain import newest
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tiers.priority_rows import PriorityRows, parse_directory

pytestmark = pytest.mark.skipif(not has_extension(), reason="the extension was not built")

Workers = Callable[[int], WorkerPool]
Rows = dict[str, torch.Tensor]


@pytest.fixture
def where(tmp_path: Path) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="checknrun-test-", dir="/dev/shm") as memory:
        yield {"folder": str(tmp_path), "memory": memory}


def restored(lives: Lives) -> RestoreReport:
    report = lives.saver.restore()
    assert report is not None
    return report


def rows_of(lives: Lives) -> Rows:
    """Copy this rank's rows of sharded tables, weight and state side by side."""
    lives.saver._target.tracked.flush()
    found = {}
    for shard in lives.saver._target.tracked.shards:
        if not shard.local.replicated:
            parts = [t.detach().float().reshape(len(t), -1) for t in shard.local.tensors]
            found[str(shard.local)] = torch.cat(parts, dim=1)
    return found


def saver_of(lives: Lives) -> PriorityRows:
    priority = lives.saver._survival._priority
    assert priority is not None
    return priority


def settled(lives: Lives) -> None:
    """Wait for this rank's priority saves."""
    saver_of(lives)._worker.submit(lambda: None).result()
    dist.barrier()


def train(lives: Lives, steps: int) -> None:
    """Train, with time for every save."""
    for _ in range(steps):
        lives.train(1)
        settled(lives)


def saves(lives: Lives) -> list[str]:
    return sorted(path.name for path in (lives.root / PRIORITY_SAVES).glob("*"))


def distance(one: Rows, other: Rows) -> float:
    return sum(float((one[name] - other[name]).norm() ** 2) for name in one) ** 0.5


def differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one != other).any(1)


def lose(folder: str, memory: str, by: str | None, fraction: float) -> list[Any]:
    """Lose rank 2 at step 11, after a checkpoint of step 8 and a save of step 10; go on."""
    priority = None if by is None else PrioritySaves(5, fraction, by)
    lives = Lives(folder, memory, priority=priority)
    lives.begin()
    lives.saver.restore()
    lives.train(8)
    at_8 = rows_of(lives)
    lives.train(2)
    at_10 = rows_of(lives)
    if by is not None:
        settled(lives)
    lives.train(1)
    at_11 = rows_of(lives)
    lives.die([2])
    lives.begin()
    report = restored(lives)
    assert [rank.step for rank in report.ranks] == [11, 11, 8, 11]
    found, lost = rows_of(lives), dist.get_rank() == 2
    counts = []
    for name, now in found.items():
        if not lost:
            assert torch.equal(now, at_11[name])
            continue
        newer = differ(now, at_8[name])
        assert torch.equal(now[newer], at_10[name][newer])  # whole rows, of one instant
        modified = differ(at_10[name], at_8[name])
        most = 0 if by is None else max(1, int(fraction * len(now)))
        assert int(newer.sum()) == min(most, int(modified.sum()))
        counts.append([int(newer.sum()), int(modified.sum())])
    lives.train(5)
    assert differing(from_storage(lives), lives.values()) == []  # of step 16: no row is missing
    lives.end()
    dist.barrier()  # each rank removes its own
    assert not (lives.root / PRIORITY_SAVES).exists()
    return [counts, distance(found, at_11), distance(at_8, at_11), report.pls]


@pytest.mark.parametrize("by", some_of([*PRIORITIES, None], 0))
def test_a_lost_rank_takes_the_newer_rows(
    by: str | None, where: dict[str, Any], workers: Workers
) -> None:
    counts, stale, without, pls = workers(4).run(lose, by=by, fraction=0.004, **where)[2]
    if by is None:
        assert stale == without > 0
    else:
        assert any(saved < modified for saved, modified in counts)  # a choice was made
        assert 0 < stale < without
    assert pls == pytest.approx(3 / (100 * 4))  # which counts steps, not rows


@pytest.mark.slow  # a_damaged_save_is_passed_over has saves of all modified rows, too
def test_all_modified_rows_where_they_are_few(where: dict[str, Any], workers: Workers) -> None:
    counts, stale, without, _ = workers(4).run(lose, by="growth", fraction=1.0, **where)[2]
    assert all(saved == modified for saved, modified in counts)
    assert stale < 0.7 * without  # of three lost steps one is left


def training_lost(folder: str, memory: str, by: str | None) -> float:
    """Return how far a lost rank's rows are from those it had, after a longer interval."""
    priority = None if by is None else PrioritySaves(6, 0.01, by)
    lives = Lives(folder, memory, priority=priority)
    lives.begin()
    lives.saver.restore()
    lives.train(4)
    lives.saver._schedule.due = lambda step: False  # type: ignore[method-assign]  # no more of them
    lives.train(15)
    before = rows_of(lives)
    if by is not None:
        settled(lives)
    lives.die([1])
    lives.begin()
    assert restored(lives).ranks[1].step == 4
    found = distance(rows_of(lives), before)
    lives.end()
    return found


@pytest.mark.slow  # a_lost_rank_takes_the_newer_rows compares them, too
def test_priorities_lose_less_training_than_nothing(tmp_path: Path, workers: Workers) -> None:
    found = {}
    for by in (None, "growth", "updates"):
        with tempfile.TemporaryDirectory(prefix="checknrun-test-", dir="/dev/shm") as memory:
            folder = tmp_path / str(by)
            folder.mkdir()
            lost = workers(4).run(training_lost, by=by, folder=str(folder), memory=memory)
        assert lost[0] == lost[2] == lost[3] == 0
        found[by] = lost[1]
    assert found["growth"] < found[None]
    assert found["updates"] < found[None]


def no_full_restore_reads_them(folder: str, memory: str) -> None:
    lives = Lives(folder, memory, priority=PrioritySaves(1, 1.0))
    lives.begin()
    lives.saver.restore()
    lives.train(8)
    at_8 = lives.values()
    train(lives, 2)
    assert [parse_directory(name)[2] for name in saves(lives)] == [9, 10]
    chain, problems = newest(Folder(lives.root))
    assert chain is not None
    assert (chain.head.step, problems) == (8, [])
    assert differing(from_storage(lives), at_8) == []
    lives.die([0, 1, 2, 3])
    lives.begin()
    assert restored(lives).source == "checkpoint"
    assert differing(lives.values(), at_8) == []
    train(lives, 1)  # other images: saves of the run before count for nothing, and go
    names = saves(lives)
    assert [parse_directory(name)[2] for name in names] == [9]
    assert parse_directory(names[0])[1] == lives.image.incarnation[:16]
    train(lives, 4)  # beyond the checkpoint of step 12
    assert [parse_directory(name)[2] for name in saves(lives)] == [13]
    lives.end()


def test_no_full_restore_reads_them_and_newer_checkpoints_end_them(
    where: dict[str, Any], workers: Workers
) -> None:
    workers(4).run(no_full_restore_reads_them, **where)


def damaged(folder: str, memory: str) -> None:
    """Damage the newest of two saves of a rank that is lost: the older one counts."""
    lives = Lives(folder, memory, priority=PrioritySaves(1, 1.0))
    lives.begin()
    lives.saver.restore()
    train(lives, 9)
    at_9 = rows_of(lives)
    train(lives, 1)
    if dist.get_rank() == 3:
        path = lives.root / PRIORITY_SAVES / saves(lives)[-1] / "rank-00003.bin"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    lives.die([3])
    lives.begin()
    restored(lives)
    if dist.get_rank() == 3:
        found = rows_of(lives)
        assert all(torch.equal(found[name], at_9[name]) for name in found)
    lives.train(2)
    assert differing(from_storage(lives), lives.values()) == []
    lives.end()


def test_a_damaged_save_is_passed_over(where: dict[str, Any], workers: Workers) -> None:
    workers(4).run(damaged, **where)


def only_modified(folder: str, memory: str) -> list[int]:
    """Return the sizes of two saves of which the second follows no training of most rows."""
    lives = Lives(folder, memory, priority=PrioritySaves(1, 1.0))
    lives.begin()
    lives.saver.restore()
    train(lives, 6)
    own = f"rank-{dist.get_rank():05d}.bin"
    sizes = [(lives.root / PRIORITY_SAVES / name / own).stat().st_size for name in saves(lives)]
    full = next(lives.root.glob("seq-*")) / own
    lives.end()
    return [*sizes, full.stat().st_size]


def test_a_save_holds_what_the_step_has_modified(where: dict[str, Any], workers: Workers) -> None:
    for first, second, full in workers(4).run(only_modified, **where):
        assert max(first, second) < full / 3  # each its own step, not all since the checkpoint
        assert 0.5 < first / second < 2
