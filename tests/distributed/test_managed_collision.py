"""Managed collisions: raw ids are saved with their rows, and training continues."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync

from tests.distributed import references
from tests.distributed.collisions import (
    CHUNK_BYTES,
    CollisionZoo,
    Options,
    Spec,
    build,
    checkpointer,
    keep,
    on_device,
    refused,
    saved,
)
from tests.distributed.damage import chunks_of, flip
from tests.distributed.models import CPU
from tests.distributed.states import gather
from tests.distributed.test_tracking_zoo import no_streams
from tests.distributed.worker_pool import WorkerPool
from tests.distributed.zoo import ZooBatch, changed_rows, stored_rows, table_arrays
from tests.examples import some_of
from torchrec_checknrun.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from torchrec_checknrun.tracking import track

Workers = Callable[[int], WorkerPool]


def check_copy(zoo: CollisionZoo, path: Path) -> None:
    """Restore a copy on as many ranks; a GPU may add gradients in another order."""
    wanted, found = references.load(path.with_suffix(".npz")), gather(zoo)
    if zoo.device.type == "cpu":
        assert references.differences(found, wanted, None) == []
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6)
    history = json.loads(path.with_suffix(f".{dist.get_rank()}.json").read_text())
    assert zoo.history() == history


def run_through(root: str, spec: Options) -> list[str]:
    """Save two checkpoints between evictions, and the run's later state."""
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
    """Restore into a run with a history of its own, and train on."""
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
    some_of(
        [
            {},
            {"bag": False, "fused": "sgd"},
            {"policy": "lfu"},
            {"policy": "lru", "fused": "rowwise_adagrad"},
        ],
        *(3,),
    ),
    ids=str,
)
def test_a_restored_run_goes_on_as_if_never_interrupted(
    workers: Workers, tmp_path: Path, options: Options
) -> None:
    names = workers(2).run(run_through, root=str(tmp_path), spec=options)[0]
    for name in reversed(names):
        workers(2).run(go_on, root=str(tmp_path), spec=options, name=name)


def evictions(root: str, spec: Options, pipeline: str | None = None) -> dict[str, int]:
    """Compare every checkpoint with the changed rows; return the rows given to other ids."""
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


@pytest.mark.parametrize("pipeline", some_of(["sparse_dist", "semi_sync"], 1))
def test_rows_of_evicted_ids_in_pipelines(workers: Workers, tmp_path: Path, pipeline: str) -> None:
    counts = workers(2).run(evictions, root=str(tmp_path), spec={}, pipeline=pipeline)[0]
    assert counts["evicted"] > 20
    assert (counts["missed"], counts["wrong"], counts["extra"]) == (0, 0, 0)


@pytest.mark.parametrize(
    "options",
    some_of([{}, {"fused": "sgd", "bag": False}, {"fused": "rowwise_adagrad"}], 1, 2),
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


@pytest.mark.parametrize("tracked", some_of([True, False], 0))
def test_with_dcp(workers: Workers, tmp_path: Path, tracked: bool) -> None:
    workers(2).run(with_dcp, root=str(tmp_path), spec={}, tracked=tracked)


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
            sizes = [
                (chunk.get("difference") or {"raw": chunk["length"]})["raw"] for _, chunk in chunks
            ]
            assert sum(sizes) == int(own)
            assert set(sizes) <= set(range(8, CHUNK_BYTES // 5 + 1))
            kinds = ("state", "block", "collisions")
            dense = [c for k in kinds for _, c in chunks_of(Path(root) / report.id, k)]
            assert report.bytes["dense"] == sum(chunk["length"] for chunk in dense)


def test_every_checkpoint_holds_them_in_pieces(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(bytes_of, root=str(tmp_path))


@pytest.mark.parametrize("kind", some_of(["block", "collisions"], 1))
def test_damage(workers: Workers, tmp_path: Path, kind: str) -> None:
    name = workers(2).run(saved, root=str(tmp_path), spec={})[0]
    file, chunk = chunks_of(tmp_path / "root" / name, kind)[-1]
    flip(file, chunk["offset"] + chunk["length"] // 2)
    how: Options = {"error": "CorruptCheckpoint", "match": "checksum", "verify": "all"}
    workers(2).run(refused, root=str(tmp_path), spec={}, name=name, **how)
