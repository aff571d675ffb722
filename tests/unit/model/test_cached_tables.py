"""Flush a GPU cache in front of a table's memory before reading, and purge the cache after writing.

The kernels are real ones on a CPU with a simulated cache: cached rows are right, and the memory
behind them is not, until ``flush``; ``purge`` forgets cached rows, written back or not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import nn

from tests.unit.tracked_model import TALL, WIDE, make_model, train
from torchrec_checknrun import Checkpointer, Consecutive, load_tables
from torchrec_checknrun.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from torchrec_checknrun.model.kernels import find_kernels
from torchrec_checknrun.tracking import TrackedModel, track

pytestmark = pytest.mark.usefixtures("group")


class Cache:
    """A simulated cache of one kernel's tables, which replaces its ``flush`` and ``purge``."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._rows: list[dict[int, torch.Tensor]] = []
        self.calls: list[str] = []
        module.flush, module.purge = self.flush, self.purge
        self.fill()

    def fill(self) -> None:
        """Move some rows of each table into the cache."""
        self._rows = []
        for weight in self._module.split_embedding_weights():
            rows = range(1, len(weight), 3)
            self._rows.append({row: weight[row].clone() for row in rows})
            # As FBGEMM writes, without changing the version counter
            weight.data[list(rows)] = torch.nan
        self.calls = []

    def flush(self) -> None:
        self.calls.append("flush")
        for weight, rows in zip(self._module.split_embedding_weights(), self._rows, strict=True):
            for row, value in rows.items():
                weight.data[row] = value

    def purge(self) -> None:
        self.calls.append("purge")
        self._rows = [{} for _ in self._rows]


class Cached:
    """A model whose kernels all have a cache."""

    def __init__(self) -> None:
        self.model = make_model()
        self.caches: list[Cache] = []

    def cover(self) -> None:
        if self.caches:
            for cache in self.caches:
                cache.fill()
        else:
            kernels, _ = find_kernels(self.model)
            self.caches = [Cache(kernel.module) for kernel in kernels]

    def what_training_sees(self) -> dict[str, torch.Tensor]:
        """Return the weights as a lookup finds them, in the cache or in memory."""
        for cache in self.caches:
            cache.flush()
        return weights(self.model)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    kernels, _ = find_kernels(model)
    shards = [shard for kernel in kernels for shard in kernel.shards]
    return {str(shard): shard.weight.clone() for shard in shards}


def trained() -> tuple[Cached, dict[str, torch.Tensor]]:
    """Return a trained model with full caches, and its true weights."""
    cached = Cached()
    train(cached.model, a=[[1, 2, 3]], shared=[[4, 5, 6, 7]], b=[[8]])
    right = weights(cached.model)
    cached.cover()
    return cached, right


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, weight in found.items():
        assert torch.equal(weight, wanted[name]), name


def shard_of(tracked: TrackedModel, name: str) -> Any:
    return next(shard for shard in tracked.shards if shard.table == name)


def test_rows_are_read_as_training_sees_them() -> None:
    cached, right = trained()
    tracked = track(cached.model)
    shard = shard_of(tracked, WIDE)
    assert torch.equal(shard.read_rows([1, 2, 4]).weight, right[str(shard.local)][[1, 2, 4]])
    cached.cover()
    encoded = shard.encode_rows([1, 4], bits=8)
    assert encoded.shape[0] == 2  # a NaN would be refused
    assert not any("purge" in cache.calls for cache in cached.caches)


def test_written_rows_win_and_the_others_stay() -> None:
    cached, right = trained()
    tracked = track(cached.model)
    shard = shard_of(tracked, TALL)
    rows, new = [1, 2], torch.full((2, 8), 5.0)
    shard.write_rows(rows, new)
    right[str(shard.local)][rows] = new
    assert_equal(cached.what_training_sees(), right)
    cache = next(cache for cache in cached.caches if "purge" in cache.calls)
    assert cache.calls.index("flush") < cache.calls.index("purge")


def test_checkpoints_hold_and_restore_what_training_sees(tmp_path: Path) -> None:
    cached, right = trained()
    with Checkpointer(tmp_path, model=cached.model, policy=Consecutive(), chunk_bytes=700) as saver:
        saver.save()
        for cache in cached.caches:
            cache.purge()  # as if evicted
        train(cached.model, a=[[1, 9]], shared=[[7, 13]])
        later = weights(cached.model)
        cached.cover()
        report = saver.save()
        assert report is not None
        assert report.kind == "differential"
        assert report.modified_fraction < 0.5
        first, second = sorted(path.name for path in tmp_path.glob("seq-*"))
        for name, wanted in ((first, right), (second, later)):
            cached.cover()
            assert saver.restore(name) is not None
            assert_equal(cached.what_training_sees(), wanted)
            for cache in cached.caches:
                assert cache.calls[-2:] == ["purge", "flush"]  # the flush is this test's own
    fresh, _ = trained()
    with Checkpointer(tmp_path, model=fresh.model) as saver:
        assert saver.restore() is not None
    assert_equal(fresh.what_training_sees(), later)


def test_dcp_save_and_load_flush_and_purge(tmp_path: Path) -> None:
    cached, right = trained()
    state = {"model": cached.model}
    saving = SavePlanner(track(cached.model))
    dcp_save(state, saving, tmp_path / "one")
    fresh, _ = trained()
    dcp_load({"model": fresh.model}, LoadPlanner(track(fresh.model)), tmp_path / "one")
    assert_equal(fresh.what_training_sees(), right)


def dcp_save(state: dict[str, Any], planner: SavePlanner, path: Path) -> None:
    torch.distributed.checkpoint.save(state, planner=planner, storage_writer=StorageWriter(path))


def dcp_load(state: dict[str, Any], planner: LoadPlanner, path: Path) -> None:
    torch.distributed.checkpoint.load(state, planner=planner, storage_reader=StorageReader(path))


def test_one_table_into_another_model(tmp_path: Path) -> None:
    cached, right = trained()
    with Checkpointer(tmp_path, model=cached.model) as saver:
        saver.save()
    fresh = Cached()
    train(fresh.model, a=[[20]], shared=[[21]])
    wanted = weights(fresh.model)
    fresh.cover()
    load_tables(tmp_path, fresh.model, ["wide"])
    wanted |= {name: weight for name, weight in right.items() if name.startswith(WIDE)}
    assert_equal(fresh.what_training_sees(), wanted)
