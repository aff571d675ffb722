"""Random runs with rows in few bits: no row is lost, stale or another one's, on any plan.

Each seed draws a model, and lives of it on other ranks and plans, each with a quantization, a
policy and more of its own. Restored rows are compared with those of their cut; and restores on
other plans, exports, followers, publications and warm starts with each other, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.layouts import Layout
from tests.distributed.models import CollectionSpec, ModelSpec, TableSpec
from tests.distributed.quantized_life import SABOTAGE, live
from tests.distributed.quantized_run import run
from tests.distributed.worker_pool import WorkerPool
from tests.examples import some_of

Workers = Callable[[int], WorkerPool]

OFTEN = 9004
SEEDS = (OFTEN, *(seed for seed in range(9000, 9040) if seed != OFTEN))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", some_of(SEEDS, 0))
def test_rows_of_few_bits(workers: Workers, tmp_path: Path, seed: int) -> None:
    seen = run(workers, seed, tmp_path)
    assert seen["lives"] == 4
    assert seen["restores"] > 4


@pytest.mark.parametrize("sabotage", [None, *SABOTAGE])
def test_a_wrong_row_is_found(workers: Workers, tmp_path: Path, sabotage: str | None) -> None:
    """Lose rows, or exchange them, in a second life on another plan."""
    spec = ModelSpec((CollectionSpec("c", (TableSpec("t", 1200, 12, ("f",)),)),))
    (tmp_path / "copies").mkdir()
    where: dict[str, Any] = {
        "root": str(tmp_path / "root"),
        "copies": str(tmp_path / "copies"),
        "spec": spec.to_json(),
        "dtypes": {"c.t": "fp32"},
    }
    life = {"policy": "one_shot", "quantization": {"bits": 4}, "chunk_bytes": 20_000}
    first = [["write", 1, 1.0, "plain"], ["save"], ["write", 2, 0.1, "plain"], ["save"]]
    second: list[list[Any]] = [["restore", None], ["train", 2], ["save"], ["restore", None]]
    problems = []
    for number, (plan, script) in enumerate((("row_wise", first), ("table_wise:1", second))):
        found = workers(2).run(
            live,
            where=where | {"layout": asdict(Layout({"c.t": plan}, 2))},
            life=life,
            script=script,
            seed=number,
            sabotage=sabotage if number else None,
        )
        problems += found[0]["problems"]
    assert bool(problems) == (sabotage is not None), problems
