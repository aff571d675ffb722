"""Use tables in unified memory, cached on the GPU or not: rows as in training, few at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.gpu.models import DEVICE, KERNELS, ON_A_GPU, GpuJob, assert_equal, build
from torchrec_checknrun import Quantization
from torchrec_checknrun.tracking import TrackedModel, TrackedShard, track

pytestmark = ON_A_GPU

BUDGET = 4 << 20


def first_table(tracked: TrackedModel) -> TrackedShard:
    return next(shard for shard in tracked.shards if shard.table.endswith("t0"))


def look_up(job: GpuJob, ids: torch.Tensor) -> torch.Tensor:
    """Return rows of the first table as a lookup does, ``(n, dim)`` on the CPU."""
    features = KeyedJaggedTensor(
        keys=["f0", "f1"],
        values=ids,
        lengths=torch.cat([torch.ones(len(ids)), torch.zeros(len(ids))]).long(),
    )
    collection = next(
        m for m in job.model.modules() if isinstance(m, ShardedEmbeddingBagCollection)
    )
    with torch.no_grad():
        pooled: torch.Tensor = collection(features.to(DEVICE))["f0"]
    return pooled.cpu()


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_in_the_cache_are_read(kernel: str) -> None:
    job = build(kernel)
    tracked = track(job.model)
    job.train(1)
    shard = first_table(tracked)
    rows = shard.modified_rows()
    found = shard.read_rows(rows).weight.cpu()  # first: all else may flush the cache
    assert torch.equal(found, look_up(job, rows))
    whole = job.everything()["model/embeddings.embedding_bags.t0.weight#0"]
    assert torch.equal(found, whole[rows])


@pytest.mark.parametrize("kernel", KERNELS)
def test_written_rows_win_over_the_cache(kernel: str) -> None:
    """Write half of the cached rows by hand; keep the others, which are dirty in the cache."""
    job = build(kernel)
    tracked = track(job.model)
    job.train(1)
    shard = first_table(tracked)
    rows = shard.modified_rows()
    wanted = look_up(job, rows)
    half = len(rows) // 2
    wanted[:half] = 7
    shard.write_rows(rows[:half], wanted[:half])
    assert torch.equal(look_up(job, rows), wanted)
    assert torch.equal(shard.read_rows(rows).weight.cpu(), wanted)


def test_rows_written_after_a_prefetch_are_looked_up() -> None:
    """Write rows whose places in the cache a later batch knows already."""
    job = build("fused_uvm_caching")
    tracked = track(job.model)
    job.train(1)
    shard = first_table(tracked)
    rows = shard.modified_rows()
    ids, empty = rows.to(DEVICE), torch.full((len(rows),), len(rows), device=DEVICE)
    offsets = torch.cat([torch.arange(len(rows) + 1, device=DEVICE), empty])
    shard._kernel.module._emb_module.prefetch(ids, offsets)
    wanted = torch.full_like(shard.read_rows(rows).weight, 7.0)
    shard.write_rows(rows, wanted)
    assert torch.equal(look_up(job, rows), wanted.cpu())


def peak_of(act: Callable[[], object]) -> int:
    """Return the GPU memory in bytes that a call takes on top of the present amount."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    act()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("fused", ["rowwise_adagrad", "adam"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_move_in_chunks(tmp_path: Path, kernel: str, fused: str) -> None:
    """Copy never a whole table of ten times the budget, nor as much as the budget."""
    rows, dim = 10 * BUDGET // (4 * 64), 64
    job, again = (build(kernel, fused, rows=rows, dim=dim, seed=seed) for seed in (0, 9))
    job.train(2)
    with job.checkpointer(tmp_path, chunk_bytes=BUDGET) as saver:
        assert peak_of(saver.save) <= 1.1 * BUDGET
        saver.mark_all()
        assert peak_of(saver.save) <= 1.1 * BUDGET  # by marks, not as a range
    with again.checkpointer(tmp_path, chunk_bytes=BUDGET) as saver:
        assert peak_of(saver.restore) <= 1.1 * BUDGET
    assert_equal(again.everything(), job.everything())


@pytest.mark.parametrize("kernel", KERNELS)
def test_quantized_rows(tmp_path: Path, kernel: str) -> None:
    """Encode on the GPU with FBGEMM's operators; restore within a step of the saved values."""
    job, again = (build(kernel, dim=16, seed=seed) for seed in (0, 9))
    job.train(2)
    with job.checkpointer(tmp_path, quantization=Quantization(bits=8)) as saver:
        saver.save()
    with again.checkpointer(tmp_path) as saver:
        assert saver.restore() is not None
    found, wanted = again.everything(), job.everything()
    for name, tensor in found.items():
        if name.startswith("model/embeddings."):
            spread = wanted[name].amax(dim=1) - wanted[name].amin(dim=1)
            error = (tensor - wanted[name]).abs().amax(dim=1)
            assert bool((error <= spread / 255 + 1e-6).all()), name
        else:
            assert torch.equal(tensor, wanted[name]), name
