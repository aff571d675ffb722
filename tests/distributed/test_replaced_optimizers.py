"""Replace optimizers on two ranks, or on one of them only: what is saved is right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.live_optimizers import differences, live
from tests.distributed.optimizer_nests import FACTORIES, Run, layout
from tests.distributed.worker_pool import WorkerPool
from torchrec_checknrun import PerRank
from torchrec_checknrun.errors import CheckNRunError

Workers = Callable[[int], WorkerPool]

MIXED = layout("data_parallel", "row_wise")


def dense_of(run: Run) -> Any:
    return dict(run.optimizer.optimizers)["dense"]


def replace_inner(run: Run, factory: str) -> None:
    """Put another optimizer inside the wrapper of the dense one."""
    dense = dense_of(run)
    dense._optimizer = FACTORIES[factory](list(dense.params.values()))
    dense.state, dense.param_groups = dense._optimizer.state, dense._optimizer.param_groups


def reload_inner(run: Run, factory: str) -> None:
    """Load other state into the optimizer inside, but not into its wrapper."""
    inner = dense_of(run)._optimizer
    state = inner.state_dict()
    for values in state["state"].values():
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                values[name] = value + 1
    inner.load_state_dict(state)


CHANGES = {"replace": replace_inner, "reload": reload_inner}


def changed(
    root: str, change: str, before: str, after: str, where: list[int], declared: bool = False
) -> dict[str, Any]:
    """Change the dense optimizer on some ranks between saves, and restore the last checkpoint.

    Returns:
        The kinds of the checkpoints or the errors in place of them; if all ranks have changed, the
        differences of what training uses, after a restore and after further steps.
    """
    run = Run(MIXED, "combined", factory=before)
    options: dict[str, Any] = {}
    if declared:
        options = {"state": {"optimizer": PerRank(run.optimizer), "job": run.job}}
    saved: list[str] = []
    with run.checkpointer(root, **options) as saver:
        for turn in range(3):
            if turn == 1 and dist.get_rank() in where:
                CHANGES[change](run, after)
            run.train(2)
            try:
                report = saver.save()
                assert report is not None
                saved.append(report.kind)
            except CheckNRunError as error:
                saved.append(f"{type(error).__name__}: {error}")
        if len(where) < dist.get_world_size():
            return {"saved": saved}
        again = Run(MIXED, "combined", factory=after, seed=4)
        with again.checkpointer(root) as other:
            assert other.restore() is not None
        problems = differences(used(again), used(run))
        run.train(2)
        again.train(2)
    return {"saved": saved, "problems": problems + differences(used(again), used(run))}


def used(run: Run) -> Any:
    """Return what training uses: of a dense wrapper the optimizer inside."""
    inner = dense_of(run)._optimizer
    return live(run.job.model, state=inner.state, groups=inner.param_groups, steps=run.job.steps)


@pytest.mark.parametrize(
    ("change", "before", "after", "kind"),
    [
        ("replace", "adam", "adam", "differential"),
        ("replace", "adam", "momentum", "full"),
        ("replace", "momentum", "adamw", "full"),
        ("reload", "adam", "adam", "differential"),
    ],
)
def test_all_ranks_change(
    workers: Workers, tmp_path: Path, change: str, before: str, after: str, kind: str
) -> None:
    case: dict[str, Any] = {"change": change, "before": before, "after": after, "where": [0, 1]}
    for found in workers(2).run(changed, root=str(tmp_path / "run"), **case):
        assert found["saved"] == ["full", kind, "differential"]
        assert found["problems"] == []


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("change", ["replace", "reload"])
def test_one_rank_changes(workers: Workers, tmp_path: Path, change: str, where: int) -> None:
    """Refuse to save optimizers that differ, on all ranks."""
    case: dict[str, Any] = {"change": change, "before": "adam", "after": "adam", "where": [where]}
    for found in workers(2).run(changed, root=str(tmp_path / "run"), **case):
        assert found["saved"][0] == "full"
        for said in found["saved"][1:]:
            assert said.startswith("UnsupportedState: state 'optimizer' was not declared")


@pytest.mark.parametrize("where", [0, 1])
def test_other_rows_of_state_on_one_rank(workers: Workers, tmp_path: Path, where: int) -> None:
    """Refuse a data-parallel table with other state on one rank, even if optimizers may differ."""
    case: dict[str, Any] = {
        "change": "replace",
        "before": "adam",
        "after": "momentum",
        "where": [where],
    }
    found = workers(2).run(changed, root=str(tmp_path / "run"), **case, declared=True)
    for rank in found:
        assert rank["saved"][0] == "full"
        for said in rank["saved"][1:]:
            assert "'a.embedding_bags.t0' has optimizer state" in said
            assert "let the same optimizer step the table" in said
