"""``dcp.save`` and ``dcp.load`` work with this package's planners and storage."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.distributed import references
from tests.distributed.models import Job, ModelSpec, Plan, random_spec, uniform_plan
from tests.distributed.reader30 import read_rows
from tests.distributed.states import gather, local_bytes, row_bytes, scramble
from tests.distributed.worker_pool import WorkerPool
from tests.examples import ALL, some_of
from torchrec_checknrun import Checkpointer, Quantization
from torchrec_checknrun.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from torchrec_checknrun.tracking import TrackedModel, track

Workers = Callable[[int], WorkerPool]
SPEC = random_spec(11)


def build(spec: dict[str, Any], plan: Plan, seed: int = 0) -> Job:
    return Job.build(ModelSpec.from_json(spec), plan, seed=seed)


def save(job: Job, path: Path, tracked: TrackedModel | None, **options: Any) -> None:
    dcp.save(
        {"model": job.model, "optimizer": job.optimizer},
        planner=SavePlanner(tracked, **options),
        storage_writer=StorageWriter(path),
    )


def load(job: Job, path: Path, tracked: TrackedModel | None) -> None:
    dcp.load(
        {"model": job.model, "optimizer": job.optimizer},
        planner=LoadPlanner(tracked),
        storage_reader=StorageReader(path),
    )


def manifest(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((path / "manifest.json").read_bytes())["manifest"]
    return content


def keep(job: Job, path: Path) -> None:
    """Copy the state into a file beside the checkpoints."""
    state = gather(job)
    if dist.get_rank() == 0:
        references.store(path.with_suffix(".npz"), state)


def check_copy(job: Job, path: Path, bits: int | None = None) -> None:
    problems = references.differences(gather(job), references.load(path.with_suffix(".npz")), bits)
    assert problems == []


def save_two(root: str, spec: dict[str, Any], plan: Plan, bits: int | None) -> None:
    job = build(spec, plan)
    tracked = track(job.model)
    first, second = Path(root) / "first", Path(root) / "second"
    quantization = Quantization(bits, "asymmetric", exact_below_rows=0)
    job.train(2)
    save(job, first, tracked, quantization=quantization)
    keep(job, first)
    before = row_bytes(job.spec, gather(job))
    job.train(1)
    save(job, second, tracked, quantization=quantization)
    keep(job, second)
    after = row_bytes(job.spec, gather(job))
    assert manifest(first)["kind"] == "full"
    assert read_rows(first).keys() == after.keys()
    assert manifest(second)["kind"] == "differential"
    assert manifest(second)["parent"]["id"] == "first"
    assert manifest(second)["sequence"] > manifest(first)["sequence"]
    stored = read_rows(second)
    assert stored.keys() == {key for key in after if after[key] != before[key]}
    assert 0 < len(stored) < len(after)
    for key, parts in stored.items():
        (_, weight, states), *others = parts
        assert not others
        assert states == after[key][1]
        assert bits is not None or weight == after[key][0]
    assert size_of(second) < size_of(first)


def size_of(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.glob("*.bin"))


def load_all(
    root: str, spec: dict[str, Any], plan: Plan, names: list[str], tracked: bool, bits: int | None
) -> None:
    job = build(spec, plan, seed=5)
    marks = track(job.model) if tracked else None
    for name in names:
        scramble(job)
        load(job, Path(root) / name, marks)
        check_copy(job, Path(root) / name, bits)


@pytest.mark.parametrize(
    ("sharding", "bits"),
    some_of(itertools.product(["row_wise", "table_wise"], [None, 8]), 1),
)
def test_with_a_tracker_the_second_save_is_differential(
    workers: Workers, tmp_path: Path, sharding: str, bits: int | None
) -> None:
    where: dict[str, Any] = {"root": str(tmp_path), "spec": SPEC.to_json()}
    workers(2).run(save_two, **where, plan=uniform_plan(SPEC, sharding, 2), bits=bits)
    loads = list(itertools.product((True, False), ("row_wise", "table_wise")))
    for ranks in (2, 1):
        for tracked, other in loads if ALL else ((True, "table_wise"), (False, "row_wise")):
            workers(ranks).run(
                load_all,
                **where,
                plan=uniform_plan(SPEC, other, ranks),
                names=["second", "first", "second"],
                tracked=tracked,
                bits=bits,
            )


def goes_on_after_load(root: str, spec: dict[str, Any], plan: Plan) -> None:
    job = build(spec, plan, seed=5)
    tracked = track(job.model)
    load(job, Path(root) / "second", tracked)
    before = row_bytes(job.spec, gather(job))
    job.train(1)
    save(job, Path(root) / "third", tracked)
    keep(job, Path(root) / "third")
    after = row_bytes(job.spec, gather(job))
    changed = {key for key in after if after[key] != before[key]}
    assert changed <= read_rows(Path(root) / "third").keys()
    save(job, Path(root) / "fourth", tracked)
    keep(job, Path(root) / "fourth")
    assert manifest(Path(root) / "fourth")["kind"] == "differential"
    assert read_rows(Path(root) / "fourth") == {}


def test_saves_after_a_load(workers: Workers, tmp_path: Path) -> None:
    where: dict[str, Any] = {"root": str(tmp_path), "spec": SPEC.to_json()}
    plan = uniform_plan(SPEC, "row_wise", 2)
    workers(2).run(save_two, **where, plan=plan, bits=None)
    workers(2).run(goes_on_after_load, **where, plan=plan)
    names = ["third", "fourth"]
    workers(1).run(
        load_all,
        **where,
        plan=uniform_plan(SPEC, "table_wise", 1),
        names=names,
        tracked=True,
        bits=None,
    )


def save_and_load_without_tracker(root: str, spec: dict[str, Any], plan: Plan, form: str) -> None:
    """Save full checkpoints from the ShardedTensors of a state dict, in three of its forms."""

    def contents(job: Job) -> dict[str, Any]:
        model = job.model.state_dict()
        return {
            "flat": model,
            "nested": {"model": model},
            "with_optimizer": {"model": model, "optimizer": job.optimizer.state_dict()},
        }[form]

    job = build(spec, plan)
    for number in (1, 2):
        job.train(2)
        path = Path(root) / f"{number}"
        dcp.save(contents(job), planner=SavePlanner(), storage_writer=StorageWriter(path))
        keep(job, path)
        assert manifest(path)["kind"] == "full"
        stored = read_rows(path)
        after = row_bytes(job.spec, gather(job))
        assert stored.keys() == after.keys()
        for key, (part,) in stored.items():
            states = after[key][1] if form == "with_optimizer" else {}
            assert part[1:] == (after[key][0], states)
    for number in (2, 1):
        path = Path(root) / f"{number}"
        scramble(job)
        dcp.load(contents(job), planner=LoadPlanner(), storage_reader=StorageReader(path))
        wanted = references.load(path.with_suffix(".npz"))
        found = gather(job)
        if form != "with_optimizer":
            wanted = {k: v for k, v in wanted.items() if k.startswith("model/")}
            found = {k: v for k, v in found.items() if k.startswith("model/")}
        assert references.differences(found, wanted, None) == []


@pytest.mark.parametrize(
    ("form", "sharding"),
    some_of(
        itertools.product(["flat", "nested", "with_optimizer"], ["row_wise", "table_wise"]),
        *(0, 3, 4),
    ),
)
def test_without_a_tracker_every_save_is_full(
    workers: Workers, tmp_path: Path, form: str, sharding: str
) -> None:
    workers(2).run(
        save_and_load_without_tracker,
        root=str(tmp_path),
        spec=SPEC.to_json(),
        plan=uniform_plan(SPEC, sharding, 2),
        form=form,
    )


class FailingWriter(StorageWriter):
    """A writer whose storage is full on rank 1, after some chunks."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            planner.resolve_data(plan.items[0])
            raise OSError("no space left on device")
        return super().write_data(plan, planner)


class FailingPlanner(SavePlanner):
    """A planner that fails on rank 1 after its marks were cut."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        if dist.get_rank() == 1:
            raise RuntimeError("no plan")
        return plan


def fail_then_save(root: str, spec: dict[str, Any], plan: Plan, how: str, first: bool) -> None:
    """Fail a save between others; the next one holds its rows."""
    job = build(spec, plan)
    tracked = track(job.model)
    job.train(1)
    if not first:
        save(job, Path(root) / "baseline", tracked)
    before = row_bytes(job.spec, gather(job))
    job.train(1)
    failing = Path(root) / "failing"
    if how == "exists" and dist.get_rank() == 0:
        failing.mkdir()
        (failing / "something").write_text("else")
    dist.barrier()
    state = {"model": job.model, "optimizer": job.optimizer}
    planner = (FailingPlanner if how == "planner" else SavePlanner)(tracked)
    writer = (FailingWriter if how == "writer" else StorageWriter)(failing)
    with pytest.raises(CheckpointException):
        dcp.save(state, planner=planner, storage_writer=writer)
    assert not (failing / "manifest.json").exists()
    job.train(1)
    after = row_bytes(job.spec, gather(job))
    save(job, Path(root) / "next", tracked)
    keep(job, Path(root) / "next")
    stored = read_rows(Path(root) / "next")
    if first:
        assert manifest(Path(root) / "next")["kind"] == "full"
        assert stored.keys() == after.keys()
    else:
        assert manifest(Path(root) / "next")["parent"]["id"] == "baseline"
        assert stored.keys() == {key for key in after if after[key] != before[key]}
    scramble(job)
    load(job, Path(root) / "next", tracked)
    check_copy(job, Path(root) / "next")


@pytest.mark.parametrize(
    ("how", "first"),
    some_of(itertools.product(["exists", "planner", "writer"], [True, False]), 0, 3, 5),
)
def test_a_failed_save_loses_no_row(
    workers: Workers, tmp_path: Path, how: str, first: bool
) -> None:
    workers(2).run(
        fail_then_save,
        root=str(tmp_path),
        spec=SPEC.to_json(),
        plan=uniform_plan(SPEC, "row_wise", 2),
        how=how,
        first=first,
    )


def checkpointer_goes_on(root: str, spec: dict[str, Any], plan: Plan) -> str:
    """Continue with a Checkpointer's differential checkpoints upon what ``dcp.save`` wrote."""
    job = build(spec, plan, seed=5)
    with Checkpointer(root, model=job.model, state={"optimizer": job.optimizer}) as checkpointer:
        for name in ("first", "second"):
            report = checkpointer.restore(name)
            assert report is not None
            check_copy(job, Path(root) / name)
        newest = checkpointer.restore()
        assert newest is not None
        assert newest.chain == ("first", "second")
        job.train(1)
        saved = checkpointer.save()
        assert saved is not None
        assert saved.kind == "differential"
        assert saved.sequence > newest.sequence
        keep(job, Path(root) / saved.id)
        scramble(job)
        checkpointer.restore()
        check_copy(job, Path(root) / saved.id)
        return saved.id


def test_both_ways_to_save_read_each_other(workers: Workers, tmp_path: Path) -> None:
    where: dict[str, Any] = {"root": str(tmp_path), "spec": SPEC.to_json()}
    plan = uniform_plan(SPEC, "row_wise", 2)
    workers(2).run(save_two, **where, plan=plan, bits=None)
    name = workers(2).run(checkpointer_goes_on, **where, plan=plan)[0]
    for ranks in (2, 1):
        workers(ranks).run(
            load_all,
            **where,
            plan=uniform_plan(SPEC, "table_wise", ranks),
            names=[name, "first"],
            tracked=False,
            bits=None,
        )


def refuse(root: str, spec: dict[str, Any], plan: Plan) -> None:
    """Refuse DCP's own planner or storage in place of this package's, without any change."""
    job = build(spec, plan)
    state = {"model": job.model, "optimizer": job.optimizer}
    path = Path(root) / "mixed"
    before = local_bytes(job)
    with pytest.raises(CheckpointException, match="StorageWriter"):
        dcp.save(
            state,
            planner=SavePlanner(track(job.model)),
            storage_writer=dcp.FileSystemWriter(str(path)),
        )
    with pytest.raises(CheckpointException, match="SavePlanner"):
        dcp.save(state, storage_writer=StorageWriter(Path(root) / "mixed2"))
    save(job, Path(root) / "sound", None)
    with pytest.raises(CheckpointException, match="LoadPlanner"):
        dcp.load(state, storage_reader=StorageReader(Path(root) / "sound"))
    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(Path(root) / "stock")))
    with pytest.raises(CheckpointException, match="StorageReader"):
        dcp.load(
            state,
            planner=LoadPlanner(),
            storage_reader=dcp.FileSystemReader(str(Path(root) / "stock")),
        )
    assert local_bytes(job) == before


def test_mixed_with_the_planners_of_dcp(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(
        refuse,
        root=str(tmp_path),
        spec=SPEC.to_json(),
        plan=uniform_plan(SPEC, "row_wise", 2),
    )
