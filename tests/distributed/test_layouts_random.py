"""Random tables, layouts and chains restore on another layout and then a third."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from tests.distributed.layouts import Layout, splits_into_whole_blocks
from tests.distributed.models import CollectionSpec, ModelSpec, TableSpec
from tests.distributed.test_layouts import run_chain
from tests.distributed.worker_pool import WorkerPool
from tests.examples import examples

Workers = Callable[[int], WorkerPool]

FEATURES = ["f0", "f1", "f2"]


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    collections = []
    for number in range(draw(st.integers(1, 2))):
        bag = draw(st.integers(0, 3)) > 0
        dim = draw(st.sampled_from([8, 16]))
        tables = tuple(
            TableSpec(
                name=f"t{i}",
                rows=draw(st.integers(3, 60)),
                dim=draw(st.sampled_from([8, 16, 48, 256])) if bag else dim,
                features=tuple(
                    draw(st.lists(st.sampled_from(FEATURES), min_size=1, max_size=2, unique=True))
                ),
            )
            for i in range(draw(st.integers(1, 3)))
        )
        collections.append(CollectionSpec(f"c{number}", tables, bag))
    return ModelSpec(
        tuple(collections), fused=draw(st.sampled_from(["rowwise_adagrad", "adagrad", "sgd"]))
    )


@st.composite
def layouts(draw: st.DrawFn, spec: ModelSpec, world_sizes: list[int]) -> Layout:
    ranks = draw(st.sampled_from(world_sizes))
    nodes = draw(st.sampled_from([n for n in (1, 2) if ranks % n == 0]))
    rank = st.integers(0, ranks - 1)
    plan = {}

    def column_shards(dim: int) -> int:
        return draw(st.sampled_from([2, 4] if dim % 16 == 0 else [2]))

    for collection in spec.collections:
        # TorchRec's sequences have one width: it can't train two tables split into unequal columns.
        common = 0 if collection.bag else column_shards(collection.tables[0].dim)
        for table in collection.tables:
            shards = common or column_shards(table.dim)
            choices = [
                f"table_wise:{draw(rank)}",
                "column_wise:" + ",".join(str(draw(rank)) for _ in range(shards)),
            ]
            if splits_into_whole_blocks(table.rows, ranks):
                choices.append("row_wise")
            if collection.bag:
                choices.append("data_parallel")
                if splits_into_whole_blocks(table.rows, ranks // nodes):
                    choices.append(f"table_row_wise:{draw(st.integers(0, nodes - 1))}")
                    if table.dim >= 256 and nodes == 2:  # TorchRec halves them
                        choices.append("grid_shard:" + ",".join(map(str, range(nodes))))
            plan[f"{collection.name}.{table.name}"] = draw(st.sampled_from(choices))
    return Layout(plan, ranks, ranks // nodes, prefix=draw(st.sampled_from(["tables", "", "a"])))


@st.composite
def chains(draw: st.DrawFn, world_sizes: list[int]) -> tuple[ModelSpec, list[Layout]]:
    spec = draw(specs())
    return spec, [draw(layouts(spec, world_sizes)) for _ in range(3)]


def check(workers: Workers, chain: tuple[ModelSpec, list[Layout]]) -> None:
    note(str(chain))
    with tempfile.TemporaryDirectory() as folder:
        run_chain(workers, Path(folder), *chain, steps=2)


quick = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=examples(6, quick=3),
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@quick
@given(chain=chains([1, 2]))
def test_random_layouts(workers: Workers, chain: Any) -> None:
    check(workers, chain)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(quick, max_examples=examples(100))
@given(chain=chains([1, 2, 3, 4, 8]))
def test_random_layouts_long(workers: Workers, chain: Any) -> None:
    check(workers, chain)
