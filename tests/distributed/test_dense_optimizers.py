"""Dense optimizers: state made late or never, any wrapper, tables that come and go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.distributed.dense_jobs import (
    APART,
    MIXED,
    OPTIMIZERS,
    REPLICAS,
    ROWS,
    T0,
    checkpointer,
    differences,
    everything,
    make,
    save,
)
from tests.distributed.layouts import LayoutJob
from tests.distributed.worker_pool import WorkerPool
from tests.examples import some_of
from torchrec_checknrun.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.tracking import track

Workers = Callable[[int], WorkerPool]


def resumes(root: str, dense: str, wrapper: str) -> None:
    """Restore in a new process without state: training continues as if never interrupted."""
    job = make(MIXED, dense, wrapper)
    with checkpointer(root, job) as saver:
        save(saver)  # before any state was made
        job.train(2)
        save(saver)
        job.train(1)
        save(saver)
    again = make(MIXED, dense, wrapper, seed=9)
    with checkpointer(root, again) as saver:
        with torch.no_grad():  # the memory may hold anything
            again.model.state_dict()[f"{T0}.weight"][3] = torch.nan
            again.model.state_dict()["out.weight"][:] = torch.inf
        assert saver.restore() is not None
    assert differences(everything(again), everything(job)) == []
    for either in (job, again):
        either.train(3)
    assert differences(everything(again), everything(job)) == []


OTHER_WRAPPERS = [
    *(("adam", wrapper) for wrapper in ("clipped", "warm_up", "plain")),
    *((dense, "plain") for dense in ("momentum", "asgd")),
]


@pytest.mark.parametrize(
    ("dense", "wrapper"),
    some_of(
        [*((dense, "combined") for dense in sorted(OPTIMIZERS)), *OTHER_WRAPPERS],
        *(0, 4),  # adagrad, asgd
        *(10, 11),  # Adam's other wrappers
    ),
)
def test_state_that_is_made_late(
    workers: Workers, tmp_path: Path, dense: str, wrapper: str
) -> None:
    workers(2).run(resumes, root=str(tmp_path), dense=dense, wrapper=wrapper)


def rolls_back(root: str, dense: str, wrapper: str) -> None:
    """Roll back to before any state was made, then forward to after it, in one process."""
    job = make(MIXED, dense, wrapper)
    with checkpointer(root, job) as saver:
        at_first, first = everything(job), save(saver)
        job.train(2)
        at_second, second = everything(job), save(saver)
        job.train(1)
        for name, wanted in ((first, at_first), (second, at_second), (first, at_first)):
            assert saver.restore(name) is not None
            assert differences(everything(job), wanted) == []
        job.train(2)
        # Group options that only a step brings (the rate of a warm-up) are the same as well.
        assert differences(everything(job), at_second) == []


@pytest.mark.parametrize(
    ("dense", "wrapper"),
    some_of([("adam", "combined"), ("adagrad", "plain"), *OTHER_WRAPPERS], 0, 6),
)
def test_back_to_before_the_first_step(
    workers: Workers, tmp_path: Path, dense: str, wrapper: str
) -> None:
    workers(2).run(rolls_back, root=str(tmp_path), dense=dense, wrapper=wrapper)


def is_refused(root: str, saved: str, wanted: str, wrapper: str, trained: int, match: str) -> None:
    """Refuse without changing anything, optimizer state included: both jobs train on alike."""
    job = make(MIXED, saved, wrapper)
    job.train(2)
    with checkpointer(root, job) as saver:
        save(saver)
    other, same = (make(MIXED, wanted, wrapper, seed=3) for _ in range(2))
    for either in (other, same):
        either.train(trained)
    with checkpointer(root, other) as saver:
        before = everything(other)
        with pytest.raises(IncompatibleCheckpoint, match=match):
            saver.restore()
        assert differences(everything(other), before) == []
        assert saver.save() is not None
    for either in (other, same):
        either.train(2)
    assert differences(everything(other), everything(same)) == []


@pytest.mark.parametrize(
    ("saved", "wanted", "wrapper", "trained", "match"),
    some_of(
        [
            ("amsgrad", "adam", "combined", 0, r"t0.*max_exp_avg_sq"),
            ("sgd", "adam", "combined", 0, r"t0.*saved with optimizer state none.*has momentum1"),
            ("sgd", "adam", "plain", 1, r"t0.*saved with optimizer state none.*has momentum1"),
            ("momentum", "sgd", "plain", 0, r"t0.*momentum_buffer.*has none"),
            ("rmsprop", "adam", "combined", 1, r"t0.*square_avg"),
        ],
        *(0, 2, 3),
    ),
)
def test_another_optimizer(
    workers: Workers,
    tmp_path: Path,
    saved: str,
    wanted: str,
    match: str,
    wrapper: str,
    trained: int,
) -> None:
    workers(2).run(
        is_refused,
        root=str(tmp_path),
        saved=saved,
        wanted=wanted,
        wrapper=wrapper,
        trained=trained,
        match=match,
    )


def skips(root: str, wrapper: str) -> list[str]:
    """Skip another optimizer's state with ``strict=False``, and restore everything else."""
    job = make(MIXED, "amsgrad", wrapper)
    job.train(2)
    with checkpointer(root, job) as saver:
        save(saver)
    adam, momentum = make(MIXED, "adam", wrapper, seed=3), make(MIXED, "momentum", wrapper, seed=3)
    momentum.train(1)
    with checkpointer(root, adam) as saver:
        report = saver.restore(strict=False)
        assert report is not None
        wanted, found = everything(job), everything(adam)
        assert all(
            "max_exp_avg_sq" in key for key in differences(found, wanted) if "param" not in key
        )
        adam.train(1)
    with checkpointer(root, momentum) as saver:
        own = {k: v for k, v in everything(momentum).items() if "momentum_buffer" in k}
        assert saver.restore(strict=False) is not None
        found = everything(momentum)
        assert {k: found[k] for k in own} == own
        assert not any(k.startswith("/model") for k in differences(found, wanted))
        momentum.train(1)
        report_after = saver.save()
        assert report_after is not None
        assert report_after.kind == "full"
    return list(report.skipped)


@pytest.mark.parametrize("wrapper", some_of(["combined", "plain"], 0))
def test_another_optimizer_skipped(workers: Workers, tmp_path: Path, wrapper: str) -> None:
    skipped = workers(2).run(skips, root=str(tmp_path), wrapper=wrapper)[0]
    assert any("t0" in line and "max_exp_avg_sq" in line for line in skipped)


# Tables that are data parallel on one layout and sharded on another.


def there_and_back(root: str, wrapper: str, dense: str, fused: str, steps: int) -> None:
    """Shard two data-parallel tables, then make them data parallel again: nothing is lost."""
    job = make(REPLICAS, dense, wrapper, fused=fused)
    rates = {"tables": 0.003, "rest": 0.004}
    set_rates(job, wrapper, rates)
    job.train(3)
    with checkpointer(root, job) as saver:
        save(saver)
    sharded = make(ROWS, dense, wrapper, seed=5, fused=fused)
    with checkpointer(root, sharded) as saver:
        assert saver.restore() is not None
        assert sharded.steps == 3
        fused_state = sharded.model.fused_optimizer.state_dict()["state"]
        dense_state = {
            key.rpartition("a.embedding_bags.")[2]: value for key, value in named_state(job).items()
        }
        for key, states in fused_state.items():
            table = key.rsplit(".", 2)[-2]
            own = dense_state[f"{table}.weight"]
            names = {"momentum1": "sum" if "sum" in own else "exp_avg", "exp_avg_sq": "exp_avg_sq"}
            for name, state in states.items():
                for shard in state.local_shards():
                    row = shard.metadata.shard_offsets[0]
                    whole = own[names[name.rsplit(".", 1)[-1]]]
                    assert torch.equal(shard.tensor, whole[row : row + len(shard.tensor)]), name
        assert counters(sharded) == {3}
        rate = rates["tables" if wrapper == "plain" else "rest"]
        assert {g["lr"] for g in sharded.model.fused_optimizer.param_groups} == {rate}
        for _ in range(steps):
            count(sharded)
        save(saver)
    again = make(REPLICAS, dense, wrapper, seed=7, fused=fused)
    set_rates(again, wrapper, rates)
    with checkpointer(root, again) as saver:
        assert saver.restore() is not None
    found, wanted = everything(again), everything(job)
    if steps:
        assert {k.rsplit("/", 1)[-1] for k in differences(found, wanted)} == {"step"}
        steps_found = {k: float(v["step"]) for k, v in named_state(again).items()}
        assert {v for k, v in steps_found.items() if "embedding_bags" in k} == {3.0 + steps}
        assert {v for k, v in steps_found.items() if "embedding_bags" not in k} == {3.0}
        return
    assert differences(found, wanted) == []
    for either in (job, again):
        either.train(3)
    assert differences(everything(again), everything(job)) == []


def named_state(job: LayoutJob) -> dict[str, dict[str, torch.Tensor]]:
    """Return the dense optimizer's state by the model's names."""
    found = {}
    state: dict[Any, Any] = dict(job.optimizer.state)
    for name, parameter in job.model.named_parameters():
        if parameter in state and not hasattr(parameter, "_in_backward_optimizers"):
            found[name] = state[parameter]
    return found


def set_rates(job: LayoutJob, wrapper: str, rates: dict[str, float]) -> None:
    """Set rates as a scheduler does, where data-parallel tables have a group of their own."""
    groups = list(job.optimizer.param_groups)
    if wrapper == "plain":
        for group, name in zip(reversed(groups), ("rest", "tables"), strict=False):
            group["lr"] = rates[name]
    else:
        groups[-1]["lr"] = rates["rest"]


def kernels(job: LayoutJob) -> list[Any]:
    return [
        kernel._emb_module
        for module in job.model.modules()
        for lookup in getattr(module, "_lookups", [])
        for kernel in getattr(lookup, "_emb_modules", [])
    ]


def counters(job: LayoutJob) -> set[int]:
    return {int(kernel.iter) for kernel in kernels(job)}


def count(job: LayoutJob) -> None:
    for kernel in kernels(job):
        kernel.iter.add_(1)


@pytest.mark.parametrize(
    ("wrapper", "dense", "fused", "steps"),
    some_of(
        [
            ("combined", "adam", "adam", 0),
            ("plain", "adam", "adam", 0),
            ("combined", "adam", "adam", 4),
            ("plain", "adagrad", "adagrad", 0),
        ],
        *(1, 2),
    ),
)
def test_data_parallel_to_sharded_and_back(
    workers: Workers, tmp_path: Path, wrapper: str, dense: str, fused: str, steps: int
) -> None:
    workers(2).run(
        there_and_back, root=str(tmp_path), wrapper=wrapper, dense=dense, fused=fused, steps=steps
    )


def there_and_back_with_dcp(root: str) -> None:
    """Go there and back with DCP alone, after TorchRec's ``init_state`` has made the state."""
    job = make(REPLICAS, "adam", "combined", fused="adam")
    job.train(3)
    sharded = make(ROWS, "adam", "combined", seed=5, fused="adam")
    again = make(REPLICAS, "adam", "combined", seed=7, fused="adam")
    for number, (source, target) in enumerate(((job, sharded), (sharded, again))):
        target.optimizer.init_state()
        path = f"{root}/{number}"
        dcp.save(
            {"model": source.model, "optimizer": source.optimizer},
            planner=SavePlanner(track(source.model, [source.optimizer])),
            storage_writer=StorageWriter(path),
        )
        dcp.load(
            {"model": target.model, "optimizer": target.optimizer},
            planner=LoadPlanner(track(target.model, [target.optimizer])),
            storage_reader=StorageReader(path),
        )
    assert counters(sharded) == {3}
    again.steps = job.steps
    for either in (job, again):
        either.train(2)
    assert differences(everything(again), everything(job)) == []


def test_data_parallel_to_sharded_and_back_with_dcp(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(there_and_back_with_dcp, root=str(tmp_path))


def groups_saved(root: str, source: dict[str, Any], target: dict[str, Any], seen: str) -> None:
    """Save groups with ``save_param_groups``: options follow parameters, not numbers."""
    job = make(source, "adagrad", "combined")
    job.optimizer.save_param_groups(True)
    for group in job.optimizer.param_groups:
        group["lr"] = 0.007
    list(job.optimizer.param_groups)[-1]["weight_decay"] = 0.25
    job.train(1)
    with checkpointer(root, job) as saver:
        save(saver)
    again = make(target, "adagrad", "combined", seed=4)
    again.optimizer.save_param_groups(seen == "also")
    with checkpointer(root, again) as saver:
        assert saver.restore() is not None
        assert {group["lr"] for group in again.optimizer.param_groups} == {0.007}
        assert list(again.optimizer.param_groups)[-1]["weight_decay"] == 0.25
        again.train(1)
        save(saver)
    if source == target:
        job.train(1)
        again.optimizer.save_param_groups(True)
        assert differences(everything(again), everything(job)) == []


@pytest.mark.parametrize(
    ("source", "target", "seen"),
    some_of(
        [
            *((APART, APART, seen) for seen in ("also", "not")),
            *((APART, MIXED, "also"), (MIXED, APART, "also"), (ROWS, REPLICAS, "also")),
        ],
        *(1, 2, 4),
    ),
)
def test_parameter_groups(
    workers: Workers, tmp_path: Path, source: dict[str, Any], target: dict[str, Any], seen: str
) -> None:
    workers(2).run(groups_saved, root=str(tmp_path), source=source, target=target, seen=seen)


def regrouped(root: str) -> None:
    """Join groups with different options: refused before anything is changed."""
    job = make(MIXED, "adam", "plain")
    job.train(1)
    with checkpointer(root, job) as saver:
        save(saver)
    other = make(MIXED, "adam", "plain", seed=4)
    parameters = [p for group in other.optimizer.param_groups for p in group["params"]]
    other = replace(other, optimizer=torch.optim.Adam(parameters, lr=0.5))
    with checkpointer(root, other) as saver:
        before = everything(other)
        with pytest.raises(IncompatibleCheckpoint, match=r"param_groups.*different options"):
            saver.restore()
        assert differences(everything(other), before) == []
        assert saver.restore(strict=False) is not None
        changed = differences(everything(other), everything(job))
        assert all("param_groups" in key for key in changed)
        assert [group["lr"] for group in other.optimizer.param_groups] == [0.5]


def test_parameters_grouped_otherwise(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(regrouped, root=str(tmp_path))
