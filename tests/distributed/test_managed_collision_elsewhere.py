"""Managed collisions move to other ranks, or into modules that map ids differently."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.distributed import references
from tests.distributed.collisions import (
    MAPS,
    ROWS,
    CollisionZoo,
    Options,
    Spec,
    build,
    checkpointer,
    fill,
    refused,
    saved,
)
from tests.distributed.states import gather, local_bytes
from tests.distributed.worker_pool import WorkerPool
from tests.distributed.zoo import changed_rows, stored_rows, table_arrays
from tests.examples import some_of
from torchrec_checknrun import errors
from torchrec_checknrun.dcp import LoadPlanner, StorageReader

Workers = Callable[[int], WorkerPool]


def on_fewer_ranks(root: str, spec: Options, name: str, ranks: int) -> None:
    """Restore on fewer ranks: raw ids keep their rows, recent ones too, and training continues."""
    zoo = build(Spec(**spec), seed=7)
    with checkpointer(f"{root}/root", zoo) as saver:
        report = saver.restore(name)
        assert report is not None
        wanted = json.loads((Path(root) / f"{name}.json").read_text())
        found = zoo.mapping()
        assert found == {t: {int(raw): row for raw, row in m.items()} for t, m in wanted.items()}
        assert sum(map(len, found.values())) > 40
        for module in zoo.modules.values():
            segments = [int(n) for n in module._output_segments_tensor if n >= 0]
            assert len(segments) == dist.get_world_size() + 1
        tables = {k: v for k, v in references.load(Path(root) / f"{name}.npz").items() if "t." in k}
        assert {k: v.tobytes() for k, v in gather(zoo).items() if "t." in k} == {
            k: v.tobytes() for k, v in tables.items()
        }
        for table, ids in found.items():  # as a forward pass maps them, on the rank they go to
            block = -(-zoo.modules[table].input_size() // dist.get_world_size())
            own = sorted(raw for raw in ids if raw // block == dist.get_rank())
            jagged = JaggedTensor(values=torch.tensor(own), lengths=torch.tensor([len(own)]))
            mapped = zoo.modules[table].remap({table: jagged})[table].values().tolist()
            assert mapped == [ids[raw] for raw in own]
        if name != "untracked":
            check_histories(zoo, Path(root) / name, ranks)
        before = table_arrays(zoo)
        zoo.train(4)
        second = saver.save()
        assert second is not None
        assert second.kind == "differential"
        after = table_arrays(zoo)
        stored, wrong = stored_rows(Path(root) / "root" / second.id, after)
        assert stored >= changed_rows(before, after)
        assert not wrong
        mapping = zoo.mapping()
        assert mapping != found
    again = build(Spec(**spec), seed=8)
    with checkpointer(f"{root}/root", again) as saver:
        saver.restore(second.id)
        assert again.mapping() == mapping


def check_histories(zoo: CollisionZoo, path: Path, ranks: int) -> None:
    own = range(ranks)[dist.get_rank() :: dist.get_world_size()]
    if dist.get_world_size() > 1:
        share = ranks // dist.get_world_size()
        own = range(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    parts = [json.loads(path.with_suffix(f".{rank}.json").read_text()) for rank in own]
    for table, history in zoo.history().items():
        seen = [row for part in parts for row in part[table]["seen"]]
        assert sorted(history["seen"]) == sorted(seen)
        assert seen
        assert history["size"] == sum(part[table]["size"] for part in parts)
        assert {history["since"]} == {part[table]["since"] for part in parts}


@pytest.mark.parametrize(("ranks", "fewer"), some_of([(2, 1), (4, 2), (4, 1), (3, 1)], 0, 1))
def test_fewer_ranks(workers: Workers, tmp_path: Path, ranks: int, fewer: int) -> None:
    name = workers(ranks).run(saved, root=str(tmp_path), spec={})[0]
    workers(fewer).run(on_fewer_ranks, root=str(tmp_path), spec={}, name=name, ranks=ranks)


def test_fewer_ranks_for_what_was_saved_without_a_tracker(workers: Workers, tmp_path: Path) -> None:
    name = workers(2).run(saved, root=str(tmp_path), spec={}, tracked=False)[0]
    workers(1).run(on_fewer_ranks, root=str(tmp_path), spec={}, name=name, ranks=2)


@pytest.mark.parametrize(("ranks", "other"), some_of([(1, 2), (2, 4), (3, 2), (2, 3)], 0, 2))
def test_ranks_that_ids_would_have_to_move_between(
    workers: Workers, tmp_path: Path, ranks: int, other: int
) -> None:
    name = workers(ranks).run(saved, root=str(tmp_path), spec={})[0]
    match = rf"t\d: raw ids belong to ranks.* restore on {ranks} ranks, or on one"
    workers(other).run(refused, root=str(tmp_path), spec={}, name=name, match=match)


def test_ids_that_ranks_would_not_get(workers: Workers, tmp_path: Path) -> None:
    """Refuse 241 ids: rows of 4 ranks divide over 2, but the ids of 4 ranks don't."""
    spec = {"raw_ids": 242}
    name = workers(4).run(saved, root=str(tmp_path), spec=spec)[0]
    match = "raw ids belong to ranks"
    workers(2).run(refused, root=str(tmp_path), spec=spec, name=name, match=match)
    workers(1).run(on_fewer_ranks, root=str(tmp_path), spec=spec, name=name, ranks=4)


def refused_by_dcp(root: str, name: str) -> None:
    zoo = build(Spec(), seed=7)
    before = local_bytes(zoo)
    with pytest.raises(CheckpointException, match=r"pass tracked=track\(model\)"):
        dcp.load(
            {"model": zoo.model, "optimizer": zoo.optimizer},
            planner=LoadPlanner(),
            storage_reader=StorageReader(Path(root) / "root" / name),
        )
    assert local_bytes(zoo) == before


def test_another_number_of_ranks_needs_a_tracker(workers: Workers, tmp_path: Path) -> None:
    name = workers(2).run(saved, root=str(tmp_path), spec={})[0]
    workers(1).run(refused_by_dcp, root=str(tmp_path), name=name)


@pytest.mark.parametrize(
    ("saved_with", "spec", "match"),
    some_of(
        [
            ({"policy": "lfu"}, {}, r"t0\._mch_last_access_iter is not in seq-.*strict=False"),
            ({"raw_ids": 480}, {}, r"t0 had input_hash_size 480 in seq-.* and has 240 now"),
            ({}, {"grown": 4}, r"_mch_counts is int64 \[48\] in seq-.* int64 \[52\] in the model"),
        ],
        *(0, 1),
    ),
)
def test_another_module(
    workers: Workers, tmp_path: Path, saved_with: Options, spec: Options, match: str
) -> None:
    name = workers(2).run(saved, root=str(tmp_path), spec=saved_with)[0]
    workers(2).run(refused, root=str(tmp_path), spec=spec, name=name, match=match)


def test_a_renamed_table(workers: Workers, tmp_path: Path) -> None:
    """Restore the ids of a renamed table, kept under its name."""
    name = workers(1).run(saved, root=str(tmp_path), spec={})[0]
    renamed: Options = {"map": {"t0": "t0x", "t1": "t1x"}, "strict": False}
    match = r"table '.*t0' can't be restored into '.*t0x'"
    where: Options = {"root": str(tmp_path), "spec": {"suffix": "x"}}
    workers(1).run(refused, **where, name=name, match=match, **renamed)


def not_strict(root: str, spec: Options, name: str) -> list[str]:
    zoo = build(Spec(**spec), seed=7)
    last_access = zoo.modules["t0"]._mch_last_access_iter.fill_(5)
    with checkpointer(f"{root}/root", zoo) as saver:
        report = saver.restore(name, strict=False)
        assert report is not None
        wanted = json.loads((Path(root) / f"{name}.json").read_text())
        assert zoo.mapping() == {
            t: {int(raw): row for raw, row in rows.items()} for t, rows in wanted.items()
        }
        assert last_access.tolist() == [5] * len(last_access)
        assert not any(history["seen"] for history in zoo.history().values())
        zoo.train(4)
        saver.save()
    return list(report.skipped)


def test_what_is_skipped(workers: Workers, tmp_path: Path) -> None:
    name = workers(2).run(saved, root=str(tmp_path), spec={"policy": "lfu"})[0]
    skipped = workers(2).run(not_strict, root=str(tmp_path), spec={}, name=name)[0]
    buffers = [f"state model.{MAPS}.{table}._mch_last_access_iter" for table in ROWS]
    assert skipped == [f"{buffer} is not in {name}" for buffer in buffers]
    name = workers(2).run(saved, root=str(tmp_path), spec={})[0]
    skipped = workers(2).run(not_lru, root=str(tmp_path), name=name)[0]
    assert skipped == [f"{buffer}: only in the checkpoint" for buffer in buffers]


def not_lru(root: str, name: str) -> list[str]:
    zoo = build(Spec(policy="lfu"), seed=7)
    with checkpointer(f"{root}/root", zoo) as saver:
        report = saver.restore(name, strict=False)
        assert report is not None
        return list(report.skipped)


def other_interval(root: str, name: str) -> None:
    """Drop the seen ids under another interval, which starts over."""
    zoo = build(Spec(interval=2), seed=7)
    with checkpointer(f"{root}/root", zoo) as saver:
        saver.restore(name)
        before = zoo.mapping()
        zoo.train(1)
        assert zoo.mapping() == before
        zoo.train(1)
        assert zoo.mapping() != before


def test_another_interval(workers: Workers, tmp_path: Path) -> None:
    name = workers(2).run(saved, root=str(tmp_path), spec={})[0]
    workers(2).run(other_interval, root=str(tmp_path), name=name)


def hashed(root: str, spec: Options) -> str:
    zoo = build(Spec(**spec))
    fill(zoo, 3)
    with checkpointer(f"{root}/root", zoo) as saver:
        report = saver.save()
        assert report is not None
    state, mapping = gather(zoo), zoo.mapping()
    if dist.get_rank() == 0:
        references.store(Path(root) / f"{report.id}.npz", state)
        (Path(root) / f"{report.id}.json").write_text(json.dumps(mapping))
    return report.id


def hashed_again(root: str, spec: Options, name: str) -> None:
    zoo = build(Spec(**spec), seed=7)
    fill(zoo, 5)
    with checkpointer(f"{root}/root", zoo) as saver:
        saver.restore(name)
        wanted = json.loads((Path(root) / f"{name}.json").read_text())
        found = zoo.mapping()
        assert found == {t: {int(raw): row for raw, row in m.items()} for t, m in wanted.items()}
        assert all(len(rows) >= ROWS[table] // 2 for table, rows in found.items())
        copy = references.load(Path(root) / f"{name}.npz")
        assert references.differences(gather(zoo), copy, None) == []
        if not spec.get("evicts"):
            zoo.model.eval()
            with torch.no_grad():
                zoo.model(zoo.batch())
        saver.save()


@pytest.mark.parametrize("evicts", some_of([False, True], 1))
def test_hashed_ids_on_any_number_of_ranks(workers: Workers, tmp_path: Path, evicts: bool) -> None:
    options: Options = {"root": str(tmp_path), "spec": {"hashed": True, "evicts": evicts}}
    name = workers(2).run(hashed, **options)[0]
    for ranks in (2, 4, 1):
        workers(ranks).run(hashed_again, **options, name=name)


def hashed_otherwise(root: str, name: str) -> None:
    zoo = build(Spec(hashed=True, buckets=8), seed=7)
    before = local_bytes(zoo)
    with checkpointer(f"{root}/root", zoo) as saver:
        with pytest.raises(errors.IncompatibleCheckpoint, match=r"t0 had buckets 4 .* has 8 now"):
            saver.restore(name)
        assert local_bytes(zoo) == before


def test_ids_hashed_otherwise(workers: Workers, tmp_path: Path) -> None:
    name = workers(2).run(hashed, root=str(tmp_path), spec={"hashed": True})[0]
    workers(2).run(hashed_otherwise, root=str(tmp_path), name=name)
