"""Save although gradients were dropped without a step.

After a loss that is not finite a loop drops its gradients, and a gradient scaler skips the step.
Fused tables were updated all the same, so a checkpoint must be made, with their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.unit.tracked_model import Model, batch
from torchrec_checknrun import Checkpointer, Consecutive
from torchrec_checknrun.dense.gradients import PendingGradients, has_gradient
from torchrec_checknrun.errors import SaveDeferred

pytestmark = pytest.mark.usefixtures("group")


class Net(nn.Module):
    """A net of a dense part and tables: ``wide`` is data parallel, ``tall`` and ``split`` fused."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = Model()
        self.out = nn.Linear(32, 1)

    def forward(self, **bags: list[list[int]]) -> torch.Tensor:
        out: torch.Tensor = self.out(self.sparse(batch(**bags))).square().sum()
        return out


class Job:
    """A sharded net with its optimizer and a checkpointer."""

    def __init__(self, root: Path, dense: Callable[[Any], torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.root = root
        net = Net()
        tables = net.sparse.ebc.embedding_bags
        for name in ("tall", "split"):
            apply_optimizer_in_backward(RowWiseAdagrad, tables[name].parameters(), {"lr": 0.5})
        sharder = EmbeddingBagCollectionSharder()
        plan = construct_module_sharding_plan(
            net.sparse.ebc,
            {"wide": data_parallel(), "tall": table_wise(rank=0), "split": table_wise(rank=0)},
            sharder=sharder,
            local_size=1,
            world_size=1,
            device_type="cpu",
        )
        self.model = DistributedModelParallel(
            net,
            device=torch.device("cpu"),
            plan=ShardingPlan({"sparse.ebc": plan}),
            sharders=[sharder],
        )
        parameters = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.dense = KeyedOptimizerWrapper(parameters, dense)
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, ("dense", self.dense)])
        self.parameters = list(parameters.values())
        self.saver = Checkpointer(
            root,
            model=self.model,
            state={"optimizer": self.optimizer},
            policy=Consecutive(),
            retention=None,
        )

    def backward(self, factor: float = 1.0) -> None:
        loss = self.model(a=[[1, 2]], shared=[[3]], b=[[4]])
        (loss * factor).backward()

    def saves(self) -> bool:
        self.saver.steps += 1
        try:
            self.saver.save()
        except SaveDeferred:
            return False
        return True


@pytest.fixture(params=["SGD", "Adagrad"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path, lambda parameters: getattr(torch.optim, request.param)(parameters, lr=0.1))
    yield job
    job.optimizer.zero_grad()
    job.saver.close()


def set_none(job: Job) -> None:
    for parameter in job.parameters:
        parameter.grad = None


def zero(job: Job) -> None:
    for parameter in job.parameters:
        if parameter.grad is not None:
            parameter.grad.zero_()


DROPS: dict[str, Callable[[Job], None]] = {
    "combined": lambda job: job.optimizer.zero_grad(),
    "dense": lambda job: job.dense.zero_grad(),
    "to_zero": lambda job: job.dense._optimizer.zero_grad(set_to_none=False),
    "model": lambda job: job.model.zero_grad(),
    "none": set_none,
    "zeros": zero,
}


@pytest.mark.parametrize("drop", sorted(DROPS))
def test_a_dropped_gradient_holds_nothing_up(job: Job, drop: str) -> None:
    job.backward()
    assert not job.saves()  # the gradient may still be applied
    DROPS[drop](job)
    assert job.saves()
    job.backward()
    assert not job.saves()
    job.optimizer.step()
    assert job.saves()


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_wait_as_well(job: Job, factor: float) -> None:
    job.backward(factor)
    assert not job.saves()
    job.optimizer.zero_grad()
    assert job.saves()


def test_a_scaler_that_skips_the_step(job: Job) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = job.dense._optimizer
    for factor, steps in ((1.0, True), (float("inf"), False)):
        job.optimizer.zero_grad()
        scaler.scale(job.model(a=[[1]], shared=[[3]], b=[[4]]) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert job.saves() == steps
    job.optimizer.zero_grad()
    assert job.saves()


def test_rows_of_a_dropped_gradient_are_saved_if_a_later_step_changes_them(job: Job) -> None:
    """Restore the newest step's table after accumulating, dropping and accumulating again."""
    job.backward()
    job.optimizer.zero_grad()
    assert job.saves()
    job.backward()
    job.optimizer.step()
    job.optimizer.zero_grad()
    assert job.saves()
    found = Job(job.root, lambda parameters: type(job.dense._optimizer)(parameters, lr=0.1))
    assert found.saver.restore() is not None
    for name, parameter in found.model.named_parameters():
        assert torch.equal(parameter, dict(job.model.named_parameters())[name]), name
    found.saver.close()


class TestHasGradient:
    def test_of_every_kind(self) -> None:
        weight = nn.Parameter(torch.ones(3, 2))
        assert not has_gradient(weight)
        weight.grad = torch.zeros(3, 2)
        assert not has_gradient(weight)
        weight.grad[1, 1] = float("nan")
        assert has_gradient(weight)
        weight.grad = torch.full((3, 2), 1e-45)
        assert has_gradient(weight)

    def test_a_zeroed_sparse_gradient_is_none(self) -> None:
        table = nn.Embedding(5, 2, sparse=True)
        table(torch.tensor([1, 3])).sum().backward()
        assert has_gradient(table.weight)
        assert table.weight.grad is not None
        table.weight.grad.zero_()
        assert not has_gradient(table.weight)


def test_a_closure_steps() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.LBFGS([weight])
    pending = PendingGradients([optimizer])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight - 3).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    found = [pending.waiting]
    weight.square().sum().backward()
    found.append(pending.waiting)
    optimizer.zero_grad(set_to_none=False)
    found.append(pending.waiting)
    assert found == [False, True, False]
    pending.close()
