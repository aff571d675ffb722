"""Mark rows written through one tracker of a model in all of the model's trackers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from tests.distributed.damage import damage
from tests.distributed.layouts import Layout, build
from tests.distributed.models import CollectionSpec, ModelSpec, TableSpec
from tests.unit.tracked_model import (
    DIM,
    ROWS,
    SPLIT,
    TALL,
    WIDE,
    make_model,
    modified,
    only,
    table,
    train,
)
from torchrec_checknrun import Checkpointer, Consecutive, load_tables
from torchrec_checknrun.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from torchrec_checknrun.errors import IncompatibleCheckpoint, ModelPartlyRestored
from torchrec_checknrun.tracking import Consumer, TrackedModel, track

pytestmark = pytest.mark.usefixtures("group")

EVERYTHING = {name: list(range(ROWS)) for name in ("wide", "tall", "split")}


def checkpointer(root: Path, model: nn.Module) -> Checkpointer:
    return Checkpointer(root, model=model, policy=Consecutive(), retention=None, chunk_bytes=700)


@contextmanager
def others(model: Any) -> Iterator[list[TrackedModel]]:
    """Return trackers of the whole model and of its collection alone, without any mark."""
    with ExitStack() as stack:
        found = [track(model), track(model.module.ebc)]
        for tracked in found:
            stack.callback(tracked.close)
            tracked.clear(Consumer.EVERY)
        yield found


def marked(tracked: TrackedModel) -> dict[str, list[int]]:
    """Return the rows marked for every consumer, by the last part of the tables' names."""
    rows: list[dict[str, list[int]]] = []
    for consumer in (Consumer.LAST, Consumer.BASELINE, Consumer.USER):
        found = tracked.modified_rows(consumer)
        rows.append({name.split(".")[-1]: ids.tolist() for name, ids in found.items() if len(ids)})
    assert rows[0] == rows[1] == rows[2]
    return rows[0]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: table(model, name) for name in (WIDE, TALL, SPLIT)}


def restored(root: Path) -> dict[str, torch.Tensor]:
    """Return the tables that a new process restores."""
    fresh = make_model()
    with checkpointer(root, fresh) as saver:
        assert saver.restore() is not None
    return weights(fresh)


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, weight in found.items():
        assert torch.equal(weight, wanted[name]), name


def save_two(root: Path, model: nn.Module) -> list[str]:
    """Save a full and a differential checkpoint; return their ids."""
    with checkpointer(root, model) as saver:
        for i in range(2):
            train(model, a=[[i, 7]], shared=[[i + 2]], b=[[9]])
            saver.step()
            saver.save()
    return sorted(path.name for path in root.glob("seq-*"))


class TestWrittenRows:
    def test_the_next_checkpoint_holds_them(self, model: nn.Module, tmp_path: Path) -> None:
        with checkpointer(tmp_path, model) as saver:
            train(model, a=[[1]])
            saver.step()
            saver.save()
            publisher = track(model)
            only(publisher, WIDE).write_rows([3], torch.full((1, DIM), 7.0))
            saver.steps += 1
            report = saver.save()
            assert report is not None
            assert (report.kind, report.modified_rows) == ("differential", 1)
            publisher.close()
        assert_equal(restored(tmp_path), weights(model))

    def test_of_the_same_shard_only(self, model: nn.Module, tracked: TrackedModel) -> None:
        """Write to ``split``, which has two shards in one kernel."""
        stranger = track(make_model())
        with others(model) as rest:
            first, second = (s for s in tracked.shards if s.table == SPLIT)
            second.write_rows([4, 2], torch.ones(2, second.rectangle.cols))
            for each in (tracked, *rest):
                assert marked(each) == {"split": [2, 4]}
                (other,) = (s for s in each.shards if s.rectangle == first.rectangle)
                assert not len(other.modified_rows())
        assert marked(stranger) == {}
        stranger.close()

    def test_through_a_tracker_that_is_closed(self, model: nn.Module) -> None:
        closed = track(model)
        closed.close()
        with others(model) as rest:
            only(closed, WIDE).write_rows([3], torch.ones(1, DIM))
            assert [marked(each) for each in rest] == [{"wide": [3]}] * 2

    def test_refused_rows_are_nobodys(self, model: nn.Module, tracked: TrackedModel) -> None:
        with others(model) as rest:
            with pytest.raises(IndexError):
                only(tracked, WIDE).write_rows([3, ROWS], torch.ones(2, DIM))
            assert [marked(each) for each in (tracked, *rest)] == [{}] * 3


class TestRestores:
    def test_of_another_root(self, model: nn.Module, tmp_path: Path) -> None:
        roots = tmp_path / "a", tmp_path / "b"
        with checkpointer(roots[0], model) as a, checkpointer(roots[1], model) as b:
            ids = []
            for i in range(2):
                train(model, a=[[i, 7]], shared=[[i + 2]])
                for saver in (a, b):
                    saver.step()
                    report = saver.save()
                    assert report is not None
                    ids.append(report.id)
            assert a.restore(ids[0]) is not None
            report = b.save()  # of the same step, and nevertheless different
            assert report is not None
            assert report.modified_rows == 3 * ROWS
            assert_equal(restored(roots[1]), weights(model))
            train(model, a=[[20]])
            report = a.save()
            assert report is not None
            assert (report.kind, report.modified_rows) == ("differential", 1)

    @pytest.mark.parametrize("how", ["own tracker", "state dicts", "objects"])
    def test_dcp_load_marks_in_all_trackers(
        self, model: nn.Module, tmp_path: Path, how: str
    ) -> None:
        save(tmp_path / "one", model)
        train(model, a=[[1]], shared=[[2]])
        stranger = track(make_model())
        own = track(model) if how == "own tracker" else None
        state = {} if own else objects(model)
        if how == "state dicts":
            state = {name: stateful.state_dict() for name, stateful in state.items()}
        with others(model) as rest:
            load(tmp_path / "one", state, LoadPlanner(own))
            assert [marked(each) for each in rest] == [EVERYTHING] * 2
        assert marked(stranger) == {}
        if own is not None:
            assert modified(own, Consumer.LAST) == {}
            assert modified(own) == EVERYTHING
            own.close()
        stranger.close()

    def test_of_data_parallel_tables(self, tmp_path: Path) -> None:
        """Write to data-parallel tables, plain tensors in a state dict."""
        tables = (TableSpec("t0", ROWS, DIM, ("f0",)),)
        spec = ModelSpec((CollectionSpec("c", tables),)).to_json()
        job = build(spec, asdict(Layout({"c.t0": "data_parallel"}, 1)))
        state = {"model": job.model, "optimizer": job.optimizer}
        job.train()
        writer = StorageWriter(tmp_path / "one")
        dcp.save(state, planner=SavePlanner(), storage_writer=writer)
        tracked = track(job.model)
        load(tmp_path / "one", state, LoadPlanner())
        assert marked(tracked) == {"t0": EVERYTHING["wide"]}
        tracked.close()

    def test_between_direct_saves(self, model: nn.Module, tmp_path: Path) -> None:
        tracked = track(model)
        for name in ("one", "two"):
            train(model, a=[[1, 5]], shared=[[2]])
            save(tmp_path / name, model, tracked)
        load(tmp_path / "one", objects(model), LoadPlanner())
        train(model, a=[[20]])
        save(tmp_path / "three", model, tracked)
        fresh = make_model()
        other = track(fresh)
        load(tmp_path / "three", {}, LoadPlanner(other))
        assert_equal(weights(fresh), weights(model))
        for each in (tracked, other):
            each.close()

    def test_of_tables_that_moved(self, model: nn.Module, tmp_path: Path) -> None:
        """Write after tables moved: a tracker finds their memory again only when asked for rows."""
        save(tmp_path / "one", model)
        with others(model) as rest:
            for each in rest:
                for shard in each.shards:  # as if the shard had been elsewhere
                    shard.local.weight = shard.local.weight.clone()
                    shard.local.optimizer = {}
            load(tmp_path / "one", objects(model), LoadPlanner())
            assert [marked(each) for each in rest] == [EVERYTHING] * 2

    def test_that_change_nothing(self, model: nn.Module, tmp_path: Path) -> None:
        """Mark nothing after a read without a restore, or after a refusal."""
        save(tmp_path / "one", model)
        # Pass state dicts: given the objects, dcp.load would call load_state_dict, which writes.
        states = {name: value.state_dict() for name, value in objects(model).items()}
        with others(model) as rest:
            load(tmp_path / "one", states, LoadPlanner(dry_run=True))
            with pytest.raises(CheckpointException, match="has no state 'other'"):
                load(tmp_path / "one", {**objects(model), "other": {"a": 1}}, LoadPlanner())
            assert [marked(each) for each in rest] == [{}] * 2

    def test_that_fail_half_way(self, model: nn.Module, tmp_path: Path) -> None:
        _, second = save_two(tmp_path, model)
        damage(tmp_path / second, "last_rows")
        with others(model) as rest, checkpointer(tmp_path, model) as saver:
            with pytest.raises(ModelPartlyRestored):
                saver.restore(second)
            assert [marked(each) for each in rest] == [EVERYTHING] * 2


def objects(model: Any) -> dict[str, Any]:
    return {"model": model, "optimizer": model.fused_optimizer}


def save(path: Path, model: nn.Module, tracked: TrackedModel | None = None) -> None:
    dcp.save(objects(model), planner=SavePlanner(tracked), storage_writer=StorageWriter(path))


def load(path: Path, state: dict[str, Any], planner: LoadPlanner) -> None:
    dcp.load(state, planner=planner, storage_reader=StorageReader(path))


class TestLoadedTables:
    @pytest.mark.parametrize("part", ["whole", "collection"])
    def test_under_any_name(self, model: Any, tmp_path: Path, part: str) -> None:
        """Restore under shorter names, as tables have in a part of the model."""
        save_two(tmp_path, model)
        into, name = (model, WIDE) if part == "whole" else (model.module.ebc, "embedding_bags.wide")
        with others(model) as rest:
            load_tables(tmp_path, into, [name], map={WIDE: name})
            assert [marked(each) for each in rest] == [{"wide": EVERYTHING["wide"]}] * 2

    def test_of_which_a_part_came(self, model: nn.Module, tmp_path: Path) -> None:
        first, _ = save_two(tmp_path, model)
        damage(tmp_path / first, "every_rows")
        train(model, a=[[1]])
        before = table(model, WIDE)
        with others(model) as rest:
            with pytest.raises(ModelPartlyRestored):
                load_tables(tmp_path, model, ["wide"])
            assert not torch.equal(table(model, WIDE), before)
            assert [marked(each) for each in rest] == [{"wide": EVERYTHING["wide"]}] * 2

    def test_that_are_refused(self, model: nn.Module, tmp_path: Path) -> None:
        save_two(tmp_path, model)
        with others(model) as rest:
            with pytest.raises(IncompatibleCheckpoint):
                load_tables(tmp_path, model, ["wide"], map={"wide": "none"})
            assert [marked(each) for each in rest] == [{}] * 2
