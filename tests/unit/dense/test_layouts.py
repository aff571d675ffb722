"""Restore optimizer state in the order in memory that its parameter has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.utils import _pytree as pytree
from torchrec.optim.keyed import KeyedOptimizerWrapper

from tests.crash.save_sweep import alone
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    with alone():
        yield


class ByColumns(nn.Module):
    """A layer with a column-major weight, and a convolution whose channels come last."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 7).t())
        self.layer = nn.Conv2d(3, 4, 2)
        weight = self.layer.weight.detach().contiguous(memory_format=torch.channels_last)
        self.layer.weight = nn.Parameter(weight)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        image = values.reshape(-1, 3, 2, 2)
        product = values[:, :7] @ self.weight
        result: torch.Tensor = self.layer(image).sum() + product.square().sum()
        return result


class Trainer:
    """A user's object with an optimizer and an average of a weight, loaded by itself."""

    def __init__(self, model: ByColumns, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.average = model.weight.detach().clone()
        self.basis = torch.zeros(9, 7)

    def state_dict(self) -> dict[str, Any]:
        self.basis = torch.linalg.qr(self.basis + torch.linspace(0, 1, 63).reshape(9, 7))[0]
        found = {"average": self.average, "basis": self.basis, "new": [self.basis + 1]}
        return {"optimizer": self.optimizer.state_dict(), **found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.average, self.basis = state["average"], state["basis"]
        assert state["new"][0].stride() == self.basis.stride() == (1, 9)


class Unknown(optim.Adam):
    """An optimizer whose first step can't be tried on a stand-in."""

    def step(self, closure: Any = None) -> Any:
        if self.param_groups[0]["params"][0].numel() != 35:
            raise ValueError("another model")
        return super().step(closure)


class Decomposed(optim.Optimizer):
    """SOAP: state that a decomposition returns, column-major, in a list, a tensor, an attribute."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.basis = torch.zeros(9, 7)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded
        values = torch.linspace(0, 1, 63).reshape(9, 7)
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.update({} if len(state) > 1 else self.begin())
            factor = self.basis.sum() + state["listed"][0].sum() + state["one"].sum()
            p.sub_(p.grad * factor, alpha=0.01)
            state["one"] = torch.linalg.qr(state["one"] + values + p.sum())[0]
            state["listed"] = [torch.linalg.qr(values + state["one"])[0]]
            self.basis = torch.linalg.qr(self.basis + state["one"])[0]

    def begin(self) -> dict[str, Any]:
        return {"one": torch.zeros(9, 7), "listed": [torch.zeros(9, 7)]}


class Begun(Decomposed):
    """An optimizer with row-major state before its first step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for p in self.param_groups[0]["params"]:
            self.state[p] = self.begin()


def decomposed(model: nn.Module) -> optim.Optimizer:
    return Decomposed(model.parameters())


def begun(model: nn.Module) -> optim.Optimizer:
    return Begun(model.parameters())


def keyed_decomposed(model: nn.Module) -> optim.Optimizer:
    return KeyedOptimizerWrapper(dict(model.named_parameters()), Decomposed)


def adam(model: nn.Module) -> optim.Optimizer:
    return optim.Adam(model.parameters(), lr=0.1, fused=True)


def keyed(model: nn.Module) -> optim.Optimizer:
    named = dict(model.named_parameters())
    return KeyedOptimizerWrapper(named, lambda p: optim.Adam(p, lr=0.1, fused=True))


def unknown(model: nn.Module) -> optim.Optimizer:
    return Unknown(model.parameters(), lr=0.1, fused=True)


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.linspace(-1, 1 + step, 24).reshape(2, 12)).backward()
        optimizer.step()


def strides(optimizer: Any) -> list[tuple[int, ...]]:
    return [
        value.stride()
        for state in optimizer.state.values()
        for value in pytree.tree_leaves(state)
        if torch.is_tensor(value)
    ]


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("make", [adam, keyed, unknown])
def test_training_goes_on_bit_for_bit(
    tmp_path: Path, make: Callable[[nn.Module], optim.Optimizer], held: bool
) -> None:
    lives: list[tuple[ByColumns, Any, Trainer]] = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = ByColumns()
        optimizer = make(model)
        trainer = Trainer(model, optimizer)
        states: dict[str, Any] = {"trainer": trainer} if held else {"optimizer": optimizer}
        lives.append((model, optimizer, trainer))
        with Checkpointer(str(tmp_path), model=model, state=states) as saver:
            if seed:
                assert saver.restore() is not None
            else:
                train(model, optimizer, 3)
                assert saver.save() is not None
        train(model, optimizer, 2)
    (model, optimizer, trainer), (again, other, loaded) = lives
    assert strides(other) == strides(optimizer)
    assert loaded.average.stride() == trainer.average.stride()
    for one, two in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("make", [decomposed, begun, keyed_decomposed])
def test_state_of_another_order_than_row_major(
    tmp_path: Path, make: Callable[[nn.Module], optim.Optimizer]
) -> None:
    lives: list[tuple[ByColumns, Any]] = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = ByColumns()
        optimizer: Any = make(model)
        lives.append((model, optimizer))
        with Checkpointer(tmp_path, model=model, state={"optimizer": optimizer}) as saver:
            if not seed:
                train(model, optimizer, 3)
                saver.save()
                order = strides(optimizer)
            else:
                assert saver.restore() is not None
                assert strides(optimizer) == order
        train(model, optimizer, 2)
    for one, two in zip(lives[0][0].parameters(), lives[1][0].parameters(), strict=True):
        assert torch.equal(one, two)


def by_rows(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()


@pytest.mark.parametrize("now", ["columns", "rows"])
@pytest.mark.parametrize("then", ["columns", "rows"])
@pytest.mark.parametrize("made", [False, True])
def test_state_that_dcp_load_makes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, made: bool, then: str, now: str
) -> None:
    """Tell of state in another order than its parameter, unless state was there to load into."""
    model, again = ByColumns(), ByColumns()
    for each, order in ((model, then), (again, now)):
        if order == "rows":
            by_rows(each)
    optimizers = [optim.Adam(each.parameters(), fused=True) for each in (model, again)]
    for each, optimizer in zip((model, again), optimizers, strict=True):
        if each is model or made:
            each(torch.ones(2, 12)).backward()
            optimizer.step()
    writer, reader = StorageWriter(tmp_path / "one"), StorageReader(tmp_path / "one")
    state = {"model": model, "optimizer": optimizers[0]}
    dcp.save(state, planner=SavePlanner(), storage_writer=writer)
    state = {"model": again, "optimizer": optimizers[1]}
    dcp.load(state, planner=LoadPlanner(), storage_reader=reader)
    told = [r.getMessage() for r in caplog.records if "order in memory" in r.getMessage()]
    if not made and then != now:
        assert len(told) == 1
        assert "optimizer.state" in told[0]
        assert "model." in told[0]
    else:
        assert not told
        kept = optimizers[1].state[again.weight]["exp_avg"]
        assert kept.stride() == again.weight.stride()
