"""Managed collisions: which raw id has which row is saved with the rows, and training goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.distributed import references
from tests.distributed.collisions import MAPS, ROWS, CollisionZoo, Spec, build, resets_on_cpu
from tests.distributed.models import CPU, gather, local_bytes
from tests.distributed.test_errors import chunks_of, flip
from tests.distributed.test_tracking_zoo import no_streams
from tests.distributed.worker_pool import WorkerPool
from tests.distributed.zoo import ZooBatch, changed_rows, stored_rows, table_arrays
from torchrec_checknrun import (
    Checkpointer,
    Consecutive,
    LoadPlanner,
    SavePlanner,
    StorageReader,
    StorageWriter,
    errors,
    track,
)

Workers = Callable[[int], WorkerPool]
Options = dict[str, Any]

CHUNK_BYTES = 700


def checkpointer(root: str, zoo: CollisionZoo) -> Checkpointer:
    return Checkpointer(
        root,
        model=zoo.model,
        state={"optimizer": zoo.optimizer, "zoo": zoo},
        policy=Consecutive(),
        chunk_bytes=CHUNK_BYTES,
    )


def on_device(spec: Spec) -> Any:
    return resets_on_cpu() if spec.fused == "rowwise_adagrad" else nullcontext()


def keep(zoo: CollisionZoo, path: Path) -> None:
    """A copy of all that a run consists of, of this rank's history in a file of its own."""
    rank, state, mapping = dist.get_rank(), gather(zoo), zoo.mapping()
    path.with_suffix(f".{rank}.json").write_text(json.dumps(zoo.history()))
    if rank == 0:
        references.store(path.with_suffix(".npz"), state)
        path.with_suffix(".json").write_text(json.dumps(mapping))
    dist.barrier()


def check_copy(zoo: CollisionZoo, path: Path) -> None:
    """The same on as many ranks."""
    wanted = references.load(path.with_suffix(".npz"))
    assert references.differences(gather(zoo), wanted, None) == []
    history = json.loads(path.with_suffix(f".{dist.get_rank()}.json").read_text())
    assert zoo.history() == history


def run_through(root: str, spec: Options) -> list[str]:
    """Two checkpoints between evictions, and what became of the run later."""
    zoo = build(Spec(**spec))
    folder, names = Path(root), []
    with on_device(Spec(**spec)), checkpointer(str(folder / "root"), zoo) as saver:
        for kind in ("full", "differential"):
            zoo.train(4)
            report = saver.save()
            assert report is not None
            assert report.kind == kind
            assert all(history["seen"] for history in zoo.history().values())
            keep(zoo, folder / report.id)
            names.append(report.id)
        zoo.train(5)
        keep(zoo, folder / "later")
    return names


def go_on(root: str, spec: Options, name: str) -> None:
    """A run with a history of its own, restored."""
    zoo = build(Spec(**spec), seed=7)
    folder = Path(root)
    with on_device(Spec(**spec)), checkpointer(str(folder / "root"), zoo) as saver:
        zoo.train(4)
        saver.restore(name)
        check_copy(zoo, folder / name)
        zoo.train(13 - zoo.steps)
        check_copy(zoo, folder / "later")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bag": False, "fused": "sgd"},
        {"policy": "lfu"},
        {"policy": "lru", "fused": "rowwise_adagrad"},
    ],
    ids=str,
)
def test_a_restored_run_goes_on_as_if_never_interrupted(
    workers: Workers, tmp_path: Path, options: Options
) -> None:
    names = workers(2).run(run_through, root=str(tmp_path), spec=options)[0]
    for name in reversed(names):
        workers(2).run(go_on, root=str(tmp_path), spec=options, name=name)


def evictions(root: str, spec: Options, pipeline: str | None = None) -> dict[str, int]:
    """Every checkpoint against what has changed, and which rows were given to another id."""
    zoo = build(Spec(**spec))
    counts = dict.fromkeys(("missed", "wrong", "extra", "evicted"), 0)
    batches = iter([zoo.batch(i) for i in range(12)])
    with on_device(Spec(**spec)), no_streams(), checkpointer(root, zoo) as saver:
        step = stepper(zoo, batches, pipeline)
        step()
        step()
        saver.save()
        for _ in range(6):
            before, mapped = table_arrays(zoo), zoo.mapping()
            step()
            report = saver.save()
            assert report is not None
            after, remapped = table_arrays(zoo), zoo.mapping()
            changed = changed_rows(before, after)
            stored, wrong = stored_rows(Path(root) / report.id, after)
            counts["missed"] += len(changed - stored)
            counts["extra"] += len(stored - changed)
            counts["wrong"] += len(wrong)
            for table, rows in remapped.items():
                given = {row for raw, row in rows.items() if mapped[table].get(raw) != row}
                counts["evicted"] += len(given)
                assert {(t.rpartition(".")[2], row) for t, row in stored} >= {
                    (table, row) for row in given
                }
            dist.barrier()
    return counts


def stepper(zoo: CollisionZoo, batches: Iterator[ZooBatch], pipeline: str | None) -> Any:
    if pipeline is None:
        return zoo.train
    kinds = {"sparse_dist": TrainPipelineSparseDist, "semi_sync": TrainPipelineSemiSync}
    options = {"start_batch": 0} if pipeline == "semi_sync" else {}
    runner: Any = kinds[pipeline](zoo.model, zoo.optimizer, device=CPU, **options)
    return lambda: runner.progress(batches)


@pytest.mark.parametrize("pipeline", ["sparse_dist", "semi_sync"])
def test_rows_of_evicted_ids_in_pipelines(workers: Workers, tmp_path: Path, pipeline: str) -> None:
    counts = workers(2).run(evictions, root=str(tmp_path), spec={}, pipeline=pipeline)[0]
    assert counts["evicted"] > 20
    assert (counts["missed"], counts["wrong"], counts["extra"]) == (0, 0, 0)


@pytest.mark.parametrize(
    "options",
    [{}, {"fused": "sgd", "bag": False}, {"fused": "rowwise_adagrad"}],
    ids=str,
)
def test_rows_of_evicted_ids_count_as_modified(
    workers: Workers, tmp_path: Path, options: Options
) -> None:
    counts = workers(2).run(evictions, root=str(tmp_path), spec=options)[0]
    assert counts["evicted"] > 20
    assert (counts["missed"], counts["wrong"], counts["extra"]) == (0, 0, 0)


def with_dcp(root: str, spec: Options, tracked: bool) -> None:
    zoo = build(Spec(**spec))
    folder = Path(root)

    def save(name: str) -> None:
        state = {"model": zoo.model, "optimizer": zoo.optimizer}
        planner = SavePlanner(marks, chunk_bytes=CHUNK_BYTES)
        dcp.save(state, planner=planner, storage_writer=StorageWriter(folder / name))
        keep(zoo, folder / f"{name}-copy")

    marks = track(zoo.model) if tracked else None
    zoo.train(4)
    save("first")
    zoo.train(4)
    save("second")
    zoo.train(5)
    keep(zoo, folder / "later")
    again = build(Spec(**spec), seed=7)
    if tracked:
        again.train(2)
    for name in ("first", "second"):
        dcp.load(
            {"model": again.model, "optimizer": again.optimizer},
            planner=LoadPlanner(track(again.model) if tracked else None),
            storage_reader=StorageReader(folder / name),
        )
        wanted = references.load(folder / f"{name}-copy.npz")
        assert references.differences(gather(again), wanted, None) == []
    again.steps = 8
    again.train(5)
    if tracked:
        check_copy(again, folder / "later")


@pytest.mark.parametrize("tracked", [True, False])
def test_with_dcp(workers: Workers, tmp_path: Path, tracked: bool) -> None:
    workers(2).run(with_dcp, root=str(tmp_path), spec={}, tracked=tracked)


def saved(root: str, spec: Options, tracked: bool = True) -> str:
    """One checkpoint and its copy; with ids seen since the last eviction."""
    zoo = build(Spec(**spec))
    zoo.train(4)
    if not tracked:
        dcp.save(
            {"model": zoo.model, "optimizer": zoo.optimizer, "zoo": zoo},
            planner=SavePlanner(),
            storage_writer=StorageWriter(Path(root) / "root" / "untracked"),
        )
        keep(zoo, Path(root) / "untracked")
        return "untracked"
    with checkpointer(f"{root}/root", zoo) as saver:
        zoo.train(4)
        report = saver.save()
        assert report is not None
    keep(zoo, Path(root) / report.id)
    return report.id


def on_fewer_ranks(root: str, spec: Options, name: str, ranks: int) -> None:
    """Each raw id has its row; so have those that were seen lately; and the run goes on."""
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


@pytest.mark.parametrize(("ranks", "fewer"), [(2, 1), (3, 1), (4, 2), (4, 1)])
def test_fewer_ranks(workers: Workers, tmp_path: Path, ranks: int, fewer: int) -> None:
    name = workers(ranks).run(saved, root=str(tmp_path), spec={})[0]
    workers(fewer).run(on_fewer_ranks, root=str(tmp_path), spec={}, name=name, ranks=ranks)


def test_fewer_ranks_for_what_was_saved_without_a_tracker(workers: Workers, tmp_path: Path) -> None:
    name = workers(2).run(saved, root=str(tmp_path), spec={}, tracked=False)[0]
    workers(1).run(on_fewer_ranks, root=str(tmp_path), spec={}, name=name, ranks=2)


def refused(
    root: str,
    spec: Options,
    name: str,
    match: str,
    error: str = "IncompatibleCheckpoint",
    **how: Any,
) -> None:
    """It raises, on all ranks, and nothing is changed."""
    zoo = build(Spec(**spec), seed=7)
    zoo.train(2)
    before, history = local_bytes(zoo), zoo.history()
    with checkpointer(f"{root}/root", zoo) as saver:
        with pytest.raises(getattr(errors, error), match=match):
            saver.restore(name, **how)
        assert (local_bytes(zoo), zoo.history(), zoo.steps) == (before, history, 2)
        zoo.train(2)
        saver.save()


@pytest.mark.parametrize(("ranks", "other"), [(1, 2), (2, 4), (3, 2), (2, 3)])
def test_ranks_that_ids_would_have_to_move_between(
    workers: Workers, tmp_path: Path, ranks: int, other: int
) -> None:
    name = workers(ranks).run(saved, root=str(tmp_path), spec={})[0]
    match = rf"t\d: raw ids belong to ranks.* restore on {ranks} ranks, or on one"
    workers(other).run(refused, root=str(tmp_path), spec={}, name=name, match=match)


def test_ids_that_ranks_would_not_get(workers: Workers, tmp_path: Path) -> None:
    """Rows of 4 ranks make up those of 2, but 241 ids dealt to 4 and to 2 don't."""
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
    [
        ({"policy": "lfu"}, {}, r"t0\._mch_last_access_iter is not in seq-.*strict=False"),
        ({"raw_ids": 480}, {}, r"t0 had input_hash_size 480 in seq-.* and has 240 now"),
        ({}, {"grown": 4}, r"_mch_counts is int64 \[48\] in seq-.* int64 \[52\] in the model"),
    ],
)
def test_another_module(
    workers: Workers, tmp_path: Path, saved_with: Options, spec: Options, match: str
) -> None:
    name = workers(2).run(saved, root=str(tmp_path), spec=saved_with)[0]
    workers(2).run(refused, root=str(tmp_path), spec=spec, name=name, match=match)


def test_a_renamed_table(workers: Workers, tmp_path: Path) -> None:
    """Its ids are kept under the table's name."""
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
    """What was seen is dropped, and the next interval begins."""
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


def bytes_of(root: str) -> None:
    zoo = build(Spec())
    tensors = [t for m in zoo.modules.values() for t in m.buffers() if len(t) == m.output_size()]
    own = torch.tensor(sum(tensor.nbytes for tensor in tensors))
    dist.all_reduce(own)
    with checkpointer(root, zoo) as saver:
        for _ in range(2):
            zoo.train(2)
            report = saver.save()
            assert report is not None
            chunks = chunks_of(Path(root) / report.id, "block")
            assert sum(chunk["length"] for _, chunk in chunks) == int(own)
            assert {chunk["length"] for _, chunk in chunks} <= set(range(8, CHUNK_BYTES // 5 + 1))
            kinds = ("state", "block", "collisions")
            dense = [c for k in kinds for _, c in chunks_of(Path(root) / report.id, k)]
            assert report.bytes["dense"] == sum(chunk["length"] for chunk in dense)


def test_every_checkpoint_holds_them_in_pieces(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(bytes_of, root=str(tmp_path))


@pytest.mark.parametrize("kind", ["block", "collisions"])
def test_damage(workers: Workers, tmp_path: Path, kind: str) -> None:
    name = workers(2).run(saved, root=str(tmp_path), spec={})[0]
    file, chunk = chunks_of(tmp_path / "root" / name, kind)[-1]
    flip(file, chunk["offset"] + chunk["length"] // 2)
    how: Options = {"error": "CorruptCheckpoint", "match": "checksum", "verify": "all"}
    workers(2).run(refused, root=str(tmp_path), spec={}, name=name, **how)


def fill(zoo: CollisionZoo, seed: int) -> None:
    """As a GPU would: the kernel that puts ids into their slots doesn't run on a CPU."""
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for module in zoo.modules.values():
        rows = module.output_size()
        block = -(-module.input_size() // module.buckets())
        per_bucket = rows * ranks // module.buckets()
        for bucket in range(module._start_bucket, module._end_bucket):
            start = (bucket - rank * module.buckets() // ranks) * per_bucket
            ids = bucket * block + torch.randperm(block, generator=generator)[: per_bucket // 2]
            slots = torch.randperm(per_bucket, generator=generator)[: len(ids)]
            module._hash_zch_identities.data[start + slots] = ids[:, None]


def hashed(root: str, buckets: int) -> str:
    zoo = build(Spec(hashed=True, buckets=buckets))
    fill(zoo, 3)
    with checkpointer(f"{root}/root", zoo) as saver:
        report = saver.save()
        assert report is not None
        keep_mapping(zoo, Path(root) / report.id)
    return report.id


def keep_mapping(zoo: CollisionZoo, path: Path) -> None:
    mapping = zoo.mapping()
    if dist.get_rank() == 0:
        path.with_suffix(".json").write_text(json.dumps(mapping))
    dist.barrier()


def hashed_again(root: str, name: str, buckets: int) -> None:
    zoo = build(Spec(hashed=True, buckets=buckets), seed=7)
    fill(zoo, 5)
    with checkpointer(f"{root}/root", zoo) as saver:
        saver.restore(name)
        wanted = json.loads((Path(root) / f"{name}.json").read_text())
        found = zoo.mapping()
        assert found == {t: {int(raw): row for raw, row in m.items()} for t, m in wanted.items()}
        assert all(len(rows) >= ROWS[table] // 2 for table, rows in found.items())
        zoo.model.eval()
        with torch.no_grad():
            zoo.model(zoo.batch())
        saver.save()


def hashed_refused(root: str, name: str) -> None:
    zoo = build(Spec(hashed=True, buckets=8), seed=7)
    before = local_bytes(zoo)
    with checkpointer(f"{root}/root", zoo) as saver:
        with pytest.raises(errors.IncompatibleCheckpoint, match=r"t0 had buckets 4 .* has 8 now"):
            saver.restore(name)
        assert local_bytes(zoo) == before


def test_hashed_ids_on_any_number_of_ranks(workers: Workers, tmp_path: Path) -> None:
    name = workers(2).run(hashed, root=str(tmp_path), buckets=4)[0]
    for ranks in (2, 4, 1):
        workers(ranks).run(hashed_again, root=str(tmp_path), name=name, buckets=4)
    workers(2).run(hashed_refused, root=str(tmp_path), name=name)
