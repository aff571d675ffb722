"""A rank whose image is gone reads its rows from a peer's memory, and nothing from the storage."""

from __future__ import annotations

import errno
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.distributed.models import CollectionSpec, ModelSpec, TableSpec
from tests.distributed.partial_lives import (
    Lives,
    bytes_read,
    differing,
    from_storage,
    of_tables,
)
from tests.distributed.worker_pool import WorkerPool
from tests.examples import some_of
from torchrec_checknrun import Consecutive, Intermittent, OneShot, RestoreReport
from torchrec_checknrun.memory.partial import PeerCopies
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.tiers.peer_tier import IncomingCopy, PeerTier
from torchrec_checknrun.tiers.peers import Peers

pytestmark = pytest.mark.skipif(not has_extension(), reason="the extension was not built")

Workers = Callable[[int], WorkerPool]
POLICIES = {"consecutive": Consecutive(), "one_shot": OneShot(), "intermittent": Intermittent()}


@pytest.fixture
def where(tmp_path: Path) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="checknrun-test-", dir="/dev/shm") as memory:
        yield {"folder": str(tmp_path), "memory": memory}
        assert list(Path(memory).iterdir()) == []  # the run has come to its end


def restored(lives: Lives) -> RestoreReport:
    report = lives.saver.restore()
    assert report is not None
    return report


def peers_of(lives: Lives) -> Peers:
    peers = lives.saver._survival._peers
    assert peers is not None
    return peers


def lose(
    folder: str,
    memory: str,
    lost: list[int],
    machines: bool = True,
    damage: str | None = None,
    most_bytes: int | None = None,
    policy: str = "consecutive",
    **options: Any,
) -> dict[str, Any]:
    """Lose some ranks at step 11, after checkpoints of steps 4 and 8; go on to step 16."""
    options["policy"] = POLICIES[policy]
    lives = Lives(folder, memory, peers=PeerCopies(most_bytes), **options)
    lives.begin()
    lives.saver.restore()
    lives.train(8)
    at_8 = lives.values()
    lives.train(3)
    at_11 = lives.values()
    if damage is not None:
        DAMAGES[damage](lives)
    lives.die(lost, machines)
    lives.begin()
    with bytes_read(within=str(lives.root)) as counts:
        report = restored(lives)
    rank, found = dist.get_rank(), lives.values()
    rows = of_tables(at_8 if rank in lost else at_11, sharded=True)
    assert differing(of_tables(found, sharded=True), rows) == []
    assert differing(of_tables(found, sharded=False), of_tables(at_11, sharded=False)) == []
    assert not peers_of(lives).folder.fetched_path.exists()
    lives.train(5)
    assert differing(from_storage(lives), lives.values()) == []  # of step 16
    lives.end()
    sources = [source["source"] for source in json.loads(json.dumps(report.to_json()))["ranks"]]
    return {"read": sum(counts), "sources": sources}


def sources(lost: list[int], of_lost: str) -> list[str]:
    return [of_lost if rank in lost else "images" for rank in range(4)]


@pytest.mark.parametrize(
    ("options", "lost"),
    some_of(
        itertools.product(
            [{}, {"policy": "one_shot"}, {"policy": "intermittent"}, {"background": "process"}],
            [[2], [0, 2]],
        ),
        *(3,),  # processes that write start on each of four ranks
    ),
)
def test_no_row_is_read_from_the_storage(
    lost: list[int], options: dict[str, Any], where: dict[str, Any], workers: Workers
) -> None:
    for found in workers(4).run(lose, lost=lost, **options, **where):
        assert found == {"read": 0, "sources": sources(lost, "peer")}


def quantized(folder: str, memory: str) -> None:
    """Lose a rank in a run of 4-bit checkpoints; compare its rows with those of the storage."""
    lives = Lives(folder, memory, peers=PeerCopies(), quantization=4)
    lives.begin()
    lives.saver.restore()
    lives.train(9)
    lives.die([1], machines=True)
    lives.begin()
    assert restored(lives).ranks[1].source == "peer"
    found = of_tables(lives.values(), sharded=True)
    wanted = of_tables(from_storage(lives), sharded=True)
    assert (differing(found, wanted) == []) == (dist.get_rank() == 1)
    lives.end()


def test_quantized_rows_are_those_of_the_storage(where: dict[str, Any], workers: Workers) -> None:
    workers(4).run(quantized, **where)


def test_where_the_holder_is_lost_too_the_storage_is_read(
    where: dict[str, Any], workers: Workers
) -> None:
    found = workers(4).run(lose, lost=[1, 2], **where)  # rank 2 holds the copies of rank 1
    assert found[0]["sources"] == ["images", "checkpoint", "peer", "images"]
    assert [of_rank["read"] > 0 for of_rank in found] == [False, True, False, False]


def change_a_byte(lives: Lives) -> None:
    """Change a byte of a copy of rank 2, wherever it lies."""
    for path in peers_of(lives).folder.path.glob("held/2-*/*/*.bin"):
        content = bytearray(path.read_bytes())
        content[len(content) // 3] ^= 4
        path.write_bytes(content)


def cut_it_off(lives: Lives) -> None:
    for path in peers_of(lives).folder.path.glob("held/2-*/*/*.bin"):
        path.write_bytes(path.read_bytes()[:-9])


def forget_the_newest(lives: Lives) -> None:
    found = sorted(peers_of(lives).folder.path.glob("held/2-*/*/*.bin"))
    for path in found[-1:]:
        path.unlink()


def open_to_others(lives: Lives) -> None:
    peers_of(lives).folder.path.chmod(0o755)


DAMAGES = {
    each.__name__: each for each in (change_a_byte, cut_it_off, forget_the_newest, open_to_others)
}


@pytest.mark.parametrize("damage", some_of(DAMAGES, 0))
def test_copies_that_are_not_whole_are_not_used(
    damage: str, where: dict[str, Any], workers: Workers
) -> None:
    found = workers(4).run(lose, lost=[2], damage=damage, **where)
    assert found[0]["sources"] == sources([2], "checkpoint")
    assert [of_rank["read"] > 0 for of_rank in found] == [False, False, True, False]


@pytest.mark.parametrize("most_bytes", some_of([1000, 850_000], 1))
def test_what_exceeds_the_budget_is_dropped(
    most_bytes: int, where: dict[str, Any], workers: Workers
) -> None:
    found = workers(4).run(lose, lost=[2], most_bytes=most_bytes, **where)
    assert found[0]["sources"] == sources([2], "checkpoint")


def lose_of_a_small_model(folder: str, memory: str) -> list[str]:
    """Lose a rank of a model whose tables take less than its dense part and the indexes."""
    small = ModelSpec((CollectionSpec("c", (TableSpec("parts", 80, 4, ("f0",)),)),), hidden=300)
    plan = {"c.parts": "row_wise"}
    found: list[str] = lose(folder, memory, [2], spec=small, plan=plan)["sources"]
    return found


def test_a_small_model_has_room_for_its_indexes(where: dict[str, Any], workers: Workers) -> None:
    assert workers(4).run(lose_of_a_small_model, **where) == [sources([2], "peer")] * 4


def held_after(folder: str, memory: str, steps: int) -> list[int]:
    """Return the copies that this rank holds after some steps, and their bytes."""
    lives = Lives(folder, memory, peers=PeerCopies(), policy=OneShot())
    lives.begin()
    lives.saver.restore()
    lives.train(steps)
    found = list(peers_of(lives).folder.path.glob("held/*/*/*"))
    own = (dist.get_rank() - 1) % 4
    files = list((Path(folder) / "root").glob(f"*/rank-0000{own}.bin"))
    for path in found:
        assert path.read_bytes() == next(
            file.read_bytes() for file in files if file.parent.name == path.parent.name
        )
    assert not list(peers_of(lives).folder.path.glob("outbox/*"))
    lives.end()
    return [len(found), peers_of(lives)._most]


def test_a_peer_holds_the_neighbours_baseline_and_chain(
    where: dict[str, Any], workers: Workers
) -> None:
    for count, most in workers(4).run(held_after, steps=12, **where):
        assert count == 2  # of three checkpoints the first and, since that, the last
        assert most > 1_000_000


def a_failing_exchange(folder: str, memory: str) -> str:
    """Fail on one rank while copies are made; the checkpoint is committed all the same."""
    lives = Lives(folder, memory, peers=PeerCopies())
    lives.begin()
    lives.saver.restore()
    lives.train(3)
    if dist.get_rank() == 1:
        with mock.patch.object(Peers, "_accept", return_value=None):
            lives.train(1)
    else:
        lives.train(1)
    committed = lives.saver._saver.lineage.previous
    assert committed is not None
    lives.die([0, 2], machines=True)
    lives.begin()
    found = restored(lives).ranks
    lives.end()
    return f"{committed.step}: {found[0].source}, {found[2].source}"


def test_a_checkpoint_needs_no_copies(where: dict[str, Any], workers: Workers) -> None:
    assert set(workers(4).run(a_failing_exchange, **where)) == {"4: checkpoint, peer"}


def processes_die(folder: str, memory: str) -> list[str]:
    """Let all processes die once and go on by images: copies go on with their chain."""
    lives = Lives(folder, memory, peers=PeerCopies())
    lives.begin()
    lives.saver.restore()
    lives.train(5)
    lives.die([])
    lives.begin()
    assert restored(lives).source == "images"
    lives.train(4)
    lives.die([3], machines=True)
    lives.begin()
    found = [source.source for source in restored(lives).ranks]
    lives.end()
    return found


def test_copies_outlive_the_processes(where: dict[str, Any], workers: Workers) -> None:
    assert workers(4).run(processes_die, **where) == [sources([3], "peer")] * 4


@contextmanager
def no_descriptors(owner: type, name: str, rank: int) -> Iterator[None]:
    """Fail the first call of a method on one rank, as where too many files are open."""
    real: Any = getattr(owner, name)
    calls = itertools.count()

    def fail(*arguments: Any) -> Any:
        if dist.get_rank() == rank and next(calls) == 0:
            raise OSError(errno.EMFILE, "too many open files, says the test")
        return real(*arguments)

    with mock.patch.object(owner, name, fail):
        yield


def one_rank_fails(folder: str, memory: str) -> list[str]:
    """Fail what one rank alone does for copies; return where the lost ranks' rows came from."""
    lives = Lives(folder, memory, peers=PeerCopies())
    lives.begin()
    lives.saver.restore()
    began = time.monotonic()
    for rank, name in ((1, "sizes"), (0, "receive"), (1, "keep_only"), (0, "sizes")):
        with no_descriptors(PeerTier, name, rank):
            lives.train(4)
    found = []
    for owner, name, rank in ((IncomingCopy, "keep", 1), (PeerTier, "sizes", 0)):
        lives.train(5)
        lives.die([1])
        lives.begin()
        with no_descriptors(owner, name, rank):
            report = restored(lives)
        found.append(f"{report.ranks[1].source}")
        lives.train(3)
    assert differing(from_storage(lives), lives.values()) == []
    lives.end()
    assert time.monotonic() - began < 60
    return found


def test_no_rank_waits_for_one_that_fails(where: dict[str, Any], workers: Workers) -> None:
    assert workers(2).run(one_rank_fails, **where) == [["checkpoint", "checkpoint"]] * 2
