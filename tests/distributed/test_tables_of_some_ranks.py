"""Save and restore tables that only some ranks have, as embedding towers are those of one node."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.shard import shard
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
)
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.partial_lives import end_as_killed
from tests.distributed.small_job import Workers
from torchrec_checknrun import Checkpointer, Images, PartialRecovery, load_tables
from torchrec_checknrun.dcp import SavePlanner, StorageWriter

ROWS, WIDTH = {"common": 40, "left": 30, "right": 22}, 4
Values = dict[str, dict[str, list[Any]]]
OF_ALL = [0, 1]


class Towers(nn.Module):
    """Collections, each sharded among ranks of its own; a rank has those that it is named for.

    Args:
        ranks: by the collection's name.
    """

    def __init__(self, ranks: dict[str, list[int]], seed: int) -> None:
        super().__init__()
        groups = [dist.new_group(which) for which in ranks.values()]
        torch.manual_seed(seed)
        for (name, which), group in zip(ranks.items(), groups, strict=True):
            if dist.get_rank() in which:
                setattr(self, name, _sharded(name, which, group))
        self.steps = 0

    def train(self, *_: object) -> Towers:
        """Look up rows in each collection and update them."""
        for name, bags in self.named_children():
            generator = torch.Generator().manual_seed(self.steps * 64 + dist.get_rank())
            ids = torch.randint(0, ROWS[name], (6,), generator=generator)
            lengths = torch.ones(6, dtype=torch.int64)
            found = bags(KeyedJaggedTensor(keys=[f"f_{name}"], values=ids, lengths=lengths))
            (found.values() + 1).square().sum().backward()
        self.steps += 1
        return self

    def content(self) -> Values:
        """Return the weights and optimizer state of this rank's rows, by table and part."""
        tensors: dict[str, Any] = dict(self.state_dict())
        for bags in self.children():
            optimizer: Any = bags.fused_optimizer
            state = optimizer.state_dict()["state"]
            tensors |= {k: v for of in state.values() for k, v in of.items() if "momentum" in k}
        return {
            name: {str(s.metadata.shard_offsets): s.tensor.tolist() for s in value.local_shards()}
            for name, value in tensors.items()
            if isinstance(value, ShardedTensor)
        }


def _sharded(name: str, ranks: list[int], group: Any) -> nn.Module:
    table = EmbeddingBagConfig(
        name=f"t_{name}",
        num_embeddings=ROWS[name],
        embedding_dim=WIDTH,
        feature_names=[f"f_{name}"],
    )
    sharder, world = EmbeddingBagCollectionSharder(), len(ranks)
    bags = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.Adagrad, bags.parameters(), {"lr": 0.1})
    kinds = {table.name: row_wise(compute_kernel="fused")}
    plan = construct_module_sharding_plan(bags, kinds, sharder, world, world, device_type="cpu")
    for part in getattr(plan[table.name].sharding_spec, "shards", []):
        part.placement._rank = ranks[part.placement.rank()]  # placements are by global ranks
    module: nn.Module = shard(
        bags, plan, ShardingEnv.from_process_group(group), torch.device("cpu"), sharder
    )
    return module


@contextmanager
def training(
    root: str, ranks: dict[str, list[int]], seed: int, **options: Any
) -> Iterator[tuple[Towers, Checkpointer]]:
    model = Towers(ranks, seed)
    with Checkpointer(root, model=model, retention=None, **options) as saver:
        yield model, saver


def save(root: str, ranks: dict[str, list[int]]) -> Values:
    with training(root, ranks, seed=0) as (model, saver):
        kinds = []
        for _ in range(3):
            model.train()
            saver.step()
            report = saver.save()
            assert report is not None
            kinds.append(report.kind)
        assert kinds == ["full", "differential", "differential"]
        return model.content()


def restore(root: str, ranks: dict[str, list[int]]) -> Values:
    with training(root, ranks, seed=5) as (model, saver):
        saver.restore()
        return model.content()


def whole(of_ranks: list[Values]) -> Values:
    found: Values = {}
    for of_rank in of_ranks:
        for name, parts in of_rank.items():
            found.setdefault(name, {}).update(parts)
    return found


def rows(values: Values) -> dict[str, list[Any]]:
    """Put the parts of each tensor together."""

    def first_row(offsets: str) -> int:
        return int(offsets.strip("[]").split(",")[0])

    return {
        name: [row for place in sorted(parts, key=first_row) for row in parts[place]]
        for name, parts in values.items()
    }


APART = {"common": OF_ALL, "left": [0], "right": [1]}


@pytest.mark.parametrize(
    "ranks", [APART, {"common": OF_ALL, "left": [1], "right": [0]}, dict.fromkeys(APART, OF_ALL)]
)
def test_each_comes_back(workers: Workers, tmp_path: Path, ranks: dict[str, list[int]]) -> None:
    """Give the rows to whatever ranks have the table then."""
    root = str(tmp_path / "root")
    saved = workers(2).run(save, root=root, ranks=APART)
    tables = [{t for t in ROWS for name in of_rank if f"t_{t}." in name} for of_rank in saved]
    assert tables == [{"common", "left"}, {"common", "right"}]
    restored = workers(2).run(restore, root=root, ranks=ranks)
    assert rows(whole(restored)) == rows(whole(saved))
    (alone,) = workers(1).run(restore, root=root, ranks={name: [0] for name in APART})
    assert rows(alone) == rows(whole(saved))


def survive(root: str, memory: str, lost: bool) -> list[Any]:
    """Die after steps that no checkpoint has; rank 1's image may be gone."""
    options: dict[str, Any] = {
        "survive": Images(folder=memory),
        "partial": PartialRecovery(max_pls=1.0, total_steps=100),
    }
    model = Towers(APART, 0)
    saver = Checkpointer(root, model=model, **options)
    saver.restore()
    model.train()
    saver.step()
    saver.save()
    saved = model.content()
    model.train()
    saver.step()
    done = model.content()
    end_as_killed(saver, memory, 1 if lost else None)
    with training(root, APART, 5, **options) as (model, saver):
        report = saver.restore()
        assert report is not None
        restored = model.content()
        model.steps = 2
        model.train()
        saver.step()
        saver.save()
    return [restored == done, restored == saved, report.source, model.content()]


@pytest.mark.parametrize("lost", [False, True])
def test_images_hold_what_each_rank_has(workers: Workers, tmp_path: Path, lost: bool) -> None:
    """Go on from images; where one is lost, its rank's rows are the checkpoint's."""
    root = str(tmp_path / "root")
    with tempfile.TemporaryDirectory(prefix="checknrun-test-", dir="/dev/shm") as memory:
        found = workers(2).run(survive, root=root, memory=memory, lost=lost)
    source = "both" if lost else "images"
    assert [each[:3] for each in found] == [[True, False, source], [not lost, lost, source]]
    restored = workers(2).run(restore, root=root, ranks=APART)
    assert restored == [each[3] for each in found]


def by_hand(root: str) -> None:
    """Mark, load and choose the rows of a table on ranks that don't have it."""
    with training(root, APART, seed=7) as (model, saver):
        mine = model.content()
        load_tables(root, model, tables=["t_left"])
        now = model.content()
        changed = {name for name in now if now[name] != mine[name]}
        assert len(changed) == (1 if dist.get_rank() == 0 else 0)
        saver._target.tracked.mark("right.embedding_bags.t_right", [3])
        with pytest.raises(KeyError, match="the model has"):
            saver._target.tracked.mark("right.embedding_bags.t_none", [3])


def test_rows_by_hand(workers: Workers, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    workers(2).run(save, root=root, ranks=APART)
    workers(2).run(by_hand, root=root)


def direct(root: str) -> str:
    model = Towers(APART, 0)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(model.state_dict(), planner=SavePlanner(), storage_writer=StorageWriter(root))
    return str(caught.value)


def test_dcp_alone_refuses_them(workers: Workers, tmp_path: Path) -> None:
    for told in workers(2).run(direct, root=str(tmp_path / "root")):
        assert "'left.embedding_bags.t_left'" in told
        assert "make a Checkpointer" in told
