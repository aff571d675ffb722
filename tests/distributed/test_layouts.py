"""Any saved layout restores onto any other: weights, optimizer state, and training from there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.layouts import Layout, build
from tests.distributed.models import CollectionSpec, ModelSpec, TableSpec
from tests.distributed.unsharded import Reference, Whole, differences, expected, whole_state
from tests.distributed.worker_pool import WorkerPool
from tests.examples import some_of
from torchrec_checknrun import Checkpointer, Consecutive
from torchrec_checknrun.root.report import CheckpointReport

Workers = Callable[[int], WorkerPool]

# t0 has an odd number of rows; names and features are shared; `wide` can be sharded as a grid.
SPEC = ModelSpec(
    (
        CollectionSpec(
            "a", (TableSpec("t0", 59, 16, ("f0", "f1")), TableSpec("t1", 40, 8, ("f1", "f2")))
        ),
        CollectionSpec("b", (TableSpec("t0", 32, 256, ("f0",)),)),
        CollectionSpec(
            "c", (TableSpec("t0", 31, 8, ("f2", "f3")), TableSpec("t2", 24, 8, ("f0",))), bag=False
        ),
    )
)
NAMES = ("a.t0", "a.t1", "b.t0", "c.t0", "c.t2")


def layout(kind: str, ranks: int) -> Layout:
    """Shard the tables of ``SPEC`` alike, or as nearly as TorchRec can on that many ranks."""
    last = ranks - 1
    halves, quarters = f"column_wise:0,{last}", f"column_wise:{last},0,0,{last}"
    nodes = 2 if ranks % 2 == 0 else 1
    grid = "grid_shard:" + ",".join(map(str, range(nodes)))
    sequence = ["row_wise", f"table_wise:{last}"]  # EmbeddingCollection
    shardings = {
        "table_wise": [f"table_wise:{i % ranks}" for i in range(5)],
        "row_wise": ["row_wise"] * 5,
        "column_2": [halves] * 5,
        "column_4": [quarters, halves, quarters, halves, halves],
        "table_row_wise": [f"table_row_wise:{i % nodes}" for i in range(3)] + sequence,
        "grid": [halves, "row_wise", grid, *sequence],
        "data_parallel": ["data_parallel"] * 3 + sequence,
        "mixed": [quarters, "data_parallel", "row_wise", f"table_wise:{last}", halves],
    }[kind]
    return Layout(dict(zip(NAMES, shardings, strict=True)), ranks, ranks // nodes)


def checkpointer(root: str, job: Any, **options: Any) -> Checkpointer:
    return Checkpointer(
        root,
        model=job.model,
        retention=None,
        state={"optimizer": job.optimizer, "job": job},
        policy=Consecutive(),
        chunk_bytes=1500,
        **options,
    )


def save(saver: Checkpointer) -> CheckpointReport:
    report = saver.save()
    assert report is not None
    return report


def keep(job: Any, layout: dict[str, Any], path: str) -> None:
    whole = whole_state(job, layout)
    if dist.get_rank() == 0:
        whole.store(path)


def save_chain(root: str, spec: dict[str, Any], layout: dict[str, Any], copy: str) -> list[str]:
    """Save a full checkpoint and two differential ones; return differences to the reference."""
    job = build(spec, layout)
    with checkpointer(root, job) as saver:
        job.train(1)
        start = whole_state(job, layout)
        kinds = [save(saver).kind]
        for _ in range(2):
            job.train(1)
            kinds.append(save(saver).kind)
        assert kinds == ["full", "differential", "differential"]
        keep(job, layout, copy)
    reference = Reference(job.spec, start, Layout.from_json(layout))
    reference.train(1, 2)
    return differences(whole_state(job, layout), reference.whole, set(), exact=False)


def restore_and_go_on(
    root: str,
    spec: dict[str, Any],
    source: dict[str, Any],
    target: dict[str, Any],
    copy: str,
    kind: str | None = None,
    steps: int = 5,
) -> list[str]:
    """Restore into a new model on a layout, train and save twice; return what is wrong.

    Args:
        source: the layout that the copy of the state was taken on.
        kind: of the first checkpoint after that; None for whatever follows from the layouts.
    """
    job = build(spec, target, seed=77)
    came, went = Layout.from_json(source), Layout.from_json(target)
    with checkpointer(root, job) as saver:
        report = saver.restore()
        assert report is not None
        assert report.step == saver.steps
        found = whole_state(job, target)
        wanted, converted = expected(
            Whole.load(copy), job.spec, came, went, pointwise=job.spec.fused != "rowwise_adagrad"
        )
        problems = [f"restored: {p}" for p in differences(found, wanted, converted)]
        reference = Reference(job.spec, found, went)
        first = job.steps
        job.train(steps)
        reference.train(first, steps)
        after = whole_state(job, target)
        problems += [
            f"trained: {p}" for p in differences(after, reference.whole, set(), exact=False)
        ]
        columns = {
            name: (came.widths(name, t.dim), went.widths(name, t.dim))
            for c in job.spec.collections
            for t in c.tables
            for name in [f"{c.name}.{t.name}"]
        }
        same = all(a == b for a, b in columns.values())
        kinds = [save(saver).kind]
        job.train(1)
        kinds.append(save(saver).kind)
        first_kind = kind or ("differential" if same else "full")
        if kinds != [first_kind, "differential"]:
            problems.append(f"checkpoints were {kinds}, not [{first_kind}, differential]")
        keep(job, target, copy)
    return problems


def run_chain(
    workers: Workers, folder: Path, spec: ModelSpec, layouts: list[Layout], steps: int = 5
) -> None:
    """Save on the first layout, restore on the second, train and save there, and so on."""
    where: dict[str, Any] = {
        "root": str(folder / "root"),
        "spec": spec.to_json(),
        "copy": str(folder / "copy.npz"),
    }
    first, *others = layouts
    problems = workers(first.world_size).run(save_chain, **where, layout=asdict(first))
    assert not problems[0], problems[0]
    for source, target in zip(layouts, others, strict=False):
        problems = workers(target.world_size).run(
            restore_and_go_on, **where, source=asdict(source), target=asdict(target), steps=steps
        )
        assert not problems[0], f"{source} to {target}: {problems[0]}"


CASES = [
    # saved as, restored as, restored again as
    (("table_wise", 1), ("row_wise", 2), ("column_2", 2)),
    (("row_wise", 2), ("table_wise", 1), ("data_parallel", 2)),
    (("column_2", 2), ("column_4", 1), ("row_wise", 2)),
    (("column_4", 1), ("table_row_wise", 2), ("mixed", 2)),
    (("table_row_wise", 2), ("grid", 2), ("table_wise", 2)),
    (("grid", 2), ("data_parallel", 1), ("grid", 2)),
    (("data_parallel", 2), ("mixed", 2), ("column_4", 2)),
    (("mixed", 2), ("mixed", 1), ("data_parallel", 1)),
    (("mixed", 2), ("mixed", 2), ("mixed", 2)),
]


# Every case with the optimizer whose state is the hardest to convert, the others with some.
OPTIMIZERS = [
    *((case, "rowwise_adagrad") for case in CASES),
    *((case, "adagrad") for case in CASES[2:8:2]),
    *((case, "sgd") for case in CASES[1:8:3]),
]
OFTEN = (3, 5, 10)
"""The layouts that are the hardest to convert; ``test_layouts_random`` has others."""


def name_of(case: object) -> str | None:
    return "-".join(f"{k}@{n}" for k, n in case) if isinstance(case, tuple) else None


@pytest.mark.parametrize(("case", "fused"), some_of(OPTIMIZERS, *OFTEN), ids=name_of)
def test_any_layout_onto_any_other(
    workers: Workers, tmp_path: Path, case: tuple[tuple[str, int], ...], fused: str
) -> None:
    spec = ModelSpec(SPEC.collections, fused=fused)
    run_chain(workers, tmp_path, spec, [layout(kind, ranks) for kind, ranks in case])


def test_four_ranks_on_two_nodes(workers: Workers, tmp_path: Path) -> None:
    spec = ModelSpec(SPEC.collections, fused="rowwise_adagrad")
    run_chain(workers, tmp_path, spec, [layout("mixed", 2), layout("grid", 4), layout("grid", 4)])


MORE_RANKS = [
    (("mixed", 1), ("row_wise", 3), ("grid", 4)),
    (("grid", 8), ("table_row_wise", 4), ("column_4", 3)),
    (("table_row_wise", 4), ("mixed", 8), ("table_wise", 2)),
    (("data_parallel", 3), ("column_2", 4), ("mixed", 8)),
]


def test_parts_of_an_optimizer_without_a_key(workers: Workers, tmp_path: Path) -> None:
    """Give fused and data-parallel tables' optimizers the same key, the empty one; ranks have other
    numbers of fused ones.
    """
    shardings = ["table_wise:1", "row_wise", "data_parallel", "table_wise:1", "table_wise:1"]
    plan = dict(zip(NAMES, shardings, strict=True))
    there, back = Layout(plan, 2, 2, prefix=""), replace(layout("row_wise", 2), prefix="")
    run_chain(workers, tmp_path, SPEC, [there, back])


@pytest.mark.slow
@pytest.mark.parametrize("fused", ["sgd", "rowwise_adagrad", "adagrad"])
@pytest.mark.parametrize("case", MORE_RANKS, ids=lambda case: "-".join(f"{k}@{n}" for k, n in case))
def test_more_ranks(
    workers: Workers, tmp_path: Path, case: tuple[tuple[str, int], ...], fused: str
) -> None:
    spec = ModelSpec(SPEC.collections, fused=fused)
    run_chain(workers, tmp_path, spec, [layout(kind, ranks) for kind, ranks in case])
