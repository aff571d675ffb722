"""Place the tables on the ranks: by TorchRec's planner, or one way for all tables.

The fixed plans are made with TorchRec's plan constructors, which also make plans that its planner
does not consider on a CPU (row-wise). An impossible plan is an error on every rank: TorchRec's own
collective planning raises on rank 0 only, and leaves the others waiting.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    construct_module_sharding_plan,
)
from torchrec.distributed.sharding_plan import column_wise as by_columns
from torchrec.distributed.sharding_plan import row_wise as by_rows
from torchrec.distributed.sharding_plan import table_wise as by_table
from torchrec.distributed.types import ShardingPlan, ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

COLUMN_MULTIPLE = 4  # FBGEMM's kernels take widths that are a multiple of four floats


class Sharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder, with a GPU's choices for the planner on a CPU as well."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return super().sharding_types("cuda")


def planner(
    model: nn.Module, device: torch.device, sharding_types: Sequence[str] | None = None
) -> ShardingPlan:
    """Make a plan by TorchRec's planner on rank 0, the same on all ranks."""
    known = [sharding_type.value for sharding_type in ShardingType]
    if unknown := set(sharding_types or ()) - set(known):
        raise ValueError(
            f"sharding.sharding_types has {sorted(unknown)}; expected some of {', '.join(known)}"
        )
    return _same_on_all_ranks(lambda: _plan(model, device, sharding_types))


def row_wise(model: nn.Module, device: torch.device) -> ShardingPlan:
    """Give every rank a block of rows of every table."""
    return _every_table(model, device, lambda name, table: by_rows())


def table_wise(model: nn.Module, device: torch.device) -> ShardingPlan:
    """Put every table on one rank; the largest first, each on the emptiest rank."""
    loads = [0] * dist.get_world_size()
    ranks: dict[str, int] = {}
    for name, table in sorted(_tables(model).items(), key=lambda t: -t[1].numel()):
        ranks[name] = loads.index(min(loads))
        loads[ranks[name]] += table.numel()
    return _every_table(model, device, lambda name, table: by_table(rank=ranks[name]))


def column_wise(model: nn.Module, device: torch.device) -> ShardingPlan:
    """Split every table by columns over as many ranks as its width allows."""
    world_size = dist.get_world_size()
    turn = 0  # where the next table starts: narrow tables must not all end up on the first ranks

    def shard(name: str, table: nn.Parameter) -> ParameterShardingGenerator:
        nonlocal turn
        width = table.shape[1]
        if width % COLUMN_MULTIPLE:
            raise ValueError(
                f"sharding=column_wise: table {name} has {width} columns; expected a multiple of "
                f"{COLUMN_MULTIPLE}"
            )
        parts = max(n for n in range(1, world_size + 1) if width % (COLUMN_MULTIPLE * n) == 0)
        ranks = sorted((turn + part) % world_size for part in range(parts))
        turn += parts
        return by_columns(ranks=ranks)

    return _every_table(model, device, shard)


def _collections(model: nn.Module) -> dict[str, EmbeddingBagCollection]:
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, EmbeddingBagCollection)
    }


def _tables(model: nn.Module) -> dict[str, nn.Parameter]:
    return {
        f"{path}/{name}": table
        for path, module in _collections(model).items()
        for name, table in Sharder().shardable_parameters(module).items()
    }


def _every_table(
    model: nn.Module,
    device: torch.device,
    shard: Callable[[str, nn.Parameter], ParameterShardingGenerator],
) -> ShardingPlan:
    tables = _tables(model)
    plan = {}
    for path, module in _collections(model).items():
        names = Sharder().shardable_parameters(module)
        plan[path] = construct_module_sharding_plan(
            module,
            {name: shard(f"{path}/{name}", tables[f"{path}/{name}"]) for name in names},
            sharder=Sharder(),
            local_size=_local_world_size(),
            world_size=dist.get_world_size(),
            device_type=device.type,
        )
    return ShardingPlan(plan)


def _plan(
    model: nn.Module, device: torch.device, sharding_types: Sequence[str] | None
) -> ShardingPlan:
    topology = Topology(
        world_size=dist.get_world_size(),
        compute_device=device.type,
        local_world_size=_local_world_size(),
    )
    constraints = {
        name: ParameterConstraints(sharding_types=list(sharding_types))
        for module in _collections(model).values()
        for name in Sharder().shardable_parameters(module)
        if sharding_types
    }
    return EmbeddingShardingPlanner(topology=topology, constraints=constraints).plan(
        model, [Sharder()]
    )


def _same_on_all_ranks(make: Callable[[], ShardingPlan]) -> ShardingPlan:
    outcome: list[ShardingPlan | str | None] = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [make()]
        except Exception as error:  # the other ranks must hear of any error
            outcome = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(outcome, src=0, device=torch.device("cpu"))
    (plan,) = outcome
    if not isinstance(plan, ShardingPlan):
        raise RuntimeError(
            f"TorchRec's planner found no sharding plan: {plan}\n"
            "Give it more ranks or memory, a smaller model.scale, or choose sharding=row_wise"
        )
    return plan


def _local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
