"""Restores of wrapped optimizers and schedulers on two ranks, compared by live objects."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.live_optimizers import differences, kernels
from tests.distributed.optimizer_nests import Run, goes_on, layout
from tests.distributed.worker_pool import WorkerPool
from tests.examples import some_of
from torchrec_checknrun import PerRank

Workers = Callable[[int], WorkerPool]

APART = layout("table_wise:0", "table_wise:1")
MIXED = layout("data_parallel", "row_wise")
COLUMNS = layout("column_wise:0,1", "row_wise")
ROWS = layout("row_wise", "row_wise")


@pytest.mark.parametrize(
    "case",
    some_of(
        [
            {"layout": APART, "nest": "warm combined", "over_all": True},
            {"layout": MIXED, "nest": "averaging", "schedule": "lambda", "over_all": True},
            {"layout": COLUMNS, "nest": "warm each", "factory": "momentum"},
            {"layout": APART, "nest": "combined", "factory": "adamw", "schedule": "step"},
            {"layout": APART, "nest": "combined warm"},
            {"layout": APART, "nest": "delegating combined"},
        ],
        *(1, 2),
    ),
    ids=lambda case: case["nest"],
)
def test_goes_on(workers: Workers, tmp_path: Path, case: dict[str, Any]) -> None:
    for problems in workers(2).run(goes_on, root=str(tmp_path), cases=[case]):
        assert problems == []


def kernel_rates(root: str, source: dict[str, Any], target: dict[str, Any]) -> list[str]:
    """Save rates and hyperparameters set by hand, and a rate not yet passed to the kernel."""
    run = Run(source, "combined")
    run.train(2)
    for kernel in kernels(run.job.model):
        if hasattr(kernel, "set_learning_rate"):
            kernel.set_learning_rate(0.0123)
            kernel.update_hyper_parameters({"eps": 3e-4, "weight_decay": 0.01})
    for group in run.job.model.fused_optimizer.param_groups:
        group["lr"] = 0.007
        group["initial_lr"] = 0.5
    with run.checkpointer(root) as saver:
        assert saver.save() is not None
    again = Run(target, "combined", seed=4)
    with again.checkpointer(root) as saver:
        assert saver.restore() is not None
    if source == target:
        problems = differences(again.live(), run.live())
        for either in (run, again):
            # Without step() and zero_grad() of the fused optimizer, as with one that is not used.
            either.job.loss(*either.job.batch(either.job.steps)).backward()
        return problems + differences(again.live(), run.live())
    found = {
        (round(k.get_learning_rate(), 6), k.optimizer_args.eps, k.optimizer_args.weight_decay)
        for k in kernels(again.job.model)
    }
    groups = {(g["lr"], g["initial_lr"]) for g in again.job.model.fused_optimizer.param_groups}
    wanted = {(0.0123, 3e-4, 0.01)}, {(0.007, 0.5)}
    return [] if (found, groups) == wanted else [f"{found}, {groups} instead of {wanted}"]


@pytest.mark.parametrize(
    ("source", "target"),
    some_of(
        [(APART, APART), (MIXED, MIXED), (COLUMNS, COLUMNS), (ROWS, COLUMNS), (APART, ROWS)], 1, 3
    ),
    ids=["apart", "mixed", "columns", "rows to columns", "apart to rows"],
)
def test_kernel_rates(
    workers: Workers, tmp_path: Path, source: dict[str, Any], target: dict[str, Any]
) -> None:
    for problems in workers(2).run(kernel_rates, root=str(tmp_path), source=source, target=target):
        assert problems == []


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect what the package logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]  # a stub
    logger = logging.getLogger("torchrec_checknrun")
    logger.addHandler(handler)
    logging.disable(logging.NOTSET)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logging.disable(logging.WARNING)


def rates_disagree(root: str) -> list[str]:
    """Join tables with different rates in one kernel: it keeps its own rate, with a warning."""
    run = Run(APART, "combined")
    for kernel in kernels(run.job.model):
        kernel.set_learning_rate(
            0.01 * (1 + int(kernel.split_embedding_weights()[0].shape[0] == 24))
        )
    with run.checkpointer(root) as saver:
        assert saver.save() is not None
    again = Run(ROWS, "combined", seed=4)
    before = [kernel.get_learning_rate() for kernel in kernels(again.job.model)]
    with heard() as lines, again.checkpointer(root) as saver:
        assert saver.restore() is not None
    assert [kernel.get_learning_rate() for kernel in kernels(again.job.model)] == before
    return [line for line in lines if "learning_rate" in line]


def test_kernel_rates_that_disagree(workers: Workers, tmp_path: Path) -> None:
    for lines in workers(2).run(rates_disagree, root=str(tmp_path)):
        assert len(lines) == 1
        assert "0.01" in lines[0]
        assert "0.02" in lines[0]


def own_norms(root: str) -> list[str]:
    """Save wrappers with values of their rank alone, which is no reason to refuse."""
    run = Run(APART, "warm each")
    run.train(2)
    clipping: Any = dict(run.optimizer.optimizers)["dense"]
    clipping._last_total_grad_norm = torch.tensor(float(dist.get_rank()))
    with heard() as lines, run.checkpointer(root) as saver:
        assert saver.save() is not None
    assert not [line for line in lines if "wrappers" in line]
    again = Run(APART, "warm each", seed=3)
    with again.checkpointer(root) as saver:
        assert saver.restore() is not None
    return [line for line in differences(again.live(), run.live()) if "grad_norm" not in line]


def test_wrappers_may_differ_between_ranks(workers: Workers, tmp_path: Path) -> None:
    for problems in workers(2).run(own_norms, root=str(tmp_path)):
        assert problems == []


def per_rank(run: Run, declared: bool) -> dict[str, Any]:
    """Return the options that declare a run's optimizer as each rank's own."""
    return {"state": {"optimizer": PerRank(run.optimizer), "job": run.job}} if declared else {}


def own_values(root: str, declared: bool) -> tuple[list[str], list[str]]:
    """Save a wrapper of which each rank has other values, undeclared or per rank; return what was
    logged, and the differences after a restore.
    """
    run = Run(APART, "averaging")
    run.train(1)
    run.optimizer.history.extend([dist.get_rank()] * 3)
    with heard() as lines, run.checkpointer(root, **per_rank(run, declared)) as saver:
        for _ in range(2):
            assert saver.save() is not None
            run.train(1)
            run.optimizer.history.extend([dist.get_rank()] * 3)
        last = run.live()
        assert saver.save() is not None
    again = Run(APART, "averaging", seed=3)
    with again.checkpointer(root, **per_rank(again, declared)) as saver:
        assert saver.restore() is not None
    return [line for line in lines if "wrappers" in line], differences(again.live(), last)


def test_wrappers_that_differ_are_the_lowest_ranks(workers: Workers, tmp_path: Path) -> None:
    """One warning names the values and what to declare; which rank's values come back is known."""
    (told, same), (_, other) = workers(2).run(own_values, root=str(tmp_path), declared=False)
    assert len(told) == 1
    assert "'optimizer'" in told[0]
    assert "wrappers.Averaging.attributes.history" in told[0]
    assert "PerRank" in told[0]
    assert same == []
    assert all("history" in line for line in other)
    assert other


def test_wrappers_that_differ_come_back_where_declared(workers: Workers, tmp_path: Path) -> None:
    for told, problems in workers(2).run(own_values, root=str(tmp_path), declared=True):
        assert told == problems == []
