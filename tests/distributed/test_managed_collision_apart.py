"""Managed collisions whose maps are not sharded with the tables, and histories that begin anew."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.collisions import CollisionZoo, Options, Spec, build, refused, rows_of
from tests.distributed.states import local_bytes
from tests.distributed.worker_pool import WorkerPool
from tests.examples import some_of
from torchrec_checknrun import Checkpointer, Images
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.shared_memory import file as files

Workers = Callable[[int], WorkerPool]
APART: Options = {"apart": True, "fused": "sgd"}
STEPS, KILL = 11, 7
"""Ids are evicted every third step: between evictions."""


def content(zoo: CollisionZoo) -> dict[str, Any]:
    """Return what this rank has, with its maps."""
    maps = {table: rows_of(module) for table, module in zoo.modules.items()}
    return {**local_bytes(zoo), "maps": maps, "history": zoo.history(), "steps": zoo.steps}


def checkpointer(root: str, zoo: CollisionZoo, memory: str | None = None) -> Checkpointer:
    files._mapped.clear()
    return Checkpointer(
        f"{root}/root",
        model=zoo.model,
        state={"optimizer": zoo.optimizer, "zoo": zoo},
        survive=None if memory is None else Images(folder=memory),
        per_rank_buffers="*_managed_collision_modules*" if dist.get_world_size() > 1 else (),
    )


def go_on(root: str, memory: str | None) -> list[str]:
    """Die between two evictions, and go on; tell what differs from a run without an end."""
    calm = build(Spec(**APART))
    calm.train(STEPS)
    zoo = build(Spec(**APART))
    saver = checkpointer(root, zoo, memory)
    for _ in range(KILL):
        zoo.train()
        saver.step()
    if memory is None:
        saver.save()
    saved = content(zoo)
    assert all(history["seen"] for history in zoo.history().values())
    saver._release(failed=True)
    zoo = build(Spec(**APART), seed=7)
    saver = checkpointer(root, zoo, memory)
    report = saver.restore()
    assert report is not None
    assert report.source == ("checkpoint" if memory is None else "images")
    lost = [f"restored: {name}" for name, value in content(zoo).items() if value != saved[name]]
    zoo.train(STEPS - KILL)
    wanted = content(calm)
    lost += [f"at the end: {name}" for name, value in content(zoo).items() if value != wanted[name]]
    saver._release(failed=True)
    return lost


@pytest.mark.parametrize("ranks", some_of([1, 2], 1))
def test_maps_that_are_not_sharded(workers: Workers, tmp_path: Path, ranks: int) -> None:
    found = workers(ranks).run(go_on, root=str(tmp_path), memory=None)
    assert found == [[]] * ranks


@pytest.mark.skipif(not has_extension(), reason="the extension was not built")
def test_maps_that_are_not_sharded_in_images(workers: Workers, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="checknrun-test-", dir="/dev/shm") as memory:
        found = workers(1).run(go_on, root=str(tmp_path), memory=memory)
    assert found == [[]]


def saved_apart(root: str, spec: Options) -> str:
    zoo = build(Spec(**spec))
    with checkpointer(root, zoo) as saver:
        zoo.train(KILL)
        report = saver.save()
    return report.id


def sharded_otherwise(root: str, spec: Options, name: str) -> dict[str, Any]:
    """Restore where maps are sharded, or no longer are."""
    zoo = build(Spec(**spec), seed=7)
    with checkpointer(root, zoo) as saver:
        saver.restore(name)
        found = {"history": zoo.history(), "mapping": zoo.mapping()}
        zoo.train(STEPS - KILL)
    return {**found, "later": zoo.mapping()}


@pytest.mark.parametrize("apart", some_of([True, False], 1))
def test_maps_sharded_otherwise(workers: Workers, tmp_path: Path, apart: bool) -> None:
    """Move them between the two on one rank; refuse to divide one map among ranks."""
    before, after = APART | {"apart": apart}, APART | {"apart": not apart}
    name = workers(1).run(saved_apart, root=str(tmp_path), spec=before)[0]
    where: dict[str, Any] = {"root": str(tmp_path), "name": name}
    wanted = workers(1).run(sharded_otherwise, spec=before, **where)
    assert workers(1).run(sharded_otherwise, spec=after, **where) == wanted
    if apart:
        match = "raw ids belong to ranks.* restore on 1 ranks, or on one"
        workers(2).run(refused, spec=after, match=match, **where)


def back_to_the_start(root: str) -> list[bool]:
    """Go back to a checkpoint from before the first batch, and train on other batches."""
    zoo = build(Spec())
    with checkpointer(root, zoo) as saver:
        report = saver.save()
        zoo.train(4)
        saver.restore(report.id)
        zoo.steps = 20
        zoo.train(7)
    new = build(Spec(), seed=7)
    with checkpointer(root, new) as saver:
        saver.restore(report.id)
        new.steps = 20
        new.train(7)
        return [content(zoo) == content(new)]


def test_back_to_before_the_first_batch(workers: Workers, tmp_path: Path) -> None:
    """Have room for as many ids as a new process would: it follows from the first batch."""
    assert workers(2).run(back_to_the_start, root=str(tmp_path)) == [[True]] * 2
