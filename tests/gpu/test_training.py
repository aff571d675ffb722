"""Check marks, checkpoints and continued training that need a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.reader30 import read_rows
from tests.gpu.models import FUSED, KERNELS, ON_A_GPU, GpuJob, State, assert_equal, build

pytestmark = ON_A_GPU


def rows_changed(before: State, after: State) -> set[tuple[str, int]]:
    """Return the changed rows of the tables' weights, by table and row."""
    changed = set()
    for name, now in after.items():
        if name.startswith("model/embeddings."):
            table = name.removeprefix("model/").partition(".weight")[0]
            different = (now != before[name]).any(dim=1)
            changed |= {(table, int(row)) for row in different.nonzero()}
    return changed


def train_save_and_go_on(root: Path, job: GpuJob, again: GpuJob, all_rows: bool = False) -> None:
    """Make a full and a differential checkpoint; check their rows, and a new job made from them."""
    job.train(3)
    with job.checkpointer(root, chunk_bytes=4000) as saver:
        full = saver.save()
        before = job.everything()
        job.train(2)
        differential = saver.save()
        after = job.everything()
    assert full is not None
    assert differential is not None
    assert (full.kind, differential.kind) == ("full", "differential")
    stored, changed = read_rows(root / differential.id).keys(), rows_changed(before, after)
    assert changed <= stored
    assert len(stored) == 2 * job.rows if all_rows else len(stored) < 2 * job.rows
    if not all_rows:
        assert len(stored - changed) <= len(changed) // 20  # an update may be rounded away
    with again.checkpointer(root) as saver:
        report = saver.restore()
        assert report is not None
        assert report.chain == (full.id, differential.id)
        assert_equal(again.everything(), after)
        assert again.counters() == job.counters()
        for either in (job, again):
            either.train(3)
        assert_equal(again.everything(), job.everything(), exact=False)
        goes_on = saver.save()
        assert goes_on is not None
        assert goes_on.kind == "differential"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("fused", sorted(FUSED))
def test_fused_optimizers(tmp_path: Path, fused: str, kernel: str) -> None:
    train_save_and_go_on(tmp_path, build(kernel, fused), build(kernel, fused, seed=9))


@pytest.mark.parametrize("kernel", KERNELS)
def test_sequences(tmp_path: Path, kernel: str) -> None:
    job, again = (build(kernel, sequence=True, seed=seed) for seed in (0, 9))
    train_save_and_go_on(tmp_path, job, again)


@pytest.mark.parametrize("dense", ["adagrad", "adam", "adam_fused"])
@pytest.mark.parametrize("sequence", [False, True])
def test_data_parallel(tmp_path: Path, sequence: bool, dense: str) -> None:
    job, again = (
        build("data_parallel", sequence=sequence, dense=dense, seed=seed) for seed in (0, 9)
    )
    train_save_and_go_on(tmp_path, job, again, all_rows=dense != "adagrad")


@pytest.mark.parametrize("sequence", [False, True])
def test_data_parallel_to_sharded_and_back(tmp_path: Path, sequence: bool) -> None:
    """Move dense Adam's moments and counter to fused Adam, train with them, and move them back."""
    job = build("data_parallel", sequence=sequence, dense="adam")
    job.train(3)
    with job.checkpointer(tmp_path) as saver:
        saver.save()
    sharded = build("fused", "adam", sequence=sequence, dense="adam", seed=5)
    with sharded.checkpointer(tmp_path) as saver:
        assert saver.restore() is not None
        assert set(sharded.counters()) == {3}
        sharded.train(1)
        saver.save()
        weights = {k.partition("#")[0]: v for k, v in sharded.everything().items()}
    again = build("data_parallel", sequence=sequence, dense="adam", seed=7)
    with again.checkpointer(tmp_path) as saver:
        assert saver.restore() is not None
    found = again.everything()
    steps = {k: float(v) for k, v in found.items() if k.endswith("/step")}
    assert set(steps.values()) == {4.0}
    for name, weight in found.items():
        if name.startswith("model/"):
            assert torch.equal(weight, weights[name]), name
    again.train(1)


@pytest.mark.parametrize("kernel", KERNELS)
def test_training_goes_on_while_rows_are_read(tmp_path: Path, kernel: str) -> None:
    """Update rows right after the cut, while a side stream still copies them."""
    job, again = build(kernel, "rowwise_adagrad"), build(kernel, "rowwise_adagrad", seed=9)
    job.train(3)
    with job.checkpointer(tmp_path, chunk_bytes=4000) as saver:
        wanted = job.everything()
        saver.save(wait=False)
        job.train(3)
        saver.wait()
    with again.checkpointer(tmp_path) as saver:
        assert saver.restore() is not None
        assert_equal(again.everything(), wanted)
