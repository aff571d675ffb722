"""Any sharded tensor in a state object is saved in place, and restored into any other sharding."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torchrec.distributed.shards_wrapper import LocalShardsWrapper

from tests.distributed.damage import chunks_of, index_of
from tests.distributed.models import Job, random_spec, uniform_plan
from tests.distributed.worker_pool import WorkerPool
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter

Workers = Callable[[int], WorkerPool]
Corner = tuple[int, ...]
Part = tuple[int, Corner, Corner]
"""Rank, offset and size of a shard."""

SIZE = (11, 6)
LAYOUTS: dict[str, list[Part]] = {
    "one": [(0, (0, 0), (11, 6))],
    "rows": [(0, (0, 0), (4, 6)), (1, (4, 0), (7, 6))],
    "columns": [(1, (0, 0), (11, 2)), (0, (0, 2), (11, 4))],
    "several": [(1, (0, 0), (3, 6)), (0, (3, 0), (1, 6)), (1, (4, 0), (7, 6))],
    "one_of_two": [(1, (0, 0), (11, 6))],
    "three": [(0, (0, 0), (5, 6)), (2, (5, 0), (6, 3)), (1, (5, 3), (6, 3))],
}
VALUES = torch.arange(66).reshape(SIZE) * 7 % 31
KINDS: dict[str, tuple[torch.dtype, bool]] = {
    "half": (torch.float16, True),
    "flags": (torch.bool, True),
    "ids": (torch.int64, False),  # one dimension: the first column
}


def sharded(layout: str, kind: str, dtensor: bool, fill: bool) -> Any:
    dtype, two = KINDS[kind]
    values = (VALUES % 2 == 0) if dtype == torch.bool else VALUES.to(dtype)
    shards, offsets = [], []
    parts = LAYOUTS[layout]
    if not two:  # row blocks alone
        parts = [(r, o[:1], s[:1]) for r, o, s in parts if o[1:] == (0,)]
        values = values[:, 0]
    local = []
    for rank, offset, size in parts:
        if rank == dist.get_rank():
            part = values[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
            shards.append(part.clone() if fill else torch.zeros_like(part))
            offsets.append(offset)
            place = ShardMetadata(list(offset), list(size), placement=f"rank:{rank}/cpu")
            local.append(Shard(shards[-1], place))
    if dtensor:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return DTensor.from_local(
            LocalShardsWrapper(shards, offsets),
            mesh,
            [Replicate()],
            run_check=False,
            shape=values.shape,
            stride=values.stride(),
        )
    return ShardedTensor._init_from_local_shards(local, values.shape)


class Buffers:
    """A state object with sharded tensors at several depths."""

    def __init__(self, layout: str, dtensor: bool, fill: bool) -> None:
        made = {kind: sharded(layout, kind, dtensor, fill) for kind in kinds_of(layout)}
        self.state: dict[str, Any] = {"deep": {7: made}, "steps": 5 if fill else 0}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["deep"][7].keys() == self.state["deep"][7].keys()
        self.state["steps"] = state["steps"]  # sharded tensors were restored in place

    def check(self, layout: str, dtensor: bool) -> None:
        """Compare with tensors made anew."""
        for kind, found in self.state["deep"][7].items():
            wanted = sharded(layout, kind, dtensor, fill=True)
            for one, other in zip(locals_of(found), locals_of(wanted), strict=True):
                assert torch.equal(one, other)
        assert self.state["steps"] == 5


def kinds_of(layout: str) -> list[str]:
    """Name the kinds of tensors for a sharding: column shards have two dimensions."""
    columns = layout in ("columns", "three")
    return [kind for kind, (_, two) in KINDS.items() if two or not columns]


def locals_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return list(value.to_local().local_shards())


def save(root: str, layouts: list[str], dtensor: bool) -> None:
    for layout in layouts:
        save_one(Path(root) / layout, layout, dtensor)


def save_one(path: Path, layout: str, dtensor: bool) -> None:
    dcp.save(
        {"buffers": Buffers(layout, dtensor, fill=True)},
        planner=SavePlanner(chunk_bytes=200),
        storage_writer=StorageWriter(path),
    )
    chunks = chunks_of(path, "block")
    kinds = kinds_of(layout)
    sizes = {"half": 2 * 66, "flags": 66, "ids": 8 * 11}
    assert sum(chunk["length"] for _, chunk in chunks) == sum(sizes[kind] for kind in kinds)
    assert {chunk["path"][-1] for _, chunk in chunks} == set(kinds)
    assert max(chunk["length"] for _, chunk in chunks) <= 40
    manifest = json.loads((path / "manifest.json").read_bytes())["manifest"]
    (state,) = [c for c in index_of_all(path) if c["kind"] == "state"]
    dense = sum(chunk["length"] for _, chunk in chunks) + state["length"]
    assert manifest["dense_bytes"] == dense


def index_of_all(path: Path) -> list[dict[str, Any]]:
    return [chunk for file in sorted(path.glob("rank-*.bin")) for chunk in index_of(file)[1]]


def load(root: str, layouts: list[str], dtensor: bool) -> None:
    """Load what was saved in each layout into these."""
    for saved, layout in itertools.product(LAYOUTS, layouts):
        buffers = Buffers(layout, dtensor, fill=False)
        skipped = set(kinds_of(layout)) - set(kinds_of(saved))
        for kind in skipped:
            del buffers.state["deep"][7][kind]
        dcp.load(
            {"buffers": buffers},
            planner=LoadPlanner(),
            storage_reader=StorageReader(Path(root) / saved),
        )
        buffers.check(layout, dtensor)


@pytest.mark.parametrize("dtensor", [False, True])
def test_any_sharding_into_any_other(workers: Workers, tmp_path: Path, dtensor: bool) -> None:
    of_ranks = {1: ["one"], 2: ["rows", "columns", "several", "one_of_two"], 3: ["three"]}
    for ranks, layouts in of_ranks.items():
        workers(ranks).run(save, root=str(tmp_path), layouts=layouts, dtensor=dtensor)
    for ranks, layouts in of_ranks.items():
        workers(ranks).run(load, root=str(tmp_path), layouts=layouts, dtensor=not dtensor)


def missing(root: str) -> None:
    buffers = Buffers("rows", dtensor=False, fill=False)
    state = buffers.state["deep"][7]
    for name, kind, match in (
        ("more", "ids", r"buffers\.deep\.7\.more is not in rows"),
        ("ids", "half", r"int64 \[11\] in rows, and float16"),
    ):
        state[name] = sharded("rows", kind, False, fill=False)
        with pytest.raises(CheckpointException, match=match):
            dcp.load(
                {"buffers": buffers},
                planner=LoadPlanner(),
                storage_reader=StorageReader(Path(root) / "rows"),
            )
        assert not any(t.any() for value in state.values() for t in locals_of(value))
        assert buffers.state["steps"] == 0
        del state[name]


def test_a_misfit_changes_nothing(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(save, root=str(tmp_path), layouts=["rows"], dtensor=False)
    workers(2).run(missing, root=str(tmp_path))


SPEC = random_spec(11)


def with_a_model(root: str) -> None:
    """Save buffers beside a model's tables, in every checkpoint and wholly; restore both."""
    job = Job.build(SPEC, uniform_plan(SPEC, "row_wise", 2))
    buffers = Buffers("several", dtensor=False, fill=True)
    state: dict[str, Any] = {"optimizer": job.optimizer, "buffers": buffers}
    with Checkpointer(root, model=job.model, state=state) as saver:
        for kind in ("full", "differential"):
            job.train()
            report = saver.save()
            assert report is not None
            assert report.kind == kind
            chunks = chunks_of(Path(root) / report.id, "block")
            whole = [chunk.get("difference", {"raw": chunk["length"]}) for _, chunk in chunks]
            assert sum(each["raw"] for each in whole) == 3 * 66 + 88
    again = Job.build(SPEC, uniform_plan(SPEC, "table_wise", 2), seed=5)
    for layout in ("rows", "one_of_two"):
        empty = Buffers(layout, dtensor=False, fill=False)
        state = {"optimizer": again.optimizer, "buffers": empty}
        with Checkpointer(root, model=again.model, state=state) as saver:
            saver.restore()
        empty.check(layout, dtensor=False)


def test_beside_a_model(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(with_a_model, root=str(tmp_path))


def unsupported(root: str) -> None:
    lone = {"state": {"c.t.weight": {"t.momentum1": sharded("rows", "half", False, True)}}}
    with pytest.raises(CheckpointException, match="save the model's state dict with it"):
        dcp.save(lone, planner=SavePlanner(), storage_writer=StorageWriter(Path(root) / "lone"))


def test_what_is_refused(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(unsupported, root=str(tmp_path))
