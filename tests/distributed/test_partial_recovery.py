"""Ranks whose images are gone go back to a checkpoint alone; all others keep their rows."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.partial_lives import (
    LONELY,
    LONELY_PLAN,
    TOTAL,
    Lives,
    bytes_read,
    differing,
    from_storage,
    of_tables,
)
from tests.distributed.worker_pool import WorkerPool
from torchrec_checknrun import Consecutive, Intermittent, OneShot, RestoreReport

Workers = Callable[[int], WorkerPool]
POLICIES = {"consecutive": Consecutive(), "one_shot": OneShot(), "intermittent": Intermittent()}


@pytest.fixture
def where(tmp_path: Path) -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="checknrun-test-", dir="/dev/shm") as memory:
        yield {"folder": str(tmp_path), "memory": memory}
        assert not list(Path(memory).iterdir()), "images were left behind"


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
    own_dice = bool((lives.dice.generator.get_state() == dice).all())
    assert own_dice == (rank not in lost or rank == min({*range(4)} - {*lost}))

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
        "kind": last.kind,
        "all": sum(all_counts),
    }


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("lost", [[2], [0, 3]])
def test_only_lost_ranks_go_back(
    lost: list[int], policy: str, where: dict[str, str], workers: Workers
) -> None:
    found = workers(4).run(go_on, lost=lost, policy=policy, **where)
    for rank, of_rank in enumerate(found):
        assert (of_rank["read"] > 0) == (rank in lost), of_rank["read"]
        report = of_rank["report"]
        assert (report["source"], report["step"], report["reproducible"]) == ("both", 11, False)
        assert report["pls"] == pytest.approx(len(lost) * 3 / (TOTAL * 4))
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
