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

from tests.unit.mixed_job import Job
from torchrec_checknrun.dense.gradients import PendingGradients, has_gradient

pytestmark = pytest.mark.usefixtures("group")


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


def replace_in_the_model(job: Job) -> tuple[Any, nn.Parameter]:
    """Replace a parameter whose gradient waits; return the module and the earlier parameter."""
    out: Any = job.model.module.out
    earlier = out.weight
    out.weight = nn.Parameter(torch.ones_like(earlier))
    return out, earlier


def test_a_gradient_of_a_replaced_parameter_does_not_wait(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.backward()
    replace_in_the_model(job)
    assert not job.saves()  # other parameters' gradients wait
    job.model.zero_grad()
    assert job.saves()
    assert job.saves()
    told = [r.getMessage() for r in caplog.records if "is replaced" in r.getMessage()]
    assert len(told) == 1
    assert "'out.weight'" in told[0]
    job.backward()
    assert not job.saves()


def test_a_gradient_waits_while_the_model_has_the_memory_or_gets_the_parameter_back(
    job: Job,
) -> None:
    job.backward()
    out, earlier = replace_in_the_model(job)
    job.model.zero_grad()
    assert job.saves()
    with torch.no_grad():
        out.weight = nn.Parameter(earlier.data)  # a step on the earlier one changes this one
    assert not job.saves()
    out.weight = earlier
    assert not job.saves()
    job.optimizer.step()
    assert job.saves()


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
