"""Every sharding plan of the recipe holds the same model; one that can't be made is an error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hydra.utils import instantiate

from recipes.dlrm_criteo import final_state
from recipes.dlrm_criteo.model import table_values
from recipes.dlrm_criteo.train import build
from tests.distributed.worker_pool import WorkerPool
from tests.examples import some_of
from tests.unit.recipes.test_dlrm_model import configured

SEED = 5
PLANS = ["row_wise", "table_wise", "column_wise", "planner", "everything"]


def shards_of(plan: str) -> list[dict[str, Any]]:
    """Return this rank's shards, and whether each holds the values of the seed."""
    overrides = [f"seed={SEED}", "model.scale=1e-4", f"sharding={plan}"]
    if plan == "everything":
        overrides[-1:] = ["sharding=planner", "sharding.sharding_types=null"]
    config = configured(*overrides)
    model, optimizer = build(config, instantiate(config.model), torch.device("cpu"))
    shards = [s | {"right": _is_right(s)} for s in final_state.shards_of(model)]
    for name, parameter in final_state.dense_of(model, optimizer).items():
        if name.endswith(".weight") and ".embedding_bags." in name:  # data-parallel
            table = name.split(".")[-2]
            whole = {"table": table, "shape": tuple(parameter.shape), "row": 0, "column": 0}
            shard = {**whole, "weight": parameter}
            shards.append(shard | {"right": _is_right(shard), "data_parallel": True})
    return [
        {key: value for key, value in shard.items() if key not in ("weight", "state")}
        | {"size": list(shard["weight"].shape)}
        for shard in shards
    ]


def _is_right(shard: dict[str, Any]) -> bool:
    name = f"model.sparse_arch.embedding_bag_collection.embedding_bags.{shard['table']}.weight"
    ((_, values),) = table_values(SEED, name, shard["shape"], 0, shard["shape"][0])
    row, column, weight = shard["row"], shard["column"], shard["weight"]
    part = values[row : row + weight.shape[0], column : column + weight.shape[1]]
    return torch.equal(weight, torch.from_numpy(part))


@pytest.mark.parametrize("plan", some_of(PLANS, 2, 4))
def test_every_plan_starts_from_the_same_tables(
    workers: Callable[[int], WorkerPool], plan: str
) -> None:
    shards = [shard for rank in workers(2).run(shards_of, plan=plan) for shard in rank]
    assert shards
    assert all(shard["right"] for shard in shards if math.prod(shard["size"]))
    tables = {shard["table"]: math.prod(shard["shape"]) for shard in shards}
    assert len(tables) == 26
    for table, size in tables.items():
        held = [math.prod(s["size"]) for s in shards if s["table"] == table]
        copies = [s for s in shards if s["table"] == table and s.get("data_parallel")]
        assert sum(held) == size * (len(copies) or 1)


def test_plans_spread_the_tables(workers: Callable[[int], WorkerPool]) -> None:
    for plan in ("row_wise", "table_wise", "column_wise"):
        held = [
            sum(math.prod(shard["size"]) for shard in rank)
            for rank in workers(2).run(shards_of, plan=plan)
        ]
        assert min(held) > 0.45 * sum(held), plan


def plan_the_impossible() -> str:
    config = configured("model=dlrm_terabyte", "model.scale=20", "sharding=planner")
    try:
        build(config, instantiate(config.model), torch.device("cpu"))  # 1.9 TB
    except RuntimeError as error:
        dist.barrier()  # the ranks are still in step
        return str(error)
    return "planned"


def test_no_plan_is_an_error_on_every_rank(workers: Callable[[int], WorkerPool]) -> None:
    for message in workers(2).run(plan_the_impossible):
        assert message.startswith("TorchRec's planner found no sharding plan: ")
        assert "choose sharding=row_wise" in message


def test_unknown_sharding_types_are_refused(workers: Callable[[int], WorkerPool]) -> None:
    for message in workers(2).run(plan_with_a_typo):
        assert "sharding.sharding_types has ['rowwise']" in message
        assert "row_wise" in message


def plan_with_a_typo() -> str:
    config = configured("sharding=planner", "sharding.sharding_types=[rowwise,table_wise]")
    try:
        build(config, instantiate(config.model), torch.device("cpu"))
    except ValueError as error:
        return str(error)
    return "planned"
