"""Notice gradients that FSDP2 accumulates without reducing them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from torchrec_checknrun.dense.gradients import PendingGradients

pytestmark = pytest.mark.usefixtures("group")
POLICIES = {
    "plain": MixedPrecisionPolicy(),
    "other_dtype": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


@pytest.fixture(params=sorted(POLICIES))
def model(request: pytest.FixtureRequest) -> nn.Module:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    mesh = init_device_mesh("cpu", (1,))
    for module in (layers[0], layers):
        fully_shard(module, mesh=mesh, mp_policy=POLICIES[request.param])
    return layers


@pytest.fixture
def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


@pytest.fixture
def watch(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[PendingGradients]:
    watch = PendingGradients([optimizer], model)
    yield watch
    watch.close()


def backward(model: nn.Module, last: bool) -> None:
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(last)
    model(torch.ones(1, 3)).sum().backward()


def test_accumulated_gradients_wait(
    model: nn.Module, optimizer: torch.optim.Optimizer, watch: PendingGradients
) -> None:
    for _ in range(2):
        for last in (False, False, True):
            backward(model, last)
            assert watch.waiting
        optimizer.step()
        assert not watch.waiting
        optimizer.zero_grad()
        assert not watch.waiting


def test_parameters_of_no_optimizer_hold_nothing_up(model: nn.Module) -> None:
    watch = PendingGradients([], model)
    backward(model, last=False)
    assert not watch.waiting
    watch.close()
