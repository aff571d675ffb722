"""One instant of the dense part: every optimizer, accumulated gradients, buffers.

See ``test_one_instant`` for what each case shows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torchrec.distributed import model_parallel

from tests.distributed import dense_jobs
from tests.distributed.normalized import NormalizedJob
from tests.distributed.slowed import Instants, on_all_ranks, slowed
from tests.distributed.states import gather
from tests.distributed.test_one_instant import train_and_save
from tests.distributed.test_tracking_zoo import PLANS
from tests.distributed.worker_pool import WorkerPool
from tests.distributed.zoo import build_zoo
from tests.examples import some_of

Workers = Callable[[int], WorkerPool]


def accumulated(root: str, plan: dict[str, str], dense: str) -> list[int]:
    """Accumulate gradients without synchronization."""
    make = {"adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}
    dense_of: Any = partial(make[dense], lr=0.05)
    wrapper = partial(model_parallel.DefaultDataParallelWrapper, static_graph=False)
    with mock.patch.object(model_parallel, "DefaultDataParallelWrapper", wrapper):
        zoo, again = (build_zoo("bags", plan, dense=dense_of) for _ in range(2))
    inner: Any = zoo.model._dmp_wrapped_module

    def train() -> None:
        zoo.optimizer.zero_grad()
        for last in (False, True):
            with nullcontext() if last else inner.no_sync():
                zoo.model(zoo.batch())[0].backward()
            zoo.steps += 1
        zoo.optimizer.step()

    with slowed() as chunks:
        return train_and_save(Instants(root, zoo, again, chunks), train)


@pytest.mark.parametrize(
    ("plan", "dense"), some_of([("rows", "adam"), ("columns", "adagrad"), ("mixed", "adagrad")], 2)
)
def test_accumulation(workers: Workers, tmp_path: Path, plan: str, dense: str) -> None:
    found = workers(2).run(accumulated, root=str(tmp_path), plan=PLANS[plan], dense=dense)
    assert min(found[0]) > 0


def stepped(root: str, layout: dict[str, Any], dense: str, wrapper: str) -> list[int]:
    """Train the dense part, with data-parallel tables, by any optimizer."""
    job, again = (dense_jobs.make(layout, dense, wrapper, seed) for seed in (0, 4))
    with slowed() as chunks:
        return train_and_save(Instants(root, job, again, chunks), job.train)


WRAPPED = {"adam": "plain", "adamw": "clipped", "momentum": "warm_up", "adagrad": "plain"}


@pytest.mark.parametrize("dense", some_of(sorted(dense_jobs.OPTIMIZERS), 4, 5))
def test_dense_optimizers(workers: Workers, tmp_path: Path, dense: str) -> None:
    how: dict[str, Any] = {"dense": dense, "wrapper": WRAPPED.get(dense, "keyed")}
    found = workers(2).run(stepped, root=str(tmp_path), layout=dense_jobs.MIXED, **how)
    assert min(found[0]) > 0


def normalized(root: str) -> list[int]:
    job, again = NormalizedJob(), NormalizedJob(seed=3)

    def take(of: Any) -> dict[str, Any]:
        """Copy the whole state; of the buffers, which differ, rank 0's."""
        content = gather(of)
        buffers = {n: t.numpy().copy() for n, t in of.model.state_dict().items() if ".num" in n}
        means = of.model.state_dict()
        buffers |= {n: means[n].numpy().copy() for n in means if "running" in n}
        everyone = on_all_ranks(buffers)
        own = {n: v for n, v in content.items() if "norm.running" not in n}
        return {**own, **everyone[0]}

    with slowed() as chunks:
        instants = Instants(root, job, again, chunks, take=take, chunk_bytes=200)
        return train_and_save(instants, job.train)


def test_buffers_of_batch_normalization(workers: Workers, tmp_path: Path) -> None:
    assert min(workers(2).run(normalized, root=str(tmp_path))[0]) > 0
