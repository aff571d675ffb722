"""A lost rank goes back to a checkpoint of differences; the others keep their rows."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.models import Plan
from tests.distributed.partial_lives import (
    PLAN,
    Lives,
    bytes_read,
    differing,
    from_storage,
    of_tables,
)
from tests.distributed.worker_pool import WorkerPool
from tests.examples import some_of
from tests.unit.run.deltas import delta, lc, pieces, state_pieces
from torchrec_checknrun.memory.partial import PeerCopies

Workers = Callable[[int], WorkerPool]


@pytest.fixture
def where(tmp_path: Path) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="checknrun-test-", dir="/dev/shm") as memory:
        yield {"folder": str(tmp_path), "memory": memory}


def rounded(lives: Lives) -> dict[str, bytes]:
    """Return this rank's rows of sharded tables, with their state, as the last checkpoint restores
    them.
    """
    found = of_tables(lives.values(), sharded=True)
    for shard in lives.saver._target.tracked.shards:
        if shard.local.replicated:
            continue
        (name,) = (n for n in found if n.startswith(f"model/{shard.table}.weight@"))
        ((_, values),) = pieces(lives.saver, shard)
        found[name] = values.tobytes()
        for _, state, sums in state_pieces(lives.saver, shard):
            (name,) = (n for n in found if f"{shard.table}.weight/" in n and f".{state}@" in n)
            found[name] = sums.tobytes()
    return found


def go_back(
    folder: str,
    memory: str,
    lost: list[int],
    peers: bool,
    plan: Plan | None = None,
    method: str = "delta",
) -> list[str]:
    """Lose images at step 14, after a base of step 4 and links of 8 and 12; go on to step 20.

    Returns:
        Kinds of the checkpoints.
    """
    copies = PeerCopies() if peers else None
    chosen = lc() if method == "lc" else delta(optimizer="logdelta")
    lives = Lives(folder, memory, quantization=chosen, peers=copies, plan=plan)
    lives.begin()
    lives.saver.restore()
    lives.train(12)
    at_12 = rounded(lives)
    lives.train(2)
    at_14 = lives.values()
    lives.die(lost)

    lives.begin()
    with bytes_read(within=str(lives.root)) as counts:
        report = lives.saver.restore()
    assert report is not None
    assert report.source == "both"
    gone = dist.get_rank() in lost
    assert (sum(counts) > 0) == (gone and not peers)
    found = lives.values()
    rows = at_12 if gone else of_tables(at_14, sharded=True)
    assert differing(of_tables(found, sharded=True), rows) == []
    assert differing(of_tables(found, sharded=False), of_tables(at_14, sharded=False)) == []

    lives.train(6)
    wanted = rounded(lives)
    assert differing(of_tables(from_storage(lives), sharded=True), wanted) == []
    lives.end()
    manifests = sorted(lives.root.glob("seq-*/manifest.json"))
    return [json.loads(path.read_text())["manifest"]["kind"] for path in manifests]


@pytest.mark.parametrize(
    ("lost", "peers"),
    some_of([([2], False), ([2], True), ([0, 3], False), ([0, 3], True)], 3),
)
def test_a_lost_rank_adds_links_up(
    lost: list[int], peers: bool, where: dict[str, Any], workers: Workers
) -> None:
    """Begin a base after a recovery: the predecessors of a link are in no image."""
    links = ["full", "differential", "differential"]
    for kinds in workers(4).run(go_back, lost=lost, peers=peers, **where):
        assert kinds == [*links, "full", "differential"]


@pytest.mark.parametrize("peers", some_of([False, True], 1))
def test_a_lost_rank_adds_buckets_up(peers: bool, where: dict[str, Any], workers: Workers) -> None:
    """Begin a base after a recovery, with LC-Checkpoint's links."""
    kinds = ["full", "differential", "differential", "full", "differential"]
    found = workers(4).run(go_back, lost=[2], peers=peers, method="lc", **where)
    assert found == [kinds] * 4


def test_columns_of_a_peer_s_copy_are_not_the_whole_table(
    where: dict[str, Any], workers: Workers
) -> None:
    """A digest is of all columns, and the copy of one rank's file tells of its own alone."""
    plan = {**PLAN, "c.more": "column_wise:0,1"}
    kinds = ["full", "differential", "differential", "full", "differential"]
    assert workers(2).run(go_back, lost=[1], peers=True, plan=plan, **where) == [kinds, kinds]
