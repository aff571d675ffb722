"""State of the fused optimizers that can't train on a CPU: rows, step counter and learning rate.

Tables are built and filled with known values through FBGEMM's own views, saved, and restored onto
one layout after another; what is found there is put together from those views again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.distributed.fused_on_cpu import any_fused_optimizer
from tests.distributed.layouts import Layout, LayoutJob, build, table_names
from tests.distributed.models import CollectionSpec, ModelSpec, TableSpec
from tests.distributed.unsharded import Whole, differences, expected
from tests.distributed.worker_pool import WorkerPool
from tests.examples import some_of
from torchrec_checknrun import Checkpointer, Consecutive, Quantization
from torchrec_checknrun.tools.verify import verify

Workers = Callable[[int], WorkerPool]

SPEC = ModelSpec(
    (
        CollectionSpec("a", (TableSpec("t0", 29, 16, ("f0",)), TableSpec("t1", 24, 8, ("f1",)))),
        CollectionSpec("b", (TableSpec("t0", 31, 8, ("f1", "f2")),), bag=False),
    )
)
STATES = ("momentum1", "exp_avg_sq")
ROWWISE = {"partial_rowwise_adam": ("exp_avg_sq",), "partial_rowwise_lamb": ("exp_avg_sq",)}


def layout(ranks: int, *shardings: str) -> dict[str, Any]:
    names = [f"{c.name}.{t.name}" for c in SPEC.collections for t in c.tables]
    return asdict(Layout(dict(zip(names, shardings, strict=True)), ranks))


ROWS = layout(2, *["row_wise"] * 3)
COLUMNS = layout(2, "column_wise:1,0,0,1", "column_wise:0,1", "column_wise:1,0")
HALVES = layout(1, *["column_wise:0,0"] * 3)
TABLES = layout(1, *["table_wise:0"] * 3)
NODE = layout(2, "table_row_wise:0", "table_wise:1", "row_wise")


class Views:
    """A table's shard in FBGEMM: weight, states and their place in the table."""

    def __init__(self, path: str, config: Any, weight: Any, states: list[Any]) -> None:
        row, col = config.local_metadata.shard_offsets
        self.path = path
        self.tensors = dict(zip(("weight", *STATES), (weight, *states), strict=True))
        self.rows = slice(row, row + weight.shape[0])
        self.columns = slice(col, col + weight.shape[1])


def kernels(job: LayoutJob) -> Iterator[tuple[str, Any]]:
    """Yield every fused kernel on this rank, with its collection's path of tables."""
    for name, module in job.model.named_modules():
        for lookup in getattr(module, "_lookups", []):
            for kernel in getattr(lookup, "_emb_modules", []):
                kind = "embeddings" if "Collection" in type(module).__name__ else ""
                kind = "embedding_bags" if "Bag" in type(module).__name__ else kind
                yield f"{name.rsplit('.', 1)[-1]}.{kind}", kernel


def views(job: LayoutJob) -> Iterator[Views]:
    for path, kernel in kernels(job):
        tbe = kernel._emb_module
        for config, weight, states in zip(
            kernel._config.embedding_tables,
            tbe.split_embedding_weights(),
            tbe.split_optimizer_states(),
            strict=True,
        ):
            yield Views(f"{path}.{config.name}", config, weight, states)


def fill(job: LayoutJob, seed: int, every: int = 1) -> dict[str, np.ndarray]:
    """Write known values into every n-th row; return the rows by table."""
    tables = {path: table for path, (_, table) in table_names(job.spec).items()}
    written = {path: np.arange(0, table.rows, every) for path, table in tables.items()}
    for view in views(job):
        table = tables[view.path]
        here = written[view.path]
        here = here[(here >= view.rows.start) & (here < view.rows.stop)]
        for number, (name, tensor) in enumerate(view.tensors.items()):
            generator = torch.Generator().manual_seed(seed * 31 + number)
            whole = torch.rand(table.rows, table.dim, generator=generator)
            part = whole[here, view.columns]
            local = torch.from_numpy(here - view.rows.start)
            tensor[local] = part if tensor.dim() == 2 else part.mean(dim=1)
            assert name == "weight" or float(tensor.min()) >= 0
    return written


def wholes(job: LayoutJob) -> dict[str, Whole]:
    """Return unsharded tables by state; a row-wise value is repeated in each of its columns."""
    mine = [
        (v.path, v.rows, v.columns, name, tensor.numpy().copy())
        for v in views(job)
        for name, tensor in v.tensors.items()
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found = {name: Whole() for name in STATES}
    tables = {path: table for path, (_, table) in table_names(job.spec).items()}
    for path, rows, columns, name, array in (part for parts in everyone for part in parts):
        table = tables[path]
        block = array if array.ndim == 2 else array[:, None]
        for state in STATES if name == "weight" else [name]:
            into = found[state].weights if name == "weight" else found[state].states
            whole = into.setdefault(path, np.full((table.rows, table.dim), np.nan, np.float32))
            whole[rows, columns] = block
    for whole_of in found.values():
        for arrays in (whole_of.weights, whole_of.states):
            assert arrays.keys() == tables.keys()
            assert not any(np.isnan(array).any() for array in arrays.values())
    return found


def checkpointer(root: str, job: LayoutJob, optimizer: str = "fp32") -> Checkpointer:
    return Checkpointer(
        root,
        quantization=Quantization(optimizer=optimizer),
        model=job.model,
        retention=None,
        state={"optimizer": job.optimizer, "job": job},
        policy=Consecutive(),
        chunk_bytes=1500,
    )


def set_progress(job: LayoutJob, step: int, rate: float) -> None:
    for _, kernel in kernels(job):
        kernel._emb_module.iter.fill_(step)
        kernel._emb_module.set_learning_rate(rate)
    for group in job.model.fused_optimizer.param_groups:
        group["lr"] = rate


def progress(job: LayoutJob) -> list[tuple[int, int, float, float]]:
    found = set()
    for _, kernel in kernels(job):
        tbe, group = kernel._emb_module, kernel.fused_optimizer.param_groups[0]
        rate = round(tbe.get_learning_rate(), 6)
        found.add((int(tbe.iter), int(tbe.iter_cpu), rate, round(group["lr"], 6)))
    return sorted(found)


def save_chain(saver: Checkpointer, job: LayoutJob, seed: int, first: str) -> None:
    """Save all rows, then every third one changed, each time with another counter."""
    for every, kind in ((1, first), (3, "differential")):
        rows = fill(job, seed + every, every)
        set_progress(job, step=seed * 10 + every, rate=seed / 1000)
        for path in rows:
            saver.mark(path, rows[path])
        report = saver.save()
        assert report is not None
        assert report.kind == kind


def keep(job: LayoutJob, copy: str) -> None:
    for state, whole in wholes(job).items():
        if dist.get_rank() == 0:
            whole.store(f"{copy}-{state}.npz")


def names_in_torchrec(job: LayoutJob) -> set[str]:
    states = job.model.fused_optimizer.state_dict()["state"].values()
    return {key.rsplit(".", 1)[-1] for state in states for key in state}


def start(root: str, spec: dict[str, Any], layout: dict[str, Any], copy: str) -> None:
    with any_fused_optimizer():
        job = build(spec, layout)
    assert names_in_torchrec(job) == set(STATES)
    with checkpointer(root, job) as saver:
        save_chain(saver, job, seed=1, first="full")
    keep(job, copy)


def go_on(
    root: str,
    spec: dict[str, Any],
    source: dict[str, Any],
    target: dict[str, Any],
    copy: str,
    seed: int,
) -> list[str]:
    with any_fused_optimizer():
        job = build(spec, target, seed=seed)
    came, went = Layout.from_json(source), Layout.from_json(target)
    rowwise = ROWWISE.get(job.spec.fused, ())
    with checkpointer(root, job) as saver:
        assert saver.restore() is not None
        problems = []
        for state, found in wholes(job).items():
            wanted, converted = expected(
                Whole.load(f"{copy}-{state}.npz"),
                job.spec,
                came,
                went,
                pointwise=state not in rowwise,
            )
            problems += [f"{state}: {p}" for p in differences(found, wanted, converted)]
        before = (seed - 1) * 10 + 3, 0, (seed - 1) / 1000, (seed - 1) / 1000
        if progress(job) != [before]:
            problems.append(f"counters and rates are {progress(job)}, not {before}")
        same = all(
            came.widths(name, table.dim) == went.widths(name, table.dim)
            for name, table in table_names(job.spec).values()
        )
        save_chain(saver, job, seed, "differential" if same else "full")
        keep(job, copy)
    return problems


@pytest.mark.parametrize(
    "fused", some_of(["adam", "partial_rowwise_adam", "lamb", "partial_rowwise_lamb"], 3)
)
def test_state_onto_any_other_layout(workers: Workers, tmp_path: Path, fused: str) -> None:
    spec = ModelSpec(SPEC.collections, fused=fused).to_json()
    root, copy = str(tmp_path / "root"), str(tmp_path / "copy")
    layouts = [ROWS, COLUMNS, HALVES, TABLES, NODE, ROWS]
    workers(2).run(start, root=root, spec=spec, layout=layouts[0], copy=copy)
    for seed, (source, target) in enumerate(itertools.pairwise(layouts), start=2):
        problems = workers(target["world_size"]).run(
            go_on, root=root, spec=spec, source=source, target=target, copy=copy, seed=seed
        )
        assert not problems[0], f"{source} to {target}: {problems[0]}"


def save_in_a_byte(root: str, spec: dict[str, Any], layout: dict[str, Any], copy: str) -> None:
    with any_fused_optimizer():
        job = build(spec, layout)
    with checkpointer(root, job, "rowlog8") as saver:
        save_chain(saver, job, seed=1, first="full")
    keep(job, copy)


def restore_from_a_byte(root: str, spec: dict[str, Any], layout: dict[str, Any], copy: str) -> None:
    with any_fused_optimizer():
        job = build(spec, layout, seed=2)
    with checkpointer(root, job) as saver:
        assert saver.restore() is not None
    for state, found in wholes(job).items():
        saved = Whole.load(f"{copy}-{state}.npz")
        for path, wanted in saved.weights.items():
            np.testing.assert_array_equal(found.weights[path], wanted)
            values, exact = found.states[path], saved.states[path]
            assert not np.array_equal(values, exact)
            np.testing.assert_allclose(values, exact, rtol=0.048, atol=0)


def test_moments_in_a_byte(workers: Workers, tmp_path: Path) -> None:
    """The whole way, onto other columns and ranks, and verified in between."""
    spec = ModelSpec(SPEC.collections, fused="adam").to_json()
    root, copy = str(tmp_path / "root"), str(tmp_path / "copy")
    workers(2).run(save_in_a_byte, root=root, spec=spec, layout=ROWS, copy=copy)
    assert not any(found.problems for found in verify(root))
    for layout in (COLUMNS, HALVES):
        workers(layout["world_size"]).run(
            restore_from_a_byte, root=root, spec=spec, layout=layout, copy=copy
        )
