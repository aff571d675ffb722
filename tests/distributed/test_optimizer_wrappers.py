"""Wrapped optimizers and schedulers go on as if never interrupted: live objects are compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.live_optimizers import differences
from tests.distributed.optimizer_nests import ALONE, NESTS, SCHEDULES, Run, layout
from tests.distributed.worker_pool import WorkerPool

Workers = Callable[[int], WorkerPool]

APART = layout("table_wise:0", "table_wise:1")
MIXED = layout("data_parallel", "row_wise")
COLUMNS = layout("column_wise:0,1", "row_wise")


def goes_on(root: str, cases: list[dict[str, Any]]) -> list[str]:
    """Save in the middle, restore into new objects (and into the old ones), train on."""
    problems = []
    for number, case in enumerate(cases):
        path = f"{root}/{number}"
        first = case.pop("scheduler_first", False)
        run = Run(**case)
        with run.checkpointer(path, first) as saver:
            start = saver.save()
            at_start = run.live()
            run.train(5)  # through two stages of a warm-up
            middle = saver.save()
            assert start is not None
            assert middle is not None
            at_middle = run.live()
            run.train(4)
            at_end = run.live()
            again = Run(**{**case, "seed": 7})
            with again.checkpointer(path, first) as other:
                assert other.restore() is not None
                found = [("restored", again.live(), at_middle)]
            again.train(4)
            found.append(("trained on", again.live(), at_end))
            assert saver.restore(middle.id) is not None
            found.append(("gone back", run.live(), at_middle))
            run.train(4)
            found.append(("trained again", run.live(), at_end))
            assert saver.restore(start.id) is not None
            found.append(("gone back to the start", run.live(), at_start))
        problems += [
            f"{case} {when}: {line}"
            for when, one, wanted in found
            for line in differences(one, wanted)
        ]
    return problems


def check(workers: Workers, root: Path, cases: list[dict[str, Any]]) -> None:
    for problems in workers(2).run(goes_on, root=str(root), cases=cases):
        assert problems == []


@pytest.mark.parametrize("where", [APART, MIXED, COLUMNS], ids=["apart", "mixed", "columns"])
def test_nests(workers: Workers, tmp_path: Path, where: dict[str, Any]) -> None:
    names = [*NESTS, *ALONE]
    check(workers, tmp_path, [{"layout": where, "nest": name} for name in names])


def test_schedulers(workers: Workers, tmp_path: Path) -> None:
    cases = [
        {"layout": MIXED, "nest": nest, "schedule": schedule, "scheduled": scheduled}
        for nest in ("combined",)
        for schedule in SCHEDULES
        for scheduled in ("outer", "wrapper", "inner")
        if schedule != "none"
    ]
    for number, case in enumerate(cases):
        case |= {
            "factory": ("adam", "adamw", "momentum")[number % 3],
            "scheduler_first": number % 2 == 1,
        }
    check(workers, tmp_path, cases)


def test_optimizer_over_all_parameters(workers: Workers, tmp_path: Path) -> None:
    cases = [
        {"layout": where, "nest": nest, "factory": factory, "over_all": True}
        for where in (APART, MIXED)
        for nest, factory in (("combined", "adam"), ("averaging", "momentum"))
    ]
    check(workers, tmp_path, cases)
