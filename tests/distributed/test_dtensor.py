"""Dense parameters that are DTensors, with their optimizers, onto any ranks, meshes, placements."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from tests.distributed.damage import chunks_of
from tests.distributed.placed import PlacedJob
from tests.distributed.worker_pool import WorkerPool
from tests.examples import some_of
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter

Workers = Callable[[int], WorkerPool]

SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "few": (3,),  # fewer than ranks: some have none
    "matrix": (7, 5),
    "cube": (4, 3, 5),
    "deep": (2, 3, 1, 4, 2),
    "none": (0, 3),
}
PLACINGS: dict[str, tuple[str, list[str]]] = {
    "rows": ("line", ["0"]),
    "last": ("line", ["-1"]),
    "copies": ("line", ["r"]),
    "hybrid": ("square", ["r", "0"]),
    "both": ("square", ["0", "-1"]),
    "twice": ("square", ["0", "0"]),
}
"""The mesh, and for each of its dimensions which one of the tensor it splits."""


def values(name: str, dtype: torch.dtype) -> torch.Tensor:
    count = torch.arange(torch.Size(SHAPES[name]).numel()) * 7 % 31
    return count.reshape(SHAPES[name]).to(dtype) / 3


def make(layout: str, name: str, whole: torch.Tensor) -> Any:
    """Lay the tensor out over all ranks."""
    if layout == "plain":
        return whole.clone()
    if layout == "sharded":
        return as_sharded(whole)
    mesh_name, along = PLACINGS[layout]
    along_mesh = placements(along, whole.dim())
    return distribute_tensor(whole, meshes[mesh_name], along_mesh, src_data_rank=None)


meshes: dict[str, DeviceMesh] = {}
"""Meshes of the running case: each has process groups."""


def make_meshes() -> None:
    world = dist.get_world_size()
    meshes["line"] = init_device_mesh("cpu", (world,))
    if world == 4:
        meshes["square"] = init_device_mesh("cpu", (2, 2))


def placements(along: list[str], dimensions: int) -> list[Placement]:
    return [
        Shard(int(at) % dimensions) if at != "r" and dimensions else Replicate() for at in along
    ]


def as_sharded(whole: torch.Tensor) -> Any:
    """Make a ShardedTensor with the given rows on each rank, the last rank's last."""
    if not whole.dim() or not whole.numel():
        return whole.clone()
    rank, world = dist.get_rank(), dist.get_world_size()
    start, stop = len(whole) * rank // world, len(whole) * (rank + 1) // world
    place = ShardMetadata(
        [start] + [0] * (whole.dim() - 1), [stop - start, *whole.shape[1:]], f"rank:{rank}/cpu"
    )
    shards = [LocalShard(whole[start:stop].clone(), place)] if stop > start else []
    return ShardedTensor._init_from_local_shards(shards, whole.shape)


def state(layout: str, dtype: str, fill: bool) -> dict[str, Any]:
    """Nest tensors of all shapes in containers, beside other values."""
    wanted = getattr(torch, dtype)
    made = {}
    for name in SHAPES:
        whole = values(name, wanted)
        made[name] = make(layout, name, whole if fill else torch.zeros_like(whole))
    cube = made.pop("cube")
    return {"tensors": made, "list": [1, cube, "x"], "epoch": 7 if fill else 0}


def save(root: str, layouts: list[str], dtype: str = "float32") -> None:
    make_meshes()
    for layout in layouts:
        save_one(Path(root) / f"{layout}-{dtype}", layout, dtype)


def save_one(path: Path, layout: str, dtype: str) -> None:
    dcp.save(
        {"own": state(layout, dtype, fill=True)},
        planner=SavePlanner(chunk_bytes=200),
        storage_writer=StorageWriter(path),
    )
    stored = sum(chunk["length"] for _, chunk in chunks_of(path, "block"))
    if layout in PLACINGS:  # every value once, however many ranks have it
        size = getattr(torch, dtype).itemsize
        assert stored == sum(size * torch.Size(shape).numel() for shape in SHAPES.values())


def load(root: str, saved: list[str], layouts: list[str], dtype: str = "float32") -> None:
    make_meshes()
    for name in saved:
        for layout in layouts:
            live = {"own": state(layout, dtype, fill=False)}
            before = leaves(live)
            dcp.load(
                live,
                planner=LoadPlanner(),
                storage_reader=StorageReader(Path(root) / name),
            )
            stored = getattr(torch, name.rpartition("-")[2])
            for (path, found), (_, old) in zip(leaves(live).items(), before.items(), strict=True):
                if isinstance(found, (DTensor, ShardedTensor)):
                    assert found is old, path  # restored in place
                whole = values(path.rpartition(".")[2], stored).to(getattr(torch, dtype))
                wanted = make(layout, path, whole)
                for one, other in zip(local(found), local(wanted), strict=True):
                    assert torch.equal(one, other), (name, layout, path)
            assert live["own"]["epoch"] == 7
            assert live["own"]["list"][::2] == [1, "x"]


def leaves(live: dict[str, Any]) -> dict[str, Any]:
    return {**live["own"]["tensors"], "cube": live["own"]["list"][1]}


def local(value: Any) -> list[torch.Tensor]:
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value.to_local() if isinstance(value, DTensor) else value]


SAVED = {
    1: ["rows"],
    2: ["last", "plain", "sharded"],
    4: ["rows", "copies", "hybrid", "both", "twice"],
}
INTO = {1: ["rows"], 2: ["last", "sharded"], 4: ["both", "plain"]}


@pytest.mark.parametrize("part", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_any_layout_into_any_other(workers: Workers, tmp_path: Path, part: int) -> None:
    saved = []
    for ranks, layouts in SAVED.items():
        workers(ranks).run(save, root=str(tmp_path / str(ranks)), layouts=layouts)
        saved += [f"{ranks}/{layout}-float32" for layout in layouts]
    for start, (ranks, wanted) in enumerate(INTO.items()):
        some = saved[start % part :: part]
        workers(ranks).run(load, root=str(tmp_path), saved=some, layouts=wanted)


def test_one_type_of_float_into_another(workers: Workers, tmp_path: Path) -> None:
    names = []
    for layout in ("rows", "plain"):
        for dtype in ("float32", "bfloat16"):
            workers(2).run(save, root=str(tmp_path), layouts=[layout], dtype=dtype)
            names.append(f"{layout}-{dtype}")
    for dtype in ("bfloat16", "float32"):
        wanted = ["last", "plain", "sharded"]
        where: dict[str, Any] = {"root": str(tmp_path), "saved": names}
        workers(2).run(load, **where, layouts=wanted, dtype=dtype)


def train(root: str, placing: str, optimizer: str) -> dict[str, Any]:
    """Train three steps, save, train three more; return digests at the save and at the end."""
    job = PlacedJob(placing, optimizer)
    with Checkpointer(root, model=job.model, state=states_of(job)) as saver:
        job.train(3)
        report = saver.save()
        assert report is not None
    saved = job.digests()
    job.train(3)
    return {"saved": saved, "end": job.digests(), "id": report.id}


def states_of(job: PlacedJob) -> dict[str, Any]:
    return {"optimizer": job.optimizer, "job": job}


def resume(root: str, placing: str, optimizer: str) -> dict[str, Any]:
    """Resume in a new model with other weights, without optimizer state; return digests."""
    job = PlacedJob(placing, optimizer, seed=9)
    with Checkpointer(root, model=job.model, state=states_of(job)) as saver:
        assert saver.restore() is not None
        restored = job.digests()
        job.train(3)
        assert saver.save() is not None  # the chain goes on
    return {"saved": restored, "end": job.digests(), "steps": job.steps}


@pytest.mark.parametrize(
    ("placing", "ranks", "optimizer"),
    some_of(
        [
            ("fsdp", 2, "adam"),
            ("fsdp", 2, "combined:adam"),
            ("fsdp", 4, "momentum"),
            ("hsdp", 4, "adam"),
            ("tp", 4, "adam"),
        ],
        *(1,),
    ),
)
def test_training_goes_on_as_if_never_interrupted(
    workers: Workers, tmp_path: Path, placing: str, ranks: int, optimizer: str
) -> None:
    how: dict[str, Any] = {"placing": placing, "optimizer": optimizer}
    first = workers(ranks).run(train, root=str(tmp_path), **how)
    blocks = chunks_of(tmp_path / first[0]["id"], "block")
    paths = {json.dumps(chunk["path"]) for _, chunk in blocks}
    states = 2 if "momentum" in optimizer else 3
    assert len(paths) == 8 * states  # four layers' weights and biases, and their states
    for elsewhere, other in ((4, "hsdp"), (2, "fsdp"), (1, "whole"), (1, "fsdp")):
        if (elsewhere, other) != (ranks, placing):
            where = str(tmp_path / f"{elsewhere}{other}")
            shutil.copytree(tmp_path / first[0]["id"], Path(where) / first[0]["id"])
            again = workers(elsewhere).run(resume, root=where, placing=other, optimizer=optimizer)
            assert again[0]["saved"] == first[0]["saved"]
    again = workers(ranks).run(resume, root=str(tmp_path), **how)
    for before, after in zip(first, again, strict=True):
        assert after["steps"] == 6
        assert after["saved"] == before["saved"]
        assert after["end"] == before["end"]


def refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    part = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    with pytest.raises(CheckpointException, match=r"own\.sum is a DTensor .*Redistribute it first"):
        dcp.save({"own": {"sum": part}}, planner=SavePlanner(), storage_writer=StorageWriter("/x"))


def apart(root: str) -> dict[str, Any]:
    """Give each pair of ranks a mesh of its own, as tensor parallelism under DDP."""
    mesh = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])][dist.get_rank() // 2]
    whole = torch.arange(12.0).reshape(4, 3)
    same = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    path = Path(root) / "same"
    dcp.save({"own": {"w": same}}, planner=SavePlanner(), storage_writer=StorageWriter(path))
    assert [chunk["length"] for _, chunk in chunks_of(path, "block")] == [24, 24]
    live = {"own": {"w": distribute_tensor(whole * 0, mesh, [Shard(1)], src_data_rank=None)}}
    dcp.load(live, planner=LoadPlanner(), storage_reader=StorageReader(path))
    assert torch.equal(live["own"]["w"].full_tensor(), whole)
    other = distribute_tensor(whole + dist.get_rank() // 2, mesh, [Shard(0)], src_data_rank=None)
    with pytest.raises(CheckpointException, match=r"own\.w: ranks 0 and 2 hold \[0:2, 0:3\] each"):
        dcp.save(
            {"own": {"w": other}},
            planner=SavePlanner(),
            storage_writer=StorageWriter(Path(root) / "other"),
        )
    return {}


def test_meshes_of_their_own(workers: Workers, tmp_path: Path) -> None:
    workers(4).run(apart, root=str(tmp_path))


def direct(root: str) -> None:
    """Save and load through ``dcp.save`` and ``dcp.load``, tables included."""
    job, path = PlacedJob("fsdp", "adam"), Path(root) / "direct"
    job.train(2)
    state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
    dcp.save(state, planner=SavePlanner(), storage_writer=StorageWriter(path))
    again = PlacedJob("fsdp", "adam", seed=9)
    again.train(1)  # makes the state that is restored in place
    live = {"model": again.model.state_dict(), "optimizer": again.optimizer.state_dict()}
    dcp.load(live, planner=LoadPlanner(), storage_reader=StorageReader(path))
    again.optimizer.load_state_dict(live["optimizer"])
    assert again.digests() == job.digests()


def gradients(root: str) -> None:
    """Begin no checkpoint before the sharded parameters' optimizer has stepped."""
    job = PlacedJob("fsdp", "adam")
    with Checkpointer(root, model=job.model, state=states_of(job), every_steps=1) as saver:
        job.train(1)
        job.optimizer.zero_grad()
        job.model(job.batch()).sum().backward()
        assert saver.step() is None
        assert saver.wait() is None  # nothing was begun
        job.optimizer.step()
        saver.step()
        assert saver.wait() is not None


def test_directly_and_with_gradients_that_wait(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(direct, root=str(tmp_path))
    workers(2).run(gradients, root=str(tmp_path / "gradients"))


def misfits(root: str) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    mesh = init_device_mesh("cpu", (2,))

    def place(tensor: torch.Tensor) -> DTensor:
        return distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)

    path = Path(root) / "one"
    saved = {"own": {"w": place(whole), "plain": whole}}
    dcp.save(saved, planner=SavePlanner(), storage_writer=StorageWriter(path))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"w": place(whole[:, :2])}, r"own\.w is float32 \[4, 3\] in one, and float32 \[4, 2\] in"),
        ({"w": whole[:, :2].clone()}, r"own\.w is float32 \[4, 3\] in one"),
        ({"w": place(whole.int())}, r"and int32 \[4, 3\] in the model"),
        ({"w": place(whole), "more": place(whole)}, r"own\.more is not in one"),
        ({"w": place(whole), "plain": place(whole[:3])}, r"own\.plain.*wants float32 \[3, 3\]"),
    ]
    for own, match in cases:
        live = {"own": {name: tensor * 0 for name, tensor in own.items()}}
        live["own"].setdefault("plain", whole * 0)
        with pytest.raises(CheckpointException, match=match):
            dcp.load(live, planner=LoadPlanner(), storage_reader=StorageReader(path))
        for tensor in live["own"].values():
            assert not local(tensor)[0].any()  # nothing was changed


def test_what_is_refused(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(refused)
    workers(2).run(misfits, root=str(tmp_path))
