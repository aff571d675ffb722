"""Ranks whose images are gone go back to a checkpoint alone; all others keep their rows."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.distributed.partial_lives import (
    LONELY,
    LONELY_PLAN,
    TOTAL,
    Gathered,
    Lives,
    bytes_read,
    differing,
    from_storage,
    of_tables,
)
from tests.distributed.worker_pool import WorkerPool
from tests.examples import some_of
from torchrec_checknrun import Consecutive, Intermittent, OneShot, Replicated, RestoreReport
from torchrec_checknrun.recovery.held_restore import HeldRestore

Workers = Callable[[int], WorkerPool]
POLICIES = {"consecutive": Consecutive(), "one_shot": OneShot(), "intermittent": Intermittent()}


@pytest.fixture
def where(tmp_path: Path) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="checknrun-test-", dir="/dev/shm") as memory:
        yield {"folder": str(tmp_path), "memory": memory}


def restored(lives: Lives) -> RestoreReport:
    report = lives.saver.restore()
    assert report is not None
    return report


def go_on(folder: str, memory: str, lost: list[int], policy: str) -> dict[str, Any]:
    """Lose some ranks' images at step 11, after checkpoints of steps 4 and 8; go on to step 18."""
    lives = Lives(folder, memory, policy=POLICIES[policy])
    lives.begin()
    lives.saver.restore()
    lives.train(8)
    at_8 = lives.values()
    lives.train(3)
    at_11, position = lives.values(), lives.reader.position
    dice = lives.dice.generator.get_state()
    lives.die(lost)

    lives.begin()
    with bytes_read() as counts:
        report = restored(lives)
    rank, found = dist.get_rank(), lives.values()
    rows = of_tables(at_8 if rank in lost else at_11, sharded=True)
    assert differing(of_tables(found, sharded=True), rows) == []
    assert differing(of_tables(found, sharded=False), of_tables(at_11, sharded=False)) == []
    assert rows != of_tables(at_11, sharded=True) or rank not in lost
    assert (lives.job.steps, lives.saver.steps, lives.reader.position) == (11, 11, position)
    everyones: list[Any] = [None] * 4
    dist.all_gather_object(everyones, dice)  # as they were: the lowest survivor's is copied
    source = min({*range(4)} - {*lost}) if rank in lost else rank
    assert torch.equal(lives.dice.generator.get_state(), everyones[source])

    lives.train(5)
    assert differing(from_storage(lives), lives.values()) == []  # of step 16
    lives.train(2)
    last = lives.saver.save()
    assert differing(from_storage(lives), lives.values()) == []
    lives.end()
    with bytes_read() as all_counts:
        from_storage(lives)
    return {
        "read": sum(counts),
        "report": json.loads(json.dumps(report.to_json())),
        "last": last.id,
        "lost": [last.pls, last.reproducible],
        "kind": last.kind,
        "all": sum(all_counts),
    }


@pytest.mark.parametrize(
    ("lost", "policy"),
    some_of([(lost, p) for lost in ([2], [0, 3]) for p in sorted(POLICIES)], 5),
)
def test_only_lost_ranks_go_back(
    lost: list[int], policy: str, where: dict[str, Any], workers: Workers
) -> None:
    found = workers(4).run(go_on, lost=lost, policy=policy, **where)
    for rank, of_rank in enumerate(found):
        assert (of_rank["read"] > 0) == (rank in lost), of_rank["read"]
        report = of_rank["report"]
        assert (report["source"], report["step"], report["reproducible"]) == ("both", 11, False)
        assert report["pls"] == pytest.approx(len(lost) * 3 / (TOTAL * 4))
        assert of_rank["lost"] == [report["pls"], False]
        assert report["ranks"] == [
            {"source": "checkpoint", "step": 8} if r in lost else {"source": "images", "step": 11}
            for r in range(4)
        ]
    if policy != "intermittent":
        assert found[0]["kind"] == "differential"
    manifest = json.loads(
        (Path(where["folder"]) / "root" / found[0]["last"] / "manifest.json").read_text()
    )["manifest"]
    assert manifest["losses"] == [
        {"rank": rank, "ranks": 4, "since": 8, "step": 11, "total_steps": TOTAL} for rank in lost
    ]


def read_by_each(folder: str, memory: str) -> tuple[int, int]:
    """Return the bytes that a partial recovery reads here, and those that a full one does."""
    lives = Lives(folder, memory)
    lives.begin()
    lives.saver.restore()
    lives.train(11)
    lives.die(lost=[1])
    with bytes_read() as full:
        from_storage(lives)
    lives.begin()
    with bytes_read() as partial:
        assert restored(lives).source == "both"
    lives.end()
    return sum(partial), sum(full)


def test_a_lost_rank_reads_its_own_rows_and_the_others_nothing(
    where: dict[str, Any], workers: Workers
) -> None:
    found = workers(4).run(read_by_each, **where)
    partial, full = zip(*found, strict=True)
    assert partial[0] == partial[2] == partial[3] == 0
    assert 0 < partial[1] <= 1.05 / 4 * sum(full)


def several_failures(folder: str, memory: str) -> list[float]:
    """Fail again and again; return the PLS of each report."""
    lives = Lives(folder, memory)
    lives.begin()
    lives.saver.restore()
    lives.train(6)
    found = []
    for lost, steps in (([1], 1), ([0, 2], 0), ([0], 0), ([], 5), ([3], 3)):
        lives.die(lost)
        lives.begin()
        found.append(restored(lives).pls)
        lives.train(steps)
    lives.die([0, 1, 2, 3])
    lives.begin()
    found.append(restored(lives).pls)
    lives.end()
    return found


def test_the_ledger_is_the_formulas(where: dict[str, Any], workers: Workers) -> None:
    first = 2 / (TOTAL * 4)  # at step 6, of the checkpoint of step 4
    second = first + 2 * 3 / (TOTAL * 4)  # at step 7, two ranks
    # Rank 0 again, before a step is trained: the same loss. None is lost then. Then at step 12, of
    # the checkpoint of that step: nothing. In the end the checkpoint of step 12 knows all but that.
    wanted = [first, second, second, second, second, second]
    for found in workers(4).run(several_failures, **where):
        assert found == pytest.approx(wanted)


def a_budget(folder: str, memory: str, max_pls: float) -> list[Any]:
    """Lose a rank's image twice."""
    lives = Lives(folder, memory, max_pls)
    lives.begin()
    lives.saver.restore()
    lives.train(7)
    told = []
    for _ in range(2):
        lives.die([1])
        lives.begin()
        report = restored(lives)
        told.append([report.source, lives.saver.steps, report.pls, list(report.without_images)])
        lives.train(3)
    lives.end()
    return told


def test_beyond_the_budget_all_ranks_go_back(where: dict[str, Any], workers: Workers) -> None:
    three = 3 / (TOTAL * 4)
    for first, second in workers(4).run(a_budget, max_pls=0.012, **where):
        assert first == ["both", 7, pytest.approx(three), []]
        assert second[:3] == ["checkpoint", 8, pytest.approx(three)]  # the checkpoint knows of it
        text = " ".join(second[3])
        assert "portion of lost samples would be 0.0125" in text
        assert "before it was 0.0075: more than max_pls=0.012" in text


def without(folder: str, memory: str, case: str) -> list[Any]:
    """Lose rank 0's image in a run that partial recovery can't bring back."""
    lives = Lives(folder, memory, max_pls=None if case == "opted" else 1.0, ruled=case != "rule")
    lives.begin()
    lives.saver.restore()
    lives.train(2 if case == "checkpoint" else 7)
    lives.die([0])
    lives.begin()
    report = lives.saver.restore()
    found = [lives.saver.steps, list(lives.saver._survival.reasons)]
    assert report is None or (report.source, report.reproducible) == ("checkpoint", True)
    lives.end()
    return found


@pytest.mark.parametrize(
    ("case", "step", "reason"),
    some_of(
        [
            ("rule", 4, "state 'reader' is each rank's own, and no rule makes it"),
            ("opted", 4, "there is none"),
            ("checkpoint", 0, "no checkpoint is there, which could have the lost ranks' rows"),
        ],
        *(0,),
    ),
)
def test_else_all_ranks_go_back_and_it_is_told(
    case: str, step: int, reason: str, where: dict[str, Any], workers: Workers
) -> None:
    for steps, reasons in workers(4).run(without, case=case, **where):
        assert steps == step
        assert reason in " ".join(reasons)


def gathered(folder: str, memory: str) -> list[str]:
    """Lose a rank in a run with a state that all ranks gather when they are asked for it."""
    lives = Lives(
        folder, memory, timeout_seconds=20.0, beside=lambda: {"shown": Replicated(Gathered())}
    )
    lives.begin()
    lives.saver.restore()
    lives.train(6)
    lives.die([1])
    lives.begin()
    found = [source.source for source in restored(lives).ranks]
    lives.end()
    return found


def test_a_state_that_ranks_gather_is_asked_of_all(where: dict[str, Any], workers: Workers) -> None:
    assert workers(2).run(gathered, **where) == [["images", "checkpoint"]] * 2


def a_table_of_one_rank(folder: str, memory: str) -> None:
    """Lose the only rank of a table, after its learning rate has changed."""
    lives = Lives(folder, memory, spec=LONELY, plan=LONELY_PLAN)
    lives.begin()
    lives.saver.restore()
    lives.train(9)
    for group in lives.job.optimizer.param_groups:
        group["lr"] *= 0.5
    lives.train(2)
    wanted = lives.saver._target.tracked.progress()
    lives.die([1])
    lives.begin()
    assert restored(lives).source == "both"
    assert lives.saver._target.tracked.progress() == wanted
    lives.train(3)
    lives.saver.save()
    assert differing(from_storage(lives), lives.values()) == []
    lives.end()


def test_clocks_are_agreed(where: dict[str, Any], workers: Workers) -> None:
    workers(4).run(a_table_of_one_rank, **where)


class Killed(BaseException):
    """Ends a life in its middle: nobody catches it."""


def undone_and_killed(folder: str, memory: str) -> None:
    """Lose another image when ranks have been put back already, to a step that only it needed."""
    lives = Lives(folder, memory)
    lives.begin()
    lives.saver.restore()
    lives.train(10)
    at_10 = lives.values()
    if dist.get_rank() == 1:  # it dies before it has ended the step
        with mock.patch.object(lives.image, "end_step"):
            lives.train(1)
    else:
        lives.train(1)
    lives.die([2])
    lives.begin()
    with mock.patch.object(HeldRestore, "load", side_effect=Killed), pytest.raises(Killed):
        lives.saver.restore()
    lives.die([1])
    lives.begin()
    report = restored(lives)
    assert (report.step, lives.saver.steps) == (10, 10)
    assert report.pls == pytest.approx(2 * 2 / (TOTAL * 4))
    if dist.get_rank() in (0, 3):
        assert differing(lives.values(), at_10) == []
    lives.train(4)
    lives.saver.save()
    assert differing(from_storage(lives), lives.values()) == []
    lives.end()


def test_ranks_that_were_put_back_go_to_no_later_step(
    where: dict[str, Any], workers: Workers
) -> None:
    workers(4).run(undone_and_killed, **where)


def quantized(folder: str, memory: str) -> tuple[int, bool]:
    """Lose an image in a run of 4-bit checkpoints."""
    lives = Lives(folder, memory, quantization=4)
    lives.begin()
    lives.saver.restore()
    lives.train(7)
    lives.die([3])
    lives.begin()
    report = restored(lives)
    lossy = lives.saver.save().lossy_restores
    lives.end()
    return lossy, report.lossy


@pytest.mark.slow  # the next test counts several
def test_rows_from_a_lossy_checkpoint_are_counted(where: dict[str, Any], workers: Workers) -> None:
    assert workers(4).run(quantized, **where) == [[1, True]] * 4


def quantized_again(folder: str, memory: str, lost: list[list[int]]) -> int:
    """Lose images several times in a run of 4-bit checkpoints, between two of these."""
    lives = Lives(folder, memory, quantization=4)
    lives.begin()
    lives.saver.restore()
    lives.train(5)
    for ranks in lost:
        lives.die(ranks)
        lives.begin()
        report = restored(lives)
        assert (report.source, report.lossy) == ("both", True)
        lives.train(1)
    found = lives.saver.save().lossy_restores
    lives.end()
    return found


@pytest.mark.parametrize("lost", some_of([[[3], [3]], [[3], [1]], [[0], [1, 2]]], 2))
def test_every_loss_since_a_lossy_checkpoint_is_counted(
    lost: list[list[int]], where: dict[str, Any], workers: Workers
) -> None:
    assert workers(4).run(quantized_again, lost=lost, **where) == [len(lost)] * 4


def quantized_and_killed(folder: str, memory: str) -> int:
    """Lose an image, and die again while the ranks go back."""
    lives = Lives(folder, memory, quantization=4)
    lives.begin()
    lives.saver.restore()
    lives.train(5)
    lives.die([2])
    for method in ("load", "set_generators"):
        lives.begin()
        with mock.patch.object(HeldRestore, method, side_effect=Killed), pytest.raises(Killed):
            lives.saver.restore()
        lives.die([])
    lives.begin()
    assert restored(lives).pls == pytest.approx(1 / (TOTAL * 4))
    found = lives.saver.save().lossy_restores
    lives.end()
    return found


def test_a_repeated_recovery_is_one_lossy_restore(where: dict[str, Any], workers: Workers) -> None:
    assert workers(4).run(quantized_and_killed, **where) == [1] * 4
