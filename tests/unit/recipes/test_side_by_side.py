"""Check the comparison with the peers: its trace, its bytes, and a run of it."""

import argparse
import json
import math
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from recipes.benchmarks.side_by_side import store
from recipes.benchmarks.side_by_side.limits import Limits
from recipes.benchmarks.side_by_side.model import Setting, architecture
from recipes.benchmarks.side_by_side.run import (
    COMPARED,
    FIRST,
    MORE_ROUNDS,
    WARM,
    beyond,
    limits,
    names,
    runs,
    summary,
)
from recipes.benchmarks.side_by_side.sizes import Series, Stored
from recipes.benchmarks.side_by_side.synced import synced_snapshot
from recipes.benchmarks.side_by_side.systems import (
    ASYNC,
    CASES,
    COPY,
    DCP,
    NONE,
    ON_WRITE,
    SNAPSHOT,
)
from recipes.benchmarks.side_by_side.tables import more_memory
from recipes.benchmarks.side_by_side.targets import evaluate
from recipes.benchmarks.side_by_side.trace import Trace, promised
from recipes.benchmarks.side_by_side.turns import PAIRS
from recipes.benchmarks.side_by_side.worker import memory
from tests.distributed.small_job import Workers

REPOSITORY = Path(__file__).resolve().parents[3]
ROWS = [200_000, 3, 1000, 80_000]


@pytest.mark.parametrize("start", [0, 5])
def test_the_skewed_trace_grows_as_the_paper_says_from_any_baseline(start: int) -> None:
    trace = Trace(ROWS)
    for i, found in enumerate(trace.fractions(12, start), 1):
        assert found == pytest.approx(0.26 * i**0.33, rel=0.05)
    for interval in range(start, start + 12):
        share = sum(map(len, trace.rows(interval))) / sum(ROWS)
        assert share == pytest.approx(0.26, rel=0.05)


def test_the_independent_trace() -> None:
    trace = Trace(ROWS, "independent")
    for i, found in enumerate(trace.fractions(6), 1):
        assert found == pytest.approx(1 - 0.74**i, rel=0.02)
        assert promised("independent", i) == 1 - 0.74**i


def test_the_traces_of_a_seed_are_the_same_and_their_rows_sorted() -> None:
    one, same, other = Trace(ROWS), Trace(ROWS), Trace(ROWS, seed=1)
    for rows, again, others in zip(one.rows(3), same.rows(3), other.rows(3), strict=True):
        assert rows.tolist() == again.tolist()
        assert len(rows) < 10 or rows.tolist() != others.tolist()
        assert np.all(np.diff(rows) > 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_intervals_steps_look_up_exactly_its_rows(ranks: int) -> None:
    tables = architecture(Setting(rows=20_000)).num_embeddings_per_feature
    trace = Trace(tables)
    looked_up: list[set[int]] = [set() for _ in tables]
    for rank in range(ranks):
        batches = trace.batches(2, steps=3, samples=16, rank=rank, ranks=ranks)
        assert len(batches) == 3
        for batch in batches:
            assert batch.dense_features.shape[0] == len(batch.labels) == 16 // ranks
            parts = batch.sparse_features.to_dict()
            for seen, key in zip(looked_up, batch.sparse_features.keys(), strict=True):
                seen.update(parts[key].values().tolist())
                assert parts[key].lengths().unique().numel() == 1
    assert [sorted(seen) for seen in looked_up] == [rows.tolist() for rows in trace.rows(2)]


def test_the_model_is_as_large_as_it_is_to_be() -> None:
    setting = Setting()
    tables = architecture(setting).num_embeddings_per_feature
    assert len(tables) == 26
    assert sum(tables) * setting.dim * 4 == pytest.approx(1.27e9, rel=0.01)


def _ours(folder: Path, name: str, parent: str | None, sizes: tuple[int, int, int]) -> Path:
    weights, ids, optimizer = sizes
    table = {"weight_bytes": weights, "ids_bytes": ids, "optimizer_bytes": optimizer}
    manifest = {
        "tables": {"a": table, "b": table},
        "dense_bytes": 50,
        "parent": None if parent is None else {"id": parent, "checksum": ""},
    }
    path = folder / name
    path.mkdir()
    (path / "rank-0").write_bytes(bytes(2 * sum(sizes) + 50 + 7))
    (path / "manifest.json").write_text(json.dumps({"manifest": manifest}))
    return path


def test_our_bytes_come_from_the_listing(tmp_path: Path) -> None:
    path = _ours(tmp_path, "seq-1", None, (100, 10, 20))
    found = store.split(path)
    assert (found.tables, found.optimizer, found.dense) == (220, 40, 50)
    assert found.rows == 260
    assert found.manifest == 7 + (path / "manifest.json").stat().st_size
    assert found.total == store.listed(path) == sum(p.stat().st_size for p in path.iterdir())


def test_what_keeping_one_allows_to_delete(tmp_path: Path) -> None:
    base = _ours(tmp_path, "seq-1", None, (1, 1, 1))
    first = _ours(tmp_path, "seq-2", "seq-1", (1, 1, 1))
    assert store.superseded(tmp_path) == []
    second = _ours(tmp_path, "seq-3", "seq-1", (1, 1, 1))
    assert store.superseded(tmp_path) == [first]
    (tmp_path / "seq-4").mkdir()  # not committed, and so not counted
    assert store.committed(tmp_path) == [base, first, second]
    assert store.superseded(tmp_path) == [first]
    _ours(tmp_path, "seq-5", None, (1, 1, 1))
    assert store.superseded(tmp_path) == [base, first, second]


def test_the_peers_bytes(tmp_path: Path) -> None:
    table = "model.sparse.embedding_bags.t0"
    items = {f"model.{table}.weight": 100, f"optimizer.{table}.momentum1": 30, "model.over": 5}
    dcp = tmp_path / "dcp"
    dcp.mkdir()
    places = {Index(name): SimpleNamespace(length=n) for name, n in items.items()}
    (dcp / ".metadata").write_bytes(pickle.dumps(SimpleNamespace(storage_data=places)))
    (dcp / "__0_0.distcp").write_bytes(bytes(135))
    found = store.split(dcp)
    assert (found.tables, found.optimizer, found.dense) == (100, 30, 5)
    assert found.manifest == (dcp / ".metadata").stat().st_size

    snapshot = tmp_path / "snapshot"
    (snapshot / "sharded").mkdir(parents=True)
    (snapshot / "sharded" / "w").write_bytes(bytes(100))
    (snapshot / "batched").write_bytes(bytes(35))
    part = {"tensor": {"location": "sharded/w", "byte_range": None}}
    state = {"tensor": {"location": "batched", "byte_range": [0, 30]}}
    manifest: dict[str, Any] = {
        "0/job": {"type": "dict", "keys": []},
        f"0/job/{table}.weight": {"type": "ShardedTensor", "shards": [part]},
        f"0/job/{table}.momentum1": {"type": "ShardedTensor", "shards": [state]},
        "0/job/over": {"type": "Tensor", "location": "batched", "byte_range": [30, 35]},
    }
    (snapshot / ".snapshot_metadata").write_text(json.dumps({"manifest": manifest}))
    found = store.split(snapshot)
    assert (found.tables, found.optimizer, found.dense) == (100, 30, 5)
    assert found.manifest == (snapshot / ".snapshot_metadata").stat().st_size

    plain = tmp_path / "plain"
    plain.mkdir()
    for name, size in (("tables-0", 60), ("tables-1", 40), ("optimizer-0", 30), ("dense", 5)):
        (plain / f"{name}.pt").write_bytes(bytes(size))
    assert vars(store.split(plain)) == {"tables": 100, "optimizer": 30, "dense": 5, "manifest": 0}
    assert [path.name for path in store.committed(tmp_path)] == ["dcp", "plain", "snapshot"]


@dataclass(frozen=True)
class Index:
    """An index with the attributes of DCP's keys."""

    fqn: str


def test_another_process_sees_a_checkpoint_when_it_is_committed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recipes.benchmarks.side_by_side.store", str(tmp_path / "s")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=REPOSITORY, **pipes) as watcher:
        (tmp_path / "s").mkdir()
        _ours(tmp_path / "s", "seq-1", None, (1, 1, 1))
        (tmp_path / "s" / "seq-2").mkdir()
        with pytest.raises(subprocess.TimeoutExpired):
            watcher.wait(0.5)  # waits for more until asked
        out, _ = watcher.communicate("stop\n", timeout=30)
    assert list(json.loads(out)) == ["seq-1"]


def stored_of(total: int, full: bool) -> Stored:
    return Stored(total, 0, 0, 0, total, total, full, kept=total, peak=2 * total)


def test_averages_go_from_baseline_to_baseline() -> None:
    sizes = [(100, True), (20, False), (30, False), (100, True), (20, False), (100, True)]
    row = Series("x", "skewed", [stored_of(*one) for one in sizes]).to_json()
    assert (row["cycle"], row["rows"], row["over"]) == (2, 60, "baseline to baseline")
    row = Series("x", "skewed", [stored_of(*one) for one in sizes[:4]]).to_json()
    assert (row["cycle"], row["rows"]) == (3, 50)
    row = Series("x", "skewed", [stored_of(*one) for one in sizes[:3]]).to_json()
    assert (row["cycle"], row["rows"], row["kept"], row["peak"]) == (2, 25, 100, 200)
    assert row["over"] == "2 differentials"
    row = Series("x", "skewed", [stored_of(100, True), stored_of(100, True)]).to_json()
    assert (row["cycle"], row["over"]) == (1, "full")


def a_save(label: str, **others: float) -> dict[str, Any]:
    save = {"call": 0.1, "extra": 0.2, "longest": 0.3, "listed": 1.0, "gather": 0.1}
    return {"label": label, **save, "normal": 0.1, "steps": 10, **others}


def a_result(name: str, *saves: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "saves": list(saves), "limits": [], "limit_bytes": 0, "group": "0"}


def test_a_workers_row() -> None:
    saves = [
        a_save("first", call=9),
        a_save("warm"),
        a_save("idle", call=0.5),
        a_save("warm", call=2),
    ]
    row = summary(a_result("x", *saves), 1, batch=100)
    assert [row[label]["call"] for label in ("first", "idle", "warm")] == [9, 0.5, 1.05]
    # Three later blocks of ten steps of 0.1 s, each with 0.2 s more.
    assert row["samples_per_second"] == pytest.approx(3 * 10 * 100 / 3.6)
    assert row["of_without"] == pytest.approx(3 / 3.6)
    assert row["warm"]["listed"] == 1.0
    assert summary({"name": "x", "error": "no"}, 2, 100) == {"name": "x", "error": "no", "ranks": 2}


def test_limits_are_those_of_the_run_without_checkpoints() -> None:
    found = {"limits": [{"copy": 2.0}, {"copy": 4.0}], "limit_bytes": 3e9, "trace": "skewed"}
    rows = [
        {"name": DCP, "ranks": 1, "limits": [], "trace": "skewed"},
        {"name": NONE, "ranks": 2, **found},
        {"name": NONE, "ranks": 1, **found, "trace": "independent"},
    ]
    (row,) = limits(rows)
    assert (row["ranks"], row["name"], row["seconds"]) == (2, "copy", 3.0)
    assert row["gbps"] == pytest.approx(2.0)


def test_what_limits_need_is_there_from_the_beginning(tmp_path: Path) -> None:
    def modified(interval: int) -> list[tuple[Any, torch.Tensor]]:
        rows = torch.arange(5 + 3 * (interval == 1))
        return [(SimpleNamespace(weight=torch.ones(10, 4)), rows)]

    job: Any = SimpleNamespace(
        rank=0,
        ranks=1,
        setting=SimpleNamespace(dim=4, threads=1),
        modified=modified,
        together=lambda: None,
    )
    found = Limits(job, tmp_path, 3)
    held = [found._buffer.data_ptr(), found._copy.data_ptr()]
    assert len(found._buffer) == len(found._copy) == 8
    for interval in range(3):
        assert found.gather(interval) > 0
        assert all(seconds > 0 for seconds in found.all(interval).values())
    assert [found._buffer.data_ptr(), found._copy.data_ptr()] == held
    assert list(tmp_path.iterdir()) == []


def test_memory_beyond_that_of_training_alone() -> None:
    rows: list[dict[str, Any]] = [
        {"name": DCP, "ranks": 1, "trace": "skewed", "memory": 7},
        {"name": DCP, "ranks": 2, "trace": "skewed", "memory": 5},
        {"name": NONE, "ranks": 1, "trace": "skewed", "memory": 4},
        {"name": COPY, "ranks": 1, "trace": "skewed", "error": "no"},
    ]
    beyond(rows)
    assert [row.get("memory_beyond") for row in rows] == [3, None, 0, None]
    assert [more_memory(size) for size in (3e9, 0, -1e6)] == ["3,000", "0", "none"]


def test_those_that_targets_compare_have_more_rounds_of_their_own() -> None:
    options = argparse.Namespace(ranks=[1, 2], systems=[], rounds=2, together=3)
    compared, others, first, both, independent = runs(Setting(), options)
    assert (compared.cases, compared.rounds, compared.together) == (COMPARED, 4, 5)
    assert (first.cases, first.rounds, first.together) == (FIRST, 2, 4)
    assert sorted(compared.cases + others.cases) == sorted(CASES)
    assert (both.ranks, first.cases + both.cases) == (2, names(2, []))
    assert {run.rounds for run in (others, both, independent)} == {2}
    for run in (compared, first):
        assert {name: (n - 1) * run.rounds >= WARM for name, n in run.pairs.items()} == {
            ON_WRITE: True,
            COPY: True,
        }
    assert (others.pairs, both.pairs, independent.pairs) == ({}, {}, {})
    assert independent.setting.trace == "independent"


def test_a_snapshot_is_synced_before_it_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    class Snapshot:
        @staticmethod
        def _write_snapshot_metadata(storage: Any, **_: object) -> None:
            done.append("commit")
            Path(storage.root, ".snapshot_metadata").touch()

    def fsync(file: int) -> None:
        done.append(Path(f"/proc/self/fd/{file}").resolve().name)

    monkeypatch.setitem(sys.modules, "torchsnapshot", SimpleNamespace(Snapshot=Snapshot))
    monkeypatch.setattr(os, "fsync", fsync)
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "weights").touch()
    # Called as torchsnapshot does.
    synced_snapshot.__wrapped__()._write_snapshot_metadata(
        snapshot_metadata=None, storage=SimpleNamespace(root=str(tmp_path)), event_loop=None
    )
    assert done == ["weights", "commit", ".snapshot_metadata"]


def test_ratios_are_of_the_same_rounds_whatever_the_number_of_saves() -> None:
    def row(name: str, *costs: float) -> dict[str, Any]:
        labels = ["first", "warm", "warm", "idle", "warm", "warm"]
        if len(costs) == 4:
            labels = ["first", "warm", "idle", "warm"]
        saves = [
            {"label": label, "call": cost, "extra": cost, "gather": 1.0}
            for label, cost in zip(labels, costs, strict=True)
        ]
        warm = {"call": 1.0, "extra": 1.0, "gather": 1.0}
        return {**a_result(name, *saves), "ranks": 1, "warm": warm}

    often, seldom = row(ON_WRITE, 9, 1, 3, 9, 10, 10), row(DCP, 9, 40, 9, 500)
    aims = {aim.claim: aim for aim in evaluate([often, seldom], [], [])}
    assert aims[f"{DCP}'s stall, times copy on write's (in the call)"].value == (40 / 2 + 50) / 2
    elsewhere = {**seldom, "group": "1"}
    aims = {aim.claim: aim for aim in evaluate([often, elsewhere], [], [])}
    assert aims[f"{DCP}'s stall, times copy on write's (in the call)"].value == 1


def test_targets_systems_come_first() -> None:
    assert set(names(1, [])) == set(CASES)
    assert set(names(2, [])) < set(CASES)
    assert names(1, ["async_save, plain"]) == [f"{ASYNC}, plain"]
    assert names(1, [])[:3] == names(2, [])[:3] == [ON_WRITE, COPY, DCP]


def peaks() -> list[int]:
    level = memory(start=True)
    block = bytearray(b"x" * (40 << 20))
    del block
    first = memory() - level
    again = memory(start=True)
    return [first, memory() - again]


def test_memory_is_the_peak_since_the_start(workers: Workers) -> None:
    """Measure in a process without children: those of other tests would count."""
    ((first, second),) = workers(1).run(peaks)
    assert 30 << 20 < first < 200 << 20
    assert second < 20 << 20


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_compares_systems(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    systems = [NONE, ON_WRITE, COPY, DCP, SNAPSHOT]
    options = ["--quick", "--json", str(out), "--folder", str(tmp_path), "--systems", *systems]
    command = [sys.executable, "-m", "recipes.benchmarks.side_by_side", *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=880)
    assert done.returncode in (0, 1), done.stderr  # 1: targets were missed, at this size
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    content = json.loads(out.read_text())
    for row in content["training"]:
        if "error" in row:
            assert row["name"] == SNAPSHOT
            assert row["error"].startswith("NotInstalled")
            continue
        compared = COMPARED if row["ranks"] == 1 else FIRST
        more = row["name"] in compared and row["trace"] == "skewed"
        turns = (MORE_ROUNDS * 2 if row["ranks"] == 1 else 2) if more else 2
        many = more and row["name"] in (ON_WRITE, COPY)
        warm = ["warm"] * (WARM // turns if many else PAIRS - 1)
        labels = ["first", *warm] + ["idle", *warm] * (turns - 1)
        assert [save["label"] for save in row["saves"]] == labels
        assert row["setup"] > 0
        assert all(0.2 < save["fraction"] < 0.3 for save in row["saves"])
        if row["name"] == NONE:
            continue
        # A save is durable after its call, or at the end of it if the call waits.
        assert all(save["listed"] > 0 for save in row["saves"])
        if row["name"] == DCP:
            assert all(save["listed"] >= save["call"] * 0.5 for save in row["saves"])
        assert row["bytes"]["total"] > row["bytes"]["rows"] > 0
    trained = {(row["name"], row["ranks"], row["trace"]) for row in content["training"]}
    assert {(ON_WRITE, 1, "skewed"), (COPY, 2, "skewed"), (ON_WRITE, 1, "independent")} < trained
    assert {row["ranks"] for row in content["limits"]} == {1, 2}
    assert all(row["seconds"] > 0 for row in content["limits"])
    sizes = {(row["name"], row["trace"]): row for row in content["bytes"] if "error" not in row}
    full = sizes["ours 4 bit full", "skewed"]
    part = sizes["ours 4 bit consecutive", "skewed"]
    assert 0.2 < part["rows"] / full["rows"] < 0.3
    assert sizes[DCP, "skewed"]["peak"] == 2 * sizes[DCP, "skewed"]["kept"]
    # Of fewer bits, these few rows are less than the dense part, which only a baseline holds whole.
    until_baseline = sizes["ours fp32 intermittent", "skewed"]
    assert until_baseline["over"] == "baseline to baseline"
    assert len(until_baseline["checkpoints"]) < 15
    chain = next(row for row in content["restore"] if row["name"] == "ours fp32, chain of 1 + 10")
    assert chain["checkpoints"] == 11
    assert 0 < chain["median_reading"] < chain["median"]
    assert {row["ranks"] for row in content["restore"] if "error" not in row} == {1, 2}
    ours = [row for row in content["instants"] if row["name"].startswith("ours")]
    assert ours
    assert all(row["one_instant"] for row in ours)
    assert all(aim["value"] is None or math.isfinite(aim["value"]) for aim in content["targets"])
    assert len(content["targets"]) == 17
    for text in ("limits, 2 ranks", "targets, on 2 cores", "of 17 targets met"):
        assert text in done.stdout
