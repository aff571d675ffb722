"""Name optimizers that step what checkpoints hold, and whose own state no checkpoint holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import (
    _apply_optimizer_in_backward,
    _get_in_backward_optimizers,
)
from torch.optim import Optimizer
from torchrec.distributed.model_parallel import DistributedModelParallel

from tests.unit.tracked_model import Model, batch
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.dense.gradients import PendingGradients


class Trainer:
    """A state object with an optimizer in an attribute."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return dict(self.optimizer.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


class SlottedTrainer(Trainer):
    """The same with the optimizer in a slot, as in a dataclass of slots."""

    __slots__ = ("optimizer",)


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))


@pytest.fixture
def watch(model: nn.Module) -> Iterator[Callable[..., PendingGradients]]:
    made: list[PendingGradients] = []

    def make(*states: object) -> PendingGradients:
        made.append(PendingGradients(states, model))
        return made[-1]

    yield make
    for each in made:
        each.close()


def step(model: nn.Module, *optimizers: Optimizer) -> None:
    model(torch.ones(1, 3)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def texts(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if "steps param" in record.message]
    caplog.clear()
    return found


def test_an_optimizer_that_was_not_given(
    model: nn.Module, watch: Callable[..., PendingGradients], caplog: pytest.LogCaptureFixture
) -> None:
    known, forgotten = (torch.optim.Adam(layer.parameters()) for layer in model.children())
    watched = watch(known)
    for _ in range(2):
        step(model, known, forgotten)
        assert not watched.waiting
        step(model, known, forgotten)
    (text,) = texts(caplog)
    assert "Adam steps parameters of the model (1.bias, 1.weight)" in text
    assert "not among the state objects" in text


def test_no_optimizer_was_given(
    model: nn.Module, watch: Callable[..., PendingGradients], caplog: pytest.LogCaptureFixture
) -> None:
    watched, forgotten = watch(), torch.optim.Adam(model.parameters())
    step(model, forgotten)
    assert not watched.waiting
    (text,) = texts(caplog)
    assert "parameters of the model (0.bias, 0.weight, 1.bias, …)" in text


def test_optimizers_in_backward(
    model: nn.Module, watch: Callable[..., PendingGradients], caplog: pytest.LogCaptureFixture
) -> None:
    _apply_optimizer_in_backward(torch.optim.Adam, model.parameters(), {"lr": 0.1})
    watched = watch()
    step(model)
    assert not watched.waiting
    (text,) = texts(caplog)
    assert "Adam steps parameters of the model (0.bias, 0.weight, 1.bias, …)" in text
    assert "_in_backward_optimizers" in text
    known = watch(*_get_in_backward_optimizers(model))
    step(model)
    assert not known.waiting
    assert texts(caplog) == []


def test_optimizers_that_are_known_or_of_another_model(
    model: nn.Module, watch: Callable[..., PendingGradients], caplog: pytest.LogCaptureFixture
) -> None:
    known, held = (torch.optim.Adam(layer.parameters()) for layer in model.children())
    watched, other = watch(known, Trainer(held)), nn.Sequential(nn.Linear(3, 1))
    elsewhere = torch.optim.Adam(other.parameters())
    for _ in range(2):
        step(model, known, held)
        step(other, elsewhere)
        assert not watched.waiting
    assert texts(caplog) == []


def test_an_optimizer_of_another_model_is_examined_once(
    model: nn.Module,
    watch: Callable[..., PendingGradients],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spare later saves a walk over the model, and look again once it steps more parameters."""
    first, second = model.children()
    known, other = torch.optim.Adam(first.parameters()), nn.Sequential(nn.Linear(3, 1))
    watched, elsewhere = watch(known), torch.optim.SGD(other.parameters(), lr=0.1)
    walks, walk = [], model.named_parameters

    def named_parameters(*arguments: Any, **options: Any) -> Any:
        walks.append(1)
        return walk(*arguments, **options)

    monkeypatch.setattr(model, "named_parameters", named_parameters)
    for _ in range(3):
        step(other, elsewhere)
        assert not watched.waiting
    assert len(walks) == 1
    elsewhere.add_param_group({"params": list(second.parameters())})
    step(other, elsewhere)
    assert not watched.waiting
    (text,) = texts(caplog)
    assert "SGD steps parameters of the model (1.bias, 1.weight)" in text


@pytest.mark.parametrize("kind", [Trainer, SlottedTrainer])
def test_an_optimizer_inside_an_object(
    model: nn.Module,
    watch: Callable[..., PendingGradients],
    caplog: pytest.LogCaptureFixture,
    kind: type[Trainer],
) -> None:
    """Notice gradients that wait for it."""
    held = torch.optim.Adam(model.parameters())
    watched = watch(kind(held))
    step(model, held)
    assert not watched.waiting
    assert texts(caplog) == []
    model(torch.ones(1, 3)).sum().backward()
    assert watched.waiting


def test_a_weak_proxy_of_an_optimizer(
    model: nn.Module, watch: Callable[..., PendingGradients], caplog: pytest.LogCaptureFixture
) -> None:
    """Take the optimizer for one that is not known."""
    optimizer = torch.optim.Adam(model.parameters())
    watched = watch(Trainer(weakref.proxy(optimizer)))
    step(model, optimizer)
    assert not watched.waiting
    (text,) = texts(caplog)
    assert "unless one of these saves it" in text


def test_an_optimizer_in_another_ones_place(
    model: nn.Module, watch: Callable[..., PendingGradients], caplog: pytest.LogCaptureFixture
) -> None:
    watched = watch(torch.optim.Adam(model.parameters()))
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, other)
    assert not watched.waiting
    (text,) = texts(caplog)
    assert "SGD steps parameters (0.bias, 0.weight, 1.bias, …) whose optimizer among" in text


class Net(nn.Module):
    """Fused tables and layers, which aren't wrapped: on a CPU DistributedDataParallel can't step
    in backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sparse, self.out = Model(), nn.Linear(32, 1)

    def forward(self, **bags: list[list[int]]) -> torch.Tensor:
        out: torch.Tensor = self.out(self.sparse(batch(**bags))).square().sum()
        return out


@pytest.mark.usefixtures("group")
def test_optimizers_in_backward_come_back(tmp_path: Path) -> None:
    """Go on bit for bit where they are given, each under a name of its own."""

    def make(seed: int) -> tuple[Any, Checkpointer]:
        torch.manual_seed(seed)
        net = Net()
        _apply_optimizer_in_backward(torch.optim.SGD, net.sparse.parameters(), {"lr": 0.5})
        _apply_optimizer_in_backward(torch.optim.Adam, net.out.parameters(), {"lr": 0.1})
        model = DistributedModelParallel(net, device=torch.device("cpu"), init_data_parallel=False)
        own = {f"out.{i}": each for i, each in enumerate(_get_in_backward_optimizers(net.out))}
        assert len(own) == 2
        state = {"fused": model.fused_optimizer, **own}
        return model, Checkpointer(tmp_path / "root", model=model, state=state)

    def train(model: Any, saver: Checkpointer, steps: int) -> None:
        for number in range(steps):
            model(a=[[1, 2]], shared=[[3 + number]], b=[[4]]).backward()
            saver.step()

    one, saver = make(0)
    with saver:
        train(one, saver, 3)
        saver.save()
        train(one, saver, 2)
    other, saver = make(1)
    with saver:
        train(other, saver, 1)
        assert saver.restore() is not None
        train(other, saver, 2)
    pairs = zip(one.module.out.parameters(), other.module.out.parameters(), strict=True)
    for left, right in pairs:
        assert torch.equal(left, right)


def test_optimizers_without_a_hash(
    model: nn.Module, watch: Callable[..., PendingGradients], caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(torch.optim.SGD):
        __hash__ = None  # type: ignore[assignment]  # as of a class with an __eq__ of its own

    known, forgotten = (Odd(layer.parameters(), lr=0.1) for layer in model.children())
    watched = watch(known)
    for _ in range(2):
        step(model, known, forgotten)
        assert not watched.waiting
    assert len(texts(caplog)) == 1
